"""Run a student's file in a child process, and compare its answers with the right ones.

Our own answers are computed in this process, which never loads the student's file. The child is
for endless loops and crashes. It is no sandbox: it has all the rights of the user.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import textwrap
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from exercises.questions import EXERCISES, Question
from losses import Batch

LIMIT = 10  # seconds for a whole file
START = 120  # seconds until the child has imported torch


@dataclass
class Answer:
    """What a function returned, in plain Python, so that it can be sent, compared and shown."""

    value: object = None
    is_tensor: bool = False
    gradient: list | None = None  # of a scalar; [] if another result has one; None if detached
    error: str = ""  # one line, if it raised one
    blank: str = ""  # why, if it is still to be written


@dataclass
class Verdict:
    """What a student is told about one function."""

    function: str
    state: str  # PASS, NOT YET, blank
    lines: list[str] = field(default_factory=list)


# ---------------- one answer


def to_plain(value):
    """Numbers, strings and nested lists. Of anything else, the name of its type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_plain(x) for x in value]
    if hasattr(value, "tolist"):  # of torch or numpy
        return value.tolist()
    return f"<{type(value).__name__}>"


def find_leaf(arguments: tuple) -> Tensor | None:
    """The argument that a result can be differentiated by."""
    tensors = [getattr(x, "logp", x) for x in arguments]
    return next((x for x in tensors if isinstance(x, Tensor) and x.requires_grad), None)


def answer(function: Callable, arguments: tuple, path: str = "") -> Answer:
    """Call a function, of the student's file if there is a path."""
    arguments = copy.deepcopy(arguments)  # it may change them in place
    try:
        value = function(*arguments)
        if not isinstance(value, Tensor):
            return Answer(to_plain(value))
        gradient = None
        if value.requires_grad:
            leaf = find_leaf(arguments)
            gradient = []
            if not value.dim():
                gradient = torch.autograd.grad(value, leaf, materialize_grads=True)[0].tolist()
        return Answer(value.tolist(), True, gradient)
    except (Exception, SystemExit) as error:
        is_plain = isinstance(error, NotImplementedError) and not error.args  # torch's has a text
        if is_plain and traceback.extract_tb(error.__traceback__)[-1].name == function.__name__:
            return Answer(
                error="NotImplementedError", blank="raise NotImplementedError stands in it."
            )
        return Answer(error=describe(error, path))


def describe(error: BaseException, path: str) -> str:
    """The error in one line, with its place in the student's file."""
    text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}, line {error.lineno}"
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == path]
    return f"{text} (line {frames[-1].lineno}, in {frames[-1].name})" if frames else text


# ---------------- the child process


def serve(pipe: Connection, path: str, number: int) -> None:
    """In the child: send (function, None), then (function, Answer) for each of its inputs.

    ("", None) says that the clock may start, ("", Answer) that the file cannot be loaded.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # torch.tensor of a list of ours loses no digit
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # what a function prints would be heard for every input
        os.dup2(nowhere, descriptor)
    pipe.send(("", None))
    module = types.ModuleType("student")
    module.__file__ = path
    sys.modules["student"] = module  # where dataclasses look for it
    try:
        source = Path(path).read_bytes()
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        pipe.send(("", Answer(error=describe(error, path))))
        return
    for question in EXERCISES[number].questions:
        pipe.send((question.function, None))
        function = getattr(module, question.function, None)
        if function is None:
            missing = f"The file has no function {question.function}."
            pipe.send((question.function, Answer(error=missing, blank=missing)))
            continue
        for arguments in question.inputs:
            reply = answer(function, arguments, path)
            pipe.send((question.function, reply))
            if reply.blank:
                break


def collect(path: str, number: int, limit: float = LIMIT) -> tuple[dict[str, list[Answer]], str]:
    """The answers of a file by function, and why there are no more, "" if there are all."""
    # Not a fork of this process: torch forbids autograd in a fork where there is a GPU.
    method = "forkserver" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["exercises.questions"])
    pipe, there = context.Pipe(duplex=False)
    child = context.Process(target=serve, args=(there, path, number), daemon=True)
    child.start()
    there.close()
    answers: dict[str, list[Answer]] = {}
    end = time.monotonic() + START
    try:
        while pipe.poll(max(0.0, end - time.monotonic())):
            function, reply = pipe.recv()
            if not function and reply:
                return {}, reply.error
            elif not function:
                end = time.monotonic() + limit
            elif reply:
                answers[function].append(reply)
            else:
                answers[function] = []
        return answers, f"no answer: stopped after {limit:g} s"
    except EOFError:
        child.join()
        return answers, f"the process ended (exit code {child.exitcode})" if child.exitcode else ""
    finally:
        child.kill()
        child.join()


# ---------------- comparing


def are_close(yours, right, floor: float) -> bool:
    try:
        x, y = (torch.as_tensor(v, dtype=torch.float64) for v in (yours, right))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return x.shape == y.shape and bool(((x - y).abs() <= 1e-9 * y.abs().clamp(min=floor)).all())


def agree(yours: Answer, right: Answer, floor: float) -> bool:
    """Whether two answers are the same in value, and in gradient."""
    if yours.error or right.error or (right.is_tensor and not yours.is_tensor):
        return False
    if yours.gradient is None or right.gradient is None:
        same_gradient = yours.gradient is right.gradient
    else:
        same_gradient = are_close(yours.gradient, right.gradient, 1.0)
    return same_gradient and are_close(yours.value, right.value, floor)


def is_undefined(reply: Answer) -> bool:
    """A division by 0: Python's exception, or a nan or inf of torch's."""
    if reply.error:
        return reply.error.startswith("ZeroDivisionError")
    return any(word in f"{reply.value} {reply.gradient}" for word in ("nan", "inf"))


def find_hint(question: Question, yours: list[Answer], right: list[Answer], failing: int) -> str:
    """The hint of the mistake that explains your answers: they are its own wherever it is wrong.

    A missing guard may stand beside another mistake, so other inputs with a nan do not count.
    """
    for _, mistake, hint in question.mistakes:
        for k, arguments in enumerate(question.inputs[: len(yours)]):
            theirs = answer(mistake, arguments)
            is_wrong = not agree(theirs, right[k], question.floor)
            if k == failing and not is_wrong:
                break
            undefined = [is_undefined(reply) for reply in (yours[k], theirs)]
            if all(undefined) or (k != failing and any(undefined)):
                continue
            if is_wrong and not agree(yours[k], theirs, question.floor):
                break
        else:
            return hint
    return guess(yours[failing], right[failing])


def guess(yours: Answer, right: Answer) -> str:
    """A hint where no known mistake gives these answers."""
    if yours.error:
        return ""
    if yours.value is None:
        return "Your function returns nothing. Did you print instead of return?"
    if right.is_tensor and not yours.is_tensor:
        return "A tensor is asked for. (w.min(dim=1) is a pair: take its .values.)"
    if yours.gradient is not None and right.gradient is None:
        return "Your result has a gradient. Return it detached."
    if are_close(yours.value, right.value, 1e5):
        return "The two are nearly the same. Did you add an epsilon, or is a part float32?"
    return ""


# ---------------- the verdict


def grade_file(path: str, number: int, limit: float = LIMIT) -> list[Verdict]:
    """One verdict for each function of an exercise."""
    torch.set_num_threads(1)
    questions = EXERCISES[number].questions
    right = [[answer(q.right, x) for x in q.inputs] if q.right else [] for q in questions]
    answers, trouble = collect(path, number, limit)
    verdicts = []
    for question, expected in zip(questions, right, strict=True):
        yours = answers.get(question.function, [])
        verdict = judge(question, yours, expected)
        is_whole = len(yours) == len(question.inputs) or verdict.state == "blank"
        if verdict.state == "PASS" and not is_whole:
            verdict = Verdict(question.function, "NOT YET", [trouble])
            if question.function in answers:  # it stopped here, and came to no other
                verdict.lines = show_trouble(question, yours, trouble)
                trouble = "not tried: an earlier function of this file does not return"
        verdicts.append(verdict)
    return verdicts


def judge(question: Question, yours: list[Answer], right: list[Answer]) -> Verdict:
    """The verdict on the answers that there are."""
    name = question.function
    if yours and yours[0].blank:
        return Verdict(name, "blank", [yours[0].blank])
    for k, reply in enumerate(yours):
        arguments = question.inputs[k]
        if question.right and not agree(reply, right[k], question.floor):
            lines = show_difference(question, arguments, reply, right[k])
            hint = find_hint(question, yours, right, k)
            return Verdict(name, "NOT YET", [*lines, hint] if hint else lines)
        if reply.error:
            return Verdict(name, "NOT YET", [*show_trouble(question, yours[:k], reply.error)])
    if question.right or len(yours) < len(question.inputs):
        return Verdict(name, "PASS")
    try:
        return Verdict(name, "PASS", question.check([reply.value for reply in yours]) or [])
    except ValueError as problem:
        lines = [str(problem)]
    for _, mistake, hint in question.mistakes:
        theirs = [answer(mistake, arguments) for arguments in question.inputs]
        if all(are_close(y.value, t.value, 1.0) for y, t in zip(yours, theirs, strict=True)):
            lines.append(hint)
    return Verdict(name, "NOT YET", lines)


# ---------------- showing


def show_value(value, digits: int = 4) -> str:
    """A number, list or name as a student would write it."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(show_value(x, digits) for x in value)}]"
    if isinstance(value, float):
        text = f"{value + 0.0:.{digits}g}"  # + 0.0: no -0
        return f"{text}.0" if text.lstrip("-").isdigit() else text
    return f'"{value}"' if isinstance(value, str) and value[:1] != "<" else str(value)


def show_batch(batch: Batch) -> str:
    """The ratios and the advantages of a batch; a point is padding."""
    ratios = (batch.logp - batch.logp_old).exp().tolist()
    rows = []
    for row, mask in zip(ratios, batch.mask.tolist(), strict=True):
        cells = [show_value(x) if inside else "." for x, inside in zip(row, mask, strict=True)]
        rows.append(f"[{', '.join(cells)}]")
    adv = show_value(batch.adv.masked_fill(~batch.mask, 0.0).amax(1))
    return f"r = [{', '.join(rows)}], A = {adv}, L = {batch.max_tokens}"


def show_arguments(question: Question, arguments: tuple) -> str:
    """The arguments of a call with their names."""
    parts = []
    for name, value in zip(question.names.split(), arguments, strict=True):
        is_batch = isinstance(value, Batch)
        parts.append(show_batch(value) if is_batch else f"{name} = {show_value(value, 6)}")
    return ", ".join(parts) or "no arguments"


def show_answer(reply: Answer, arguments: tuple, digits: int) -> str:
    """A result; of a loss also its token coefficients, and of a weight whether it is detached."""
    if reply.error:
        return reply.error
    text = show_value(reply.value, digits)
    if not reply.is_tensor:
        return text
    if isinstance(arguments[0], Batch):
        if reply.gradient is None:
            return f"loss {text}, without a gradient"
        rows = torch.tensor(reply.gradient, dtype=torch.float64)
        return f"loss {text}, coefficients {show_value(-len(rows) * rows, digits)}"
    if find_leaf(arguments) is not None:
        text += ", detached" if reply.gradient is None else ", with a gradient"
    return text


def show_line(name: str, text: str) -> str:
    short = text if len(text) < 1500 else f"{text[:1500]} ..."
    return textwrap.fill(f"{name:10}{short}", 96, subsequent_indent=" " * 14)


def show_difference(question: Question, arguments: tuple, yours: Answer, right: Answer) -> list:
    """The input, and both answers with as many digits as tell them apart."""
    expected = mine = ""
    for digits in (4, 10, 17):
        expected, mine = (show_answer(reply, arguments, digits) for reply in (right, yours))
        if expected != mine:
            break
    shown = {"with": show_arguments(question, arguments), "yours": mine, "expected": expected}
    return [show_line(name, text) for name, text in shown.items()]


def show_trouble(question: Question, before: list[Answer], trouble: str) -> list[str]:
    """The input after these answers, and what happened there."""
    arguments = question.inputs[len(before)]
    if not question.names:
        return [show_line("yours", trouble)]
    return [show_line("with", show_arguments(question, arguments)), show_line("yours", trouble)]
