"""Whoever follows a link in a Markdown page arrives: at a file, a heading, a line of the code.

`python tests/test_links.py` writes today's lines into the pages.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("[!.]*/*.md")]
# [text](file#anchor) without an address of the web; a text that is `a_name` is caught by itself.
LINK = re.compile(r"\[(?:`(\w+)`|[^][]*)\]\(([^()\s:#]*)#?([^()\s:]*)\)")


def read(page: Path) -> str:
    """A page without its blocks of code, in which a comment looks like a heading."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of headings: small letters, - for a space, no punctuation but - and _."""
    headings = re.findall(r"^#+ (.*)", read(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", x).lower().replace(" ", "-") for x in headings}


def line_of(file: Path, name: str) -> str:
    """Where a file defines a function or class: the anchor of its line, L12."""
    lines = file.read_text("utf-8").splitlines()
    found = [i for i, x in enumerate(lines, 1) if re.match(rf"\s*(def|class) {name}\b", x)]
    return f"L{found[0]}"


def with_todays_lines(page: Path) -> str:
    def renew(link: re.Match) -> str:
        name, path, anchor = link.groups()
        if not name or not path.endswith(".py"):
            return link[0]
        return f"[`{name}`]({path}#{line_of(page.parent / path, name)})"

    return LINK.sub(renew, page.read_text("utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_arrive(page):
    """[`name`](file.py#L12) promises that line 12 of the file defines this function or class."""
    text = page.read_text("utf-8")
    assert text == with_todays_lines(page), "run python tests/test_links.py"
    for name, path, anchor in LINK.findall(read(page)):
        file = page.parent / path if path else page
        assert file.exists(), path
        is_line = name and path.endswith(".py")
        assert not anchor or is_line or anchor in anchors(file), (path, anchor)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_todays_lines(page), "utf-8")
