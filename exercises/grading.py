"""Run a student's file in a child process, and compare its answers with the right ones.

Our own answers are computed in this process, which never loads the student's file. The child is
for endless loops and crashes. It is no sandbox: it has all the rights of the user.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import sys
import textwrap
import traceback
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch

from exercises.questions import EXERCISES, Question

LIMIT = 10  # seconds for one answer


@dataclass
class Answer:
    """What a function returned, in plain Python, so that it can be sent, compared and shown."""

    value: object = None
    error: str = ""  # one line, if it raised one
    is_blank: bool = False


@dataclass
class Verdict:
    """What a student is told about one function."""

    function: str
    state: str  # PASS, NOT YET, blank
    lines: list[str]


# ---------------- one answer


def to_plain(value):
    """Numbers, strings, lists. A tensor (or an array of numpy) becomes a list."""
    return json.loads(json.dumps(value, default=lambda x: x.tolist()), parse_int=float)


def answer(question: Question, function: Callable, k: int) -> Answer:
    """What a function returns for input k."""
    try:
        return Answer(to_plain(question.call(function, *question.inputs[k])))
    except (Exception, SystemExit) as error:
        is_blank = isinstance(error, NotImplementedError) and not error.args  # torch's has a text
        return Answer(error=describe(error), is_blank=is_blank)


def describe(error: BaseException) -> str:
    """The error in one line, with its last place in the student's file."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}, line {error.lineno}"
    text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == STUDENT]
    return f"{text} (line {frames[-1].lineno}, in {frames[-1].name})" if frames else text


# ---------------- the child process

STUDENT = "<student>"  # the name of the file in tracebacks, and of the module


def load(source: bytes) -> Answer:
    """Load the student's file, in the child."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # torch.tensor of a list of ours loses no digit
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # what a function prints would be heard for every input
        os.dup2(nowhere, descriptor)
    module = sys.modules[STUDENT] = types.ModuleType(STUDENT)
    try:
        exec(compile(source, STUDENT, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        return Answer(error=describe(error))
    return Answer()


def answer_loaded(number: int, place: int, k: int) -> Answer:
    """What the student's function returns for input k, in the child."""
    question = EXERCISES[number].questions[place]
    function = getattr(sys.modules[STUDENT], question.function, None)
    if function is None:
        return Answer(error=f"The file has no function {question.function}.", is_blank=True)
    return answer(question, function, k)


def ask(pool: ProcessPoolExecutor, limit: float, task: Callable, *arguments) -> Answer:
    """The answer of the child, which is killed if there is none in time."""
    try:
        return pool.submit(task, *arguments).result(limit)
    except BrokenProcessPool:
        return Answer(error="no answer: the process has ended, here or earlier")
    except TimeoutError:
        kill_children()
        return Answer(error=f"no answer: stopped after {limit:g} s")


def kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()


def grade_file(path: str, number: int, limit: float = LIMIT) -> list[Verdict]:
    """One verdict for each function of an exercise."""
    questions = EXERCISES[number].questions
    # Not a fork of this process: torch forbids autograd in a fork where there is a GPU.
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["exercises.questions"])
    with ProcessPoolExecutor(1, context) as pool:
        try:
            pool.submit(load, b"").result()  # now torch is imported, and the clock may start
            loaded = ask(pool, limit, load, Path(path).read_bytes())
            if loaded.error:
                return [Verdict(q.function, "NOT YET", [loaded.error]) for q in questions]
            verdicts = []
            for place, question in enumerate(questions):
                yours: list[Answer] = []
                while len(yours) < len(question.inputs) and not (yours and yours[-1].error):
                    yours.append(ask(pool, limit, answer_loaded, number, place, len(yours)))
                verdicts.append(judge(question, yours))
            return verdicts
        finally:
            kill_children()  # a thread of the student's may still run


# ---------------- the verdict


def is_same(yours, right) -> bool:
    """Whether two plain values are the same up to rounding. A nan is the same as an inf."""
    if isinstance(yours, list) and isinstance(right, list):
        return len(yours) == len(right) and all(map(is_same, yours, right))
    if not {type(yours), type(right)} <= {bool, float}:
        return yours == right
    if not math.isfinite(right):
        return not math.isfinite(yours)
    return math.isclose(yours, right, rel_tol=1e-9, abs_tol=1e-9)


def judge(question: Question, yours: list[Answer]) -> Verdict:
    """The verdict on the answers to one question, up to the first error."""
    if yours[0].is_blank:
        return Verdict(question.function, "blank", [yours[0].error])
    for k, reply in enumerate(yours):
        lines = find_problem(question, k, reply)
        if lines:
            return Verdict(question.function, "NOT YET", lines + find_hint(question, yours))
    return Verdict(question.function, "PASS", [])


def find_problem(question: Question, k: int, reply: Answer) -> list[str]:
    """What is wrong with the answer to input k. Empty if nothing is."""
    lines = []
    if question.names:
        pairs = zip(question.names.split(), question.inputs[k], strict=True)
        lines.append(show_line("with", ", ".join(f"{name} = {show(x)}" for name, x in pairs)))
    lines.append(show_line("yours", reply.error or show(reply.value)))
    if reply.error:
        return lines
    if question.right:
        right = answer(question, question.right, k).value
        is_right = is_same(reply.value, right)
        return [] if is_right else [*lines, show_line("expected", show(right))]
    try:
        return [*itertools.islice(question.check(reply.value), 1)]
    except (TypeError, ValueError, IndexError, RuntimeError):
        return ["Your answer has another form than the exercise asks for."]


def find_hint(question: Question, yours: list[Answer]) -> list[str]:
    """The hint of the mistake that gives the same answers as yours, if there is one."""
    if yours[-1].error:
        return []
    values = [reply.value for reply in yours]
    for mistake, hint in question.mistakes:
        theirs = [answer(question, mistake, k).value for k in range(len(values))]
        if is_same(values, theirs):
            return [hint]
    return ["Your function returns nothing. Did you print?"] if None in values else []


# ---------------- showing


def show(value) -> str:
    """An input or an answer."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, float):
        return f"{value + 0.0:.9g}"  # + 0.0: no -0
    return str(value)


def show_line(name: str, text: str) -> str:
    return textwrap.fill(f"{name:10}{text[:1500]}", 96, subsequent_indent=" " * 14)
