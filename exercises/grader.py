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
import inspect
import io
import itertools
import json
import math
import signal
import sys
import textwrap
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from exercises import solutions
from exercises.questions import EXERCISES, Group, Question

FOLDER = Path(__file__).parent
LIMIT = 10  # seconds for one answer
RANDOM_CASES = 16
STUDENT = "student"  # the name of the file in tracebacks, and of the module

# ---------------- one answer


class Stopped(BaseException):
    """Not an Exception, so that a student's `except` does not catch it."""


@contextlib.contextmanager
def limited():
    """Stop what takes too long, and keep what it prints."""

    def stop(*_):
        raise Stopped(f"no answer after {LIMIT:g} s")

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


def answer(question: Question, function: Callable, inputs: tuple) -> Answer:
    """What a function returns for these inputs. It gets copies: it may change them."""
    try:
        with limited() as printed:
            value = to_plain(question.call(function, *copy.deepcopy(inputs)))
        return Answer(value, None, printed.getvalue())
    except (Exception, SystemExit, Stopped) as error:
        # With tensors a division by 0 would be a nan. Another error is the same as no answer.
        return Answer(math.nan if isinstance(error, ZeroDivisionError) else error, error)


def load(source: str | bytes) -> dict:
    """What a file defines."""
    module = sys.modules[STUDENT] = types.ModuleType(STUDENT)
    with limited():
        exec(compile(source, STUDENT, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def describe(error: BaseException) -> str:
    """The error in one line, with its last place in the student's file."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == STUDENT]
    return f"{text} (line {frames[-1].lineno}, in {frames[-1].name})" if frames else text


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
        if {type(x), type(y)} == {float}:
            close = math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance)
            same = close if math.isfinite(y) else not math.isfinite(x)
        if not same:
            return False
    return True


# ---------------- the verdict


@dataclass
class Verdict:
    """What a student is told about one function."""

    function: str
    state: str  # PASS, NOT YET, NOT YET (blank)
    lines: list[str] = field(default_factory=list)


def grade_file(path: Path, number: int) -> list[Verdict]:
    """One verdict for each function of an exercise."""
    questions, verdicts = EXERCISES[number].questions, []
    try:
        student = load(path.read_bytes())
        for question in questions:
            verdicts.append(judge(question, student.get(question.function)))
            if verdicts[-1].state != "PASS":
                # The next function may call this one, and is not to blame for it.
                student[question.function] = getattr(solutions, question.function)
        return verdicts
    except (Exception, SystemExit, Stopped) as error:  # the file's own, outside of its functions
        return [Verdict(question.function, "NOT YET", [describe(error)]) for question in questions]


def judge(question: Question, function: Callable | None) -> Verdict:
    """The verdict on one function, from its answers to all inputs."""
    name, lesson = question.function, read_lessons().get(question.function)
    if function is None:
        return Verdict(name, "NOT YET", ["The file has no function of this name."])
    yours = []
    for inputs in lesson.cases if lesson else [()]:
        yours.append(answer(question, function, inputs))
        error = yours[-1].error
        if isinstance(error, NotImplementedError) and not error.args:  # torch's has a text
            return Verdict(name, "NOT YET (blank)")
        if isinstance(error, Stopped) or error and question.check:
            return Verdict(name, "NOT YET", [describe(error)])
    if question.check:
        value = yours[0].value
        if problem := find_problem(question, value):
            return Verdict(name, "NOT YET", [f"yours     {show(value)[:90]}", problem])
        return Verdict(name, "PASS")

    right = [answer(question, question.right, inputs).value for inputs in lesson.cases]
    attempt = Attempt(question, function, lesson, yours, right)
    if not attempt.failing:
        return Verdict(name, "PASS")
    return Verdict(name, "NOT YET", [*show_case(attempt), *find_hints(attempt)])


def find_problem(question: Question, value) -> str | None:
    """What an answer lacks, of which many are right."""
    try:
        return next(question.check(value), None)
    except (TypeError, ValueError, IndexError, RuntimeError):
        return "Your answer has another form than the exercise asks for."


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
    """A right answer of a function, what it is tried on, and the likely mistakes."""

    solution: str
    inputs: list[str]  # their names
    cases: list  # the small ones of mistakes.json, then random ones
    mistakes: dict[tuple[str, ...], str]  # old, new, ...: what is replaced by what; and the hint


@functools.cache
def read_lessons() -> dict[str, Lesson]:
    """The lesson of each function that has inputs."""
    texts = json.loads((FOLDER / "mistakes.json").read_text())
    lessons = {}
    for question in itertools.chain(*(exercise.questions for exercise in EXERCISES.values())):
        if question.function in texts:
            text = texts[question.function]
            drawn = [question.draw(Group(seed)) for seed in range(RANDOM_CASES)]
            lessons[question.function] = Lesson(
                inspect.getsource(getattr(solutions, question.function)),
                text["inputs"],
                text["cases"] + drawn,
                {tuple(edits): hint for *edits, hint in text["mistakes"]},
            )
    return lessons


def make_mistakes(lesson: Lesson, *mistakes: tuple[str, ...]) -> Callable | None:
    """The solution with these edits. None if they do not go together."""
    source, edits = lesson.solution, itertools.chain(*mistakes)
    for old, new in zip(edits, edits, strict=True):  # two at a time
        if old not in source:
            return None
        source = source.replace(old, new)
    with contextlib.suppress(SyntaxError):
        return [*load(f"import math, torch\n{source}").values()][-1]


@functools.cache
def answer_mistaken(question: Question, edits: tuple[str, ...]) -> list:
    """What the solution with these edits says in every case."""
    lesson = read_lessons()[question.function]
    mistaken = make_mistakes(lesson, edits)
    return [answer(question, mistaken, inputs).value for inputs in lesson.cases]


@dataclass
class Attempt:
    """A student's function, and what it says in every case beside what is right."""

    question: Question
    function: Callable
    lesson: Lesson
    yours: list[Answer]
    right: list

    def __post_init__(self):
        pairs = enumerate(zip(self.yours, self.right, strict=True))
        self.failing = [k for k, (y, x) in pairs if not is_same(y.value, x)]

    def agrees(self, k: int, theirs) -> bool:
        """Whether the student says the same as somebody else in case k."""
        return is_same(self.yours[k].value, theirs, 1e-6)


def find_hints(attempt: Attempt) -> list[str]:
    """What a student should look at: the first of these that finds something."""
    finders = (find_mistake, find_two_mistakes, find_form, find_difference)
    return next(filter(None, (find(attempt) for find in finders)), [])


def find_mistake(attempt: Attempt) -> list[str]:
    """A known mistake that says what the student says, wherever one of them is wrong.

    In two of three of these cases is enough: a mistake elsewhere, at the edge, does not hide it.
    """

    def agreement(edits: tuple[str, ...]) -> float:
        theirs = answer_mistaken(attempt.question, edits)
        wrong = {k for k, x in enumerate(attempt.right) if not is_same(theirs[k], x)}
        same = [k for k in attempt.failing if attempt.agrees(k, theirs[k])]
        return len(same) / len(wrong.union(attempt.failing))

    best = max(attempt.lesson.mistakes, key=agreement)
    return [attempt.lesson.mistakes[best]] if agreement(best) > 2 / 3 else []


def find_two_mistakes(attempt: Attempt) -> list[str]:
    """Two known mistakes that together say what the student says."""
    lesson = attempt.lesson
    for pair in itertools.combinations(lesson.mistakes, 2):
        mistaken = make_mistakes(lesson, *pair)
        if mistaken and all(
            attempt.agrees(k, answer(attempt.question, mistaken, inputs).value)
            for k, inputs in enumerate(lesson.cases)
        ):
            return [lesson.mistakes[edits] for edits in pair]
    return []


def find_form(attempt: Attempt) -> list[str]:
    """Nothing, an error that many meet, or the right numbers but for rounding."""
    if any(y.value is None for y in attempt.yours):
        return ["Your function returns nothing. Did you print?"]
    if all(is_same(y.value, x, 0.01) for y, x in zip(attempt.yours, attempt.right, strict=True)):
        return ["It is nearly right. Is there a small number in a divisor, or float32?"]
    errors = " ".join(str(y.error) for y in attempt.yours)
    return [hint for words, hint in ERRORS.items() if words in errors][:1]


def find_difference(attempt: Attempt) -> list[str]:
    """The first number that is wrong."""
    k = attempt.failing[0]
    for place, yours, right in compare(attempt.yours[k].value, attempt.right[k]):
        if place and not is_same(yours, right):
            return [f"result{place} is {show(yours)}, not {show(right)}."]
    return []


# ---------------- showing


def show_case(attempt: Attempt) -> list[str]:
    """The first case that fails."""
    k = attempt.failing[0]
    yours, right = attempt.yours[k], attempt.right[k]
    inputs = zip(attempt.lesson.inputs, attempt.lesson.cases[k], strict=True)
    lines = [f"with      {', '.join(f'{name} = {show(x)}' for name, x in inputs)}"]
    if yours.printed:
        lines.append(f"printed   {yours.printed[:1000]}")
    lines.append(f"yours     {describe(yours.error) if yours.error else show(yours.value)}")
    return [*lines, f"expected  {show(right)}"]


def show(value) -> str:
    """An input or an answer."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, float):
        return f"{value + 0.0:.9g}"  # + 0.0: no -0
    return str(value)


def is_done(verdicts: list[Verdict]) -> bool:
    return all(verdict.state == "PASS" for verdict in verdicts)


def find_files() -> dict[int, Path]:
    """The working file of each exercise."""
    return {int(path.name[:2]): path for path in sorted(FOLDER.glob("[0-9]*.py"))}


def show_exercise(number: int, verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        print(f"\n  {verdict.function}  {verdict.state}")
        for line in verdict.lines:
            wrapped = textwrap.fill(line, 96, subsequent_indent="  ")
            print(textwrap.indent(wrapped, "    "))
    print()
    if is_done(verdicts):
        print(textwrap.fill(f"Why it is so: {EXERCISES[number].why}", 96))
        print(f"More: {EXERCISES[number].more}\nWhat is next: make exercises")


def show_progress(files: dict[int, Path]) -> None:
    """One line for each exercise."""
    for number, path in files.items():
        state = "PASS" if is_done(grade_file(path, number)) else "NOT YET"
        print(f"{path.stem:32} {state}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = find_files()
    parser.add_argument("exercise", nargs="?", type=int, choices=files, help="its number")
    parser.add_argument("file", nargs="?", type=Path, help="a copy of it")
    options = parser.parse_args(argv)
    torch.set_default_dtype(torch.float64)  # torch.tensor of a list of ours loses no digit
    if options.exercise is None:
        show_progress(files)
        return 0
    verdicts = grade_file(options.file or files[options.exercise], options.exercise)
    show_exercise(options.exercise, verdicts)
    return 0 if is_done(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
