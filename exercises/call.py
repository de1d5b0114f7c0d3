"""Call the functions of a student's file, and print what they return. The grader starts it.

    python -m exercises.call ex02 FILE

The file runs in this process of its own, so nothing that it changes (a dtype, the grad mode, torch
itself) reaches the grader, the next file or a notebook. It has all your rights nevertheless: grade
what you would run yourself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

STUDENT = "your file"  # its name in tracebacks
SECONDS = 120  # then a file that has not ended is stopped, and the line where it was is shown


def make_batch(r: list, A: list, L: int) -> SimpleNamespace:
    """A Batch as losses.py has it, from a ratio for each token (None is padding, whose log-probs
    are garbage) and an advantage for each answer."""
    mask = torch.tensor([[x is not None for x in row] for row in r])
    ratio = torch.tensor([[1.0 if x is None else x for x in row] for row in r]).double()
    logp = torch.where(mask, -0.7, 1e4).double()
    return SimpleNamespace(
        logp=logp.clone().requires_grad_(),
        logp_old=(old := torch.where(mask, logp - ratio.log(), -1e4)),
        logp_ref=old,
        adv=torch.tensor(A).double()[:, None] * mask,
        mask=mask,
        group_size=len(A),
        max_tokens=L,
    )


MAKE = {  # the kinds of inputs in lessons.json
    "plain": lambda x: x,
    "tensor": torch.tensor,
    "leaf": lambda x: torch.tensor(x).requires_grad_(),
    "batch": lambda x: make_batch(**x),
}


def answer(function: Callable, kinds: list[str], case: list):
    """What a function returns for the inputs of a case, in plain Python, or {"error": a line}.

    Of a loss it is the value, and the push on every log-prob, c = -N dloss/dlogp.
    """
    torch.set_default_dtype(torch.float64)  # a tensor that a student makes loses no digit
    try:
        inputs = [MAKE[kind](x) for kind, x in zip(kinds, case, strict=True)]
        value = function(*inputs)
        if getattr(value, "requires_grad", False):
            logp = getattr(inputs[0], "logp", inputs[0])
            pushes = "with a gradient"
            if value.dim() == 0:
                pushes = -len(logp) * torch.autograd.grad(value, logp)[0]
            value = value.detach(), pushes
        return to_plain(value)
    except NotImplementedError as error:
        return {"error": describe(error) if error.args else None}  # torch's own has a text
    except Exception as error:
        return {"error": describe(error)}


def to_plain(value):
    """Lists, texts, and numbers of 7 decimals."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [to_plain(x) for x in value]
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, (int, float)) and math.isfinite(value):
        return round(value, 7) + 0.0  # no -0
    return str(value)  # nan, inf, or what no exercise asks for


def describe(error: BaseException) -> str:
    """The error in one line, with its last place in the student's file."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == STUDENT]
    return f"{text} (line {frames[-1].lineno})" if frames else text


def load(source: str | bytes) -> dict:
    """What a file defines."""
    defined = {}
    exec(compile(source, STUDENT, "exec", dont_inherit=True), defined)
    return defined


def answer_all(path: Path, functions: dict) -> dict:
    """Name -> the answers to all cases of this function, or {"error": it is missing}."""
    defined, answers = load(path.read_bytes()), {}
    for name, lesson in functions.items():
        if name in defined:
            kinds = [*lesson["inputs"].values()]
            answers[name] = [answer(defined[name], kinds, case) for case in lesson["cases"]]
        else:
            answers[name] = {"error": "The file has no function of this name."}
    return answers


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    key, file = sys.argv[1:]
    lessons = json.loads(Path(__file__).with_name("lessons.json").read_text("utf-8"))
    with contextlib.redirect_stdout(sys.stderr):  # what the file prints is no answer
        answers = answer_all(Path(file), lessons[key]["functions"])
    print(json.dumps(answers))
