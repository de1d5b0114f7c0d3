"""Q1, Q4 and Q5: what people ask about the numbers of a run.

The answers in words stand in claims/README.md, "Questions people ask".
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

import losses
from claims.evidence import ascent, claim, coefficients
from claims.formulas import average_of, shares_in
from toy.policy import Policy
from toy.worlds import Toy

SURROGATES = ("grpo", "gspo", "dr_grpo", "grpo_symmetric", "dapo", "pos_only")


@claim("Q1", *SURROGATES, only_if="the ratios are exactly 1")
def q1(name, draws, evidence):
    """In the first update of a batch the value of grpo and gspo is 0, whatever was sampled, and no
    clip acts. The gradient is not 0.

    Source: questions of users (D)

    The first update starts at the policy that sampled the batch, so all ratios are 1. A surrogate's
    term is then A_i at every token, and the value of the loss is minus the average of the A_i. With
    a mean per answer it is -(1/N) sum_i A_i = 0, because advantages are centred. Other averages
    weigh an answer by its length:

      dr-grpo, grpo-symmetric   -sum_i A_i T_i / (N L)
      dapo                      -sum_i A_i T_i / sum_i T_i, over mixed groups
      pos-only                  the same with max(A_i, 0), over all groups

    These are 0 where all answers are equally long, but for pos-only. reinforce, cispo and DFPO have
    log pi in their value, which is a weighted -A log pi and says as little. What moves the policy
    is the derivative, c_{i,t} = A_i times a weight (M1). It is 0 everywhere only if all advantages
    are: if every group has equal rewards.

    A ratio of 1 is inside any clip range with eps > 0. The clip acts from the second update on:
    with several minibatches or epochs, in Lopti's second pass, or if the sampler's log-probs differ
    from the trainer's, by numerics or by temperature. "left" is how much the coefficients change
    with the range once the ratios differ.
    """
    narrow, wide = ({"eps_low": eps, "eps_high": eps} for eps in (1e-3, 0.5))
    loss_fn = getattr(losses, name)
    for draw, spread in itertools.product(draws, (0.0, 0.6)):
        batch = draw.batch(spread)
        one, other = (coefficients(loss_fn(batch, **eps), batch) for eps in (narrow, wide))
        if spread:
            evidence.record_left((one - other)[draw.mask] / draw.size)
            continue
        evidence.equal(one, other)
        A = draw.adv.clamp(min=0) if name == "pos_only" else draw.adv
        terms = shares_in(name, draw) * torch.tensor(draw.T) * A
        evidence.equal(-terms.mean(), loss_fn(batch))
        if average_of(name) == "answer":
            evidence.equal(0, loss_fn(batch))


@claim("Q4", "k3", extremes=False)
def q4(name, draws, evidence):
    """The value of the KL term estimates KL(pi || pi_ref), but its gradient is that of
    KL(pi_ref || pi).

    Source: k3 in GRPO Eq. 4 (P); gradient (D)

    Let q = pi_ref/pi at a sampled token. The term is k3 = q - log q - 1, which is never negative.
    Over tokens drawn from pi, E q = 1, so E k3 = E[-log q] = KL(pi || pi_ref). So the value can be
    read as a distance, per token. The loss is differentiated at fixed samples: the slope of k3 in
    log pi is 1 - q, and

      E[(1 - q) grad log pi] = -sum_a pi_ref(a) grad log pi(a) = grad KL(pi_ref || pi),

    because E grad log pi = 0. "left" is how far that is from grad KL(pi || pi_ref).
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

    Answers are drawn from pi_tau = softmax(z / tau). C16's derivation needs E grad log pi = 0 under
    the distribution that sampled. For log pi_tau it holds. For log pi at temperature 1 it does not:
    in the logits, sum_a pi_tau(a) grad log pi(a) = pi_tau - pi. A history gets this error times the
    summed advantages of the answers through it. So it cancels where the whole group is together,
    and stays elsewhere. All groups of C16's toy are enumerated at tau = 0.6. "left" is how far the
    direction is off with log pi at 1.
    """
    for toy in (Toy(draw.seed) for draw in draws[::4]):
        W = toy.policy.W  # the logits at the sampling temperature
        batch = toy.batch(off_policy=False)
        evidence.equal(toy.unbiased, ascent(losses.reinforce(batch), W))
        logp = toy.log_probs(Policy(0.6 * W, toy.policy.phi, 2))  # at temperature 1
        g = ascent(losses.reinforce(replace(batch, logp=logp, logp_old=logp.detach())), W)
        evidence.record_left((g / g.norm() - toy.exact / toy.exact.norm()).norm())
