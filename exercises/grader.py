"""`python verify.py --losses FILE`: check the claims on a stranger's file.

The file may define all of losses.py or one function of an exercise. What it lacks is not yet
written. A syntax error costs its own function only. A function that hangs, or ends the process, is
cut off and fails its own claims only.

Nothing here evaluates text, but the file is run: it is the user's own.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

import losses
from claims import CLAIMS, Claim, Draws, Outcome, examine
from exercises.claims import EXERCISES

PATIENCE = 20  # seconds that a function may take for one claim
START = 60  # seconds that a new process may take: it imports torch
TOP_LEVEL = re.compile(
    r"^(?:@.*\n)*(?:def|class) (\w+).*\n?(?:(?!@|def |class ).*\n?)*?(?=^@|^def |^class |\Z)",
    re.MULTILINE,
)


class Written:
    """The module under test. It raises NotImplementedError for what it lacks.

    Batch and OldPolicy are only containers and may be ours.
    """

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        if hasattr(self.module, name):
            return getattr(self.module, name)
        if name in ("Batch", "OldPolicy"):
            return getattr(losses, name)
        raise NotImplementedError(name)


# ---------------- the file


def mend(source: str) -> str:
    """Replace every function that has a syntax error by one that says so; line numbers stay."""

    def check(block: re.Match) -> str:
        lines_above = source.count("\n", 0, block.start())
        try:
            compile("\n" * lines_above + block[0], "", "exec")
        except SyntaxError as error:
            message = f"{error.msg}, line {error.lineno}"
            stub = f"def {block[1]}(*_, **__): raise SyntaxError({message!r})"
            return stub + "\n" * block[0].count("\n")
        return block[0]

    return TOP_LEVEL.sub(check, source)


def load(path: str) -> Written:
    """A Python file as a module. An `import losses` in it finds the reference."""
    module = types.ModuleType("student")
    sys.modules["student"] = module  # where dataclasses look their module up
    source = Path(path).read_text()
    try:
        code = compile(source, path, "exec")
    except SyntaxError:
        code = compile(mend(source), path, "exec")
    exec(code, module.__dict__)
    return Written(module)


def defined_names(path: str) -> set[str]:
    """The names that a file gives a meaning at its top level, imports left out."""
    return set(re.findall(r"^(?:def |class )?(\w+)\s*[(:=]", Path(path).read_text(), re.MULTILINE))


def claims_about(path: str, claims: Iterable[Claim]) -> list[Claim]:
    """The claims about functions that a file defines. Raises ValueError if there are none.

    A claim of losses.py is narrowed to these functions; an exercise wants all of its own.
    """
    names = defined_names(path)
    chosen = []
    for claim in claims:
        functions = tuple(f for f in claim.functions if f in names)
        if functions:
            chosen.append(claim if claim in EXERCISES else replace(claim, functions=functions))
    if not chosen:
        raise ValueError(f"{path} defines none of the functions that these claims are about")
    return chosen


# ---------------- the grading


def work(path: str, tasks: list[tuple[str, str]], seed: int, pipe) -> None:
    """In the second process: send "hello", then what is wrong with the file, then all outcomes.

    "" says that nothing is wrong with it.
    """
    pipe.send("hello")
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # a print in a loss would be heard some hundred times
    try:
        module = load(path)
    except (Exception, SystemExit) as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send("")
    draws = Draws(seed)
    by_id = {claim.id: claim for claim in (*CLAIMS, *EXERCISES)}
    for id_, function in tasks:
        claim = by_id[id_]
        pipe.send(examine(module, claim, function, draws[claim.group_size]))


class CutOff(Exception):
    """The process hung or died over a task."""


def grade(path: str, claims: Iterable[Claim], seed: int) -> Iterator[Outcome]:
    """Check claims on a file, in a second process, which can be killed whatever it is doing.

    Raises RuntimeError when the file cannot be loaded at all.
    """
    tasks = [(claim.id, function) for claim in claims for function in claim.functions]
    while tasks:
        try:
            for outcome in outcomes_of_a_process(path, tasks, seed):
                yield outcome
                tasks = tasks[1:]
        except CutOff as trouble:
            culprit = tasks[0][1]
            for id_, function in tasks:
                if function == culprit:
                    yield Outcome(id_, function, "wrong", str(trouble))
            tasks = [task for task in tasks if task[1] != culprit]


def outcomes_of_a_process(path: str, tasks: list, seed: int) -> Iterator[Outcome]:
    """The outcomes of the tasks, in order.

    Raises CutOff when a task hangs or ends the process, RuntimeError when loading the file does.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)

    def receive(seconds: float):
        if not here.poll(seconds):
            raise TimeoutError
        return here.recv()

    worker = context.Process(target=work, args=(path, tasks, seed, there), daemon=True)
    worker.start()
    there.close()
    is_loaded = False
    try:
        receive(START)
        if mistake := receive(PATIENCE):
            raise RuntimeError(f"{path}: {mistake}")
        is_loaded = True
        for _ in tasks:
            yield receive(PATIENCE)
    except (TimeoutError, EOFError) as error:
        timed_out = isinstance(error, TimeoutError)
        trouble = f"cut off after {PATIENCE} s" if timed_out else "the process died"
        if is_loaded:
            raise CutOff(trouble) from None
        raise RuntimeError(f"{path}: {trouble} while it was loaded") from None
    finally:
        worker.kill()
        worker.join()


# ---------------- the score


def show_score(path: str, outcomes: list[Outcome]) -> None:
    """Print the claims passed per function, and how much of the contract the file lacks."""
    print("\nscore")
    for function in dict.fromkeys(o.function for o in outcomes):
        own = [o for o in outcomes if o.function == function]
        passed = sum(o.state == "ok" for o in own)
        first = next((f"{o.claim}: {o.message}" for o in own if o.state != "ok"), "")
        if all(o.state == "missing" for o in own):
            first = "not yet written"
        print(f"  {function:20}{passed:3} of {len(own):2}   {first}")
    print(f"  {'all':20}{sum(o.state == 'ok' for o in outcomes):3} of {len(outcomes)}")
    names = defined_names(path)
    contract = {f for claim in CLAIMS for f in claim.functions}
    if len(contract & names) > 3:  # more than an exercise asks for
        print(f"  {len(contract - names)} functions of the contract are not in this file")
