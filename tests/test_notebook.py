"""To a class: the notebook runs from end to end, and shows its pages and its curve (LONG=1)."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not os.environ.get("LONG"), reason="minutes: LONG=1")


def test_the_tour_runs_from_end_to_end(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[notebook]'")
    import nbformat

    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "tree.html"))
    tour = nbformat.read(copy / "exercises" / "tour.ipynb", as_version=4)
    where = {"metadata": {"path": str(copy / "exercises")}}
    nbclient.NotebookClient(tour, resources=where).execute()
    # A program that ends with exit code 1 is shown as an error, and the next cell is run.
    outputs = [output for cell in tour.cells for output in cell.get("outputs", [])]
    assert [output for output in outputs if output.output_type == "error"] == []
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert shown.count("text/html") == 2 and shown.count("image/png") == 1
