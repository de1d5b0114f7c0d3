"""Whoever follows a link in a Markdown page arrives: at a file, a heading, a name in the code."""

import re
from pathlib import Path

import losses

ROOT = Path(__file__).resolve().parent.parent
# [text](file#anchor) without an address of the web; a text that is `a_name` is caught by itself.
LINK = re.compile(r"\[(?:`(\w+)`|[^][]*)\]\(([^()\s:#]*)#?([^()\s:]*)\)")


def read(page: Path) -> str:
    """A page without its blocks of code, in which a comment looks like a heading."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of headings: small letters, - for a space, no punctuation but - and _."""
    headings = re.findall(r"^#+ (.*)", read(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", x).lower().replace(" ", "-") for x in headings}


def test_links_arrive():
    """[`name`](file.py) promises that the file defines this function or class."""
    followed = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("[!.]*/*.md")]:
        for name, path, anchor in LINK.findall(read(page)):
            where = f"{page.relative_to(ROOT)}: [{name}]({path}#{anchor})"
            file = page.parent / path if path else page
            assert file.exists(), where
            assert not anchor or anchor in anchors(file), where
            assert not name or re.search(rf"^\s*(def|class) {name}\b", read(file), re.M), where
            followed.append(name)
    assert "min_replace" in followed


def test_the_front_page_has_todays_rows_of_the_table_of_methods():
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and line.split()[1] in losses.METHODS]
    assert rows and {*rows} <= {*losses.table().splitlines()}
