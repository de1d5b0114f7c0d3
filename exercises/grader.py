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
    inputs = lesson.cases if lesson else [()]
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
        return Verdict(question.function, "PASS", [*question.praise(yours[0].value)])

    right = [answer(question, question.right, x).value for x in inputs[: len(yours)]]
    failing = [k for k, y in enumerate(yours) if y.error or not is_same(y.value, right[k])]
    if not failing:
        return Verdict(question.function, "PASS")
    hints, k = find_hints(question, function, lesson, yours, right, failing)
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
        problem = next(question.check(value), None)
    except (TypeError, ValueError, IndexError, RuntimeError):
        problem = "Your answer has another form than the exercise asks for."
    return [show_line("yours", show(value)[:90]), problem] if problem else []


# ---------------- hints

CHANGES = (
    "-x abs(x) x**2 x**0.5 1/x x+1 x-1 2*x x/2 0*x x*(x>0) x*(x<0) sorted(x) x[:1] x[::-1]".split()
)
OUTCOMES = {1: "what it was", 2: "twice as large", 0.5: "half as large", -1: "its negative"}
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
    return define(source)


def define(source: str) -> Callable | None:
    """The function with this source. None if it has none."""
    with contextlib.suppress(SyntaxError):
        *_, function = load(f"import math, torch\n{source}").values()
        return function
    return None


def change_words(solution: str) -> Iterator[tuple[Callable | None, str]]:
    """The solution with a word or a call changed, once or everywhere; and what to say."""
    head, body = solution.split("\n", 1)
    for pattern in (r"\w+", r"\w+\([^()]*\)"):
        for found in re.finditer(pattern, body):
            before, word, after = body[: found.start()], found[0], body[found.end() :]
            for change in CHANGES:
                new = f"({change.replace('x', word)})"
                for changed in (f"{before}{new}{after}", re.sub(rf"\b{word}\b", new, body)):
                    yield (
                        define(f"{head}\n{changed}"),
                        f"Have you {new[1:-1]} where {word} belongs?",
                    )


def find_hints(question, function, lesson, yours, right, failing) -> tuple[list[str], int]:
    """What a student should look at, if somebody has foreseen it; and the case that shows it."""
    # What the solution says with each mistake. The best one says what you say, in most of the cases
    # that either of you gets wrong: a mistake elsewhere, at the edge, does not hide it.
    theirs = lesson.answers
    for edits in lesson.mistakes.keys() - theirs:
        mistaken = make_mistakes(lesson, edits)
        theirs[edits] = [answer(question, mistaken, x).value for x in lesson.cases]
    wrong = {
        edits: {k for k, x in enumerate(right) if not is_same(theirs[edits][k], x)}
        for edits in lesson.mistakes
    }

    def agreement(edits: str) -> tuple[float, float]:
        either = wrong[edits].union(failing)
        same = [k for k in either if is_same(yours[k].value, theirs[edits][k], 1e-6)]
        return len(same) / len(either), len(wrong[edits].intersection(failing)) / len(either)

    def tell(*mistakes: str) -> tuple[list[str], int]:
        hints = [lesson.mistakes[edits] for edits in mistakes]
        return hints, min(wrong[mistakes[0]].intersection(failing) or failing)

    passing = [k for k in range(len(yours)) if k not in failing]

    def answers_alike(mistaken: Callable | None) -> bool:
        def is_alike(k: int) -> bool:
            return is_same(yours[k].value, answer(question, mistaken, lesson.cases[k]).value, 1e-6)

        if mistaken is None or not all(map(is_alike, failing[:12])):
            return False
        return sum(map(is_alike, passing)) >= len(passing) - 1

    best = max(lesson.mistakes, key=agreement)
    if agreement(best)[0] > 2 / 3:
        return tell(best)
    for pair in itertools.combinations(lesson.mistakes, 2):
        if answers_alike(make_mistakes(lesson, *pair)):
            return tell(*pair)
    for mistaken, hint in change_words(lesson.solution):
        if answers_alike(mistaken):
            return [hint], failing[0]
    if any(y.value is None for y in yours):
        return ["Your function returns nothing. Did you print?"], failing[0]
    pairs = [(y.value, x) for y, x in zip(yours, right, strict=True)]
    if all(is_same(*pair, 0.01) for pair in pairs):
        return ["It is nearly right. Is there a small number in a divisor, or float32?"], failing[0]
    if not any(y.error for y in yours):
        for rule in find_broken_rules(question, function, lesson):
            return [rule], failing[0]
    given = [dict(zip(lesson.inputs, x, strict=True)) for x in lesson.cases[: len(yours)]]
    part = {}  # hint: how many of the cases that it names are wrong, if all the wrong ones are
    for condition, hint in lesson.where.items():
        cases = {k for k, names in enumerate(given) if eval(condition, names)}
        if cases.issuperset(failing) and len(cases) < len(yours):
            part[hint] = len(failing) / len(cases)
    hint = max(part, key=part.get, default=None)
    if hint and part[hint] > 2 / 3:
        return [hint], failing[0]
    errors = " ".join(str(y.error) for y in yours)
    known = [hint for words, hint in ERRORS.items() if words in errors]
    return known[:1] or [*find_differences(pairs, failing[0])], failing[0]


def find_broken_rules(question, function: Callable, lesson: Lesson) -> Iterator[str]:
    """What happens to the right answers if an input is doubled or negated, and not to yours."""
    solution = define(lesson.solution)

    def find_outcome(function: Callable) -> float | None:
        before, after = (
            [answer(question, function, x).value for x in cases]
            for cases in (lesson.cases, changed)
        )
        return next((x for x in OUTCOMES if is_same(after, scale(before, x), 1e-6)), None)

    for i, name in enumerate(lesson.inputs):
        for factor, change in ((2, f"twice the {name}"), (-1, f"the opposite sign of {name}")):
            changed = [(*x[:i], scale(x[i], factor), *x[i + 1 :]) for x in lesson.cases]
            outcome = find_outcome(question.right)
            if outcome and outcome == find_outcome(solution) != find_outcome(function):
                yield f"With {change} the answer should be {OUTCOMES[outcome]}. Yours is not."


def scale(value, factor: float):
    if isinstance(value, list):
        return [scale(x, factor) for x in value]
    return value * factor if type(value) in (int, float) else value


def find_differences(pairs: list[tuple], k: int) -> Iterator[str]:
    """What can be said of a mistake that nobody has foreseen. Case k is shown."""
    place, y, x = next(n for n in compare(*pairs[k]) if not is_same(*n[1:]))
    numbers = [n for pair in pairs for n in compare(*pair)]
    if place:
        yield f"result{place} is {show(y)}, not {show(x)}."
    if all(isinstance(y, float) and isinstance(x, float) for _, y, x in numbers):
        factors = {round(y / x, 6) if x else y for _, y, x in numbers if x or y}
        if len(factors) == 1:
            yield f"In all cases it is {factors.pop():g} times what is expected."


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
    print(textwrap.fill(f"Why it is so: {EXERCISES[number].why}", 96))
    print(f"More: {EXERCISES[number].more}")
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
