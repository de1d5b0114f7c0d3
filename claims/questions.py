"""Q1 to Q5: what people ask about the numbers of a run.

The answers in words stand in claims/README.md, "Questions people ask".
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

import losses
from claims.choice import factor
from claims.evidence import ascent, claim, coefficients
from claims.formulas import UNCLIPPED, average_of, formula_of, shares_in
from toy.policy import Policy
from toy.worlds import Toy

SURROGATES = ("grpo", "gspo", "dr_grpo", "grpo_symmetric", "dapo", "pos_only")


@claim("Q1", *SURROGATES, only_if="the ratios are exactly 1")
def q1(name, draws, evidence):
    """In the first update of a batch the value of grpo and gspo is 0, whatever was sampled, and no
    clip acts. The gradient is not 0.

    Source: questions of users (D)

    Measured: on-policy, the value, and each coefficient with a narrow and with a wide clip range
    against M1's twin without one. "left": how much the coefficients change with the range once the
    ratios differ.
    """
    narrow, wide = ({"eps_low": eps, "eps_high": eps} for eps in (1e-3, 0.5))
    loss_fn = getattr(losses, name)
    for draw, spread in itertools.product(draws, (0.0, 0.6)):
        batch = draw.batch(spread)
        one, other = (coefficients(loss_fn(batch, **eps), batch) for eps in (narrow, wide))
        if spread:
            evidence.record_left((one - other)[draw.mask] / draw.size)
            continue
        _, unclipped = formula_of(name, batch, **UNCLIPPED)
        for c in (one, other):
            evidence.equal(unclipped, c)
        A = draw.adv.clamp(min=0) if name == "pos_only" else draw.adv
        terms = shares_in(name, draw) * torch.tensor(draw.T) * A
        evidence.equal(-terms.mean(), loss_fn(batch))
        if average_of(name) == "answer":
            evidence.equal(0, loss_fn(batch))


@claim("Q2", "group_advantages", extremes=False)
def q2(name, draws, evidence):
    """A question's expected update is K grad p, p its chance to be right; the std makes K grow
    towards p = 0 and 1, less than 1/sqrt(p(1-p)).

    Source: questions of users (D); binary rewards, on-policy, one constant divisor

    Let E[A | right] = u and E[A | wrong] = -v. Then the expected update is u grad p - v grad (1-p)
    = (u + v) grad p. Advantages sum to 0, so p u = (1-p) v and u + v = p u / (p (1-p)). With k of G
    answers right and m = k/G, the mean of A_i R_i over the group is m (1-m) without the division,
    and m (1-m) / (std + 1e-4) with it, where std = sqrt(G/(G-1) m (1-m)). So K is C18's:

      K = E[m (1-m)] / (p (1-p)) = 1 - 1/G                            scale "mean",
      K = sqrt((G-1)/G) E[sqrt(m (1-m))] / (p (1-p)), nearly          scale "std",

    over m = Bin(G, p)/G. E sqrt(m (1-m)) is below sqrt(p (1-p)), so K stays below the folklore's
    1/sqrt(p (1-p)). It is bounded, by (G-1)/sqrt(G). A question's log-odds move by p (1-p) K: hard
    and easy questions move less than others with both scales, but less so with the std. A group
    teaches nothing with the chance p^G + (1-p)^G.
    """
    G = 8
    rows = {name: [name] for name in ("K, mean", "K, std", "folklore", "no signal")}
    for p in (0.05, 0.1, 0.25, 0.5):
        chances = [math.comb(G, k) * p**k * (1 - p) ** (G - k) for k in range(G + 1)]
        for scale in ("mean", "std"):
            K = 0.0
            for k, chance in enumerate(chances):
                rewards = torch.tensor([1.0] * k + [0.0] * (G - k), dtype=torch.float64)
                A = losses.group_advantages(rewards, G, scale)
                K += chance * float((A * rewards).mean()) / (p * (1 - p))
            evidence.equal(factor(G, p, scale), K)
            rows[f"K, {scale}"].append(K)
        folklore = 1 / math.sqrt(p * (1 - p))
        evidence.equal(True, K < folklore)
        rows["folklore"].append(folklore)
        rows["no signal"].append(chances[0] + chances[-1])
    evidence.rows += rows.values()


@claim("Q4", "k3", extremes=False)
def q4(name, draws, evidence):
    """The value of the KL term estimates KL(pi || pi_ref), but its gradient is that of KL(pi_ref ||
    pi).

    Source: k3 in GRPO Eq. 4 (P); gradient (D)

    Measured: both expectations over one softmax. "left": how far the gradient is from that of KL(pi
    || pi_ref).
    """
    for draw in draws:
        z = draw.randn(5).requires_grad_()
        logp, ref = z.log_softmax(0), draw.randn(5).log_softmax(0)
        rows = logp.expand(2, 5)  # two answers to one prompt, a column for each token
        batch = losses.Batch(rows, rows.detach(), 0 * rows, rows < 1, 2, 5, ref.expand(2, 5))
        pi = logp.detach().exp()
        term = (pi * losses.k3(batch)[0]).sum()
        forward = (logp.exp() * (logp - ref)).sum()
        backward = (ref.exp() * (ref - logp)).sum()
        evidence.equal(forward, term)
        evidence.equal(ascent(backward, z), ascent(term, z))
        evidence.record_left(ascent(forward, z) - ascent(term, z))


@claim("Q5", "reinforce", only_if="the log-probs are at the sampling temperature", extremes=False)
def q5(name, draws, evidence):
    """The expected update follows the expected reward of the policy that samples.

    Source: questions of users (D)

    Measured: the expected update of reinforce over all groups of C16's toys. "left": how far its
    direction is off with log-probs at temperature 1, where sampling was at 0.6.
    """
    for toy in (Toy(draw.seed) for draw in draws[::4]):
        W = toy.policy.W  # the logits at the sampling temperature
        batch = toy.batch(off_policy=False)
        evidence.equal(toy.unbiased, ascent(losses.reinforce(batch), W))
        logp = toy.log_probs(Policy(0.6 * W, toy.policy.phi, 2))  # at temperature 1
        g = ascent(losses.reinforce(replace(batch, logp=logp, logp_old=logp.detach())), W)
        evidence.record_left((g / g.norm() - toy.exact / toy.exact.norm()).norm())
