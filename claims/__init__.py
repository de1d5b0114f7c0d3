"""Every claim about token gradient cancellation, one function each, one file per theme:

    formulas.py         M1..M6     each loss is what its paper writes
    cancellation.py     C2..C11    when a shared token cancels
    drift.py            C13, C14   what happens to a token that does not
    tax.py              C15, C16   learning tax, price
    choice.py           C18, C19   what a tax and the min cost
    control_variate.py  C21..C26   cancelling moves no expected update; off-policy samplers, masks
    objective.py        C29, C30   what an update ascends, and the crumb
    audit.py            AUDIT      all methods, four regimes
    nthr.py             N4         negative gradients
    low_probability.py  A2, A4     Advantage Reweighting and Lopti
    ibpo.py             I1, I3     comparing and correcting
    questions.py        Q1, Q4, Q5 what people ask about the numbers of a run

evidence.py says what a claim is, draws the random prefix trees and examines the claim on them.
toy/worlds.py has worlds without chance.
"""

# The order of these imports is the order of the claims.
from claims import formulas  # noqa: F401, I001
from claims import cancellation  # noqa: F401
from claims import drift  # noqa: F401
from claims import tax  # noqa: F401
from claims import choice  # noqa: F401
from claims import control_variate  # noqa: F401
from claims import objective  # noqa: F401
from claims import audit  # noqa: F401
from claims import nthr  # noqa: F401
from claims import low_probability  # noqa: F401
from claims import ibpo  # noqa: F401
from claims import questions  # noqa: F401
from claims.evidence import CLAIMS, Claim, Evidence, examine, random_draws

__all__ = ["CLAIMS", "NOTATION", "Claim", "Evidence", "examine", "random_draws"]

NOTATION = """\
Notation

symbol     meaning
G          answers per prompt, one group; its rows are contiguous
N, T       rows (prompts times G) and columns (the longest answer, EOS included) of a batch
T_i        the length of answer i
L          the generation budget: the most tokens that an answer may have
h, a       a history (prompt and answer so far), and the token taken there
r_{i,t}    pi_theta(a|h) / pi_old(a|h), the ratio of token t of answer i; rho where it is shared
s_i        the sequence ratio: (prod_t r_{i,t})^(1/T_i), or the plain product where that is said
R_i, A_i   reward at the end of answer i, and its advantage; sum_i A_i = 0 in each group
J          what a method maximises: its loss is -J; from C16 on also the expected reward
c_{i,t}    token coefficient, -N dLoss/dlogp_{i,t}: what the loss really does to a token
w_{i,t}    effective weight: c_{i,t} = w_{i,t} A_i; w~ is a weight that DFPO has transformed
v, S_v     a node (h, a) of the group's prefix tree, and the answers that pass through it;
           the node is fully shared if S_v is the whole group
u_i        the product of answer i's ratios without the shared token's: s_i = rho u_i (C4, C5)
k_a, k_b   the weights that a method gives to two answers y_a and y_b of equal reward (C14)
Q_a, q, b  of the answers that go a way: the mean reward, Q_a, or the chance to be right, q; b is
           that chance for all answers (C18, C19). q_u, q_d: of the way whose ratio went up, down
f_a, K     what pushes way a's logit, pi_a (f_a - fbar), and the factor in it (C18, C19)
K(p)       E[A(right) - A(wrong)], if answers are right with chance p (C29)
eta        the length of a step (C13, C14); NTHR's factor (M6); Lopti's threshold (A4)
sg         stop-gradient: no derivative is taken through it; such a tensor is called detached
W, phi     the toy's policy: pi(.|h) = softmax(W phi(h)), with fixed features phi and a matrix W
<x, y>     inner product; x.y is the same for vectors over a group; e_a is a unit vector

The gradient that a node gets is (sum over S_v of c_{i,t}) times grad log pi(a|h).

Grades: P stated by the paper; S known only second-hand; D derived here and checked numerically.

Papers: GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, CISPO 2506.13585,
DFPO 2604.13088v1, NTHR 2505.18830, Advantage Reweighting and Lopti ("AR/Lopti") 2505.12929,
IBPO 2605.16302, Balanced Aggregation 2605.04077, DeepSeek-V3.2 2512.02556 (all arXiv). The full
text of DFPO and IBPO was not available to us."""
