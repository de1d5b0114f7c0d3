"""`python verify.py --losses FILE`: check the claims on another file than losses.py.

The file may define all of losses.py, or a part of it, or one function of an exercise. What it lacks
is not yet written. A function that hangs, or ends the process, is cut off and fails its own claims
only. The claims run beside the file in the second process; an exercise's grade does not depend on
them (grader.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import cache

import losses
from claims import CLAIMS, Claim, Draws, Evidence, Missing, Outcome, examine
from exercises.claims import EXERCISES
from exercises.process import CutOff, SecondProcess, defined_names

PATIENCE = 20  # seconds that a function may take for one claim


class Written:
    """The module under test. It raises Missing for what it lacks.

    Batch and OldPolicy are only containers and may be ours.
    """

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        if hasattr(self.module, name):
            return getattr(self.module, name)
        if name in ("Batch", "OldPolicy"):
            return getattr(losses, name)
        raise Missing(name)


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


@cache
def draw_trees(seed: int) -> Draws:
    return Draws(seed)


def examine_here(module, claim: str, function: str, seed: int) -> dict:
    """In the second process: one claim about one function; the outcome as JSON."""
    chosen = next(c for c in (*CLAIMS, *EXERCISES) if c.id == claim)
    outcome = examine(Written(module), chosen, function, draw_trees(seed)[chosen.group_size])
    return asdict(outcome) | {"evidence": vars(outcome.evidence)}


def grade(path: str, claims: Iterable[Claim], seed: int) -> Iterator[Outcome]:
    """Check claims on a file. Raises RuntimeError when it cannot be loaded."""
    student = SecondProcess(examine_here, PATIENCE)
    lost = {}
    try:
        try:
            student.ask(path)
        except CutOff as trouble:
            raise RuntimeError(f"{path}: {trouble} while it was loaded") from None
        for claim, function in [(c.id, f) for c in claims for f in c.functions]:
            if function not in lost:
                request = {"claim": claim, "function": function, "seed": seed}
                try:
                    yield read_outcome(student.ask(path, **request))
                except CutOff as trouble:
                    lost[function] = str(trouble)
            if function in lost:
                yield Outcome(claim, function, "wrong", lost[function])
    finally:
        student.stop()


def read_outcome(reply: dict) -> Outcome:
    """The inverse of examine_here. Raises CutOff for something else than an outcome."""
    evidence = Evidence()
    try:
        vars(evidence).update(reply.pop("evidence"))
        return Outcome(**reply, evidence=evidence)
    except (KeyError, TypeError, ValueError):
        raise CutOff("sent no answer") from None


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
