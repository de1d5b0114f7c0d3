"""AUDIT: which methods cancel at a fully shared token, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from claims.evidence import NOTICEABLE, Draw, claim, pushes_of
from claims.formulas import FORMULAS, fitting

REGIMES = {  # spread and offset of the ratios, and whether lengths are equal
    "on-policy, equal T_i": (0, 0, True),
    "on-policy, unequal T_i": (0, 0, False),
    "off-policy, ratios within 16%": (0.15, 0, True),
    "off-policy, ratios beyond 30%": (0.3, 0.35, True),
}
AUDIT = {  # regime by regime: 0 if pushes cancel, x if they do not
    "reinforce": "0000",
    "grpo": "0x0x",
    "grpo_symmetric": "0000",
    "dr_grpo": "000x",
    "dapo": "000x",
    "gspo": "0xxx",
    "cispo": "0000",
    "dfpo_min": "0000",
    "dfpo_orthogonal": "0000",
    "sapo": "0xxx",
    "pos_only": "xxxx",
    "nthr_grpo": "000x",
    "token_grpo": "000x",
    "lopti_low": "000x",
    "lopti_high": "000x",
}


def net_pushes(loss: Callable, draws: list[Draw], spread, offset, equal_lengths) -> list[float]:
    """|sum_i c_i| / sum_i |c_i| at the fully shared nodes that are pushed at all."""
    net = []
    for draw in draws:
        if draw.equal_lengths == equal_lengths:
            batch = draw.batch(spread, offset)
            c = draw.at_shared(pushes_of(loss(batch), batch))  # (K, G)
            size = c.abs().sum(1)
            net += (c.sum(1).abs() / size)[size != 0].tolist()  # a nan is not left out
    return net


@claim("AUDIT", *FORMULAS)
def audit(name, draws, evidence):
    """The table says in which of four regimes the pushes of each method cancel at a fully shared
    token.

    Source: C2 to C11 together (D)

    Measured: the mean of |sum_i c_i| / sum_i |c_i| at fully shared nodes. 0 means that the answers
    cancel, 1 that all push one way. Off-policy they are equally long, so that C8 plays no part.
    "otherwise": the mean where pushes do not cancel.

    Proof: reinforce, grpo-symmetric and cispo (C2, C7), dfpo-min and
    dfpo-orthogonal (C9, C10) always cancel. The others do not cancel outside the clip range,
    because their clips look at the sign of A (C6); NTHR's credit rules add to that on purpose. With
    unequal lengths grpo, gspo and sapo do not cancel (C8). Off-policy gspo never cancels (C4), nor
    does sapo, whose soft clip looks at the sign of A at every ratio but 1. pos-only never cancels,
    because nothing opposes the winners.

    Conditions: clip ranges made for long answers are widened (gspo's to 0.2 and 0.28), and
    lopti_high takes every token (eta = 0). A group must be in one update, because the advantages of
    a part of it do not sum to 0.
    """
    loss, cells = fitting(name), []
    regimes = itertools.zip_longest(REGIMES.values(), AUDIT.get(name, ""))
    for (spread, offset, equal_lengths), expected in regimes:
        net = net_pushes(loss, draws, spread, offset, equal_lengths)
        cells.append(sum(net) / max(1, len(net)))
        if expected == "0":
            evidence.equal([0] * len(net), net)
        elif expected == "x" and not draws[0].kind:
            evidence.equal(True, cells[-1] > NOTICEABLE, what="whether there is a net push")
            evidence.record_otherwise(cells[-1])
    evidence.rows.append([name, *cells])
