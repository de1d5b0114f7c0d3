"""Every claim about token gradient cancellation, one function each, one file per theme:

    formulas.py         M1..M3     each loss is what its paper writes
    cancellation.py     C2..C11    when a shared token cancels
    drift.py            C13, C14   what happens to a token that does not
    tax.py              C15, C16   learning tax, price
    choice.py           C18, C19   what a tax and the min cost
    control_variate.py  C22..C28   a baseline at every prefix
    objective.py        C29, C30   what an update ascends, and the crumb
    audit.py            AUDIT      all methods, four regimes
    neighbours.py       M6, N4     NTHR: negative gradients
                        A2, A4     AR/Lopti: low-probability tokens
                        I1, I3     IBPO: comparing and correcting
    questions.py        Q1, Q4     what people ask about the numbers of a run

PROOFS.md has their proofs, and what the letters mean. evidence.py says what a claim is, draws the
random prefix trees and examines the claim on them. toy/worlds.py has worlds without chance.
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
