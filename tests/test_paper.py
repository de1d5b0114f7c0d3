"""What is made for paper is current and whole: exercises/sheet.svg, claims/derivations.md."""

import html
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import get_data_path
from PIL import ImageFont

import verify
from claims.audit import AUDIT
from exercises import sheet

ROOT = Path(verify.__file__).parent
EXERCISES, DERIVATIONS = ROOT / "exercises", ROOT / "claims" / "derivations.md"
FOLDER = f"{get_data_path()}/fonts/ttf"
FONTS = {  # by whether it is code, and bold; DejaVu is wider than most
    (code, bold): ImageFont.truetype(f"{FOLDER}/DejaVuSans{'Mono' * code}{'-Bold' * bold}.ttf", 100)
    for code in (False, True)
    for bold in (False, True)
}
SIZES = {"code": 12, "small": 11}  # of toy/tree.py's text, in px; other text has 12.5


def test_the_sheet_is_current(tmp_path, monkeypatch):
    shutil.copy(EXERCISES / "sheet.md", tmp_path)
    monkeypatch.setattr(sheet, "HERE", tmp_path)
    sheet.main([])
    for name in ("sheet.md", "sheet.svg"):
        committed = (EXERCISES / name).read_text()
        assert (tmp_path / name).read_text() == committed, "python -m exercises.sheet mends it"


def test_the_sheets_figures_are_in_the_right_rows_and_columns():
    text = (EXERCISES / "sheet.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    pattern = {row[0].strip("`"): "".join("0x"[x != "0"] for x in row[-4:]) for row in rows}
    assert pattern.pop("with --project") == AUDIT["project"]
    assert len(pattern) >= 9 and pattern["grpo"] == "0x0x"
    for name, cells in pattern.items():
        assert cells == AUDIT[name.replace("-", "_")]


def measure(text, x0: float, y0: float, scale: float) -> tuple[str, float, list[float]]:
    """Words, their size, and left, top, right, bottom, in pt, in DejaVu."""
    kinds = text.get("class").split()
    own = re.findall(r"font-size: ([\d.]+)px", text.get("style", ""))
    shared = min(SIZES.get(kind, 12.5) for kind in ["", *kinds])
    size = scale * (float(own[0]) if own else shared)
    width = size / 100 * FONTS["code" in kinds, "bold" in kinds].getlength(text.text)
    x, y = x0 + scale * float(text.get("x")), y0 + scale * float(text.get("y"))
    left = x - width * (1 if "end" in kinds else 0.5 if "middle" in kinds else 0)
    return text.text, size, [left, y - 0.75 * size, left + width, y]


def texts_on_the_sheet(element, *place: float):
    """All of them, measured; the page itself, or a part of it that is moved and scaled."""
    for part in element:
        moved = re.findall(r"translate\((\S+) (\S+)\) scale\((\S+)\)", part.get("transform", ""))
        if part.tag.endswith("}text"):
            yield measure(part, *place)
        else:
            yield from texts_on_the_sheet(part, *(map(float, moved[0]) if moved else place))


def test_the_sheets_text_is_at_least_8_pt_on_the_page_and_never_over_other_text():
    page = ElementTree.parse(EXERCISES / "sheet.svg").getroot()
    texts = list(texts_on_the_sheet(page, 0, 0, 1))
    assert len(texts) > 150
    for k, (words, size, (left, top, right, bottom)) in enumerate(texts):
        assert size >= 8 and min(left, top) > 20 and right < 842 - 20 and bottom < 595 - 20, words
        for other, _, (left_2, top_2, right_2, bottom_2) in texts[:k]:
            apart = left >= right_2 or left_2 >= right or top >= bottom_2 or top_2 >= bottom
            assert apart, f"{words} over {other}"


def printed(capsys, *arguments) -> str:
    assert verify.main([*arguments]) == 0
    return capsys.readouterr().out


def test_the_derivations_on_paper_are_current(capsys):
    mended = "python verify.py --explain --markdown > claims/derivations.md mends it"
    assert printed(capsys, "--explain", "--markdown") == DERIVATIONS.read_text(), mended


def test_markdown_swallows_nothing_of_the_derivations(capsys):
    """Rendered they have the words of --explain, and no line of code is cut off on A4."""
    markdown_it = pytest.importorskip("markdown_it")
    text = DERIVATIONS.read_text()
    page = markdown_it.MarkdownIt("commonmark").enable("table").render(text).partition("<h2>")[2]
    plain = re.sub("`|-{96}", "", printed(capsys, "--explain"))
    words = re.sub("<[^>]+>", " ", re.sub("</?(code|strong)[^>]*>", "", page))
    assert html.unescape(words).split() == plain.split()
    blocks = re.findall("^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 20 and max(len(x) for block in blocks for x in block.splitlines()) <= 84
    prose = re.sub(r"```.*?```|\\~", "", text, flags=re.DOTALL)
    assert "~" not in prose  # between two of them, GitHub strikes the text out
