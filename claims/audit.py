"""AUDIT: which methods cancel at a token that the whole group shares, and when."""

from __future__ import annotations

import itertools

import losses
from claims.evidence import NOTICEABLE, claim, coefficients
from claims.formulas import every_loss, fitting

REGIMES = (
    "on-policy, equal T_i",
    "on-policy, unequal T_i",
    "off-policy, inside the clip",
    "off-policy, outside it",
)
SETTINGS = ((0, 0, True), (0, 0, False), (0.15, 0, True), (0.3, 0.35, True))
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
    "recentred": "0000",
    "balanced": "0x0x",
    "off_policy_mask": "0xxx",
    "pos_only": "xxxx",
    "nthr_grpo": "000x",
    "token_grpo": "000x",
    "lopti_low": "000x",
    "lopti_high": "000x",
}


@claim("AUDIT", every_loss)
def audit(name, draws, evidence):
    """What each method leaves at a token that the whole group shares, in four regimes.

    Source: C2 to C11 together (D)

    The table shows the mean over all draws of |sum_i c_i| / sum_i |c_i| at fully shared nodes: 0
    means that the answers cancel, 1 that all push the same way. The four regimes are: on-policy
    with equal lengths, on-policy with unequal lengths, off-policy with ratios inside the clip
    range, and off-policy outside it. Off-policy the answers of a group are equally long, so that C8
    does not mix in.

      method                       what is left
      reinforce, grpo-symmetric    nothing (C2, C7)
      cispo                        nothing (C2, C7); its weights keep a bound
      dfpo-min, dfpo-orthogonal    nothing (C9, C10)
      recentred                    nothing (C21)
      dr-grpo, dapo                something outside the clip range (C6)
      nthr-grpo, token-grpo        the same; NTHR's rules leave more, on purpose
      lopti-low, lopti-high        the same; their tokens are clipped as token-grpo's are
      grpo                         something outside the clip range, and with unequal lengths (C8)
      balanced                     the same: a length tax between winners and losers
      off-policy-mask              the same, and wherever it masks losers (C26)
      gspo                         something with unequal lengths (C8), and off-policy always (C4)
      pos-only                     something always: nothing stands against the winners

    GSPO gets the clip range 0.2/0.28, because its own is made for long answers; so does every other
    loss whose clip range is below 0.1. lopti_high gets eta = 0, so that it takes every token, and
    off_policy_mask delta = 0.02, because few answers here are as far away as 0.1. A method of your
    own has no prediction in this table; M1 compares its coefficients.

    All of this is about one optimiser step that holds the whole group. If a group is torn over two
    steps, nothing cancels in either of them: the advantages of a part do not sum to 0.
    """
    loss = getattr(losses, name)
    cells = []
    for regime, what in itertools.zip_longest(SETTINGS, AUDIT.get(name, "")):
        spread, offset, equal_lengths = regime
        left = []
        for draw in draws:
            if draw.equal_lengths == equal_lengths:
                batch = draw.batch(spread, offset)
                left += draw.left_shared(coefficients(loss(batch, **fitting(loss)), batch))
        cells.append(sum(left) / max(1, len(left)))
        if what == "0":
            evidence.equal([0] * len(left), left)
        elif what == "x" and not draws[0].kind:
            evidence.equal(True, cells[-1] > NOTICEABLE)
            evidence.record_left(cells[-1])
    evidence.rows.append([name, *cells])
