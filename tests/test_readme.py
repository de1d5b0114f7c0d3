"""To a newcomer: every command of train.py and verify.py that a page prints runs, in small.

LONG=1, because it takes minutes.
"""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import TINY

import train
import verify

ROOT = Path(__file__).resolve().parent.parent
# A command ends at a backquote, a comment, a bracket or the end of its line.
COMMAND = re.compile(r"(?<![\w/.])python (?:train\.py|verify\.py)[^`\n#;)|>]*")


def commands() -> list[tuple[str, ...]]:
    found = set()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]:
        text = page.read_text("utf-8").replace("\\\n", " ")
        found |= {tuple(shlex.split(command)[1:]) for command in COMMAND.findall(text)}
    return sorted(x for x in found if "..." not in x and "$s" not in str(x))


@pytest.mark.skipif(not os.environ.get("LONG"), reason="minutes: LONG=1")
@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_runs(command, tmp_path, monkeypatch, small_gsm8k, qwen_path):
    """As printed, but for sizes. A tiny model takes the place of what is not here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llm").symlink_to(ROOT / "llm")
    script, *args = command
    args = [{"DIR": small_gsm8k, "NAME": "grpo", "ID": "C2"}.get(arg, arg) for arg in args]
    args = [qwen_path if arg.startswith("models/") else arg for arg in args]
    if script == "train.py" and not {"--help", "--resume"} & set(args):
        if "gsm8k" in args:
            args += ["--data", small_gsm8k]
        if {"gsm8k", "sums"} & set(args) and "--model" not in args:
            args += ["--model", qwen_path]
        if "mine.py" in args:
            shutil.copy(ROOT / "llm" / "five_words.py", tmp_path / "mine.py")
            args += ["--model", qwen_path]
        for start in [arg for arg in args if arg.endswith("/start")]:
            train.main([*TINY, "--steps", "0", "--out", str(Path(start).parent)])
        warm = [] if qwen_path not in args else ["--warm-steps", "0"]
        train.main([*args, *TINY, "--steps", "2", "--max-tokens", "20", *warm])
    elif script == "verify.py":
        assert verify.main(args) == 0
