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


@claim("Q4", "k3", "grpo", extremes=False)
def q4(name, draws, evidence):
    """The value of the KL term estimates KL(pi || pi_ref). Its gradient is that of KL(pi_ref || pi)
    for k3 alone, and that of KL(pi || pi_ref) for k3 times the ratio.

    Source: k3 in GRPO Eq. 4 (P); with the ratio in DeepSeek-V3.2 (S), as TRL has it (P); gradients
    (D)

    Let q = pi_ref/pi at a sampled token. The term is k3 = q - log q - 1, which is never negative.
    Over tokens drawn from pi, E q = 1, so E k3 = E[-log q] = KL(pi || pi_ref). So the value can be
    read as a distance, per token. The loss is differentiated at fixed samples: the slope of k3 in
    log pi is 1 - q, and

      E[(1 - q) grad log pi] = -sum_a pi_ref(a) grad log pi(a) = grad KL(pi_ref || pi),

    because E grad log pi = 0. "left" is how far that is from grad KL(pi || pi_ref).

    grpo with kl_ratio has r k3. On-policy r is 1, so the value is the same. But r has a slope, too,
    which is r. So the slope of r k3 is r k3 + r (1 - q) = -r log q, and over tokens from pi_old

      E_old[-r log q grad log pi] = sum_a pi(a) (log pi - log pi_ref) grad log pi(a)
                                  = grad KL(pi || pi_ref),

    on-policy and off-policy. Here "left" is how far it is from grad KL(pi_ref || pi).
    """
    has_ratio = name == "grpo"
    for draw in draws:
        z = draw.randn(5).requires_grad_()
        logp, ref = z.log_softmax(0), draw.randn(5).log_softmax(0)
        old = draw.randn(5).log_softmax(0) if has_ratio else logp.detach()
        rows = logp.expand(2, 5)  # two answers to one prompt, a column for each token
        batch = losses.Batch(rows, old.expand(2, 5), 0 * rows, rows < 1, 2, 5, ref.expand(2, 5))
        terms = losses.k3(batch)[0]
        if has_ratio:  # A is 0: nothing but the KL term is left, with 1/T_i = 1/5
            slopes = -5 * coefficients(losses.grpo(batch, kl=1.0, kl_ratio=True), batch)[0]
            terms = slopes.detach() * logp  # with this gradient; the value is tested by M1
        term = (old.exp() * terms).sum()
        forward = (logp.exp() * (logp - ref)).sum()
        backward = (ref.exp() * (ref - logp)).sum()
        if not has_ratio:
            evidence.equal(forward, term)
            forward, backward = backward, forward
        evidence.equal(ascent(forward, z), ascent(term, z))
        evidence.record_left(ascent(backward, z) - ascent(term, z))


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
