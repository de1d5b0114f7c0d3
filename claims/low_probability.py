"""A1 to A5: low-probability tokens (Advantage Reweighting and Lopti).

Improbable tokens have the largest gradients, and so they dominate a step. There are two
remedies. Advantage Reweighting shrinks their advantages. Lopti gives them a step of their own,
before the others.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import torch

from claims.evidence import claim
from claims.readout import Readout, Sampled, sampled
from claims.trees import ascent, coefficients


@claim("A1", "reinforce", extremes=False)
def a1(module, name, draws, evidence):
    """In the logits a token's gradient is between sqrt(V/(V-1)) and sqrt(2) times 1 - pi, V the
    size of the vocabulary.

    Source: AR/Lopti Prop. 4.2, softmax part (P)

    The gradient of log pi_o in the logits is e_o - pi, with ||e_o - pi||^2 = (1 - pi_o)^2 + sum_{v
    != o} pi_v^2. The other probabilities sum to 1 - pi_o. Their squares sum to at least (1 -
    pi_o)^2 / (V - 1), when all are equal, and at most (1 - pi_o)^2, when one token has it all. Both
    ends are reached, and both are checked.
    """
    for draw in draws:
        V = draw.vocabulary
        sharp, flat = torch.zeros(2, V, dtype=torch.float64)
        sharp[1] = draw.randn(1)
        sharp[2:] = -800.0
        flat[0] = draw.randn(1)
        for case, z in (("", draw.randn(V)), ("flat", flat), ("sharp", sharp)):
            z.requires_grad_()
            logp = z.log_softmax(-1)[:1].expand(2, 1)  # two answers that are the same token
            adv = torch.tensor([[1.5], [0.0]], dtype=torch.float64)
            batch = module.Batch(logp, logp.detach(), adv, logp < 1, 2, draw.max_tokens)
            norm = float(ascent(module.reinforce(batch), z).norm()) * 2 * draw.max_tokens / 1.5
            rest = 1 - math.exp(logp[0].item())
            low = math.sqrt(V / (V - 1)) * rest
            high = math.sqrt(2) * rest
            evidence.equal(min(max(norm, low), high), norm)
            if case:
                evidence.equal({"flat": low, "sharp": high}[case], norm)


@claim("A2", "advantage_reweighting", extremes=False)
def a2(module, name, draws, evidence):
    """Advantage Reweighting: A_{i,t} = [alpha pi_old + 1 - alpha] A_i, whatever the sign of A_i.

    Source: AR/Lopti Eq. 4 (P)

    Compare a token at pi = 0.1 with one at 0.9, everything else being equal. By A1 their gradients
    have the ratio 0.9 / 0.1 = 9. The factor alpha pi + 1 - alpha turns it into 8.3, 7.5 and 6.8 for
    alpha = 0.1, 0.2 and 0.3 (D). The probability is the old policy's. The factor is computed once
    per rollout batch and carries no gradient. alpha is 0.3 by default; the paper takes 0.1 for
    maths. All visitors of a node have one factor, so what cancelled at a shared token still does.
    """
    for draw, alpha in itertools.product(draws, (None, 0.0, 0.1, 1.0)):
        readout = Readout(draw)
        hyper = {} if alpha is None else {"alpha": alpha}
        a = 0.3 if alpha is None else alpha
        adv = draw.fill(draw.rows(draw.adv) * (1 + 0.5 * draw.noise), 0.0)
        predicted = []
        for i, t in readout.h:
            pi_old = math.exp(float(readout.logp[i, t]))
            predicted.append((a * pi_old + 1 - a) * float(adv[i, t]))
        measured = module.advantage_reweighting(adv, readout.old(module), **hyper)
        evidence.equal(predicted, measured[tuple(zip(*readout.h, strict=True))])
        logp = readout.logp.clone().requires_grad_()
        old = module.OldPolicy(draw.tokens, draw.mask, logp, torch.tensor(readout.R), draw.G)
        measured = module.advantage_reweighting(adv, old, **hyper)
        evidence.equal(False, measured.requires_grad)
    pair = torch.tensor([[0.1, 0.9]] * 2, dtype=torch.float64)
    tokens = torch.ones(2, 2).long()
    old = module.OldPolicy(tokens, pair > 0, pair.log(), torch.tensor([1.0, 0.0]), 2)
    for alpha, ratio in ((0.0, 9.0), (0.1, 8.3), (0.2, 7.5), (0.3, 6.8)):
        factors = module.advantage_reweighting(torch.ones_like(pair), old, alpha)[0]
        norms = factors * (1 - pair[0])
        evidence.equal(ratio, round(float(norms[0] / norms[1]), 1))


@claim("A3", "advantage_reweighting", extremes=False)
def a3(module, name, draws, evidence):
    """Low-probability tokens carry more of the gradient than their number says; Advantage
    Reweighting takes some of it.

    Source: AR/Lopti (P)

    By C1 the gradient of one token in W is c (e_o - pi) h^T. Its norm is |c| ||e_o - pi|| ||h||,
    and by A1 the middle factor grows as pi falls. The formula is compared with autograd's norm,
    token by token. The table shows the share of the summed norms by the probability of the token,
    on 200 sampled groups, before and after A2.
    """
    by_decile = torch.zeros(3, 10, dtype=torch.float64)  # tokens, gradient before, gradient after
    for number, group in enumerate(sampled(draws[0].seed)):
        adv = group.adv(module)
        mask = group.mask
        decile = (10 * group.probs[mask]).long().clamp(max=9)
        by_decile[0] += decile.bincount(minlength=10)
        reweighted = module.advantage_reweighting(adv, group.old(module))
        for row, a in ((1, adv), (2, reweighted)):
            sizes = a.abs() * group.norms * group.G / mask.sum()  # (G, T)
            by_decile[row] += decile.bincount(sizes[mask], minlength=10)
            if number < 5:
                batch = group.batch(module, a)
                c = coefficients(module.token_grpo(batch), batch)
                for i, t in mask.nonzero().tolist():
                    gradient = c[i, t] * ascent(-group.logp[i, t], group.policy.W)
                    evidence.equal(sizes[i, t], gradient.norm())
    shares = by_decile / by_decile.sum(1, keepdim=True)
    names = ("tokens", "gradient, grpo", "gradient, A2")
    evidence.rows += [[row, *x] for row, x in zip(names, shares.tolist(), strict=True)]
    tokens, before, after = shares[:, :3].sum(1).tolist()  # pi < 0.3
    evidence.equal(True, before > tokens and after < before)


@claim("A4", "lopti_low", "lopti_high")
def a4(module, name, draws, evidence):
    """Lopti's two passes part the tokens at pi_old = eta; at equal parameters their gradients add
    up to the joint one.

    Source: AR/Lopti (P)

    Pass 1 keeps the tokens with pi_old < eta, pass 2 the others; eta is 0.5 by default. The two
    parts are disjoint and cover everything. Each is divided by the number of all tokens, so at
    equal parameters the two gradients add up to the joint one.

    In training, pass 2 starts from the parameters that pass 1 has left. The old log-probs are not
    computed again, so pi_old alone decides, also where pi_theta has moved across eta since. That
    makes the clip live in pass 2 even on-policy (A5). A token exactly at eta belongs to pass 2.

    The authors' code does the same (zhyang2226/AR-Lopti, P). There, as here, each pass goes
    over all minibatches of a rollout batch before the next begins. The code takes eta = 0.4, or 0.5
    together with Advantage Reweighting; alpha = 0.2, or 0.3 together with Lopti; the clip range
    0.2/0.24; and a KL term of weight 0.001. A negative eta reverses the order of the passes there.
    """
    for draw, spread, eta in itertools.product(draws, (0.0, 0.9), (0.5, 0.3)):
        batch = draw.batch(module, spread)
        joint = coefficients(module.token_grpo(batch), batch)
        low = coefficients(module.lopti_low(batch, eta=eta), batch)
        high = coefficients(module.lopti_high(batch, eta=eta), batch)
        p_old = draw.logp.detach().exp() * (-draw.log_ratio(spread)).exp()
        evidence.equal(torch.where(draw.mask & (p_old < eta), joint, 0), low)
        evidence.equal(torch.where(draw.mask & (p_old >= eta), joint, 0), high)
        evidence.equal(joint, low + high)
    half = torch.full((2, 1), 0.5, dtype=torch.float64).log()
    adv = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    batch = module.Batch(half.clone().requires_grad_(), half, adv, half < 0, 2, 1)
    evidence.equal([[0], [0]], coefficients(module.lopti_low(batch), batch))
    evidence.equal([[1], [-2]], coefficients(module.lopti_high(batch), batch))


def second_pass_coefficients(group: Sampled, adv, logp, eta: float) -> list[float]:
    """What the second pass gives to each token of a group, by the formula."""
    n = sum(map(len, group.answers))
    predicted = []
    for i, t in group.mask.nonzero().tolist():
        r = math.exp((logp[i, t] - group.logp[i, t]).item())
        a = float(adv[i, t])
        is_clipped = r > 1.24 and a > 0 or r < 0.8 and a < 0
        is_active = float(group.probs[i, t]) >= eta and not is_clipped
        predicted.append(r * a * group.G / n if is_active else 0.0)
    return predicted


@claim("A5", "lopti_high", only_if="the step is small", extremes=False)
def a5(module, name, draws, evidence):
    """By plain ascent Lopti's two steps end where one joint step does, to first order; the second
    sees what moved.

    Source: AR/Lopti (P); limit and control (D)

    When the second pass begins, r is no longer 1: the first step has changed shared parameters. So
    the second gradient is r times the on-policy one, and it may be clipped. Its coefficients are
    compared with r A G / (number of tokens) at its own ratio.

    To first order in the step size the second gradient is the one at the start, and by A4 the two
    add up to the joint one. So the end points differ by a share of the way that is proportional to
    the size. Halving it halves the share ("left": the share at size 4). AdamW, which train.py uses,
    is different: it makes each step about equally long, whatever the gradient. So two steps go
    further than one at any learning rate. A fair comparison needs a control that makes two steps as
    well, for instance grpo with two passes.
    """
    eta = 0.5
    shares = defaultdict(float)
    for group, size in itertools.product(sampled(draws[0].seed)[:20], (4.0, 0.02, 0.01)):
        start = group.policy
        adv = group.adv(module)
        first, second = module.METHODS["lopti"].passes
        joint = start.step(ascent(module.token_grpo(group.batch(module, adv)), start.W), size)
        middle = start.step(ascent(first(group.batch(module, adv)), start.W), size)
        middle.W.requires_grad_()
        logp, _ = middle.log_probs([group.prompt] * group.G, group.answers)
        logp_old = group.logp.detach()
        batch = module.Batch(logp, logp_old, adv, group.mask, group.G, group.max_tokens)
        c = coefficients(second(batch), batch)
        evidence.equal(second_pass_coefficients(group, adv, logp, eta), c[group.mask])
        end = middle.step(ascent(second(batch), middle.W), size)
        way = (joint.W - start.W).norm()
        shares[size] += ((end.W - joint.W).norm() / way).item() / 20
    evidence.record_left(shares[4.0])
    evidence.equal(2, round(shares[0.02] / shares[0.01], 1))
