"""Every claim about token gradient cancellation, checked to the last digit on a policy that is
known exactly.

    python verify.py                    all claims, the audit of all methods, what cancelling costs
    python verify.py --only C9 C17      some of them
    python verify.py --explain C14      what a claim says, and its proof
    python verify.py --explain loss     questions people ask about that word
    python verify.py --explain symbols  what the letters mean
    python verify.py --explain all      everything, in order
    python verify.py --losses FILE      with FILE's functions in place of those of losses.py

The claims are in claims/, one short function each. Each is checked on many random prefix trees: 1
to 3 prompts with 2 to 16 answers each, on-policy and off-policy, inside and outside the clip range.
Most are also checked on extreme trees: ratios of 20, ids of a large vocabulary, groups of 64,
rewards that nearly agree, hundreds of tokens. These decide about verdicts, not about the numbers.

"predicted" is computed by hand and "measured" by autograd; both are shown where they are furthest
apart. "error" is the largest error of all draws. "left" is the average size of what remains when
the condition of a HOLDS ONLY IF is dropped, or by how much a FAILS AS STATED is wrong.

Exit code 0: every verdict is the expected one, and every function of METHODS is spoken of. 1: not.
"""

from __future__ import annotations

import argparse
import math
import string
import sys
import textwrap
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

import losses
from claims import CLAIMS, NOTATION, Claim, Draws, Evidence, examine
from claims.audit import REGIMES
from claims.evidence import TOLERANCE
from claims.formulas import name_of

QUESTIONS = Path(__file__).parent / "claims" / "README.md"
WHEN = ("on-policy", "off-policy", "projected")
TABLES = {  # claims with a table of their own: title, head
    "AUDIT": (
        "What is left at a token that the whole group shares, |sum c| / sum |c|",
        ["method", *REGIMES],
    ),
    "C16": (
        "The price: expected update against the exact gradient (unbiased: cos 1, norm 0.667)",
        ["method", *(f"{what} {when}" for when in WHEN for what in ("cos", "norm"))],
    ),
    "C21": (
        "What cancelling without bias costs: a group's bias and variance",
        ["weight", *(f"{what}, G = {G}" for G in (2, 3, 4) for what in ("bias", "variance"))],
    ),
    "Q2": (
        "Q2: a question's expected update is K grad p, in groups of 8",
        ["", *(f"p = {p}" for p in (0.05, 0.1, 0.25, 0.5))],
    ),
}


def load(path: str) -> tuple[ModuleType, set[str]]:
    """losses.py with the functions of a file in place of its own, and the names that it defines."""
    module = ModuleType("losses_under_test")
    sys.modules[module.__name__] = module  # dataclasses look it up
    for file in (losses.__file__, path):
        before = dict(vars(module))
        exec(compile(Path(file).read_text(), file, "exec"), vars(module))
    return module, {name for name, x in vars(module).items() if before.get(name) is not x}


def unspoken(module) -> list[str]:
    """The functions of METHODS that no claim speaks of, each with its method."""
    spoken = {name for claim in CLAIMS for name in claim.names(module)}
    found = []
    for name, method in module.METHODS.items():
        for function in filter(None, (*method.passes, method.credit, method.repair)):
            called = name_of(function)  # of a lambda or a partial no claim can speak
            if called not in spoken or not hasattr(module, called):
                found.append(f"{name}: no claim checks {called}")
    return found


# ---------------- the numbers of a table


def format_number(x: float) -> str:
    if math.isnan(x):
        return ""
    if x == 0:
        return "0"
    return f"{x:.4f}" if 1e-3 <= abs(x) < 1e4 else f"{x:.0e}"


def summarise(claim: Claim, results: list[Evidence]) -> tuple[str, list[str]]:
    """A claim's verdict, and its numbers: predicted, measured, error, left.

    The function and the draw with the largest error speak for it.
    """
    worst = max(results, key=lambda result: result.excess)
    left = [result.mean_left for result in results if result.left]
    states = {result.state for result in results}
    verdict = claim.verdict
    if "wrong" in states:
        verdict = "WRONG"
    elif "missing" in states:
        verdict = "NOT YET WRITTEN"
    error = worst.error if worst.excess >= 0 else math.nan
    mean_left = sum(left) / len(left) if left else math.nan
    return verdict, [format_number(x) for x in (*worst.pair, error, mean_left)]


# ---------------- printing


def show(claims: list[Claim], results: list[Evidence]) -> None:
    columns = f"{'predicted':>11}{'measured':>11}{'error':>9}{'left':>9}"
    print(f"{'claim':6}{'verdict':17}{columns}   source")
    for claim in claims:
        own = [result for result in results if result.claim == claim.id]
        verdict, (predicted, measured, error, left) = summarise(claim, own)
        statement, source, _ = claim.text
        numbers = f"{predicted:>11}{measured:>11}{error:>9}{left:>9}"
        print(f"\n{claim.id:6}{verdict:17}{numbers}   {source}")
        print(f"      {statement}")
        if claim.condition:
            print(f"      {claim.verdict.capitalize()}: {claim.condition}.")
        print(f"      of {' '.join(result.function for result in own)}")
    for id_, (title, head) in TABLES.items():
        rows = [row for result in results if result.claim == id_ for row in result.rows]
        if rows:
            print(f"\n{title}:\n")
            show_table([head, ["---"] * len(head), *rows])


def show_table(lines: list[list]) -> None:
    """A table in Markdown, its columns aligned."""

    def format_cell(x) -> str:
        if isinstance(x, str):
            return x
        return "0" if abs(x) < TOLERANCE else f"{x:.3f}"

    lines = [[format_cell(x) for x in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(f"| {' | '.join(cells)} |")


def explain(claims: list[Claim]) -> None:
    """Statement, source and proof; each theme's introduction where all its claims are printed."""
    wrap = partial(textwrap.fill, width=96, subsequent_indent="    ", break_on_hyphens=False)
    theme = ""
    for claim in claims:
        if len(claims) == len(CLAIMS) and claim.check.__module__ != theme:
            theme = claim.check.__module__
            print(f"{'-' * 96}\n{sys.modules[theme].__doc__.strip()}\n")
        statement, source, proof = claim.text
        print(wrap(f"{claim.id}  {statement}"))
        if claim.condition:
            print(f"{claim.verdict.capitalize()}: {claim.condition}.")
        print(f"Source: {source}\n\n{proof}\n")


def questions(word: str) -> list[str]:
    """The questions of claims/README.md with this word in their title, or else in their answer."""
    _, *parts = QUESTIONS.read_text().split("\n### ")
    parts = [part.partition("\n## ")[0].strip() for part in parts]
    word = word.lower()
    titled = [part for part in parts if word in part.partition("\n")[0].lower()]
    return titled or [part for part in parts if word in part.lower()]


# ---------------- the command line


def is_meant(claim: Claim, id_: str) -> bool:
    """C17 stands for C17h and C17i, too, and "all" for every claim."""
    family = claim.id.rstrip(string.ascii_lowercase)
    return id_.lower() in (claim.id.lower(), family.lower(), "all")


def select(ids: list[str]) -> list[Claim]:
    """The claims of these ids, in order."""
    ids = " ".join(ids).replace(",", " ").split()
    for id_ in ids:
        if not any(is_meant(claim, id_) for claim in CLAIMS):
            accepted = " ".join(claim.id for claim in CLAIMS)
            sys.exit(f"error: there is no claim {id_}; accepted: {accepted}")
    return [claim for claim in CLAIMS if any(is_meant(claim, id_) for id_ in ids)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", default=["all"], metavar="ID", help="these claims: C9 C17 or C9,C17")
    add("--explain", nargs="+", metavar="ID", help="print proofs; or symbols, all, a topic word")
    add("--losses", metavar="FILE", help="its functions in place of those of losses.py")
    add("--seed", type=int, default=0, help="of the random trees (default 0)")
    options = parser.parse_args(argv)
    if options.explain:
        word = " ".join(options.explain)
        if word in ("symbols", "all"):
            print(NOTATION + "\n")
        found = questions(word) if not any(is_meant(claim, word) for claim in CLAIMS) else []
        if found:
            print("\n\n".join(found))
        elif word != "symbols":
            explain(select(options.explain))
        return 0
    module, defined, claims = losses, None, select(options.only)
    if options.losses:
        try:
            module, defined = load(options.losses)
        except Exception as error:
            sys.exit(f"error: {options.losses} cannot be loaded: {type(error).__name__}: {error}")
    torch.set_num_threads(1)
    draws = Draws(options.seed)
    pairs = [(claim, name) for claim in claims for name in claim.names(module)]
    pairs = [(claim, name) for claim, name in pairs if defined is None or name in defined]
    missed = unspoken(module)
    if not pairs and not missed:
        sys.exit(f"error: {options.losses} defines no function that these claims speak of")
    claims = [claim for claim in claims if any(claim is other for other, _ in pairs)]
    results = [examine(module, claim, name, draws) for claim, name in pairs]
    show(claims, results)
    missed += [f"{x.claim}: {x.function}: {x.message}" for x in results if x.state != "ok"]
    if missed:
        print("", *(f"! {line}" for line in missed), sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
