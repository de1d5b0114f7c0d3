"""The teacher's side of the exercises. Students get a copy without this file and solutions.py.

    python -m exercises.teacher             write results.json, after a change of lessons.json
    python -m exercises.teacher ../class    write the copy for students into this new folder

results.json has for each function what the solution returns in every case, and then a row for each
mistake of lessons.json: what it returns. A mistake is pieces of the solution's text, each followed
by the text that takes its place, and then the hint. The first command also names the mistakes that
do not get their hint, because no case shows them, or because another one returns the same.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import warnings
from pathlib import Path

from exercises import solutions
from exercises.call import answer, load
from exercises.grader import FOLDER, LESSONS, RESULTS, explain

# The functions that have one right answer.
FUNCTIONS = {
    name: lesson
    for exercise in LESSONS.values()
    for name, lesson in exercise["functions"].items()
    if "mistakes" in lesson
}


def find_results(name: str, lesson: dict) -> list:
    """What the solution of a function returns, and what each mistake returns instead."""
    source, kinds = inspect.getsource(getattr(solutions, name)), [*lesson["inputs"].values()]

    def run(text: str) -> list:
        function = [*load(f"import math, torch\n{text}").values()][-1]
        return [answer(function, kinds, case) for case in lesson["cases"]]

    results = [run(source)]
    for *edits, _ in lesson["mistakes"]:
        text = source
        for old, new in zip(edits[::2], edits[1::2], strict=True):
            text = text.replace(old, new)
        results.append(run(text))
    return results


def find_problems(name: str, lesson: dict) -> list[str]:
    """The mistakes that do not get their hint."""
    problems, (_, *mistakes) = [], RESULTS[name]
    for (*edits, hint), theirs in zip(lesson["mistakes"], mistakes, strict=True):
        said = explain(name, lesson, theirs)[-1:]
        if said != [hint]:
            problems.append(f"{name}: {edits} gets {said or 'PASS'}, not {hint!r}")
    return problems


def write_copy(folder: Path) -> None:
    copy, unseen = folder / "exercises", ("solutions.py", "teacher.py", "__pycache__")
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns(*unseen))
    shutil.copy(FOLDER.parent / "constraints.txt", folder)
    readme = (FOLDER / "README.md").read_text("utf-8")
    (copy / "README.md").write_text(readme.partition("\n---\n")[0], "utf-8")
    lessons = json.loads(json.dumps(LESSONS))
    for exercise in lessons.values():
        for lesson in exercise["functions"].values():  # hints without the pieces of the solution
            lesson["mistakes"] = [row[-1:] for row in lesson.get("mistakes", [])]
    (copy / "lessons.json").write_text(json.dumps(lessons, indent=1), "utf-8")


if __name__ == "__main__":
    if folders := sys.argv[1:]:
        write_copy(Path(folders[0]))
        sys.exit()
    warnings.simplefilter("ignore")  # those of a mistake
    RESULTS.update({name: find_results(name, lesson) for name, lesson in FUNCTIONS.items()})
    rows = (
        f'"{name}": [\n' + ",\n".join(map(json.dumps, x)) + "\n]" for name, x in RESULTS.items()
    )
    (FOLDER / "results.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")
    sys.exit("\n".join(line for item in FUNCTIONS.items() for line in find_problems(*item)) or 0)
