"""A2 and A4: low-probability tokens (Advantage Reweighting and Lopti).

Improbable tokens have the largest gradients, and so they dominate a step. There are two
remedies. Advantage Reweighting shrinks their advantages. Lopti gives them a step of their own,
before the others.
"""

from __future__ import annotations

import itertools
import math

import torch

import losses
from claims.evidence import claim, coefficients


@claim("A2", "advantage_reweighting", extremes=False)
def a2(name, draws, evidence):
    """Advantage Reweighting: A_{i,t} = [alpha pi_old + 1 - alpha] A_i, whatever the sign of A_i.

    Source: AR/Lopti Prop. 4.2, Eq. 4 (P)

    The gradient of log pi_o in the logits is e_o - pi. Its squared length is (1 - pi_o)^2 plus the
    sum of the other probabilities' squares, which is between (1 - pi_o)^2 / (V - 1), when all V - 1
    are equal, and (1 - pi_o)^2, when one token has it all. So its length is between sqrt(V/(V-1))
    and sqrt(2) times 1 - pi_o (Prop. 4.2): improbable tokens have the largest gradients.

    Compare a token at pi = 0.1 with one at 0.9, everything else being equal. Their gradients have
    the ratio 0.9 / 0.1 = 9. The factor alpha pi + 1 - alpha turns it into 8.3, 7.5 and 6.8 for
    alpha = 0.1, 0.2 and 0.3 (D). The probability is the old policy's. The factor is computed once
    per rollout batch and carries no gradient. alpha is 0.3 by default; the paper takes 0.1 for
    maths. All visitors of a node have one factor, so what cancelled at a shared token still does.
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

    Pass 1 keeps the tokens with pi_old < eta, pass 2 the others; eta is 0.5 by default. The two
    parts are disjoint and cover everything. Each is divided by the number of all tokens, so at
    equal parameters the two gradients add up to the joint one.

    In training, pass 2 starts from the parameters that pass 1 has left. The old log-probs are not
    computed again, so pi_old alone decides, also where pi_theta has moved across eta since. That
    makes the clip live in pass 2 even on-policy. A token exactly at eta belongs to pass 2.

    So a comparison needs a control that makes two steps as well, for instance grpo with two passes.
    By plain ascent the two steps end where one joint step does, to first order in the step size.
    AdamW, which train.py uses, makes each step about equally long, whatever the gradient, so there
    two steps go further than one.

    The authors' code does the same (zhyang2226/AR-Lopti, P). There, as here, each pass goes
    over all minibatches of a rollout batch before the next begins. The code takes eta = 0.4, or 0.5
    together with Advantage Reweighting; alpha = 0.2, or 0.3 together with Lopti; the clip range
    0.2/0.24; and a KL term of weight 0.001. A negative eta reverses the order of the passes there.
    """
    for draw, spread, eta in itertools.product(draws, (0.0, 0.9), (0.5, 0.3)):
        batch = draw.batch(spread)
        batch.logp_old[0, 0] = math.log(eta)  # exactly at eta
        joint = coefficients(losses.token_grpo(batch), batch)
        improbable = batch.logp_old.exp() < eta
        kept = improbable if name == "lopti_low" else ~improbable
        part = coefficients(getattr(losses, name)(batch, eta=eta), batch)
        evidence.equal(torch.where(draw.mask & kept, joint, 0), part)
