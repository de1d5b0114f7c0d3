"""One sheet of paper: every formula, the audit, what breaks the cancellation, and a tree.

    python -m exercises.sheet

This fills the table of sheet.md, and draws all of sheet.md as sheet.svg (A4, landscape). Formulas
come from the docstrings of losses.py, figures from the audit of claims/, the tree from toy/tree.py.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from html import escape
from pathlib import Path

import torch

import losses
from claims import Draws
from claims.audit import REGIMES
from llm import fail
from toy import tree
from verify import collect_tables, format_table, select, verify

HERE = Path(__file__).parent
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="297mm" height="210mm" fill="#1d2126"
 viewBox="0 0 842 595" font-family="system-ui, 'Segoe UI', Helvetica, Arial, sans-serif">
<style>@page { size: A4 landscape; margin: 0 }</style>"""
WIDTH, EDGE, ROW, CELL = 842, 26, 13.2, 60  # in pt: page, margin, row, cell of the heat map
COLUMNS = {"method": EDGE, "A": 115, "J": 148, "average": 440}  # and where they begin
HEAT = WIDTH - EDGE - 4 * CELL


def collect_rows() -> list[list[str]]:
    """Name, scale of A, J, average, and the audit's four figures.

    Of all methods with one loss and no credit rule, and of the projection.
    """
    outcomes = list(verify(losses, select(["AUDIT"]), Draws(0, kinds=())))
    ((_, _, table),) = collect_tables(outcomes)
    left = {name: cells for name, *cells in table}
    rows = []
    for name, method in losses.METHODS.items():
        if len(method.passes) == 1 and not method.credit:
            (loss,) = method.passes
            doc = (line.strip() for line in loss.__doc__.splitlines())
            sentence = next(line for line in doc if line.startswith("J = ")).partition(". ")[0]
            formula, _, average = sentence.removeprefix("J = ").rpartition(", ")
            rows.append([name, method.scale, formula, average, *left[loss.__name__]])
    return [*rows, ["with --project", "any", "c = wbar A", "any", *left["project"]]]


def fill_table(text: str, rows: list[list[str]]) -> str:
    """sheet.md with its table made anew."""
    cells = [[f"`{name}`", scale, f"`{J}`", *others] for name, scale, J, *others in rows]
    table = format_table([*COLUMNS, *REGIMES], cells)
    return re.sub(r"^\| method .*?(?=\n\n)", lambda _: table, text, flags=re.DOTALL | re.MULTILINE)


# ---------------- the paper


def draw(text: str, rows: list[list[str]]) -> str:
    """sheet.md on A4. The table is drawn from its rows, as a heat map."""
    _, title, first, *sections = re.split(r"^#+ (.*)\n", text, flags=re.MULTILINE)
    y = 70 + ROW * len(rows)
    parts = [write(EDGE, 38, title, 16, "bold"), *draw_table(rows)]
    parts += write_lines(EDGE, y + 12, first.strip().split("\n\n")[-1], 160)
    places = [(EDGE, y + 36, 52), (294, y + 36, 52), (562, y + 36, 52), (562, 522, 52)]
    for (x, top, width), heading, body in zip(places, sections[::2], sections[1::2], strict=True):
        parts += [write(x, top, heading, 11, "bold"), *write_lines(x, top + 14, body, width)]
    return "\n".join([HEAD, tree.STYLE, *parts, *draw_tree(386), "</svg>\n"])


def write(x: float, y: float, words: str, size: float = 9, kind: str = "") -> str:
    style = f'style="font-size: {size:g}px" class="{kind}"'  # the page has 842 px, so px are pt
    return f'<text x="{x:g}" y="{y:.4g}" {style}>{escape(words, quote=False)}</text>'


def write_lines(x: float, y: float, text: str, width: int) -> list[str]:
    """Paragraphs, wrapped at so many characters; pictures are left out."""
    parts = []
    for paragraph in text.replace("`", "").strip().split("\n\n"):
        if not paragraph.startswith("!"):
            for line in textwrap.wrap(paragraph, width, break_on_hyphens=False):
                parts.append(write(x, y, line))
                y += 11
            y += 3
    return parts


def draw_table(rows: list[list[str]]) -> list[str]:
    parts = [write(x, 66, name, 9, "bold") for name, x in COLUMNS.items()]
    for k, regime in enumerate(REGIMES):
        for y, words in zip((57, 66), regime.split(", "), strict=True):
            parts.append(write(HEAT + CELL * (k + 0.5), y, words, 8, "middle"))
    for n, row in enumerate(rows):
        y = 70 + ROW * n
        parts.append(f'<path d="M{EDGE} {y:g}H{WIDTH - EDGE}" stroke="#cdc9c0"/>')
        for (name, x), words in zip(COLUMNS.items(), row, strict=False):
            parts.append(write(x, y + 10, words, 9, "code" if name == "J" else ""))
        for k, figure in enumerate(row[len(COLUMNS) :]):
            x = HEAT + CELL * k
            size = f'width="{CELL}" height="{ROW}" fill="{tint(float(figure))}"'
            parts.append(f'<rect x="{x:g}" y="{y:g}" {size} stroke="#fff"/>')
            bold = "bold" if float(figure) else ""
            parts.append(write(x + CELL / 2, y + 10, figure, 9, f"middle {bold}"))
    return parts


def tint(left: float) -> str:
    """White for 0, orange for 1; the root makes small figures visible."""
    colors = [round(255 + (end - 255) * left**0.5) for end in (0xE6, 0x9F, 0x00)]
    return "#{:02x}{:02x}{:02x}".format(*colors)


def draw_tree(top: float) -> list[str]:
    """The GRPO half of toy/tree.svg."""
    group = tree.toy_group("unequal", "1010")
    group.logp = group.old[None]  # on-policy
    picture = tree.Picture(group, tree.Loss("grpo", losses.METHODS["grpo"], losses.grpo))
    (root,) = picture.tree
    middle = picture.height(root) / 2
    picture.text(0, middle + 4, group.prompt, "code")
    picture.line(f"M54 {middle:g}h14")
    picture.draw(root, 68, middle)
    place = f'transform="translate({EDGE} {top:g}) scale(.78)" font-size="12.5"'
    return [f"<g {place}>", *picture.parts, "</g>"]


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser("python -m exercises.sheet", description=__doc__)
    parser.error = fail
    parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = collect_rows()
    text = fill_table((HERE / "sheet.md").read_text(), rows)
    (HERE / "sheet.md").write_text(text)
    (HERE / "sheet.svg").write_text(draw(text, rows))


if __name__ == "__main__":
    main()
