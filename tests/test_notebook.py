"""To a class in a browser: the notebook has today's exercises, and runs from end to end."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "exercises" / "lab.ipynb"


def test_lab_has_the_texts_of_the_numbered_files():
    """If not, run python -m exercises.notebook. The code of the files may be a student's."""
    texts = ["".join(cell["source"]) for cell in json.loads(LAB.read_text("utf-8"))["cells"]]
    for path in LAB.parent.glob("[0-9]*.py"):
        text = path.read_text("utf-8").split('"""')[1].partition("**Grade it:**")[0]
        assert text.strip() in texts, path


@pytest.mark.skipif(not os.environ.get("LONG"), reason="a minute, and an extra: LONG=1")
def test_lab_clones_the_repository_and_grades_its_blanks(tmp_path):
    """As in Colab, but from here. The clone has the last commit."""
    import nbclient
    import nbformat

    text = LAB.read_text("utf-8").replace("https://github.com/OWNER/NAME", str(ROOT))
    lab = nbformat.reads(text, as_version=4)
    nbclient.NotebookClient(lab, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert str(lab.cells).count("NOT YET (blank)") == 19
