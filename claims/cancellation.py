"""C2 to C11: when do the pushes on a shared token cancel?

The push on a token is c_{i,t} = -N dLoss/dlogp_{i,t}. These losses reach the policy only through
the log-probs of the taken tokens (an entropy bonus would not). So by the chain rule

    -grad Loss = (1/N) sum_{i,t} c_{i,t} grad log pi(a_{i,t}|h_{i,t}).

A token that several answers share has one prefix and one grad log pi, so its pushes add up to one
net push. A token that all answers of a group take after the same prefix is fully shared. It says
nothing about the reward, so its net push ought to be 0.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

import losses
from claims.evidence import Draw, claim, pushes_of
from claims.formulas import DFPO, UNCLIPPED, shares


def push_shared(name, draw, spread, adv=None, **hyper) -> tuple[Tensor, Tensor, Tensor]:
    """At the K fully shared tokens: their ratio, (K,); each A_i times the weight of a token under
    the method's divisor, (K, G); and the measured net push, (K,).
    """
    adv = draw.adv if adv is None else adv
    batch = draw.batch(spread, adv=adv)
    c = pushes_of(getattr(losses, name)(batch, **hyper), batch)
    rho = draw.at_shared(draw.log_ratio(spread).exp())
    return rho, draw.at_shared(adv * shares(name, batch)), draw.at_shared(c).sum(1)


@claim("C2", "reinforce", "grpo_symmetric", "dr_grpo", "dapo", "cispo")
def c2(name, draws, evidence):
    """If a loss is token-factorised and unclipped, the net push on a fully shared token is rho
    sum_i A_i, which is 0 for every ratio rho.

    Source: DFPO Eq. 2, the design condition (S)

    Measured: the net push off-policy, with centred advantages, and with others, where it must not
    be 0.

    Proof: the design condition asks for sum_i A_i grad w_i = 0 at the token. Token-factorised means
    that w_i is the token's own ratio over one divisor. At a fully shared token this ratio is one
    number rho, and grad r = r grad log pi. So the token gets rho (sum_i A_i) grad log pi over the
    divisor, and centred advantages sum to 0. REINFORCE has 1 instead of rho.
    """
    hyper = {} if name == "reinforce" else UNCLIPPED
    for draw, shift in itertools.product(draws, (0, 0.7)):
        adv = draw.adv + shift * (draw.adv != 0)
        rho, A, measured = push_shared(name, draw, 0.9, adv, **hyper)
        evidence.equal((A if name == "reinforce" else rho * A).sum(1), measured)


@claim("C4", "sequence_ratio", "gspo")
def c4(name, draws, evidence):
    """With one ratio per answer, the net push on a fully shared token is sum_i A_i s_i (product) or
    sum_i A_i s_i / T_i (geometric mean). Off-policy, if the other tokens' ratios have a density, it
    is 0 with probability 0.

    Source: DFPO, two answers under sequence coupling, and Cor. 3.3 (S); geometric mean (D)

    Measured: both sums, and the values of the geometric mean.

    Proof: one ratio weighs the whole answer, J = (1/G) sum_i s_i A_i. The slope of the product in
    any of its log-probs is s_i, and the slope of the geometric mean is s_i / T_i. Let u_i be the
    product of the answer's other ratios, so that s_i = rho u_i for the product. Two answers with
    A_1 = -A and A_2 = A then add (A rho / 2) (u_2 - u_1) to the gradient. So the tokens that come
    after the shared one decide whether it is pushed up or down.

    For A != 0 the u with sum_i A_i u_i = 0 form a hyperplane. A hyperplane has no volume, so a u
    that has a density misses it almost surely. This is Cor. 3.3, unclipped. On-policy every u_i is
    1, so u has no density, and the product cancels in every group. For G > 2 the u_i need not be
    equal: A = (2, 1, -1, -2) and u = (2, 1, 3, 1) cancel.
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
    """Outside its range, PPO's clip pushes a fully shared token back to pi_old: the net push is
    -rho P above the range and +rho P below it, where P is the sum of the positive advantages.

    Source: DFPO (words P, formula D)

    Measured: the net push at ratios inside and outside the range. For grpo each A is divided by its
    T_i (C8).

    Proof: above the range the clip stops the winners, below it the losers (M1). The negative
    advantages sum to -P, and all answers have one ratio rho at a fully shared token. So the net
    push is rho (P - P) = 0 inside the range, -rho P above it and rho P below it. The clip thus does
    more than stop an update: it undoes it. All pushes also have the token's weight under the
    divisor, so for grpo the answers must have equal lengths (C8).
    """
    hyper = losses.defaults(getattr(losses, name))
    for draw in draws:
        rho, A, measured = push_shared(name, draw, 0.6)
        acting = torch.where(rho > 1 + hyper["eps_high"], A.clamp(max=0), A)
        acting = torch.where(rho < 1 - hyper["eps_low"], A.clamp(min=0), acting)
        evidence.equal((rho * acting).sum(1), measured)


@claim("C7", "grpo_symmetric", "cispo", only_if="PPO's min is dropped")
def c7(name, draws, evidence):
    """A sign-blind clip, which ignores the sign of A, cancels at every ratio. Setting eps_low equal
    to eps_high is not enough.

    Source: DFPO "GRPO-fix" (S; definition D)

    Measured: the net push with centred advantages, and with others, which show that pushes pass
    inside the range. "otherwise": the net push of dr_grpo with the same bounds.

    Proof: without the min, clip(r) A has the slope r A inside the range and 0 outside, both for
    winners and for losers. So the net push on a fully shared token is rho sum_i A_i = 0 inside the
    range, and nothing is pushed outside it. cispo clips the detached ratio. Its net push is
    clip(rho) sum_i A_i = 0, and no token loses its gradient.
    """
    bounds = {"eps_low": 0.2, "eps_high": 0.2}
    for draw, shift in itertools.product(draws, (0, 0.5)):
        rho, A, measured = push_shared(name, draw, 0.6, draw.adv + shift, **bounds)
        inside = (0.8 <= rho) & (rho <= 1.2)
        weight = rho.clamp(0.8, 1.2) if name == "cispo" else rho * inside
        evidence.equal((weight * A).sum(1), measured)
        if not shift:
            evidence.record_otherwise(push_shared("dr_grpo", draw, 0.6, **bounds)[2])


@claim("C8", "grpo", "gspo")
def c8(name, draws, evidence):
    """Dividing each answer by its own length gives a fully shared token the net push rho sum_i A_i
    / T_i, even on-policy. It is 0 for every A only if all T_i are equal.

    Source: the divisors of GRPO and GSPO (D)

    Measured: the net push on-policy, which is 0 where answers are equally long. "otherwise": the
    net push where they are not. C6 has it off-policy, and C2 has the other divisors.

    Proof: in (1/N) sum_i (1/T_i) sum_t the shared token has another weight in each answer. With A_1
    = -A_2 and all other A_i = 0 the sum is 0 only if T_1 = T_2. Under GSPO the net push is sum_i
    s_i A_i / T_i. The constant L (Dr. GRPO) and the number of tokens in the batch (DAPO) are common
    factors, so with them the token cancels. No old policy is involved.
    """
    for draw in draws:
        _, A, measured = push_shared(name, draw, 0.0)
        evidence.equal(A.sum(1), measured)
        if draw.equal_lengths:
            evidence.equal(0 * measured, measured)
        else:
            evidence.record_otherwise(measured)


def two_zero_sum_parts(draw: Draw) -> tuple[Tensor, Tensor]:
    """Weights and advantages of 3 groups. (3, G) each.

    The first G//2 advantages sum to 0, and so do the others.
    """
    A = draw.size * draw.randn(3, draw.G)
    half = draw.G // 2
    A[:, :half] -= A[:, :half].mean(1, keepdim=True)
    A[:, half:] -= A[:, half:].mean(1, keepdim=True)
    return draw.randn(3, draw.G).exp().requires_grad_(), A


@claim("C9", "min_replace")
def c9(name, draws, evidence):
    """Min-Replace gives the whole group one weight, min_j s_j. So any part of the group whose
    advantages sum to 0 cancels.

    Source: DFPO Eq. 17, of dfpo-min (S)

    Measured: the weights, that they are detached, and the net push of a zero-sum half of the group.

    Proof: for every part S of the group, the sum of min_j s_j times A_i over S is min_j s_j times
    the sum of A_i over S. Any other constant would do; the minimum is the cautious one. The weight
    must be detached. Otherwise the slope of the one smallest s_j adds (1/G) (s_j / T_j) sum_i A_i
    l_i for the geometric mean, where l_i is the log-prob of answer i (derived, not measured).
    """
    for draw in draws:
        w, A = two_zero_sum_parts(draw)
        out = losses.min_replace(w)
        evidence.equal(False, out.requires_grad)
        evidence.equal([[min(row)] * draw.G for row in w.tolist()], out)
        evidence.equal([0] * 3, (out * A)[:, : draw.G // 2].sum(1))


@claim("C10", "adv_orthogonal", only_if="the whole group shares the token")
def c10(name, draws, evidence):
    """Adv-Orthogonal cancels at fully shared tokens, but not on zero-sum parts of the group.

    Source: DFPO Eq. 18, of dfpo-orthogonal (S); limits (D)

    Measured: the net push of the group, the sum of the weights, and that they are detached.
    "otherwise": the net push of a zero-sum half of the group.

    Proof: wtilde = w - (A.w / ||A||^2) A has A.wtilde = 0. It keeps the sum of the weights, because
    sum_i A_i = 0. On a zero-sum part S the net push is the sum of w_i A_i over S minus A.w /
    ||A||^2 times the sum of A_i^2 over S. Weights may turn negative and push winners down: A = (1,
    1, 1, 1, -1, -1, -1, -1) and w = (3, 0.1, ..., 0.1) give three winners the weight 0.1 - 0.3625.
    """
    for draw in draws:
        w, A = two_zero_sum_parts(draw)
        out = losses.adv_orthogonal(w, A)
        evidence.equal(False, out.requires_grad)
        evidence.equal(w.sum(1), out.sum(1))
        evidence.equal([0] * 3, (out * A).sum(1))
        if draw.G > 3:
            evidence.record_otherwise((out * A)[:, : draw.G // 2].sum(1))


@claim("C11", *DFPO, only_if="the policy has not moved")
def c11(name, draws, evidence):
    """On-policy both transforms are the identity, so DFPO is REINFORCE until the policy moves.

    Source: DFPO Eq. 17 and Eq. 18 (D)

    Measured: each push on-policy against A_i / L. "otherwise": the mean difference once the ratios
    differ.

    Proof: all s_i are 1. So their minimum is 1. And A.s = sum_i A_i = 0, so the projection takes
    nothing away.
    """
    for draw, spread in itertools.product(draws, (0.0, 0.6)):
        batch = draw.batch(spread)
        c = pushes_of(getattr(losses, name)(batch), batch)
        plain = torch.where(draw.mask, draw.rows(draw.adv) / draw.max_tokens, 0)
        if spread:
            evidence.record_otherwise((c - plain)[draw.mask])
        else:
            evidence.equal(plain, c)
