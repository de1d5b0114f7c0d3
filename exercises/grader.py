"""Grade the exercises: PASS or NOT YET for every function, and what to look at.

    python -m exercises.grader 6            grade exercise 6
    python -m exercises.grader 6 mine.py    grade a copy of it
    python -m exercises.grader              how far you are

Exit code 0: all functions pass, or you asked how far you are. 1: some do not pass yet. 2: a wrong
command line.

The file runs in this process, with all your rights: grade what you would run yourself. An answer
that takes longer than ten seconds is stopped (not on Windows).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import itertools
import json
import math
import re
import signal
import sys
import textwrap
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
LIMIT = 10  # seconds for one answer
STUDENT = "student"  # the name of the file in tracebacks, and of the module

# ---------------- one answer


class Stopped(BaseException):
    """Not an Exception, so that a student's `except` does not catch it."""


@contextlib.contextmanager
def limited():
    """Stop what takes too long, and keep what it prints."""

    def stop(*_):
        raise Stopped(f"no answer: stopped after {LIMIT:g} s")

    has_clock = hasattr(signal, "SIGALRM")
    if has_clock:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield printed
    finally:
        if has_clock:
            signal.setitimer(signal.ITIMER_REAL, 0)


@dataclass
class Answer:
    """What a function returned, in plain Python, so that it can be compared and shown."""

    value: object = None
    error: BaseException | None = None
    printed: str = ""


def to_plain(value):
    """Numbers, strings, lists. A tensor (or an array of numpy) becomes a list."""
    return json.loads(json.dumps(value, default=lambda x: x.tolist()), parse_int=float)


def answer(question, function: Callable, inputs: tuple) -> Answer:
    """What a function returns for these inputs. It gets copies: it may change them."""
    try:
        with limited() as printed:
            value = to_plain(question.call(function, *copy.deepcopy(inputs)))
        return Answer(value, None, printed.getvalue())
    except (Exception, SystemExit, Stopped) as error:
        # With tensors a division by 0 would be a nan.
        return Answer(math.nan if isinstance(error, ZeroDivisionError) else None, error)


def load(source: str | bytes) -> dict:
    """What a file defines."""
    module = sys.modules[STUDENT] = types.ModuleType(STUDENT)
    with limited():
        exec(compile(source, STUDENT, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def describe(error: BaseException) -> str:
    """The error in one line, with its last place in the student's file."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}, line {error.lineno}"
    name = "" if isinstance(error, Stopped) else f"{type(error).__name__}: "
    text = f"{name}{error}".splitlines()[0].removesuffix(": ")
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == STUDENT]
    return f"{text} (line {frames[-1].lineno}, in {frames[-1].name})" if frames else text


# ---------------- the verdict


@dataclass
class Verdict:
    """What a student is told about one function."""

    function: str
    state: str  # PASS, NOT YET, NOT YET (blank)
    lines: list[str] = field(default_factory=list)


def compare(yours, right, place: str = "") -> Iterator[tuple[str, object, object]]:
    """Every number beside the one that is expected, and its place."""
    if isinstance(yours, list) and isinstance(right, list) and len(yours) == len(right):
        for k, pair in enumerate(zip(yours, right, strict=True)):
            yield from compare(*pair, f"{place}[{k}]")
    else:
        yield place, yours, right


def is_same(yours, right, tolerance: float = 1e-9) -> bool:
    """Whether two plain values are the same up to rounding. A nan is the same as an inf."""
    for _, x, y in compare(yours, right):
        same = x == y
        if {type(x), type(y)} <= {bool, float}:
            close = math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance)
            same = close if math.isfinite(y) else not math.isfinite(x)
        if not same:
            return False
    return True


def grade_file(path: Path, number: int) -> list[Verdict]:
    """One verdict for each function of an exercise."""
    import torch

    from exercises.questions import EXERCISES

    questions, before = EXERCISES[number].questions, torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # torch.tensor of a list of ours loses no digit
    try:
        student, verdicts = load(path.read_bytes()), []
        for question in questions:
            verdicts.append(judge(question, student.get(question.function)))
            if question.right and verdicts[-1].state != "PASS":
                # The next function may call this one, and is not to blame for it.
                student[question.function] = make_mistakes(read_lessons()[question.function])
        return verdicts
    except (Exception, SystemExit, Stopped) as error:  # the file's own, outside of its functions
        return [Verdict(question.function, "NOT YET", [describe(error)]) for question in questions]
    finally:
        torch.set_default_dtype(before)


def judge(question, function: Callable | None) -> Verdict:
    """The verdict on one function, from its answers to all inputs."""
    if function is None:
        return Verdict(question.function, "NOT YET", ["The file has no function of this name."])
    lesson = read_lessons().get(question.function)
    inputs = [*lesson.cases, *question.inputs] if lesson else [()]
    yours: list[Answer] = []
    for x in inputs:
        yours.append(answer(question, function, x))
        if isinstance(yours[-1].error, Stopped):
            break
    error = yours[0].error
    if isinstance(error, NotImplementedError) and not error.args:  # torch's has a text
        return Verdict(question.function, "NOT YET (blank)")
    if question.check:
        problem = [describe(error)] if error else find_problem(question, yours[0].value)
        if problem:
            return Verdict(question.function, "NOT YET", problem)
        praise = question.praise(yours[0].value) if question.praise else []
        return Verdict(question.function, "PASS", [*praise])

    right = [answer(question, question.right, x).value for x in inputs[: len(yours)]]
    failing = [k for k, y in enumerate(yours) if y.error or not is_same(y.value, right[k])]
    if not failing:
        return Verdict(question.function, "PASS")
    hints, k = find_hints(question, lesson, inputs, yours, right, failing)
    value, error = yours[k].value, yours[k].error
    digits = 17 if show(value) == show(right[k]) else 9
    named = [f"{name} = {show(x)}" for name, x in zip(lesson.inputs, inputs[k], strict=True)]
    lines = [("with", ", ".join(named)), ("printed", yours[k].printed.strip())]
    lines += [("yours", describe(error) if error else show(value, digits))]
    lines += [("expected", show(right[k], digits))]
    return Verdict(question.function, "NOT YET", [show_line(*x) for x in lines if x[1]] + hints)


def find_problem(question, value) -> list[str]:
    """What an answer lacks, of which many are right. Empty if nothing."""
    try:
        problem = [*itertools.islice(question.check(value), 1)]
    except (TypeError, ValueError, IndexError, RuntimeError):
        problem = ["Your answer has another form than the exercise asks for."]
    return [show_line("yours", show(value)[:90]), *problem] if problem else []


# ---------------- hints

ERRORS = {  # what torch says: what a student may not know
    "must match the size": "A mean over rows has the shape (P,). keepdim=True makes it (P, 1).",
    "torch.return_types": "With a dim, min and max return values and indices. Try amin.",
    "does not require grad": "The result does not depend on batch.logp: a detach, item or no_grad?",
    "not a tensor": "A loss must be differentiable: return it without item() or float().",
    "ambiguous": "A tensor of several numbers is not true or false. See torch.where.",
}


@dataclass
class Lesson:
    """What mistakes.txt says about a function."""

    solution: str
    inputs: tuple[str, ...] = ()  # their names
    cases: tuple[tuple, ...] = ()
    mistakes: dict[str, str] = field(default_factory=dict)  # edits: hint
    where: dict[str, str] = field(default_factory=dict)  # condition: hint
    answers: dict[str, list] = field(default_factory=dict)  # edits: what this mistake answers


@functools.cache
def read_lessons() -> dict[str, Lesson]:
    """The lesson of each function."""
    lessons = {}
    for block in (FOLDER / "mistakes.txt").read_text().split("\n===\n")[1:]:
        solution, header, rest = block.split("\n---\n")
        lesson = lessons[re.match(r"def (\w+)", solution)[1]] = Lesson(solution)
        exec(header, {}, vars(lesson))  # sets inputs and cases
        for head, hint in re.findall(r"((?:^(?! {4}).+\n)+)((?:^ {4}.+\n?)+)", rest, re.M):
            notes = lesson.where if head.startswith("where: ") else lesson.mistakes
            notes[head.removeprefix("where: ")] = " ".join(hint.split())
    return lessons


def make_mistakes(lesson: Lesson, *edits: str) -> Callable | None:
    """The solution with these edits. None if they do not go together."""
    source = lesson.solution
    for old, new in re.findall("^(.*?) ->(?: (.*))?$", "".join(edits), re.M):
        if old not in source:
            return None
        source = source.replace(old, new)
    with contextlib.suppress(SyntaxError):
        *_, function = load(f"import math, torch\n{source}").values()
        return function
    return None


def find_hints(question, lesson, inputs, yours, right, failing) -> tuple[list[str], int]:
    """What a student should look at, if somebody has foreseen it; and the case that shows it."""
    # What the solution says with each mistake. The best one says what you say, in most of the cases
    # that either of you gets wrong: a mistake elsewhere, at the edge, does not hide it.
    theirs = lesson.answers
    for edits in lesson.mistakes.keys() - theirs:
        function = make_mistakes(lesson, edits)
        theirs[edits] = [answer(question, function, x).value for x in inputs]
    wrong = {
        edits: {k for k, x in enumerate(right) if not is_same(theirs[edits][k], x)}
        for edits in lesson.mistakes
    }

    def agreement(edits: str) -> tuple[float, float]:
        either = wrong[edits].union(failing)
        same = [k for k in either if agrees(yours[k].value, theirs[edits][k])]
        return len(same) / len(either), len(wrong[edits].intersection(failing)) / len(either)

    def tell(*mistakes: str) -> tuple[list[str], int]:
        hints = [lesson.mistakes[edits] for edits in mistakes]
        return hints, min(wrong[mistakes[0]].intersection(failing) or failing)

    best = max(lesson.mistakes, key=agreement)
    if agreement(best)[0] > 2 / 3:
        return tell(best)
    for pair in itertools.combinations(lesson.mistakes, 2):
        function = make_mistakes(lesson, *pair)
        if function and all(
            agrees(yours[k].value, answer(question, function, inputs[k]).value)
            for k in [*failing, *range(len(yours))]  # the sooner they differ the better
        ):
            return tell(*pair)
    given = [dict(zip(lesson.inputs, x, strict=True)) for x in inputs[: len(yours)]]
    for condition, hint in lesson.where.items():
        cases = {k for k, names in enumerate(given) if eval(condition, names)}
        if cases.issuperset(failing) and 2 * len(failing) > len(cases) < len(yours):
            return [hint], failing[0]
    if any(y.value is None and not y.error for y in yours):
        return ["Your function returns nothing. Did you print?"], failing[0]
    errors = " ".join(str(y.error) for y in yours)
    known = [hint for words, hint in ERRORS.items() if words in errors]
    pairs = [(y.value, x) for y, x in zip(yours, right, strict=True)]
    return known[:1] or [*find_differences(pairs, failing[0])], failing[0]


def find_differences(pairs: list[tuple], k: int) -> Iterator[str]:
    """What can be said of a mistake that nobody has foreseen. Case k is shown."""
    place, y, x = next(n for n in compare(*pairs[k]) if not is_same(*n[1:]))
    numbers = [n for pair in pairs for n in compare(*pair)]
    if place:
        only = len({n[0][:3] for n in numbers if not is_same(*n[1:])}) == 1
        also = f" Only result{place[:3]} is ever wrong." if only else ""
        yield f"result{place} is {show(y)}, not {show(x)}.{also}"
    if all(isinstance(y, float) and isinstance(x, float) for _, y, x in numbers):
        factors = {round(y / x, 6) if x else y for _, y, x in numbers if x or y}
        if len(factors) == 1:
            yield f"In all cases it is {factors.pop():g} times what is expected."
        elif all(is_same(*n[1:], 0.01) for n in numbers):
            yield "It is nearly right. Is there a small number in a divisor, or a float32?"


def agrees(yours, theirs) -> bool:
    return yours is not None and is_same(yours, theirs, 1e-6)


# ---------------- showing


def show(value, digits: int = 9) -> str:
    """An input or an answer."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(show(x, digits) for x in value)}]"
    if isinstance(value, float):
        return f"{value + 0.0:.{digits}g}"  # + 0.0: no -0
    return str(value)


def show_line(name: str, text: str) -> str:
    return textwrap.fill(f"{name:10}{text[:1500]}", 96, subsequent_indent=" " * 14)


def read_titles() -> dict[int, tuple[Path, str]]:
    """The working file of each exercise, and its title."""
    titles = {}
    for path in sorted(FOLDER.glob("[0-9]*.py")):
        heading = re.search(r"^# \d+\. (.*?)(?: \(.*)?$", path.read_text(errors="replace"), re.M)
        titles[int(path.name[:2])] = path, heading[1] if heading else path.stem
    return titles


def show_exercise(number: int, verdicts: list[Verdict], titles: dict) -> None:
    from exercises.questions import EXERCISES

    print(f"Exercise {number}: {titles[number][1]}")
    for verdict in verdicts:
        print(f"\n  {verdict.function}  {verdict.state}")
        for line in "\n".join(verdict.lines).splitlines():
            print(textwrap.indent(textwrap.fill(line, 96), "    "))
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
    todo = []
    for number, (path, title) in titles.items():
        states = [verdict.state for verdict in grade_file(path, number)]
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
    verdicts = grade_file(path, options.exercise)
    show_exercise(options.exercise, verdicts, titles)
    return 0 if all(verdict.state == "PASS" for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
