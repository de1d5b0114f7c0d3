"""Call the functions of a student's file, and write down what they return. The grader starts it.

    python -m exercises.call ex02 FILE ANSWERS.json

The file runs in this process of its own, so nothing that it changes (a dtype, the grad mode, torch
itself) reaches the grader, the next file or a notebook. It has all your rights nevertheless: grade
what you would run yourself.
"""

from __future__ import annotations

import faulthandler
import json
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

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
    "weights": lambda x: torch.tensor(x).requires_grad_(),
    "logp": lambda x: torch.tensor(x).requires_grad_(),
    "batch": lambda x: make_batch(**x),
}


def answer(function: Callable, kinds: list[str], case: list):
    """What a function returns for the inputs of a case, in plain Python, or {"error": a line}.

    Of a loss it is the value, and the push on every log-prob, c = -N dloss/dlogp.
    """
    torch.set_default_dtype(torch.float64)  # a tensor that a student makes loses no digit
    try:
        with torch.enable_grad():
            case = json.loads(json.dumps(case))  # a function may change its inputs
            inputs = [MAKE[kind](x) for kind, x in zip(kinds, case, strict=True)]
            value = function(*inputs)
            if kinds[:1] in (["logp"], ["batch"]) and value is not None:
                if not isinstance(value, Tensor):
                    raise TypeError(f"the loss is a {type(value).__name__}, not a tensor")
                logp = getattr(inputs[0], "logp", inputs[0])
                value = value.detach(), -len(logp) * torch.autograd.grad(value, logp)[0]
            if getattr(value, "requires_grad", False):
                value = value, "with a gradient"
            return to_plain(value)
    except NotImplementedError as error:
        return {"error": describe(error) if error.args else None}  # torch's own has a text
    except (Exception, SystemExit) as error:
        return {"error": describe(error)}


def to_plain(value):
    """Lists, texts, and numbers of 7 digits."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [to_plain(x) for x in value]
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(f"{round(value, 12):.7g}") + 0.0  # no -0
    return str(value)  # nan, inf, or what no exercise asks for


def describe(error: BaseException) -> str:
    """The error in one line, with its last place in the student's file."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == STUDENT]
    return f"{text} (line {frames[-1].lineno}, in {frames[-1].name})" if frames else text


def load(source: str | bytes) -> dict:
    """What a file defines."""
    defined = {}
    exec(compile(source, STUDENT, "exec", dont_inherit=True), defined)
    return defined


def answer_all(path: Path, functions: dict) -> dict:
    """Name -> the answers to all cases of this function, or {"error": why there are none}."""
    try:
        defined = load(path.read_bytes())
    except (Exception, SystemExit) as error:  # the file's own, outside of its functions
        return dict.fromkeys(functions, {"error": describe(error)})
    answers = {}
    for name, lesson in functions.items():
        if name in defined:
            kinds = [*lesson["inputs"].values()]
            answers[name] = [answer(defined[name], kinds, case) for case in lesson["cases"]]
        else:
            answers[name] = {"error": "The file has no function of this name."}
    return answers


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.set_default_dtype(torch.float64)
    key, file, answers = sys.argv[1:]
    lessons = json.loads(Path(__file__).with_name("lessons.json").read_text("utf-8"))
    text = json.dumps(answer_all(Path(file), lessons[key]["functions"]))
    Path(answers).write_text(text, "utf-8")
