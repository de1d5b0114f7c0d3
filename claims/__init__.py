"""Every claim about token gradient cancellation, one function each, one file per theme:

    formulas.py         M1..M3         each loss is what its paper writes
    cancellation.py     C6..C10, AUDIT when the pushes on a shared token cancel
    drift.py            C13, C14       what happens to a token if they do not
    tax.py              C15, C16       the tax, and the price of not paying it
    choice.py           C18, C29c      what a tax costs, and what an update ascends
    control_variate.py  C22, C22b, C27 a prefix baseline
    neighbours.py       M6, N4         NTHR: negative gradients
                        A2             AR/Lopti: low-probability tokens
                        I3             IBPO: comparing and correcting

PROOFS.md has the longer proofs, the claims that are proved but not measured, and the symbols.
evidence.py says what a claim is and draws the random prefix trees. toy/worlds.py has worlds in
which nothing is sampled. report.py prints the page on a loss of your own.
"""

# In the order of this table, which is also that of verify.py.
from claims import formulas, cancellation, drift, tax, choice, control_variate, neighbours  # noqa: F401, I001
from claims.evidence import CLAIMS as CLAIMS
