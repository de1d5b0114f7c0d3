"""Every claim about token gradient cancellation, one function each, and how a claim is examined.

A claim function `check(module, name, draws, evidence)` takes a module that keeps the contract of
losses.py and the name of the function in it that the claim speaks of. It takes random prefix trees
(`Draw`) and adds what it finds to the evidence. It compares two numbers. The *measured* one is
autograd's, through the real functions of that module. The *predicted* one is a formula in plain
Python that shares no code with them.

The docstring of a claim function has paragraphs. The first is the statement, one sentence or two.
The second begins with "Source: " and says where the statement comes from, with its grades. The
others are the derivation; `python verify.py --explain ID` prints it. A paragraph may span lines.

One file per theme:

    formulas.py         M1..M8     each function is what its paper writes
    cancellation.py     C1..C12    when a shared token cancels
    drift.py            C13, C14   what happens to a token that does not
    tax.py              C15..C17   learning tax, price, projection
    cost.py             C18        what a tax costs
    audit.py            AUDIT      all methods, four regimes
    nthr.py             N1..N7     negative gradients
    low_probability.py  A1..A5     Advantage Reweighting and Lopti
    ibpo.py             I1..I3     comparing and correcting

trees.py has the random prefix trees, ordinary and extreme ones; readout.py has answers with hidden
states.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from claims import (
    audit,
    cancellation,
    cost,
    drift,
    formulas,
    ibpo,
    low_probability,
    nthr,
    tax,
)
from claims.formulas import ALL, DFPO, NEIGHBOURS
from claims.trees import EXTREMES, Draw

DRAWS = 24  # ordinary random trees per claim
# Not examined on extreme trees: they have worlds of their own, take small steps, say of a large
# vocabulary what N4 says, or are a race (X10).
ORDINARY = "M4 M6 M7 C5a C5b C13 C14 C16 C18a C18b C18c N1 N3 N5 N6 N7 A1 A2 A3 A5 I1 X10".split()
TOLERANCE = 1e-10  # of |measured - predicted| / max(1, |predicted|), float64
NOTICEABLE = 1e-6  # what a dropped condition must leave, on average over the draws

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
J          what a method maximises; its loss is -J
c_{i,t}    token coefficient, -N dLoss/dlogp_{i,t}: what the loss really does to a token
w_{i,t}    effective weight: c_{i,t} = w_{i,t} A_i; w~ is a weight that DFPO has transformed
v, S_v     a node (h, a) of the group's prefix tree, and the answers that pass through it;
           the node is fully shared if S_v is the whole group
sg         stop-gradient: no derivative is taken through it; such a tensor is called detached
W, phi     the toy's policy: pi(.|h) = softmax(W phi(h)), with fixed features phi and a matrix W
<x, y>     inner product; x.y is the same for vectors over a group; e_a is a unit vector

The gradient that a node gets is (sum over S_v of c_{i,t}) times grad log pi(a|h).

Grades: P stated by the paper; S known only second-hand; D derived here and checked numerically.

Papers: GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, CISPO 2506.13585,
DFPO 2604.13088v1, NTHR 2505.18830, Advantage Reweighting and Lopti ("AR/Lopti") 2505.12929,
IBPO 2605.16302 (all arXiv). The full text of DFPO and IBPO was not available."""


@dataclass(frozen=True)
class Claim:
    id: str
    check: Callable  # (module, name of the function it speaks of, draws, evidence) -> None
    functions: tuple[str, ...]  # of the module
    verdict: str = "HOLDS"
    condition: str = ""  # under which it holds, or why it fails
    group_size: int | None = None  # of the draws; None: 2 to 16

    @property
    def text(self) -> tuple[str, str, str]:
        """Statement, source and derivation, from the docstring of the claim function."""
        statement, source, derivation = inspect.cleandoc(self.check.__doc__).split("\n\n", 2)
        source = source.removeprefix("Source: ")
        return " ".join(statement.split()), " ".join(source.split()), derivation


ONLY_IF = "HOLDS ONLY IF"
FAILS = "FAILS AS STATED"
GATES = ("grpo_symmetric", "cispo", "dr_grpo")
FACTORISED = ("reinforce", "grpo_symmetric", "dr_grpo", "dapo", "cispo")
ORTHOGONAL = ("adv_orthogonal", "dfpo_orthogonal")
METER = ("learning_tax", "prefix_nodes", "dfpo_min")
PROJECTIONS = ("project", "project_unbiased")
LOPTI = ("lopti_low", "lopti_high")
UNBLIND = '"cancels only if all u_i are equal" is wrong for G > 2'
LENGTHS = "all T_i are equal, or the normaliser is a common factor"
OWN_ANSWER = "A is R minus the group's mean, and w depends on its own answer alone"
OWN_WEIGHT = ("grpo", "gspo", "reinforce", "grpo_symmetric", "dr_grpo", *DFPO)
SIBLINGS = "two answers or more visit the node, and as C17h"
CLAIMS = (
    Claim("M1", formulas.m1, (*ALL, *NEIGHBOURS)),
    Claim("M2", formulas.m2, (*ALL, *NEIGHBOURS)),
    Claim("M3", formulas.m3, ("group_advantages",)),
    Claim("M4", formulas.m4, ("METHODS",)),
    Claim("M5", formulas.m5, ("Batch", "OldPolicy")),
    Claim("M6", formulas.m6, ("nthr", "nthr_random")),
    Claim("M7", formulas.m7, ("METHODS",)),
    Claim("M8", formulas.m8, ("kept_tokens",)),
    Claim("C1", cancellation.c1, ("token_coefficients",)),
    Claim("C2", cancellation.c2, FACTORISED),
    Claim("C3", cancellation.c3, ("grpo_symmetric", "dr_grpo"), group_size=2),
    Claim("C4", cancellation.c4, ("sequence_ratio", "gspo")),
    Claim("C5a", cancellation.c5a, ("sequence_ratio",)),
    Claim("C5b", cancellation.c5b, ("sequence_ratio",), FAILS, UNBLIND),
    Claim("C6", cancellation.c6, ("grpo", "dr_grpo", "dapo")),
    Claim("C7", cancellation.c7, GATES, ONLY_IF, "the min is dropped"),
    Claim("C8", cancellation.c8, ("grpo", "gspo", *FACTORISED), ONLY_IF, LENGTHS),
    Claim("C9", cancellation.c9, ("min_replace", "dfpo_min")),
    Claim("C9e", cancellation.c9e, DFPO),
    Claim("C10", cancellation.c10, ORTHOGONAL, ONLY_IF, "the whole group shares the token"),
    Claim("C11", cancellation.c11, DFPO, ONLY_IF, "the policy has not moved"),
    Claim("C12", cancellation.c12, DFPO, ONLY_IF, "the weight is detached"),
    Claim("C13", drift.c13, ("dr_grpo", "grpo_symmetric", "dfpo_min")),
    Claim("C14", drift.c14, ("reinforce",), FAILS, "Eq. 5 needs score gradients of equal norm"),
    Claim("C15", tax.c15, METER, ONLY_IF, "w is constant on the node"),
    Claim(
        "C16",
        tax.c16,
        ("sequence_ratio", *ALL),
        ONLY_IF,
        "on-policy, or the weight is the plain product",
    ),
    Claim("C17a", tax.c17a, ("project",)),
    Claim("C17b", tax.c17b, ("project",)),
    Claim("C17c", tax.c17c, ("project",)),
    Claim("C17d", tax.c17d, PROJECTIONS),
    Claim("C17e", tax.c17e, PROJECTIONS),
    Claim("C17f", tax.c17f, PROJECTIONS),
    Claim("C17g", tax.c17g, ("project", "prefix_nodes")),
    Claim("C17h", tax.c17h, ("project",), ONLY_IF, OWN_ANSWER),
    Claim("C17i", tax.c17i, ("project_unbiased",), ONLY_IF, SIBLINGS),
    Claim("C18a", cost.c18a, OWN_WEIGHT, ONLY_IF, f"on-policy; {OWN_ANSWER}"),
    Claim("C18b", cost.c18b, OWN_WEIGHT),
    Claim("C18c", cost.c18c, OWN_WEIGHT),
    Claim("AUDIT", audit.audit, tuple(audit.AUDIT)),
    Claim("N1", nthr.n1, ("group_advantages",)),
    Claim("N2", nthr.n2, ("group_advantages",), ONLY_IF, "answers are counted, not tokens"),
    Claim("N3", nthr.n3, ("reinforce",)),
    Claim("N4", nthr.n4, ("nthr_scores",)),
    Claim("N5", nthr.n5, ("nthr_scores",)),
    Claim("N6", nthr.n6, ("nthr_scores",)),
    Claim("N7", nthr.n7, ("nthr",)),
    Claim("A1", low_probability.a1, ("reinforce",)),
    Claim("A2", low_probability.a2, ("advantage_reweighting",)),
    Claim("A3", low_probability.a3, ("advantage_reweighting",)),
    Claim("A4", low_probability.a4, LOPTI),
    Claim("A5", low_probability.a5, ("METHODS",), ONLY_IF, "the step is small"),
    Claim("I1", ibpo.i1, ("shaped_rewards",), ONLY_IF, "p > (weight bonus / 2)(1 - (1-p) q)"),
    Claim("I2", ibpo.i2, ("ibpo",)),
    Claim("I3", ibpo.i3, ("ibpo",)),
)


class Evidence:
    """What the draws said about one function."""

    def __init__(self):
        self.error = 0.0  # largest |measured - predicted| / max(1, |predicted|)
        self.excess = -1.0  # the same over its tolerance: at most 1 agrees, -1 compared nothing
        self.pair = (math.nan, math.nan)  # predicted and measured where they are furthest apart
        self.left = []  # sizes of what a dropped condition leaves, or of a statement's error
        self.rows = []  # of the claim's own table: a name, then numbers

    def equal(self, predicted, measured, tolerance: float = TOLERANCE) -> None:
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

    def record_left(self, size) -> None:
        self.left.append(torch.as_tensor(size, dtype=torch.float64).abs().mean().item())

    def raises(self, function: Callable, *args, **named) -> None:
        name = getattr(function, "__name__", "it")
        try:
            function(*args, **named)
        except ValueError:
            return
        except Exception as error:
            if is_blank(error):
                raise
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise AssertionError(f"{name} must refuse with a ValueError, not {said}") from None
        raise AssertionError(f"{name} accepted what it must refuse with a ValueError")

    @property
    def mean_left(self) -> float:
        return sum(self.left) / len(self.left) if self.left else math.nan


class Missing(NotImplementedError):
    """A module under test lacks the function of this name."""


def is_blank(error: BaseException) -> bool:
    """Whether a function is not yet written: torch's own NotImplementedError has a text."""
    plain = isinstance(error, NotImplementedError) and not error.args
    return plain or isinstance(error, Missing)


@dataclass
class Outcome:
    claim: str
    function: str
    state: str = "ok"  # ok, wrong, missing
    message: str = ""
    evidence: Evidence = field(default_factory=Evidence)


class Draws(dict):
    """Random trees by group size (None: any), grown when first asked for: ordinary ones, then one
    of each extreme kind."""

    def __init__(self, seed: int, count: int = DRAWS, kinds: Iterable[str] = EXTREMES):
        self.seed = seed
        self.count = count
        self.kinds = kinds

    def __missing__(self, group_size: int | None) -> list[Draw]:
        ordinary = [Draw(self.seed, k, group_size) for k in range(self.count)]
        self[group_size] = ordinary + [Draw(self.seed, 0, group_size, kind) for kind in self.kinds]
        return self[group_size]


def examine(module, claim: Claim, function: str, draws: list[Draw]) -> Outcome:
    """One claim about one function, on ordinary trees and then, if it holds there, on extreme ones.

    Numbers and tables are those of the ordinary trees, unless the claim fails on the others.
    """
    ordinary = examine_on([draw for draw in draws if not draw.kind], module, claim, function)
    extreme = [draw for draw in draws if draw.kind]
    if ordinary.state != "ok" or not extreme or claim.id in ORDINARY:
        return ordinary
    beyond = examine_on(extreme, module, claim, function)
    if beyond.state == "ok":
        return ordinary
    return replace(beyond, message=f"{beyond.message} (on extreme trees)")


def examine_on(draws: list[Draw], module, claim: Claim, function: str) -> Outcome:
    """Whatever goes wrong in here is that function's fault."""
    evidence = Evidence()
    for draw in draws:
        draw.generator.manual_seed(draw.seed)  # the same numbers, whatever was examined before
    state = "wrong"
    message = ""
    try:
        if not hasattr(module, function):
            raise Missing(function)
        claim.check(module, function, draws, evidence)
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        if is_blank(error):
            state = "missing"
            is_other = error.args and str(error) != function
            message = f"needs {error}, not yet written" if is_other else "not yet written"
    else:
        if evidence.excess > 1:
            message = f"expected {evidence.pair[0]:.6g}, got {evidence.pair[1]:.6g}"
        elif evidence.mean_left < NOTICEABLE and not any(draw.kind for draw in draws):
            message = "what must differ here is the same"
        else:
            state = "ok"
    return Outcome(claim.id, function, state, message, evidence)
