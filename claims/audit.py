"""AUDIT: which methods cancel at a token that the whole group shares, and when."""

from __future__ import annotations

import itertools

import losses
from claims.evidence import NOTICEABLE, claim, pushes_of
from claims.formulas import FORMULAS, fitting

REGIMES = {  # spread and offset of the ratios, and whether lengths are equal
    "on-policy, equal T_i": (0, 0, True),
    "on-policy, unequal T_i": (0, 0, False),
    "off-policy, inside the clip": (0.15, 0, True),
    "off-policy, outside it": (0.3, 0.35, True),
}
AUDIT = {  # what is left, regime by regime: 0 nothing, x something
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
    "dppo": "000x",
    "symmetric_trust": "0000",
    "pos_only": "xxxx",
    "nthr_grpo": "000x",
    "token_grpo": "000x",
    "lopti_low": "000x",
    "lopti_high": "000x",
}


@claim("AUDIT", *FORMULAS)
def audit(name, draws, evidence):
    """What each method leaves at a token that the whole group shares, in four regimes.

    Source: C2 to C11 together (D)

    Measured: the mean of |sum_i c_i| / sum_i |c_i| at fully shared nodes. 0: the answers cancel; 1:
    all push one way. Off-policy they are equally long, so that C8 does not mix in.
    """
    loss = getattr(losses, name)
    cells = []
    regimes = itertools.zip_longest(REGIMES.values(), AUDIT.get(name, ""))
    for (spread, offset, equal_lengths), what in regimes:
        left = []
        for draw in draws:
            if draw.equal_lengths == equal_lengths:
                batch = draw.batch(spread, offset)
                c = draw.at_shared(pushes_of(loss(batch, **fitting(loss)), batch))  # (K, G)
                size = c.abs().sum(1)
                left += (c.sum(1).abs() / size)[size > 0].tolist()
        cells.append(sum(left) / max(1, len(left)))
        if what == "0":
            evidence.equal([0] * len(left), left)
        elif what == "x" and not draws[0].kind:
            evidence.equal(True, cells[-1] > NOTICEABLE, what="whether something is left")
            evidence.record_left(cells[-1])
    evidence.rows.append([name, *cells])
