"""To a newcomer: every command of train.py and verify.py that a page prints runs, in small.

LONG=1, because it takes minutes.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
from conftest import TINY

import train
import verify

ROOT = Path(__file__).resolve().parent.parent
# A command ends at a backquote, a comment, a bracket or the end of its line.
COMMAND = re.compile(r"(?<![\w/.])python (?:train\.py|verify\.py)[^`\n#;)|>]*")
FILES = {  # what the pages call a file of one's own
    "mine.py": "def loss(batch, eps=0.2): return -(batch.adv * batch.logp).mean()",
    "questions.csv": "question,answer\n1+1=,2\n1+2=,3\n",
}


def commands() -> list[tuple[str, ...]]:
    found = set()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]:
        text = page.read_text("utf-8").replace("\\\n", " ")
        found |= {tuple(shlex.split(command)[1:]) for command in COMMAND.findall(text)}
    return sorted(x for x in found if "..." not in x and "$s" not in str(x) and x[-1] != "--model")


@pytest.mark.skipif(not os.environ.get("LONG"), reason="minutes: LONG=1")
@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_runs(command, tmp_path, monkeypatch, small_gsm8k, qwen_path):
    """As printed, but for sizes. A tiny model takes the place of what is not here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").symlink_to(ROOT / "tasks")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    script, *args = command
    if script == "verify.py":
        assert not verify.main(args)
        return
    args = [qwen_path if x == "DIR" or x.startswith("models/") else x for x in args]
    if "gsm8k" in args:
        args += ["--data", small_gsm8k, "--model", qwen_path]
    warm = ["--warm-steps", "0"] if qwen_path in args else []
    train.main([*args, *TINY, "--steps", "2", "--max-tokens", "20", *warm])
