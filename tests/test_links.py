"""Whoever follows a link in a Markdown page arrives: at a file, a heading, a function's name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("[!.]*/*.md")]
# [text](file#anchor) without an address of the web; a text that is `a_name` is caught by itself.
LINK = re.compile(r"\[(?:`(\w+)`|[^][]*)\]\(([^()\s:#]*)#?([^()\s:]*)\)")


def read(page: Path) -> str:
    """A page without its blocks of code, in which a comment looks like a heading."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of headings: small letters, - for a space, no punctuation but - and _."""
    headings = re.findall(r"^#+ (.*)", read(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", x).lower().replace(" ", "-") for x in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_arrive(page):
    """[`name`](file.py) promises that the file defines this function or class. A link to a line of
    it would be wrong after the next edit."""
    for name, path, anchor in LINK.findall(read(page)):
        file = page.parent / path if path else page
        assert file.exists(), path
        assert not anchor or anchor in anchors(file), (path, anchor)
        if name and file.suffix == ".py":
            assert re.search(rf"^\s*(def|class) {name}\b", file.read_text("utf-8"), re.M), name
