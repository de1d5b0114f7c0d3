"""I1 and I3: comparing and correcting (IBPO). Second-hand throughout (S).

For each wrong answer y_i the same policy is asked to correct it. A correction that succeeds says
two things: that y_i was a near miss, and which of its tokens were to blame. The near miss earns a
bonus phi_i = rho 1[R_i = 0 and the correction is right]. The shaped reward is R'_i = R_i + l phi_i,
with rho = 0.5 (`bonus`) and l = 0.6 (`weight`). How rho and l combine is not known for certain;
here they multiply. A'_i is the group advantage of the shaped rewards. The correction is aligned
with y_i (Levenshtein): tokens that it left as they were are called kept, the others changed.
"""

from __future__ import annotations

import itertools

import torch

import losses
from claims.evidence import claim, pushes_of
from claims.formulas import formula


@claim(
    "I1",
    "shaped_rewards",
    only_if="E[R] > (weight bonus / 2)(1 - P(near miss))",
)
def i1(name, draws, evidence):
    """A reward for near misses lowers the variance iff Cov(R, phi) < -(weight/2) Var(phi): not on
    hard prompts with rare repairs.

    Source: IBPO (S); condition for binary rewards (D)

    Measured: the change of the variance for 18 pairs of p and q and two of weight and bonus; some
    answers are half right. "left": how far it rises where it does, relative to Var(R).
    """
    R = torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    repaired = torch.tensor([True, True, False, True])  # only a wrong answer gets the bonus
    chances, rates = (0.05, 0.1, 0.15, 0.3, 0.5, 0.9), (0.05, 0.2, 0.8)
    for p, q, (bonus, weight) in itertools.product(chances, rates, ((0.5, 0.6), (0.2, 0.7))):
        shaped = losses.shaped_rewards(R, repaired, bonus, weight)
        wrong = 0.95 * (1 - p)
        near_miss = wrong * q
        odds = torch.tensor([p, near_miss, wrong - near_miss, 0.05 * (1 - p)], dtype=torch.float64)
        old, new = (odds @ x**2 - (odds @ x) ** 2 for x in (R, shaped))
        gap = weight * bonus / 2 * (1 - near_miss) - odds @ R  # above 0 it rises
        evidence.equal(2 * weight * bonus * near_miss * gap, new - old)
        if gap > 0:
            evidence.record_left((new - old) / old)


@claim("I3", "ibpo")
def i3(name, draws, evidence):
    """A repaired answer is blamed on its changed tokens only and praised on its kept ones only; all
    else is grpo.

    Source: IBPO (S); by sign (D)

    Measured: each push of grpo under the rule, for all three readings, off-policy, where
    none, some and all answers are repaired, against M1's twin with the mask written out.
    """
    for k, draw in enumerate(draws):
        kept_mask = draw.mask & (draw.noise > 0)
        repaired = torch.rand(draw.N, generator=draw.generator) < (k % 4) / 3  # none .. all
        R = torch.zeros(draw.N, dtype=torch.float64)
        facts = (draw.tokens, draw.mask, draw.logp.detach(), R, draw.G)
        old = losses.OldPolicy(*facts, kept_mask=kept_mask, repaired=repaired)
        _, grpo = formula("grpo", draw.batch(0.6))
        adv = draw.rows(draw.adv)
        masks = {
            "sign": torch.where(adv > 0, kept_mask, ~kept_mask),
            "changed": ~kept_mask,
            "none": draw.mask,
        }
        for reading, m in masks.items():
            batch = draw.batch(0.6, adv=losses.ibpo(adv, old, reading))
            predicted = torch.where(m | ~draw.rows(repaired), grpo, 0)
            evidence.equal(predicted, pushes_of(losses.grpo(batch), batch))
