"""Every claim about token gradient cancellation, checked to the last digit on a policy that is
known exactly.

    python verify.py                    all claims, and the tables of some
    python verify.py --only C9 C16      some of them
    python verify.py --explain C14      what a claim says, and its proof
    python verify.py --explain symbols  what the letters mean

The claims are in claims/, one short function each. Each is checked on many random prefix trees: 1
to 3 prompts with 2 to 16 answers each, on-policy and off-policy, inside and outside the clip range.
All are also checked on extreme trees: ratios of 20, ids of a large vocabulary, groups of 64,
rewards that nearly agree, hundreds of tokens. Extreme trees decide about verdicts, not about the
numbers shown.

"predicted" is computed by hand and "measured" by autograd; the pair that is furthest apart is
shown. "error" is the largest error of all draws. HOLDS ONLY IF means that the claim is false
without the condition that follows. "otherwise" is the average size of its error then, or what
--explain says.

Exit code 0: every verdict is the expected one, and a claim checks every function of METHODS.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path
from statistics import fmean

import torch

import losses
from claims import CLAIMS, Claim, Evidence, examine, random_draws
from claims.audit import REGIMES
from claims.evidence import TOLERANCE

PROOFS = Path(__file__).parent / "claims" / "PROOFS.md"
TABLES = {  # claims with a table of their own: title, head
    "AUDIT": (
        "Net push at a fully shared token, |sum c| / sum |c|, if the group is in one update",
        ["loss", *REGIMES],
    ),
    "C16": (
        "Cosine of the expected update with the gradient of the expected reward, A = R - mean(R)",
        ["loss", "on-policy", "off-policy"],
    ),
    "C27": (
        "Noise with a prefix baseline over the noise without it, for 4 visitors and b = 0.5. "
        "Below 1 the baseline helps",
        ["the token", "t", "(1 - t) n/(n - 1)", "measured"],
    ),
}


def unspoken() -> list[str]:
    """The functions of METHODS that no claim checks, each with its method."""
    checked = {name for claim in CLAIMS for name in claim.names}
    return [
        f"{name}: no claim checks {function.__name__}. A loss needs a row in FORMULAS of "
        "claims/formulas.py"
        for name, method in losses.METHODS.items()
        for function in losses.functions(method)
        if function.__name__ not in checked
    ]


# ---------------- printing


def wrap(text: str, indent: int) -> str:
    """text in lines of 100, all but the first of them indented."""
    return textwrap.fill(text, 100, subsequent_indent=" " * indent, break_on_hyphens=False)


def show(claims: list[Claim], results: list[Evidence]) -> None:
    """Each claim's verdict, and the numbers of the function and draw with the largest error."""
    columns = f"{'predicted':>11}{'measured':>11}{'error':>9}{'otherwise':>11}"
    print(f"{'claim':6}{'verdict':17}{columns}")
    for claim in claims:
        own = [result for result in results if result.claim == claim.id]
        worst = max(own, key=lambda result: result.error)
        verdict = "HOLDS ONLY IF" if claim.condition else "HOLDS"
        if any(result.message for result in own):
            verdict = "WRONG"
        numbers = f"{worst.pair[0]:11.4g}{worst.pair[1]:11.4g}{worst.error:9.1g}"
        otherwise = [result.mean_otherwise for result in own if result.otherwise]
        if otherwise or claim.condition:  # a claim with a condition has to record this
            numbers += f"{fmean(otherwise):11.2g}"
        print(f"\n{claim.id:6}{verdict:17}{numbers}")
        statement, source, _ = claim.text
        checked = f"Checked: {', '.join(result.function for result in own)}"
        for line in (statement, *condition_of(claim), source, checked):
            print(wrap(f"      {line}", indent=6))
    for id_, (title, head) in TABLES.items():
        rows = [row for result in results if result.claim == id_ for row in result.rows]
        if rows:
            print(f"\n{wrap(title, indent=0)}:\n")
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


# ---------------- explanations


def condition_of(claim: Claim) -> list[str]:
    """One line, or none."""
    return [f"Holds only if: {claim.condition}."] if claim.condition else []


def proofs() -> dict[str, str]:
    """The sections of PROOFS.md by their titles, without the short claims that they begin with."""
    text = re.sub("^>.*\n", "", PROOFS.read_text("utf-8"), flags=re.MULTILINE)
    _, *sections = text.split("\n## ")
    pairs = (section.partition("\n") for section in sections)
    return {title: text.strip() for title, _, text in pairs}


def prove(claim: Claim) -> str:
    """Statement, source, what is measured, and the proof: the docstring's, or that of PROOFS.md."""
    statement, *others = claim.text
    lines = [claim.id, statement, *condition_of(claim), *others]
    text = "\n".join(wrap(line, indent=4) for line in lines)
    return f"{text}\n\nProof: {claim.proof or proofs()[claim.id]}"


# ---------------- the command line


def select(ids: list[str]) -> list[Claim]:
    """The claims with these ids; c22 means C22, C22b and C22c. An unknown id is an error."""
    chosen = []
    for id_ in ids:
        found = [x for x in CLAIMS if id_.lower() in (x.id.lower(), x.id.lower().rstrip("abc"))]
        if not found:
            accepted = " ".join(claim.id for claim in CLAIMS)
            sys.exit(f"error: there is no claim {id_}; accepted: {accepted}")
        chosen += found
    return list(dict.fromkeys(chosen))


def explain(words: list[str]) -> str:
    """The claims with these ids and their proofs, or the notation."""
    return proofs()["Notation"] if words == ["symbols"] else "\n\n".join(map(prove, select(words)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="ID", help="these claims: C9 C16")
    add("--explain", nargs="+", metavar="ID", help="print proofs; or symbols")
    options = parser.parse_args(argv)
    if options.explain:
        print(explain(options.explain))
        return 0
    claims = select(options.only) if options.only else CLAIMS
    torch.set_num_threads(1)
    draws = random_draws(seed=0)
    results = [examine(claim, name, draws) for claim in claims for name in claim.names]
    show(claims, results)
    bad = [result for result in results if result.message]
    missed = [*unspoken(), *(f"{x.claim}: {x.function}: {x.message}" for x in bad)]
    print("", *(f"! {line}" for line in missed), sep="\n")
    as_expected = len(claims) - len({x.claim for x in bad})
    print(f"{as_expected} of {len(claims)} claims came out as expected.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
