"""I1 to I3: comparing and correcting (IBPO). Second-hand throughout (S).

For each wrong answer y_i the same policy is asked to correct it. A correction that succeeds says
two things: that y_i was a near miss, and which of its tokens were to blame. The near miss earns a
bonus phi_i = rho 1[R_i = 0 and the correction is right]. The shaped reward is R'_i = R_i + l phi_i,
with rho = 0.5 (`bonus`) and l = 0.6 (`weight`). How rho and l combine is not known for certain;
here they multiply. A'_i is the group advantage of the shaped rewards. The correction is aligned
with y_i (M8): tokens that it left as they were are called kept, the others changed.
"""

from __future__ import annotations

import itertools

import torch

from claims.trees import coefficients


def variance(x, odds) -> float:
    return float((odds * x * x).sum() - (odds * x).sum() ** 2)


def i1(module, name, draws, evidence):
    """A reward for near misses lowers the variance iff Cov(R, phi) < -(weight/2) Var(phi): not on
    hard prompts.

    Source: IBPO (S); condition for binary rewards (D)

    For every weight l, Var(R + l phi) - Var(R) = 2 l Cov(R, phi) + l^2 Var(phi). That is negative
    if and only if Cov(R, phi) < -(l/2) Var(phi).

    Let P(R = 1) = p, and let a correction succeed with probability q. Then phi = rho with
    probability (1-p) q, and only where R = 0. So Cov(R, phi) = -p (1-p) q rho, and Var(phi) = rho^2
    (1-p) q (1 - (1-p) q). The variance falls if and only if p > (l rho / 2)(1 - (1-p) q).

    With l = 0.6, rho = 0.5 and q = 0.2 it rises at p = 0.05 and 0.10 and falls from 0.15 on
    ("left": how much it rises there, relative to Var(R)). The formula is compared with the variance
    of three outcomes, and with 200 000 sampled ones.
    """
    bonus = 0.5
    weight = 0.6
    R = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    repaired = torch.tensor([False, True, False])
    shaped = module.shaped_rewards(R, repaired)
    for p, q in itertools.product((0.05, 0.1, 0.15, 0.3, 0.5, 0.9), (0.05, 0.2, 0.8)):
        near_miss = (1 - p) * q
        odds = torch.tensor([p, near_miss, (1 - p) * (1 - q)], dtype=torch.float64)
        cov = -p * (1 - p) * q * bonus
        var = bonus**2 * (1 - p) * q * (1 - near_miss)
        change = variance(shaped, odds) - variance(R, odds)
        evidence.equal(2 * weight * cov + weight**2 * var, change)
        evidence.equal(p > weight * bonus / 2 * (1 - near_miss), change < 0)
        sample = torch.multinomial(odds, 200_000, replacement=True, generator=draws[0].generator)
        shaped_sample = module.shaped_rewards(R[sample], repaired[sample])
        evidence.equal(variance(shaped, odds), shaped_sample.var().item(), tolerance=5e-3)
        evidence.equal(variance(R, odds), R[sample].var().item(), tolerance=5e-3)
        if change > 0:
            evidence.record_left(change / variance(R, odds))
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    repaired = torch.tensor([True, True, True, False])
    evidence.equal([0.2 * 0.7, 1, 0.5, 0], module.shaped_rewards(rewards, repaired, 0.2, 0.7))


def i2(module, name, draws, evidence):
    """An all-wrong group learns something as soon as one correction succeeds; an all-correct group
    still nothing.

    Source: IBPO (S)

    In an all-wrong group R' is l rho for the repaired answers and 0 for the others. So the shaped
    rewards differ, and A' is not 0. Where all answers are right there is nothing to repair, and all
    advantages are 0. "Something" is the coefficient of grpo, masked: A'_i / T_i on all tokens but
    the kept ones.
    """
    for draw, right in itertools.product(draws, (False, True)):
        R = torch.full((draw.N,), float(right), dtype=torch.float64)
        repaired = torch.zeros(draw.N, dtype=torch.bool)
        repaired[:: draw.G] = not right
        A = module.group_advantages(module.shaped_rewards(R, repaired), draw.G, "mean")
        kept_mask = draw.mask & repaired[:, None] & (draw.noise > 0)
        logp = draw.logp.detach()
        old = module.OldPolicy(draw.tokens, draw.mask, logp, R, draw.G, kept_mask=kept_mask)
        batch = draw.batch(module, adv=module.ibpo(draw.rows(A), old))
        c = coefficients(module.grpo(batch), batch)
        predicted = []
        for i in range(draw.N):
            shaped_adv = 0.0 if right else 0.3 * (i % draw.G == 0) - 0.3 / draw.G
            predicted.append([shaped_adv / draw.T[i]])
        predicted = torch.tensor(predicted, dtype=torch.float64)
        evidence.equal(torch.where(draw.mask & ~kept_mask, predicted, 0), c)


def i3(module, name, draws, evidence):
    """Tokens that a successful correction kept get coefficient 0; without any correction the method
    is grpo.

    Source: IBPO (S)

    The mask is 0 on kept tokens and 1 elsewhere, and it multiplies the advantage. What it leaves
    out has no gradient, whatever the ratio and the clip. With nothing kept and nothing repaired,
    advantages and rewards are as they were.
    """
    method = module.METHODS["ibpo"]
    for draw in draws:
        zero = torch.zeros(draw.N, dtype=torch.float64)
        A = torch.tensor(draw.adv, dtype=torch.float64)
        some = draw.mask & (draw.noise > 0.3)
        for kept_mask in (some, torch.zeros_like(some)):
            logp = draw.logp.detach()
            old = module.OldPolicy(draw.tokens, draw.mask, logp, zero, draw.G, kept_mask=kept_mask)
            plain = draw.batch(module, 0.6)
            batch = draw.batch(module, 0.6, adv=method.credit(draw.rows(draw.adv), old))
            grpo = coefficients(module.grpo(plain), plain)
            predicted = torch.where(kept_mask, 0, grpo)
            evidence.equal(predicted, coefficients(method.passes[0](batch), batch))
        no_corrections = module.OldPolicy(draw.tokens, draw.mask, draw.logp, zero, draw.G)
        evidence.raises(method.credit, draw.rows(draw.adv), no_corrections)
        evidence.equal(True, len(method.passes) == 1 and method.repair and method.scale == "std")
        nothing_repaired = torch.zeros(draw.N, dtype=torch.bool)
        evidence.equal(A, module.shaped_rewards(A, nothing_repaired))
