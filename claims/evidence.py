"""What a claim is, and how it is examined.

A claim is a function `check(module, name, draws, evidence)`. It takes a module that keeps the
contract of losses.py and the name of a function in it. It takes random prefix trees (`Draw`) and
adds what it finds to the evidence. It compares two numbers. The *measured* one is autograd's,
through the real functions of that module. The *predicted* one is a formula that shares no code with
them.

The docstring of a claim has paragraphs. The first is the statement, one sentence or two. The second
begins with "Source: " and says where the statement comes from, with its grades. The others are the
proof, which `python verify.py --explain ID` prints.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from claims.trees import EXTREMES, Draw

DRAWS = 24  # ordinary random trees per claim
TOLERANCE = 1e-10  # of |measured - predicted| / max(1, |predicted|), float64
NOTICEABLE = 1e-6  # what a dropped condition must leave, on average over the draws


@dataclass(frozen=True)
class Claim:
    id: str
    check: Callable  # (module, name of the function it speaks of, draws, evidence) -> None
    functions: tuple[str | Callable, ...]  # names, or module -> names
    verdict: str
    condition: str  # under which it holds, or why it fails
    extremes: bool  # whether it is examined on extreme trees, too

    def names(self, module) -> list[str]:
        """The functions that the claim speaks of, without repetitions."""
        found = []
        for function in self.functions:
            found += function(module) if callable(function) else [function]
        return list(dict.fromkeys(found))

    @property
    def text(self) -> tuple[str, str, str]:
        """Statement, source and proof, from the docstring of the check."""
        statement, source, proof = inspect.cleandoc(self.check.__doc__).split("\n\n", 2)
        source = source.removeprefix("Source: ")
        return " ".join(statement.split()), " ".join(source.split()), proof


CLAIMS: list[Claim] = []  # in the order in which claims/__init__.py imports the themes


def claim(
    id_: str, *functions: str | Callable, only_if="", fails="", extremes: bool = True
) -> Callable:
    """Make a check a claim about these functions; a callable finds them in a module.

    It holds; or it holds only_if a condition is met; or it fails as stated, for the reason given.
    extremes: False for a claim that has worlds of its own or takes small steps.
    """
    verdict = "HOLDS ONLY IF" if only_if else "FAILS AS STATED" if fails else "HOLDS"

    def register(check: Callable) -> Callable:
        CLAIMS.append(Claim(id_, check, functions, verdict, only_if or fails, extremes))
        return check

    return register


class Evidence:
    """What the draws said about one function."""

    def __init__(self, claim: str = "", function: str = ""):
        self.claim, self.function = claim, function
        self.state, self.message = "ok", ""  # or wrong, or missing
        self.error = 0.0  # largest |measured - predicted| / max(1, |predicted|)
        self.excess = -1.0  # the same over its tolerance: at most 1 agrees, -1 compared nothing
        self.pair = (math.nan, math.nan)  # predicted and measured where they are furthest apart
        self.what = ""  # which of several things the pair is, if the claim says so
        self.left = []  # sizes of what a dropped condition leaves, or of a statement's error
        self.rows = []  # of the claim's own table: a name, then numbers

    def equal(self, predicted, measured, tolerance: float = TOLERANCE, what: str = "") -> None:
        p, m = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (predicted, measured))
        if p.shape != m.shape:
            raise ValueError(f"a result of shape {tuple(m.shape)}; {tuple(p.shape)} was expected")
        if not p.numel():
            return
        errors = ((m - p).abs() / p.abs().clamp(min=1)).nan_to_num(math.inf).flatten()
        worst = errors.argmax()
        if errors[worst] / tolerance > self.excess:
            self.error = float(errors[worst])
            self.excess = self.error / tolerance
            self.pair = (float(p.flatten()[worst]), float(m.flatten()[worst]))
            self.what = what and f"{what}: "

    def record_left(self, size) -> None:
        self.left.append(torch.as_tensor(size, dtype=torch.float64).abs().mean().item())

    @property
    def mean_left(self) -> float:
        return sum(self.left) / len(self.left) if self.left else math.nan


class Draws(list):
    """Random trees: ordinary ones, then one of each extreme kind."""

    def __init__(self, seed: int, count: int = DRAWS, kinds: Iterable[str] = EXTREMES):
        ordinary = [Draw(seed, k) for k in range(count)]
        super().__init__(ordinary + [Draw(seed, 0, kind=kind) for kind in kinds])


def examine(module, claim: Claim, function: str, draws: list[Draw]) -> Evidence:
    """One claim about one function, on ordinary trees and then, if it holds there, on extreme ones.

    Numbers and tables are those of the ordinary trees, unless the claim fails on the others.
    """
    ordinary = examine_on([draw for draw in draws if not draw.kind], module, claim, function)
    extreme = [draw for draw in draws if draw.kind and claim.extremes]
    if ordinary.state != "ok" or not extreme:
        return ordinary
    beyond = examine_on(extreme, module, claim, function)
    beyond.message += " (on extreme trees)"
    return ordinary if beyond.state == "ok" else beyond


def examine_on(draws: list[Draw], module, claim: Claim, function: str) -> Evidence:
    """Whatever goes wrong in here is that function's fault."""
    evidence = Evidence(claim.id, function)
    for draw in draws:
        draw.generator.manual_seed(draw.seed)  # the same numbers, whatever was examined before
    try:
        claim.check(module, function, draws, evidence)
    except Exception as error:
        evidence.state, evidence.message = "wrong", f"{type(error).__name__}: {error}"
        if isinstance(error, NotImplementedError) and not error.args:
            evidence.state, evidence.message = "missing", "not yet written"
        return evidence
    if evidence.excess > 1:
        evidence.state = "wrong"
        predicted, measured = evidence.pair
        evidence.message = f"{evidence.what}expected {predicted:.6g}, got {measured:.6g}"
    elif evidence.mean_left < NOTICEABLE and not any(draw.kind for draw in draws):
        evidence.state, evidence.message = "wrong", "what must differ here is the same"
    return evidence
