"""Whoever follows a link in a Markdown page arrives: at a file, a heading, a name in the code."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("[!.]*/*.md")]
LINK = re.compile(r"\[([^][]*)\]\(([^()\s:#]*)#?([^()\s:]*)\)")  # [text](file#anchor), no https:


def read(page: Path) -> str:
    """A page without its blocks of code, in which a comment looks like a heading."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of headings: small letters, - for a space, no punctuation but - and _."""
    headings = re.findall(r"^#+ (.*)", read(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", x).strip().lower().replace(" ", "-") for x in headings}


def names(file: Path) -> set[str]:
    """The functions, methods and classes that a Python file defines."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {x.name for x in nodes if isinstance(x, (ast.FunctionDef, ast.ClassDef))}


def test_links_arrive():
    """[`name`](file.py) promises that the file defines the name."""
    lost, named = [], set()
    for page in PAGES:
        for text, path, anchor in LINK.findall(read(page)):
            file = page.parent / path if path else page
            name = re.fullmatch(r"`(\w+)`", text)
            found = file.exists() and (not anchor or anchor in anchors(file))
            if found and name and file.suffix == ".py":
                found = name[1] in names(file)
                named.add(name[1])
            if not found:
                lost.append(f"{page.relative_to(ROOT)}: [{text}]({path}#{anchor})")
    assert not lost
    assert "min_replace" in named  # or no link was found at all
