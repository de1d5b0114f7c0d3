"""The notebooks. lab.ipynb is made of the numbered files, and tour.ipynb is run.

    python -m exercises.notebooks    some minutes; needs pip install -e '.[notebook]'

Commit what it writes: a page on the web then shows the tour's tables and pictures. The pages of
toy.tree are not kept, because such a page shows no scripts.
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent
TOUR, LAB = FOLDER / "tour.ipynb", FOLDER / "lab.ipynb"
INTRODUCTION = """\
# Eleven exercises in a browser

Run the first two cells. Each exercise then has a cell in which you fill in the blanks, and one that
grades it: run both. [README.md](README.md) says how to open this notebook in Colab."""
START = """\
from exercises.grader import main as grade

Path("runs").mkdir(exist_ok=True)"""


def read_parts(path: Path) -> tuple[str, str]:
    """The text of an exercise, and its code."""
    text, *code = path.read_text("utf-8").split("# %%")[1:]
    text = text.split('"""')[1].partition("**Grade it:**")[0]
    return text.strip(), "\n\n\n".join(part.strip() for part in code)


def make_lab() -> dict:
    """The notebook with the blanks, without the outputs of any cell."""
    tour = json.loads(TOUR.read_text("utf-8"))
    get_repository = next(c for c in tour["cells"] if c["cell_type"] == "code")["source"]
    cells = [("markdown", INTRODUCTION), ("code", "".join(get_repository)), ("code", START)]
    for path in sorted(FOLDER.glob("[0-9]*.py")):
        text, code = read_parts(path)
        copy, number = f"runs/{path.name}", int(path.name[:2])
        cells.append(("markdown", text))
        cells.append(("code", f"%%writefile {copy}\n{code}"))
        cells.append(("code", f'grade(["{number}", "{copy}"]);'))
    tour["cells"] = [make_cell(k, *cell) for k, cell in enumerate(cells)]
    return tour


def make_cell(k: int, kind: str, source: str) -> dict:
    cell = {"cell_type": kind, "id": f"cell-{k}", "metadata": {}}
    cell["source"] = source.splitlines(keepends=True)
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def run_tour():
    """With what it prints and draws, but for the pages of toy.tree."""
    import nbformat
    from nbclient import NotebookClient

    tour = nbformat.read(TOUR, as_version=4)
    NotebookClient(tour, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in tour.cells:
        cell.metadata.pop("execution", None)  # when it was run
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if is_kept(output)]
    nbformat.write(tour, TOUR)


def is_kept(output: dict) -> bool:
    return "text/html" not in output.get("data", {}) and output.get("name") != "stderr"


if __name__ == "__main__":
    LAB.write_text(json.dumps(make_lab(), indent=1) + "\n", "utf-8")
    run_tour()
