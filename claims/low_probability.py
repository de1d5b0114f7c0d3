"""A2 and A4: low-probability tokens (Advantage Reweighting and Lopti).

Improbable tokens have the largest gradients, and so they dominate a step. There are two
remedies. Advantage Reweighting shrinks their advantages. Lopti gives them a step of their own,
before the others.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

import losses
from claims.evidence import claim, pushes_of
from claims.formulas import formula


@claim("A2", "advantage_reweighting")
def a2(name, draws, evidence):
    """Advantage Reweighting: A_{i,t} = [alpha pi_old + 1 - alpha] A_i, whatever the sign of A_i.

    Source: AR/Lopti Prop. 4.2, Eq. 4 (P)

    Measured: each advantage, at alpha = 0, 0.3 and 1, and that it is detached.
    """
    for draw, hyper in itertools.product(draws, ({}, {"alpha": 0.0}, {"alpha": 1.0})):
        alpha = hyper.get("alpha", 0.3)
        adv = draw.rows(draw.adv) * (1 + 0.5 * draw.noise)
        rewards = torch.zeros(draw.N)
        old = losses.OldPolicy(draw.tokens, draw.mask, draw.logp, rewards, draw.G)
        measured = losses.advantage_reweighting(adv, old, **hyper)
        evidence.equal(False, measured.requires_grad)
        factor = 1 - alpha + alpha * draw.logp.exp()
        evidence.equal((factor * adv)[draw.mask], measured[draw.mask])


@claim("A4", "lopti_low", "lopti_high")
def a4(name, draws, evidence):
    """Lopti's two passes part the tokens at pi_old = eta; at equal parameters their gradients add
    up to the joint one.

    Source: AR/Lopti (P)

    Measured: the pushes of each pass against M1's twin of the joint loss on its part of the
    tokens, on-policy and off-policy, at two eta; one token lies exactly at eta.
    """
    for draw, spread, eta in itertools.product(draws, (0.0, 0.9), (0.5, 0.3)):
        batch = draw.batch(spread)
        at_eta = batch.logp_old.clone()
        at_eta[0, 0] = math.log(eta)
        batch = replace(batch, logp_old=at_eta)
        _, joint = formula("token_grpo", batch)
        improbable = at_eta.exp() < eta
        kept = improbable if name == "lopti_low" else ~improbable
        part = pushes_of(getattr(losses, name)(batch, eta=eta), batch)
        evidence.equal(torch.where(draw.mask & kept, joint, 0), part)
