"""Write lab.ipynb, which has the texts and the blanks of the numbered files for a browser.

python -m exercises.notebook    needs pip install -e '.[notebook]'
"""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FOLDER = Path(__file__).parent
INTRODUCTION = """\
# Eleven exercises in a browser

Run the next two cells. Each exercise then has a cell in which you fill in the blanks, and one that
grades it: run both."""
CLONE = """\
import os

# In Colab, first put the address of your copy of the repository here. A clone of it needs none.
REPOSITORY = "https://github.com/OWNER/NAME"

if os.path.exists("../losses.py"):  # Jupyter begins in the notebook's folder
    os.chdir("..")
if not os.path.exists("losses.py"):
    !GIT_TERMINAL_PROMPT=0 git clone -q --depth 1 {REPOSITORY} clone
    os.chdir("clone")
os.makedirs("runs", exist_ok=True)"""


def make_cells(path: Path) -> list:
    """An exercise: its text, its blanks, and a cell that grades them."""
    text, *code = path.read_text("utf-8").split("# %%")[1:]
    text = text.split('"""')[1].partition("**Grade it:**")[0]
    blanks, copy = "\n\n\n".join(part.strip() for part in code), f"runs/{path.name}"
    return [
        new_markdown_cell(text.strip()),
        new_code_cell(f"%%writefile {copy}\n{blanks}"),
        new_code_cell(f'grade(["{int(path.name[:2])}", "{copy}"]);'),
    ]


if __name__ == "__main__":
    cells = [new_markdown_cell(INTRODUCTION), new_code_cell(CLONE)]
    cells += [new_code_cell("from exercises.grader import main as grade")]
    for path in sorted(FOLDER.glob("[0-9]*.py")):
        cells += make_cells(path)
    for k, cell in enumerate(cells):
        cell.id = f"cell-{k}"  # the same in every run
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    lab = new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(lab, FOLDER / "lab.ipynb")
