"""Grade the exercises: PASS or NOT YET for every function, and what to look at.

    python -m exercises.grader 6            grade exercise 6
    python -m exercises.grader 6 mine.py    grade a copy of it
    python -m exercises.grader              how far you are

Exit code 0: all functions pass. 1: some do not yet. 2: a wrong command line.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def read_titles() -> dict[int, tuple[Path, str]]:
    """The working file of each exercise, and its title."""
    titles = {}
    for path in sorted(FOLDER.glob("[0-9]*.py")):
        heading = re.search(r"^# \d+\. (.*?)(?: \(.*)?$", path.read_text(errors="replace"), re.M)
        titles[int(path.name[:2])] = path, heading[1] if heading else path.stem
    return titles


def show_exercise(number: int, verdicts: list, titles: dict) -> None:
    from exercises.questions import EXERCISES

    print(f"Exercise {number}: {titles[number][1]}")
    for verdict in verdicts:
        print(f"\n  {verdict.function}  {verdict.state}")
        for line in "\n".join(verdict.lines).splitlines():
            print(f"    {line}")
    print()
    if any(verdict.state != "PASS" for verdict in verdicts):
        return
    print(f"Why it is so: {EXERCISES[number].why}")
    if number + 1 in titles:
        path, title = titles[number + 1]
        print(f"Next: {number + 1}. {title}, in exercises/{path.name}")
        print(f"      make exercise N={number + 1}")
    else:
        print("This was the last exercise. Which ones are still open: make exercises")


def show_progress(titles: dict) -> None:
    """One line for each exercise, then the first that is still open."""
    from exercises.grading import grade_file

    todo = []
    for number, (path, title) in titles.items():
        states = [verdict.state for verdict in grade_file(str(path), number)]
        state = states[0] if len({*states}) == 1 else "NOT YET"
        if state != "PASS":
            todo.append(number)
        print(f"{number:3}  {title:45} {state}", flush=True)
    print(f"\n{len(titles) - len(todo)} of {len(titles)} pass.", end="")
    print(f" Next: make exercise N={todo[0]}" if todo else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    titles = read_titles()
    parser.add_argument("exercise", nargs="?", type=int, choices=titles, help="its number")
    parser.add_argument("file", nargs="?", help="a copy of it (default: the file in exercises/)")
    options = parser.parse_args(argv)
    print("grading ...", file=sys.stderr, flush=True)  # torch is imported below: it takes seconds
    if options.exercise is None:
        show_progress(titles)
        return 0
    path = Path(options.file or titles[options.exercise][0])
    if not path.is_file():
        parser.error(f"there is no file {path}")

    from exercises.grading import grade_file

    verdicts = grade_file(str(path), options.exercise)
    show_exercise(options.exercise, verdicts, titles)
    return 0 if all(verdict.state == "PASS" for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
