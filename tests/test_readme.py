"""What the READMEs say exists: links, lines, methods, claims, commands; and README.md is short.

`python tests/test_readme.py` writes the right line numbers into README.md's links to functions.
"""

import ast
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
READMES = [README, *sorted(ROOT.glob("*/README.md"))]
LINE_LINK = re.compile(r"\[(\w+)\]\(([\w/]+\.py)#L(\d+)\)")
# A command ends at a backquote, a comment, a bracket or the end of its line.
COMMAND = re.compile(r"(?<![\w/.])python (?:train\.py|verify\.py|-m [\w.]+)[^`\n#;)|>]*")


def line_of(name: str, file: str) -> int:
    """The line on which a function or class begins, its decorators left out."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node.lineno
    raise LookupError(f"{file} defines no {name}")


def commands() -> list[tuple[str, ...]]:
    found = []
    for readme in READMES:
        text = readme.read_text().replace("\\\n", " ")
        found += [tuple(shlex.split(command)[1:]) for command in COMMAND.findall(text)]
    return sorted({command for command in found if "..." not in command})


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_every_link_leads_somewhere(readme):
    links = [x for x in re.findall(r"\]\(([^)]+)\)", readme.read_text()) if "://" not in x]
    headings = re.findall(r"^#+ (.*)$", readme.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", x).strip().lower().replace(" ", "-") for x in headings}
    for link in links:
        path, _, anchor = link.partition("#")
        assert (readme.parent / path).exists(), link
        assert path or anchor in anchors, link


def test_links_to_functions_lead_to_their_lines():
    links = LINE_LINK.findall(README.read_text())
    wrong = [name for name, file, line in links if line_of(name, file) != int(line)]
    assert len(links) > 20 and not wrong, f"{wrong}: python tests/test_readme.py mends them"


def test_every_method_has_its_row_and_every_claim_exists():
    import verify
    from losses import METHODS

    text = README.read_text()
    table = text[text.index("## The methods") : text.index("## The papers")]
    assert set(METHODS) <= set(re.findall(r"`([\w-]+)`", table))
    for id_ in re.findall(r"\b[MCNAI]\d+\b", text[text.index("## The papers") :]):
        assert verify.select([id_])


def test_the_readme_is_short_and_begins_with_a_picture():
    text = README.read_text()
    assert len(text.split()) <= 1800
    assert sum(line.startswith("|") for line in text.splitlines()) <= 40
    assert any(line.startswith("![") for line in text.splitlines()[:10])


SCRIPTS = {"train.py", "verify.py", "experiments.compare"}


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_names_a_module_and_flags_that_exist(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, args = command[0], list(command[1:])
    if script == "-m":
        script, args = args[0], args[1:]
        assert (ROOT / (script.replace(".", "/") + ".py")).exists() or script in (
            "pytest",
            "verl.trainer.main_ppo",
        )
    args = [{"DIR": str(tmp_path), "NAME": "grpo"}.get(arg, arg).replace("$s", "0") for arg in args]
    if script == "train.py" and not {"--help", "--resume"} & set(args):
        import train

        for start in (arg for arg in args if arg.endswith("/start")):
            Path(start).mkdir(parents=True)
        train.parse(args)
    elif script == "experiments.compare":
        from experiments import compare

        compare.plan(args)
    elif script == "verify.py" and {"--only", "--explain"} & set(args):
        import verify

        ids = [arg for arg in args if not arg.startswith("-") and arg != "ID"]
        assert ids == ["symbols"] or verify.select(ids or ["C1"])


@pytest.mark.skipif(not os.environ.get("LONG"), reason="every command in small: make test-faults")
@pytest.mark.parametrize("command", [x for x in commands() if "$s" not in str(x)], ids=" ".join)
def test_every_command_of_train_and_verify_runs(command, tmp_path, monkeypatch, small_gsm8k):
    """As printed, but for sizes. The hub is out of reach, so Qwen becomes a model from scratch."""
    import train
    import verify
    from tests.helpers import TINY

    monkeypatch.chdir(tmp_path)
    script, args = command[0], list(command[1:])
    args = [{"DIR": small_gsm8k, "NAME": "grpo", "ID": "C2"}.get(arg, arg) for arg in args]
    if script == "train.py" and not {"--help", "--resume"} & set(args):
        if "gsm8k" in args and "scratch" not in args:
            args += ["--data", small_gsm8k, "--model", "scratch"]
        train.main([*args, *TINY, "--steps", "2", "--max-tokens", "20"])
    elif script == "verify.py" and "my_losses.py" not in args:
        args = [str(ROOT / arg) if arg.startswith("exercises/") else arg for arg in args]
        accepted = (0, 1) if "--losses" in args else (0,)  # the exercises are blank, or solved
        assert verify.main(args) in accepted


if __name__ == "__main__":
    right = LINE_LINK.sub(lambda x: f"[{x[1]}]({x[2]}#L{line_of(x[1], x[2])})", README.read_text())
    README.write_text(right)
    sys.exit()
