"""Every claim about token gradient cancellation, checked to the last digit on a policy that is
known exactly.

    python verify.py                    all claims, the audit of all methods, what cancelling costs
    python verify.py --only C9 C17      some of them
    python verify.py --explain C14      what a claim says, and why it is so
    python verify.py --explain symbols  what the letters mean
    python verify.py --explain          all derivations in order; --markdown: claims/derivations.md
    python verify.py --losses FILE      grade another file, such as exercises/06_min_replace.py
    python verify.py --markdown         the tables of claims/README.md

The claims are in claims/, one short function each. Each is checked on many random prefix trees: 1
to 3 prompts with 2 to 16 answers each, on-policy and off-policy, inside and outside the clip range.
Most are also checked on extreme trees: ratios of 20, ids of a large vocabulary, groups of 64,
rewards that nearly agree, hundreds of tokens. These decide about verdicts, not about the numbers.

"predicted" is computed by hand and "measured" by autograd; both are shown where they are furthest
apart. "error" is the largest error of all draws. "left" is the average size of what remains when
the condition of a HOLDS ONLY IF is dropped, or by how much a FAILS AS STATED is wrong.

Exit code 0: every verdict is the expected one. 1: some are not. 2: a wrong command line.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import string
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

import losses
from claims import CLAIMS, NOTATION, TOLERANCE, Claim, Draws, Evidence, Outcome, examine
from claims.audit import REGIMES
from claims.formulas import ALL
from llm import fail

WHEN = ("on-policy", "off-policy", "projected")
PAPER = 84  # characters of code on a line of A4
TITLE = """\
# Every derivation

This page is the output of `python verify.py --explain --markdown`. The numbers of each claim are in
[README.md](README.md)."""
ABOVE = [f"above {other}, {how}" for how in ("1st order", "step 1") for other in ("grpo", "random")]
TABLES = {  # claims with a table of their own: title, head
    "AUDIT": (
        "What is left at a token that the whole group shares, |sum c| / sum |c|",
        ["method", *REGIMES],
    ),
    "C16": (
        "The price: expected update against the exact gradient (unbiased: cos 1, norm 0.667)",
        ["method", *(f"{what} {when}" for when in WHEN for what in ("cos", "norm"))],
    ),
    "N3": (
        "N3: what moves a correct answer's log-likelihood, mean over correct answers",
        ["", "(I)", "(II)", "(III)", "(IV)", "GWHES"],
    ),
    "N7": (
        "N7: share of 200 sampled groups; of those where nthr selects, its Delta above another's",
        ["", "grpo lowers Delta", "nthr selects", *ABOVE],
    ),
    "A3": (
        "A3: share of tokens, and of the gradient's norm, by probability of the token, "
        "200 sampled groups",
        ["", *(f"{k / 10:.1f}-{(k + 1) / 10:.1f}" for k in range(10))],
    ),
    "X10": ("X10: the leaderboard, off-policy", ["weight", "tax", "cosine"]),
}


def verify(module, claims: Iterable[Claim], draws: Draws) -> Iterator[Outcome]:
    """Check claims on a module that keeps the contract of losses.py."""
    for claim in claims:
        for function in claim.functions:
            yield examine(module, claim, function, draws[claim.group_size])


# ---------------- the numbers of a table


def format_number(x: float) -> str:
    if math.isnan(x):
        return ""
    if x == 0:
        return "0"
    return f"{x:.4f}" if 1e-3 <= abs(x) < 1e4 else f"{x:.0e}"


def summarise(claim: Claim, outcomes: list[Outcome]) -> tuple[str, list[str]]:
    """A claim's verdict, and its numbers: predicted, measured, error, left.

    The function and the draw with the largest error speak for it. A function that is wrong in
    another way than by its numbers has none.
    """
    worst = max((o.evidence for o in outcomes), key=lambda evidence: evidence.excess)
    if worst.excess <= 1 and any(o.state == "wrong" for o in outcomes):
        worst = Evidence()
    left = [o.evidence.mean_left for o in outcomes if o.evidence.left]
    states = {o.state for o in outcomes}
    verdict = claim.verdict
    if "wrong" in states:
        verdict = "WRONG"
    elif "missing" in states:
        verdict = "NOT YET WRITTEN"
    error = worst.error if worst.excess >= 0 else math.nan
    mean_left = sum(left) / len(left) if left else math.nan
    return verdict, [format_number(x) for x in (*worst.pair, error, mean_left)]


def collect_tables(outcomes: list[Outcome]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """The tables below the claims: title, head, rows."""

    def format_cell(x) -> str:
        if isinstance(x, str):
            return x
        return "0" if abs(x) < TOLERANCE else f"{x:.3f}"

    for id_, (title, head) in TABLES.items():
        rows = [row for o in outcomes if o.claim == id_ for row in o.evidence.rows]
        if rows:
            yield title, head, [[format_cell(x) for x in row] for row in rows]


# ---------------- printing


def locate(function: str) -> str:
    """The function and its line in losses.py."""
    code = getattr(inspect.unwrap(getattr(losses, function, None)), "__code__", None)
    return f"{function}:{code.co_firstlineno}" if code else function


def show(claims: list[Claim], outcomes: list[Outcome], grading: bool = False) -> None:
    columns = f"{'predicted':>11}{'measured':>11}{'error':>9}{'left':>9}"
    print(f"{'claim':6}{'verdict':17}{columns}   source")
    for claim in claims:
        show_claim(claim, [o for o in outcomes if o.claim == claim.id], grading)
    for title, head, rows in collect_tables(outcomes):
        print(f"\n{title}")
        width = max(map(len, head)) + 2
        for name, *cells in [head, *rows]:
            print(f"{name:16}" + "".join(f"{cell:>{width}}" for cell in cells))


def show_claim(claim: Claim, outcomes: list[Outcome], grading: bool) -> None:
    verdict, (predicted, measured, error, left) = summarise(claim, outcomes)
    statement, source, _ = claim.text
    numbers = f"{predicted:>11}{measured:>11}{error:>9}{left:>9}"
    print(f"\n{claim.id:6}{verdict:17}{numbers}   {source}")
    if not grading or all(o.state == "ok" for o in outcomes):  # it may be an exercise's solution
        print(f"      {statement}")
        if claim.condition:
            print(f"      {claim.verdict.capitalize()}: {claim.condition}.")
    if not grading:
        print(f"      losses.py: {' '.join(locate(f) for f in claim.functions)}")
    for mark, state in (("!", "wrong"), ("?", "missing")):
        for message in dict.fromkeys(o.message for o in outcomes if o.state == state):
            functions = " ".join(o.function for o in outcomes if o.message == message)
            print(f"    {mark} {functions}: {message}")


def show_markdown(claims: list[Claim], outcomes: list[Outcome]) -> None:
    rows = []
    for claim in claims:
        verdict, numbers = summarise(claim, [o for o in outcomes if o.claim == claim.id])
        statement, source, _ = claim.text
        functions = ", ".join(f"`{f}`" for f in claim.functions)
        if set(ALL) <= set(claim.functions):
            functions = "all methods"
        verdict = f"**{verdict}** {claim.condition}".strip()
        rows.append([claim.id, statement, source, functions, *numbers, verdict])
    head = ["claim", "what it shows", "source", "losses.py", "predicted", "measured", "error"]
    print(format_table([*head, "left", "verdict"], rows))
    for title, head, rows in collect_tables(outcomes):
        print(f"\n{title}:\n")
        print(format_table(head, rows))


def format_table(head: list[str], rows: list[list[str]]) -> str:
    """In markdown."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def explain(claims: list[Claim], markdown: bool = False) -> None:
    """Print derivations; for all claims also the symbols, and each theme's introduction."""
    whole = {*CLAIMS} <= {*claims}
    if whole:
        print(f"{TITLE}\n\n## {to_markdown(NOTATION)}\n" if markdown else f"{NOTATION}\n")
    theme = ""
    for claim in claims:
        if whole and claim.check.__module__ != theme:
            theme = claim.check.__module__
            text = sys.modules[theme].__doc__.strip()
            print(f"## {to_markdown(text)}\n" if markdown else f"{'-' * 96}\n{text}\n")
        print(format_markdown(claim) if markdown else format_plain(claim))
    if not whole:
        print("The symbols: python verify.py --explain symbols")


def format_plain(claim: Claim) -> str:
    statement, source, derivation = claim.text
    wrap = partial(textwrap.fill, width=96, subsequent_indent="    ", break_on_hyphens=False)
    condition = f"{claim.verdict.capitalize()}: {claim.condition}.\n" if claim.condition else ""
    return f"{wrap(f'{claim.id}  {statement}')}\n{condition}Source: {source}\n\n{derivation}\n"


def format_markdown(claim: Claim) -> str:
    statement, source, derivation = map(to_markdown, claim.text)
    parts = [f"### {claim.id}", f"**{statement}**", f"Source: {source}", derivation]
    if claim.condition:
        parts.insert(2, to_markdown(f"{claim.verdict.capitalize()}: {claim.condition}."))
    return "\n\n".join(parts) + "\n"


def to_markdown(text: str) -> str:
    """Formulas become code, wide columns a table, other wide blocks a list; prose is escaped."""

    def escape(prose: str) -> str:
        return re.sub(r"[\\*_<~\[\]]", r"\\\g<0>", " ".join(prose.split()))

    def convert(block: str) -> str:
        if "  " not in block:
            return escape(block)
        block = textwrap.dedent(block)
        if max(map(len, block.splitlines())) <= PAPER:
            return f"```text\n{block}\n```"
        lines = re.sub(r"\n +", " ", block).splitlines()  # an indented line continues the last one
        rows = [[escape(cell) for cell in re.split(r" {2,}", line)] for line in lines]
        if len(rows[0]) > 1:
            return format_table(rows[0], rows[1:])
        return "\n".join(f"- {line}" for (line,) in rows)

    return "\n\n".join(map(convert, text.split("\n\n")))


# ---------------- the command line


def is_meant(claim: Claim, id_: str) -> bool:
    """C17 stands for C17a and all others of its family, "all" for every claim."""
    family = claim.id.rstrip(string.ascii_lowercase)
    return id_.lower() in (claim.id.lower(), family.lower(), "all")


def select(ids: list[str], known: Iterable[Claim] = CLAIMS) -> list[Claim]:
    """The claims of these ids, in order. Raises ValueError for an id that names no claim."""
    ids = [id_ for text in ids for id_ in text.replace(",", " ").split() or [text]]
    for id_ in ids:
        if not any(is_meant(claim, id_) for claim in known):
            accepted = " ".join(claim.id for claim in known)
            raise ValueError(f"there is no claim {id_}; accepted: {accepted}")
    return [claim for claim in known if any(is_meant(claim, id_) for id_ in ids)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = fail
    add = parser.add_argument
    add("--only", nargs="+", metavar="ID", help="check these claims only: C9 C17 or C9,C17")
    add("--explain", nargs="*", metavar="ID", help="print derivations (default all); or symbols")
    add("--losses", metavar="FILE", help="grade this file instead of losses.py")
    add("--markdown", action="store_true", help="print markdown, for claims/")
    add("--seed", type=int, default=0, help="of the random trees (default 0)")
    options = parser.parse_args(arguments)
    if options.losses and not Path(options.losses).is_file():
        fail(f"there is no file {options.losses}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.explain == ["symbols"]:
        print(NOTATION)
        return 0
    ids = options.explain or options.only or ["all"]
    known = CLAIMS
    if options.losses or any(id_[:1] in "xX" for id_ in ids):
        from exercises import contract  # and the exercises' claims, which nothing else needs

        known = (*CLAIMS, *contract.EXERCISES)
    try:
        claims = select(ids, known)
        if options.losses:
            claims = contract.claims_about(options.losses, claims)
    except ValueError as error:
        fail(str(error))
    if options.explain is not None:
        explain(claims, options.markdown)
        return 0
    torch.set_num_threads(1)
    try:
        if options.losses:
            outcomes = list(contract.grade(options.losses, claims, options.seed))
        else:
            outcomes = list(verify(losses, claims, Draws(options.seed)))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.markdown:
        show_markdown(claims, outcomes)
    else:
        show(claims, outcomes, grading=bool(options.losses))
    if options.losses:
        contract.show_score(options.losses, outcomes)
    return 0 if all(o.state == "ok" for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
