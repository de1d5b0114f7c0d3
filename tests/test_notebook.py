"""To a class: the notebooks run from end to end, and a page on the web shows the picture."""

import json
import os
import shutil
from pathlib import Path

import pytest

from exercises import notebooks

ROOT = Path(__file__).resolve().parent.parent
LONG = pytest.mark.skipif(not os.environ.get("LONG"), reason="minutes: LONG=1")


def sources(notebook: dict, kind: str) -> list[str]:
    return ["".join(x["source"]) for x in notebook["cells"] if x["cell_type"] == kind]


def shown(notebook: dict) -> list[str]:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return [kind for output in outputs for kind in output.get("data", {})]


def test_lab_has_the_texts_of_the_numbered_files():
    """Their code may be a student's."""
    lab, made = json.loads(notebooks.LAB.read_text("utf-8")), notebooks.make_lab()
    assert sources(lab, "markdown") == sources(made, "markdown")
    assert len(sources(lab, "code")) == 2 + 2 * 11


def test_the_tours_picture_is_saved():
    assert shown(json.loads(notebooks.TOUR.read_text("utf-8"))).count("image/png") == 1


@LONG
@pytest.mark.parametrize("name", ["tour", "lab"])
def test_a_notebook_runs_from_end_to_end(name, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[notebook]'")
    import nbformat

    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "models", "tree.html"))
    notebook = nbformat.read(copy / "exercises" / f"{name}.ipynb", as_version=4)
    where = {"metadata": {"path": str(copy / "exercises")}}
    nbclient.NotebookClient(notebook, resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    # A program that ends with exit code 1 is shown as an error, and the next cell is run.
    assert [output for output in outputs if output.output_type == "error"] == []
    if name == "tour":
        assert shown(notebook).count("text/html") == 2
    else:
        said = "".join(output.get("text", "") for output in outputs)
        assert said.count("NOT YET (blank)") == 19
