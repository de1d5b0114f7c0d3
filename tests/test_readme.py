"""What the README says exists: files, functions, claims, flags, exercises."""

import ast
import os
import re
import shlex
from pathlib import Path

import pytest
from test_train import TINY

import config
import losses
import train
import verify
from experiments import compare

ROOT = Path(verify.__file__).parent
READMES = [ROOT / "README.md", ROOT / "exercises" / "README.md"]
TEXT = READMES[0].read_text()
ROWS = [
    row.split(" | ")
    for row in TEXT[TEXT.index("## Read along") :].split("\n\n")[2].splitlines()[2:]
]
COMMANDS = [
    shlex.split(line.partition(" #")[0])
    for readme in READMES
    for line in re.findall(r"(?<![\w/])python (?:train|verify)\.py[^`\n;)]*", readme.read_text())
]


def names(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "name")}


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_every_link_leads_somewhere(readme):
    links = [
        link for link in re.findall(r"\]\(([^)#]+)\)", readme.read_text()) if "://" not in link
    ]
    assert len(links) > 10 and all((readme.parent / link).exists() for link in links), links


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[1].split()[:4]))
def test_the_read_along_table_names_functions_claims_and_exercises_that_exist(row):
    paper, _, equation, where, claims, see = (cell.strip(" |") for cell in row)
    file = re.search(r"\[(.*?)\]", where)
    there = names(ROOT / (file[1] if file else "losses.py"))
    functions = re.findall(r"`(\w+)`", where)
    assert functions and set(functions) <= there
    ids = re.findall(r"\b[MCNAI]\d+\b", claims)
    assert ids and verify.select(ids)
    assert re.search(r"\([^)]*[PSD]", equation)
    for number in re.findall(r"\d+", see if see.startswith("exercise") else ""):
        assert list((ROOT / "exercises").glob(f"{int(number):02}_*.py"))


def test_every_method_has_its_row_in_both_tables():
    for name in losses.METHODS:
        assert f"| `{name}` |" in TEXT and f"| {name} | 3 |" in TEXT


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_flags_and_values_that_are_accepted(command, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    command = [
        {"DIR": str(tmp_path), "$m": "grpo", "$s": "0", "S": "0"}.get(x, x)
        for x in command
        if x != "..."
    ]
    if command[1] == "train.py" and "--help" not in command and "--resume" not in command:
        args = [x.replace("$m-$s", "new") for x in command[2:]]
        compare.runs_of(args) if compare.wanted(args) else config.parse(args)
    elif ids := [x for x in command if re.fullmatch(r"[MCNAIX]\d+[a-g]?|AUDIT", x)]:
        assert verify.select(ids)
    elif "--losses" in command:
        assert (ROOT / command[-1]).exists() or command[-1] == "my_losses.py"


@pytest.mark.skipif(not os.environ.get("LONG"), reason="every command in small: make test-faults")
@pytest.mark.parametrize("command", sorted({*map(tuple, COMMANDS)}), ids=" ".join)
def test_every_command_runs(command, tmp_path, monkeypatch, small_gsm8k):
    """As printed, but for sizes; the hub is out of reach here, so GSM8K on Qwen becomes GSM8K from
    scratch."""
    monkeypatch.chdir(tmp_path)
    words = " ".join(command[1:]).partition(" >")[0].split()
    script, *args = [
        {"DIR": small_gsm8k, "$m": "ibpo", "$s": "0", "S": "0"}.get(x, x)
        for x in words
        if x != "..."
    ]
    args = [x.replace("$m-$s", "new") for x in args]
    if script == "train.py" and not {"--help", "--resume"} & {*args}:
        if "gsm8k" in args and "scratch" not in args:
            args += ["--data", small_gsm8k, "--model", "scratch"]
        train.main([*args, *TINY, "--steps", "2", "--max-tokens", "20"])
    elif script == "verify.py" and "my_losses.py" not in args:
        args = [{"ID": "C2"}.get(x, x) for x in args]
        args = [str(ROOT / x) if x.startswith("exercises/") else x for x in args]
        assert verify.main(args) == int("--losses" in args)  # the exercises are blank
