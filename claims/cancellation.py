"""C2 to C11: the design condition. When do the gradients of a shared token cancel?

Everything is about the push on a token, c_{i,t} = -N dLoss/dlogp_{i,t}. These losses reach the
policy through the log-probs of the taken tokens only (an entropy bonus would not), so by the chain
rule

  -grad Loss = (1/N) sum_{i,t} c_{i,t} grad log pi(a_{i,t}|h_{i,t}).

A token that several answers share has one prefix and one grad log pi, so its pushes add up.
If the sum over the group is 0, a token that all answers share learns nothing. It says nothing about
the reward, so it ought to learn nothing.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

import losses
from claims.evidence import Draw, claim, pushes_of
from claims.formulas import DFPO, UNCLIPPED, shares


def push_shared(name, draw, spread, adv=None, **hyper) -> tuple[Tensor, Tensor, Tensor]:
    """At the K tokens that a whole group shares: their ratio, each A_i times a token's share of
    the average, (K, G) both, and the measured sum of the coefficients, (K,)."""
    adv = draw.adv if adv is None else adv
    batch = draw.batch(spread, adv=adv)
    c = pushes_of(getattr(losses, name)(batch, **hyper), batch)
    rho = draw.at_shared(draw.log_ratio(spread).exp())
    return rho, draw.at_shared(adv * shares(name, batch)), draw.at_shared(c).sum(1)


@claim("C2", "reinforce", "grpo_symmetric", "dr_grpo", "dapo", "cispo")
def c2(name, draws, evidence):
    """Token-factorised and unclipped, a fully shared token gets rho sum_i A_i: 0 for every ratio
    rho.

    Source: DFPO Eq. 2, the design condition (S)

    Measured: the sum of the pushes off-policy, with centred advantages, and with others,
    where it must not vanish.
    """
    hyper = {} if name == "reinforce" else UNCLIPPED
    for draw, shift in itertools.product(draws, (0, 0.7)):
        adv = draw.adv + shift * (draw.adv != 0)
        rho, A, measured = push_shared(name, draw, 0.9, adv, **hyper)
        evidence.equal((A if name == "reinforce" else rho * A).sum(1), measured)


@claim("C4", "sequence_ratio", "gspo")
def c4(name, draws, evidence):
    """A sequence ratio leaves sum_i A_i s_i (product) or sum_i A_i s_i / T_i (geometric) at a
    shared token. Off-policy, if the other tokens' ratios have a density, it cancels with
    probability 0.

    Source: DFPO, two answers, sequence-coupled, and Cor. 3.3 (S); geometric ratio (D)

    Measured: both sums, and the values of the geometric ratio.
    """
    for draw in draws:
        log_s = draw.log_ratio(0.6).sum(1)  # 0 on padding
        geometric, product = (log_s / torch.tensor(draw.T)).exp(), log_s.exp()
        if name == "gspo":
            _, A, measured = push_shared(name, draw, 0.6, **UNCLIPPED)
            evidence.equal((draw.at_shared(geometric) * A).sum(1), measured)
            continue
        batch = draw.batch(0.6)
        evidence.equal(geometric, losses.sequence_ratio(batch))
        c = pushes_of(-(losses.sequence_ratio(batch, "product") * draw.adv).mean(), batch)
        evidence.equal(draw.at_shared(product * draw.adv).sum(1), draw.at_shared(c).sum(1))


@claim("C6", "grpo", "dr_grpo", "dapo")
def c6(name, draws, evidence):
    """The clipped surrogate's min pushes a shared token back to pi_old: -rho P above the clip
    range, +rho P below it.

    Source: DFPO (words P, formula D)

    Measured: the sum of the pushes at ratios inside and outside the range. Of grpo each A is
    divided by its T_i (C8).
    """
    hyper = losses.defaults(getattr(losses, name))
    for draw in draws:
        rho, A, measured = push_shared(name, draw, 0.6)
        acting = torch.where(rho > 1 + hyper["eps_high"], A.clamp(max=0), A)
        acting = torch.where(rho < 1 - hyper["eps_low"], A.clamp(min=0), acting)
        evidence.equal((rho * acting).sum(1), measured)


@claim("C7", "grpo_symmetric", "cispo", only_if="the min is dropped")
def c7(name, draws, evidence):
    """A clip that ignores the sign of A cancels for every ratio; equal eps_low and eps_high alone
    do not.

    Source: DFPO "GRPO-fix" (S; definition D)

    Measured: the sum with centred advantages, and with others, which show that the gate is open
    inside the range. "left": what dr_grpo leaves with the same bounds.
    """
    bounds = {"eps_low": 0.2, "eps_high": 0.2}
    for draw, shift in itertools.product(draws, (0, 0.5)):
        rho, A, measured = push_shared(name, draw, 0.6, draw.adv + shift, **bounds)
        inside = (0.8 <= rho) & (rho <= 1.2)
        weight = rho.clamp(0.8, 1.2) if name == "cispo" else rho * inside
        evidence.equal((weight * A).sum(1), measured)
        if not shift:
            evidence.record_left(push_shared("dr_grpo", draw, 0.6, **bounds)[2])


@claim("C8", "grpo", "gspo")
def c8(name, draws, evidence):
    """Dividing by the answer's length leaves rho sum_i A_i / T_i at a shared token, even on-policy.
    That is 0 for every A only if all T_i are equal.

    Source: the normalisers of GRPO and GSPO (D)

    Measured: the sum on-policy, and 0 where answers are equally long. "left": the sum where they
    are not. C6 has it off-policy, C2 the common factors.
    """
    for draw in draws:
        _, A, measured = push_shared(name, draw, 0.0)
        evidence.equal(A.sum(1), measured)
        if draw.equal_lengths:
            evidence.equal(0 * measured, measured)
        else:
            evidence.record_left(measured)


def two_zero_sum_parts(draw: Draw) -> tuple[Tensor, Tensor]:
    """Weights and advantages of 3 groups. (3, G) each.

    The first G//2 advantages sum to zero, and so do the others.
    """
    A = draw.size * draw.randn(3, draw.G)
    half = draw.G // 2
    A[:, :half] -= A[:, :half].mean(1, keepdim=True)
    A[:, half:] -= A[:, half:].mean(1, keepdim=True)
    return draw.randn(3, draw.G).exp().requires_grad_(), A


@claim("C9", "min_replace")
def c9(name, draws, evidence):
    """Min-Replace gives the group one weight, min_j s_j: any part of it whose advantages sum to
    zero cancels.

    Source: DFPO Eq. 17, of dfpo-min (S)

    Measured: the weights, that they are detached, and the sum over a zero-sum half of the group.
    """
    for draw in draws:
        w, A = two_zero_sum_parts(draw)
        out = losses.min_replace(w)
        evidence.equal(False, out.requires_grad)
        evidence.equal([[min(row)] * draw.G for row in w.tolist()], out)
        evidence.equal([0] * 3, (out * A)[:, : draw.G // 2].sum(1))


@claim("C10", "adv_orthogonal", only_if="the whole group shares the token")
def c10(name, draws, evidence):
    """Adv-Orthogonal cancels at tokens that the whole group shares, but not on zero-sum parts of
    it.

    Source: DFPO Eq. 18, of dfpo-orthogonal (S); limits (D)

    Measured: the sum over the group, over a zero-sum half of it ("left"), the sum of the weights,
    and that they are detached.
    """
    for draw in draws:
        w, A = two_zero_sum_parts(draw)
        out = losses.adv_orthogonal(w, A)
        evidence.equal(False, out.requires_grad)
        evidence.equal(w.sum(1), out.sum(1))
        evidence.equal([0] * 3, (out * A).sum(1))
        if draw.G > 3:
            evidence.record_left((out * A)[:, : draw.G // 2].sum(1))


@claim("C11", *DFPO, only_if="the policy has not moved")
def c11(name, draws, evidence):
    """On-policy both transforms are the identity: DFPO is REINFORCE until the policy moves.

    Source: DFPO Eq. 17 and Eq. 18 (D)

    Measured: each push on-policy against A_i / L. "left": the mean difference once the
    ratios differ.
    """
    for draw, spread in itertools.product(draws, (0.0, 0.6)):
        batch = draw.batch(spread)
        c = pushes_of(getattr(losses, name)(batch), batch)
        plain = torch.where(draw.mask, draw.rows(draw.adv) / draw.max_tokens, 0)
        if spread:
            evidence.record_left((c - plain)[draw.mask])
        else:
            evidence.equal(plain, c)
