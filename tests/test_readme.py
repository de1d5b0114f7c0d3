"""To a newcomer: every flag of train.py that a page prints is there, and so is its task."""

import re
import shlex
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).resolve().parent.parent
# A command ends at a backquote, a comment, a bracket or the end of its line.
COMMAND = re.compile(r"(?<![\w/.])python train\.py([^`\n#;)|>]*)")


def commands() -> list[str]:
    found = set()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]:
        found |= {*COMMAND.findall(page.read_text("utf-8").replace("\\\n", " "))}
    unread = re.compile(r"\.\.\.|--resume|\$s|--model$")  # cut off, or of a run that is not here
    return sorted(x for x in found if not unread.search(x))


@pytest.mark.parametrize("command", commands())
def test_every_command_is_read(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").symlink_to(ROOT / "tasks")
    (tmp_path / "mine.py").write_text("class Task: settings = {}")
    (tmp_path / "questions.csv").touch()
    train.parse(shlex.split(command))
