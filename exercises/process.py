"""A student's file, in a second process of its own that answers one request at a time.

Requests and answers are JSON, so nothing that a student's process sends is unpickled. It can be
killed whatever it is doing. `import losses` finds a stand-in there, which has the HELPERS only.
What this protects from, and what not: README.md, "Whose file it is".
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import multiprocessing
import os
import re
import sys
import textwrap
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

HELPERS = "Batch OldPolicy token_ratio lengths masked_adv seq_mean budget_mean token_mean clipped"
PATIENCE = 10  # seconds that a call may take
START = 60  # seconds that a new process may take: it imports torch
TOP_LEVEL = re.compile(
    r"^(?:@.*\n)*(?:def|class) (\w+).*\n?(?:(?!@|def |class ).*\n?)*?(?=^@|^def |^class |\Z)",
    re.MULTILINE,
)


# ---------------- the file


def mend(source: str) -> str:
    """Replace every function that has a syntax error by one that says so; line numbers stay."""

    def check(block: re.Match) -> str:
        lines_above = source.count("\n", 0, block.start())
        try:
            compile("\n" * lines_above + block[0], "", "exec", dont_inherit=True)
        except SyntaxError as error:
            message = f"{error.msg}, line {error.lineno}"
            stub = f"def {block[1]}(*_, **__): raise SyntaxError({message!r})"
            return stub + "\n" * block[0].count("\n")
        return block[0]

    return TOP_LEVEL.sub(check, source)


def load(path: str) -> types.ModuleType:
    """A Python file as a module. A syntax error costs its own function only."""
    module = types.ModuleType("student")
    module.__file__ = path
    sys.modules["student"] = module  # where dataclasses look their module up
    source = Path(path).read_text()
    try:
        code = compile(source, path, "exec", dont_inherit=True)  # not our __future__
    except SyntaxError:
        code = compile(mend(source), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module


def defined_names(path: str) -> set[str]:
    """The names that a file gives a meaning at its top level, imports left out."""
    source = Path(path).read_text(errors="replace")
    return set(re.findall(r"^(?:def |class )?(\w+)\s*[(:=]", source, re.MULTILINE))


def make_stand_in() -> types.ModuleType:
    """What `import losses` finds in a student's file: a copy of the helpers, and nothing graded."""
    sys.modules.pop("losses", None)
    copy = importlib.import_module("losses")
    stand_in = types.ModuleType("losses")

    def refuse(name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"losses.{name} is not here: a graded file may use {HELPERS}")

    stand_in.__getattr__ = refuse
    for name in HELPERS.split():
        setattr(stand_in, name, getattr(copy, name))
    return stand_in


# ---------------- values as JSON


def encode(value):
    """Numbers, strings, lists, tensors and batches as JSON. Of anything else, the type's name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [encode(x) for x in value]
    if isinstance(value, Tensor):
        return {
            "tensor": value.tolist(),
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "needs_grad": value.requires_grad,
        }
    if hasattr(value, "logp"):
        return {"batch": {f.name: encode(getattr(value, f.name)) for f in fields(value)}}
    return {"type": type(value).__name__}


def decode(value):
    """The inverse of encode. A tensor is a leaf; a batch is that of `import losses`."""
    if isinstance(value, list):
        return [decode(x) for x in value]
    if not isinstance(value, dict):
        return value
    if "batch" in value:
        batch = importlib.import_module("losses").Batch
        return batch(**{name: decode(x) for name, x in value["batch"].items()})
    if "type" in value:
        return types.SimpleNamespace(type=value["type"])
    tensor = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return tensor.view(value["shape"]).requires_grad_(value["needs_grad"])


def find_leaf(values) -> Tensor | None:
    """The first tensor among arguments by which a result can be differentiated."""
    tensors = (getattr(x, "logp", x) for x in values)
    return next((x for x in tensors if isinstance(x, Tensor) and x.requires_grad), None)


# ---------------- in the second process


def call(module, function: str, arguments: list, options: dict) -> dict:
    """A function's result, as JSON: {"value", "gradient"}, or {"error"}, or {"blank": the reason}.

    The gradient is None for a result that is detached. Of a result that is no scalar it is 0, and
    only says that there is one.
    """
    if not hasattr(module, function):
        return {"blank": f"The file has no function {function}."}
    try:
        values = [decode(x) for x in arguments]
        result = getattr(module, function)(*values, **options)
        leaf = find_leaf(values)
        gradient = None
        if isinstance(result, Tensor) and result.requires_grad:
            gradient = torch.zeros_like(leaf)
            if not result.dim():
                gradient = torch.autograd.grad(result, leaf)[0]
        return {"value": encode(result), "gradient": encode(gradient)}
    except (Exception, SystemExit) as error:
        frame = last_frame(error, module.__file__)
        is_plain = isinstance(error, NotImplementedError) and not error.args  # torch's has a text
        if not is_plain or frame and frame.name != function:
            return {"error": describe(error, module.__file__, function)}
        if raises_above_code(getattr(module, function)):
            return {"blank": "raise NotImplementedError still stands above your code."}
        return {"blank": ""}


def raises_above_code(function: Callable) -> bool:
    """Whether a function has statements below a raise, which are never reached."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body
    except (OSError, TypeError, SyntaxError, AttributeError):  # a lambda, for example
        return False
    return any(isinstance(statement, ast.Raise) for statement in body[:-1])


def last_frame(error: BaseException, path: str) -> traceback.FrameSummary | None:
    """The last line of the student's file that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if frame.filename == path), None)


def describe(error: BaseException, path: str, function: str = "<module>") -> str:
    """The error in one line, with its line, and its function if that is not the one called."""
    text = type(error).__name__
    try:
        text = f"{text}: {error}".splitlines()[0].removesuffix(": ")
    except Exception:  # of its __str__
        text += ": its text cannot be shown"
    frame = last_frame(error, path)
    if not frame:
        return text
    place = [] if isinstance(error, SyntaxError) else [f"line {frame.lineno}"]
    if frame.name.isidentifier() and frame.name != function:
        place.append(f"in {frame.name}")
    return f"{text} ({', '.join(place)})" if place else text


def serve(pipe, answer: Callable) -> None:
    """Load request["path"] at the first request, and answer all with answer(module, **request)."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # torch.tensor of a list of ours loses no digit
    sys.modules["losses"] = make_stand_in()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # a print in a loss would be heard some hundred times
        os.dup2(nowhere, descriptor)
    module = None
    pipe.send_bytes(b"{}")
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except (EOFError, KeyboardInterrupt):
            return
        path = request.pop("path")
        try:
            module = module or load(path)
            reply = json.dumps(answer(module, **request) if request else {})
        except (Exception, SystemExit) as error:
            reply = json.dumps({"error" if module else "broken": describe(error, path)})
        pipe.send_bytes(reply.encode())


# ---------------- in the first process


class CutOff(Exception):
    """The second process hung or died over a request, or sent something else than an answer."""


class SecondProcess:
    """Where a student's file runs. Another file, or the request after a CutOff, gets a new one."""

    def __init__(self, answer: Callable = call, patience: float = PATIENCE):
        self.answer = answer
        self.patience = patience
        self.path = self.worker = None

    def start(self) -> None:
        """On Linux a fork of a process that has imported torch; macOS forbids such a fork."""
        context = multiprocessing.get_context("spawn")
        if sys.platform == "linux":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch"])
        self.pipe, there = context.Pipe()
        self.worker = context.Process(target=serve, args=(there, self.answer), daemon=True)
        self.worker.start()
        there.close()
        self.exchange(b"", START)

    def exchange(self, request: bytes, seconds: float) -> dict:
        """Send a request, unless it is empty, and wait for the reply. Raises CutOff.

        A thread does it, since the other end may read nothing or stop in the middle of a reply.
        """
        replies = []

        def talk(pipe) -> None:
            try:
                if request:
                    pipe.send_bytes(request)
                reply = json.loads(pipe.recv_bytes())
                replies.append(reply if isinstance(reply, dict) else "sent no answer")
            except (EOFError, ConnectionError):
                replies.append("the process died")
            except Exception:  # of a length that cannot be, or no JSON, or too deep
                replies.append("sent no answer")

        thread = threading.Thread(target=talk, args=(self.pipe,), daemon=True)
        thread.start()
        thread.join(seconds)
        reply = replies[0] if replies else f"cut off after {seconds} s"
        if isinstance(reply, dict):
            return reply
        self.stop()
        raise CutOff(reply)

    def ask(self, path: str, **request) -> dict:
        """The answer to a request, which may be empty: then the file is only loaded.

        Raises CutOff, and RuntimeError for a file that cannot be loaded.
        """
        if path != self.path:
            self.stop()
        if not self.worker:
            self.start()
        self.path = path
        data = json.dumps({"path": path, **request}).encode()
        reply = self.exchange(data, self.patience)
        if isinstance(reply.get("broken"), str):
            raise RuntimeError(f"{path}: {reply['broken']}")
        return reply

    def stop(self) -> None:
        if self.worker:
            self.worker.kill()
            self.worker.join()
            self.worker = None
