"""Every claim about token gradient cancellation, one function each, one file per theme:

    formulas.py         M1..M3     each loss is what its paper writes
    cancellation.py     C2..C11    when the pushes on a shared token cancel
    drift.py            C13, C14   what happens to a token if they do not
    tax.py              C15, C16   the tax, and the price of not paying it
    choice.py           C18, C19   what a tax and PPO's clip cost
    control_variate.py  C22, C27   a prefix baseline
    objective.py        C29, C30   what an update ascends, and a format bonus
    audit.py            AUDIT      all methods, four regimes
    neighbours.py       M6, N4     NTHR: negative gradients
                        A2, A4     AR/Lopti: low-probability tokens
                        I1, I3     IBPO: comparing and correcting
    questions.py        Q1, Q4     what people ask about the numbers of a run

A check's docstring has the proof of its claim, or PROOFS.md has it, which also explains the
symbols. evidence.py says what a claim is, draws the random prefix trees and examines the claim on
them. toy/worlds.py has worlds in which nothing is sampled. report.py prints the page on a loss of
your own.
"""

from claims import (
    audit,
    cancellation,
    choice,
    control_variate,
    drift,
    formulas,
    neighbours,
    objective,
    questions,
    tax,
)
from claims.evidence import Claim, Evidence, examine, random_draws

__all__ = ["CLAIMS", "Claim", "Evidence", "examine", "random_draws"]

THEMES = (
    formulas,
    cancellation,
    drift,
    tax,
    choice,
    control_variate,
    objective,
    audit,
    neighbours,
    questions,
)
CLAIMS = [x for theme in THEMES for x in vars(theme).values() if isinstance(x, Claim)]
