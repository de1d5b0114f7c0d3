"""Grade the exercises: PASS or NOT YET for every function, and what to look at.

    python -m exercises.grader 2            grade exercise 2
    python -m exercises.grader 2 mine.py    grade a copy of it
    python -m exercises.grader              how far you are

It calls a student's function with small inputs and with random ones, and compares the results with
those of losses.py. If they differ, it tries the known mistakes of mistakes.json, and prints the
hint of the one that gives the student's results. A mistake is written as texts: a piece of the code
in solutions.py, the wrong code that takes its place, and the hint. A prediction is only noted.

Exit code 0: all functions pass, or you asked how far you are. 1: some do not pass yet. 2: a wrong
command line.

The file runs in this process, with all your rights: grade what you would run yourself. If it does
not end, press Ctrl-C: the traceback names the line.
"""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import itertools
import json
import math
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from exercises import solutions
from exercises.questions import EXERCISES, Group, Question

FOLDER = Path(__file__).parent
RANDOM_CASES = 16
STUDENT = "your file"  # its name in tracebacks
METHODS, SEEDS = ("grpo", "dr-grpo"), (0, 1, 2)  # of exercise 4
BLOCK = 80  # steps, whose mean reward is one number

# ---------------- one answer


def load(source: str | bytes) -> dict:
    """What a file defines."""
    defined = {}
    exec(compile(source, STUDENT, "exec", dont_inherit=True), defined)
    return defined


def to_plain(value):
    """Numbers, strings, lists. A tensor (or an array of numpy) becomes a list."""
    return json.loads(json.dumps(value, default=lambda x: x.tolist()), parse_int=float)


def answer(question: Question, function: Callable, inputs: tuple):
    """What a function returns for these inputs, in plain Python, or the error that it raises.

    It gets copies of the inputs, because it may change them.
    """
    try:
        return to_plain(question.call(function, *copy.deepcopy(inputs)))
    except (Exception, SystemExit) as error:
        return error


def is_same(yours, right, tolerance: float = 1e-9) -> bool:
    """Whether two plain values are the same up to rounding. A nan is the same as an inf."""
    # With tensors a division by 0 would be a nan.
    yours, right = (math.nan if isinstance(x, ZeroDivisionError) else x for x in (yours, right))
    if isinstance(yours, list) and isinstance(right, list):
        pairs = zip(yours, right, strict=False)
        return len(yours) == len(right) and all(is_same(x, y, tolerance) for x, y in pairs)
    if isinstance(yours, float) and isinstance(right, float):
        if not math.isfinite(right):
            return not math.isfinite(yours)
        return math.isclose(yours, right, rel_tol=tolerance, abs_tol=tolerance)
    return yours == right


# ---------------- the verdict


@dataclass
class Verdict:
    """What a student is told about one function."""

    function: str
    state: str  # PASS, NOTED, NOT YET, NOT YET (blank)
    lines: list[str]

    @property
    def done(self) -> bool:
        return self.state in ("PASS", "NOTED")


def grade_file(path: Path, number: int) -> list[Verdict]:
    """One verdict for each function of an exercise."""
    questions = EXERCISES[number].questions
    try:
        student = load(path.read_bytes())
    except (Exception, SystemExit) as error:  # the file's own, outside of its functions
        return [Verdict(question.function, "NOT YET", [describe(error)]) for question in questions]
    verdicts = [judge(question, student.get(question.function)) for question in questions]
    for above, verdict in itertools.pairwise(verdicts):
        if verdict.state == "NOT YET" and not above.done:
            verdict.lines.append(f"(If it calls your {above.function}, mend that one first.)")
    return verdicts


def judge(question: Question, function: Callable | None) -> Verdict:
    """The verdict on one function."""
    name = question.function
    if function is None:
        return Verdict(name, "NOT YET", ["The file has no function of this name."])
    lesson = read_lessons().get(name)  # none where many answers are right
    yours = lesson.ask(function) if lesson else [answer(question, function, ())]
    if any(isinstance(y, NotImplementedError) and not y.args for y in yours):  # torch's has a text
        return Verdict(name, "NOT YET (blank)", [question.blank] if question.blank else [])
    lines = explain(lesson, yours) if lesson else find_problem(question, yours[0])
    return Verdict(name, "NOT YET" if lines else question.passed, lines)


def find_problem(question: Question, value) -> list[str]:
    """What an answer lacks, of which many are right. Nothing if it is right."""
    if isinstance(value, BaseException):
        return [describe(value)]
    try:
        problem = next(question.check(value), None)
    except (TypeError, ValueError, IndexError):
        problem = "Your answer has another form than the exercise asks for."
    return [f"yours     {show(value)[:90]}", problem] if problem else []


# ---------------- hints

ERRORS = {  # what torch says: what a student may not know
    "must match the size": "A mean over rows has the shape (P,). keepdim=True makes it (P, 1).",
    "torch.return_types": "With a dim, min and max return values and indices. Try amin.",
    "does not require grad": "The log-probs have no part in it: are they missing, or detached?",
    "not a tensor": "A loss must be differentiable: return it without item() or float().",
    "scalar outputs": "A loss is one number. Add up its terms.",
    "local variable": "It has no value yet. Is none of the ifs before it true?",
    "ambiguous": "A tensor of several numbers is not true or false. See torch.where.",
}


@dataclass
class Lesson:
    """A right answer of a function, what it is tried on, and the likely mistakes."""

    question: Question
    solution: str
    inputs: list[str]  # their names
    cases: list  # the small ones of mistakes.json, then random ones
    mistakes: list[list[str]]  # what is replaced by what, perhaps at several places; and the hint

    def ask(self, function: Callable) -> list:
        """What a function answers in every case."""
        return [answer(self.question, function, inputs) for inputs in self.cases]

    @functools.cached_property
    def mistaken(self) -> list[list]:
        """What each of the mistakes answers in every case."""
        return [self.ask(make_mistaken(self, edits)) for *edits, _ in self.mistakes]


@functools.cache
def read_lessons() -> dict[str, Lesson]:
    """The lesson of each function that has inputs."""
    texts = json.loads((FOLDER / "mistakes.json").read_text("utf-8"))
    lessons = {}
    for question in itertools.chain(*(exercise.questions for exercise in EXERCISES.values())):
        if question.function in texts:
            text = texts[question.function]
            drawn = [question.draw(Group(seed)) for seed in range(RANDOM_CASES)]
            lessons[question.function] = Lesson(
                question,
                inspect.getsource(getattr(solutions, question.function)),
                text["inputs"],
                text["cases"] + drawn,
                text["mistakes"],
            )
    return lessons


def make_mistaken(lesson: Lesson, edits: list[str]) -> Callable:
    """The solution with these edits: old, new, old, new, ..."""
    source = lesson.solution
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        source = source.replace(old, new)
    return [*load(f"import math, torch\n{source}").values()][-1]


def find_different(lesson: Lesson, answers: list, others: list) -> set[int]:
    """The cases in which two lists of answers differ."""
    pairs, tolerance = zip(answers, others, strict=True), lesson.question.tolerance
    return {k for k, (x, y) in enumerate(pairs) if not is_same(x, y, tolerance)}


def explain(lesson: Lesson, yours: list) -> list[str]:
    """The first case that fails, and what to look at. Nothing if none fails."""
    right = lesson.ask(lesson.question.right)
    wrong = find_different(lesson, yours, right)
    if not wrong:
        return []
    k = min(wrong)
    inputs = zip(lesson.inputs, lesson.cases[k], strict=True)
    return [
        f"with      {', '.join(f'{name} = {show(x)}' for name, x in inputs)}",
        f"yours     {show(yours[k])}",
        f"expected  {show(right[k])}",
        *(find_mistake(lesson, yours, right) or find_form(yours, right)),
    ]


def find_mistake(lesson: Lesson, yours: list, right: list) -> list[str]:
    """The hint for the known mistake whose answers are most like the student's, if any are.

    They must say the same in two of three cases where one of them is wrong. Not in all: then a
    mistake elsewhere, at the edge, would hide this one.
    """
    best, most, wrong = [], 2 / 3, find_different(lesson, yours, right)
    for (*_, hint), theirs in zip(lesson.mistakes, lesson.mistaken, strict=True):
        either = wrong | find_different(lesson, theirs, right)
        agreement = 1 - len(find_different(lesson, yours, theirs)) / len(either)
        if agreement > most:
            best, most = [hint], agreement
    return best


def find_form(yours: list, right: list) -> list[str]:
    """Nothing, the right numbers but for rounding, or an error that many meet."""
    if None in yours:
        return ["Your function returns nothing. Is a return missing, or is none of its ifs true?"]
    if all(is_same(x, y, 0.01) for x, y in zip(yours, right, strict=True)):
        return ["It is nearly right. Is there a small number in a divisor, or float32?"]
    errors = " ".join(str(y) for y in yours if isinstance(y, BaseException))
    return [hint for words, hint in ERRORS.items() if words in errors][:1]


# ---------------- showing


def show(value) -> str:
    """An input or an answer."""
    if isinstance(value, BaseException):
        return describe(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, float):
        return f"{value + 0.0:.9g}"  # + 0.0: no -0
    return str(value)


def describe(error: Exception) -> str:
    """The error in one line, with its last place in the student's file."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == STUDENT]
    return f"{text} (line {frames[-1].lineno}, in {frames[-1].name})" if frames else text


def is_done(verdicts: list[Verdict]) -> bool:
    return all(verdict.done for verdict in verdicts)


def find_files() -> dict[int, Path]:
    """The working file of each exercise."""
    return {int(path.name[:2]): path for path in sorted(FOLDER.glob("[0-9]*.py"))}


def show_verdicts(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        print(f"\n  {verdict.function}  {verdict.state}")
        for line in verdict.lines:
            wrapped = textwrap.fill(line, 96, subsequent_indent="  ")
            print(textwrap.indent(wrapped, "    "))
    print()


def show_progress(files: dict[int, Path]) -> None:
    """One line for each exercise."""
    for number, path in files.items():
        state = "PASS" if is_done(grade_file(path, number)) else "NOT YET"
        print(f"{path.stem:32} {state}", flush=True)


def show_training(student: dict) -> None:
    """Exercise 4 after a PASS: train with the student's file, and compare with the prediction.

    student: what the file defines. One without `train`, such as solutions.py, has nothing to
    show."""
    if "train" not in student:
        return
    runs = {}
    print(f"  mean reward of every {BLOCK} steps, from first to last:\n")
    for method, seed in itertools.product(METHODS, SEEDS):
        rewards = student["train"](method, seed)
        blocks = [fmean(rewards[k : k + BLOCK]) for k in range(0, len(rewards), BLOCK)]
        print(f"  {method:8} seed {seed}  ", *(f"{mean:.2f}" for mean in blocks), flush=True)
        runs[method, seed] = blocks
    print()
    for method, guess in zip(METHODS, student["prediction"](), strict=True):
        end = fmean(runs[method, seed][-1] for seed in SEEDS)
        print(f"  {method:8} you predicted {guess:.2f}, the seeds end at {end:.2f} on average")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = find_files()
    parser.add_argument("exercise", nargs="?", type=int, choices=files, help="its number")
    parser.add_argument("file", nargs="?", type=Path, help="a copy of it")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # those of a known mistake are not the student's
    torch.set_default_dtype(torch.float64)  # torch.tensor of a list of ours loses no digit
    if options.exercise is None:
        show_progress(files)
        return 0
    exercise, path = EXERCISES[options.exercise], options.file or files[options.exercise]
    verdicts = grade_file(path, options.exercise)
    show_verdicts(verdicts)
    if not is_done(verdicts):
        return 1
    if options.exercise == 4:
        show_training(load(path.read_bytes()))
    print(textwrap.fill(f"Why it is so: {exercise.why}", 96))
    print(f"More: {exercise.more}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
