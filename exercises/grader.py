"""Grade the exercises: PASS or NOT YET for every function, and what to look at.

    python -m exercises.grader 2                  grade exercise 2
    python -m exercises.grader 2 mine.py          grade a copy of it
    python -m pytest -v --tb=no exercises         how far you are
    python -m pytest exercises -k ex02            grade by exit code, a test for each function

lessons.json has the cases and the hints on known mistakes. results.json has what the solutions
return, and what each mistake returns instead. A student whose results differ gets the hint on the
mistake that returns the same. A prediction is only noted. Each file runs in a process of its own.

Exit code 0: all functions pass. 1: some do not pass yet.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
LESSONS, RESULTS = (
    json.loads((FOLDER / name).read_text("utf-8")) for name in ("lessons.json", "results.json")
)
FILES = {key: next(FOLDER.glob(f"{key[2:]}_*.py")) for key in LESSONS}  # ex02: 02_the_net_push.py
DONE = ("PASS", "NOTED")

# ---------------- the verdict


def grade(key: str, path: Path) -> dict[str, tuple[str, list[str]]]:
    """Of each function of an exercise: PASS, NOTED, NOT YET or NOT YET (blank), and what to say."""
    functions = LESSONS[key]["functions"]
    command = [sys.executable, "-m", "exercises.call", key, path.resolve()]
    done = subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.PIPE)
    if done.returncode or not done.stdout:
        return dict.fromkeys(functions, ("NOT YET", ["Python ended too early: see above."]))
    answers = json.loads(done.stdout)
    return {name: judge(name, lesson, answers[name]) for name, lesson in functions.items()}


def judge(name: str, lesson: dict, yours: list | dict) -> tuple[str, list[str]]:
    """The verdict on one function."""
    if isinstance(yours, dict):
        return "NOT YET", [yours["error"]]
    if {"error": None} in yours:
        return "NOT YET (blank)", lesson.get("blank", [])
    lines = check(lesson, yours[0]) if "must" in lesson else explain(name, lesson, yours)
    return "NOT YET" if lines else lesson.get("passed", "PASS"), lines


def is_same(yours, right, tolerance: float = 1e-5) -> bool:
    """Whether two answers are the same up to rounding."""
    if isinstance(yours, list) and isinstance(right, list):
        pairs = zip(yours, right, strict=False)
        return len(yours) == len(right) and all(is_same(x, y, tolerance) for x, y in pairs)
    if isinstance(yours, (int, float)) and isinstance(right, (int, float)):
        return math.isclose(yours, right, rel_tol=tolerance, abs_tol=tolerance)
    return yours == right


def check(lesson: dict, yours) -> list[str]:
    """Where many answers are right: what this one lacks. Nothing if it is right."""
    if isinstance(yours, dict):
        return [yours["error"]]
    names = lesson["gives"]
    try:
        given = dict(zip(names, yours, strict=True))
        problems = [problem for condition, problem in lesson["must"] if not eval(condition, given)]
    except (TypeError, ValueError):
        problems = [f"Another form is asked for: {len(names)} numbers."]
    return [f"yours     {str(yours)[:90]}", problems[0]] if problems else []


# ---------------- hints


def explain(name: str, lesson: dict, yours: list) -> list[str]:
    """The first case that fails, and what to look at. Nothing if none fails.

    The hint is that of the known mistake whose answers are most like the student's. They must say
    the same in two of three cases where one of them is wrong. Not in all: then a mistake elsewhere,
    at the edge, would hide this one.
    """

    def differ(answers: list, others: list) -> set[int]:
        pairs, tolerance = zip(answers, others, strict=True), lesson.get("tolerance", 1e-5)
        return {k for k, (x, y) in enumerate(pairs) if not is_same(x, y, tolerance)}

    right, *mistakes = RESULTS[name]
    wrong = differ(yours, right)
    if not wrong:
        return []
    hint, most = [], 2 / 3
    for (*_, said), theirs in zip(lesson["mistakes"], mistakes, strict=True):
        agreement = 1 - len(differ(yours, theirs)) / len(wrong | differ(theirs, right))
        if agreement > most:
            hint, most = [said], agreement
    k = min(wrong)
    case = zip(lesson["inputs"], lesson["cases"][k], strict=True)
    return [
        f"with      {', '.join(f'{name} = {x}' for name, x in case)}",
        f"yours     {yours[k]}",
        f"expected  {right[k]}",
        *hint,
    ]


def main(exercise: str, file: str = "") -> int:
    key = f"ex{exercise:0>2}"
    path, lesson = Path(file) if file else FILES[key], LESSONS[key]
    verdicts = grade(key, path)
    for name, (state, lines) in verdicts.items():
        print(f"\n  {name}  {state}")
        for line in lines:
            print(f"    {line}")
    print(flush=True)
    if not all(state in DONE for state, _ in verdicts.values()):
        return 1
    if lesson.get("run"):  # exercise 4 trains
        subprocess.run([sys.executable, path])
    print(f"Why it is so: {lesson['why']}")
    print(f"More: {lesson['more']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
