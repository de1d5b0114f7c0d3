"""C2 to C11: the design condition. When do the gradients of a shared token cancel?

Everything is about the token coefficients c_{i,t} = -N dLoss/dlogp_{i,t}. These losses reach the
policy through the log-probs of the taken tokens only (an entropy bonus would not), so by the chain
rule

  -grad Loss = (1/N) sum_{i,t} c_{i,t} grad log pi(a_{i,t}|h_{i,t}).

A token that several answers share has one history and one grad log pi, so its coefficients add up.
If the sum over the group is 0, a token that all answers share learns nothing. It says nothing about
the reward, so it ought to learn nothing.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

import losses
from claims.evidence import Draw, claim, coefficients
from claims.formulas import DFPO, UNCLIPPED, average_of, defaults, shares_in

FACTORISED = ("reinforce", "grpo_symmetric", "dr_grpo", "dapo", "cispo")


def push_shared(name, draw, spread, adv=None, **hyper) -> tuple[Tensor, Tensor, Tensor]:
    """At the K tokens that a whole group shares: their ratio, each A_i times a token's share of
    the average, (K, G) both, and the measured sum of the coefficients, (K,)."""
    adv = draw.adv if adv is None else adv
    batch = draw.batch(spread, adv=adv)
    c = coefficients(getattr(losses, name)(batch, **hyper), batch)
    rho = draw.at_shared(draw.log_ratio(spread).exp())
    return rho, draw.at_shared(adv * shares_in(name, draw)), draw.at_shared(c).sum(1)


@claim("C2", *FACTORISED)
def c2(name, draws, evidence):
    """Token-factorised and unclipped, a fully shared token gets rho sum_i A_i: 0 for every ratio
    rho.

    Source: DFPO Eq. 2, the design condition (S)

    In general, let the objective weigh token t of answer i by a function w_{i,t} of the policy,
    J = sum_i sum_t w_{i,t} A_i. At a token t* that the whole group shares, the gradients cancel if
    and only if

      sum_i A_i grad w_{i,t*} = 0.

    Token-factorised means that w_{i,t} is the token's own ratio: J = (1/(N L)) sum_i sum_t r_{i,t}
    A_i. At the shared token r is one number rho for all G answers, and grad r = r grad log pi is
    the same for all of them. So the node gets

      (rho / (N L)) (sum_i A_i) grad log pi.

    The weight is a common factor, and centred advantages sum to 0. For two answers with A_1 = -A_2
    it is (rho/2) (A_1 + A_2) = 0, as the paper writes it, without L. REINFORCE has 1 in place of
    rho. DAPO has the number of tokens in place of N L. The claim is checked with centred
    advantages, and with others, where the sum must not vanish.
    """
    hyper = {} if name == "reinforce" else UNCLIPPED
    for draw, shift in itertools.product(draws, (0, 0.7)):
        adv = draw.adv + shift * (draw.adv != 0)
        rho, A, measured = push_shared(name, draw, 0.9, adv, **hyper)
        evidence.equal((A if name == "reinforce" else rho * A).sum(1), measured)


@claim("C4", "sequence_ratio", "gspo")
def c4(name, draws, evidence):
    """A sequence ratio leaves sum_i A_i s_i (product) or sum_i A_i s_i / T_i (geometric) at a
    shared token.

    Source: DFPO, two answers, sequence-coupled (S); geometric ratio (D)

    Sequence-coupled means that one ratio s_i weighs the whole answer: J = (1/G) sum_i s_i A_i. For
    the plain product s_i = prod_t r_{i,t}, d s_i / dlogp_{i,t} = s_i at every token. At a shared
    token with ratio rho write s_i = rho u_i, where u_i = prod_{t != t*} r_{i,t} is what the rest of
    answer i did. The node gets (1/G) sum_i A_i s_i = (rho/G) sum_i A_i u_i. For G = 2, A_1 = -A and
    A_2 = +A that is

      (A rho / 2) (u_2 - u_1) grad log pi.

    So the tokens that come after the shared one pull it up or down. For the geometric ratio s_i =
    (prod_t r_{i,t})^(1/T_i) the derivative is s_i / T_i, and the node gets (1/G) sum_i A_i s_i /
    T_i. The values of both ratios are checked as well.
    """
    for draw in draws:
        geometric, product = (draw.sequence_ratios(0.6, kind) for kind in ("geometric", "product"))
        if name == "gspo":
            _, A, measured = push_shared(name, draw, 0.6, **UNCLIPPED)
            evidence.equal((draw.at_shared(geometric) * A).sum(1), measured)
            continue
        batch = draw.batch(0.6)
        evidence.equal(geometric, losses.sequence_ratio(batch))
        evidence.equal(product, losses.sequence_ratio(batch, "product"))
        c = coefficients(-(losses.sequence_ratio(batch, "product") * draw.adv).mean(), batch)
        evidence.equal(draw.at_shared(product * draw.adv).sum(1), draw.at_shared(c).sum(1))


@claim("C5", "sequence_ratio", only_if="u has a density and A is not 0", extremes=False)
def c5(name, draws, evidence):
    """Under sequence coupling, unclipped, a shared token cancels with probability 0. The u_i need
    not be equal for it: A = (2, 1, -1, -2), u = (2, 1, 3, 1).

    Source: DFPO Cor. 3.3 (S), as reported; example (D)

    By C4 the sum at the shared token is rho (A.u), up to the factor 1/G, where u_i is the ratio of
    the rest of answer i. For a given A != 0 the set {u : A.u = 0} is a hyperplane through the
    origin of R^G. A hyperplane has no volume, so a u that has a density misses it almost surely.
    The claim counts the groups of 4, out of 100 000, in which |A.u| is below 1e-12 |A| |u|.
    On-policy u has no density: it is 1, and every group cancels ("left", the share of groups). With
    A = 0 every group does, too.

    Equal u is sufficient: A.u = u sum_i A_i = 0. It is necessary for G = 2, where the hyperplane
    A.u = 0 is the line u_1 = u_2. For G > 2 the hyperplane contains more than that line:
    2 * 2 + 1 * 1 - 1 * 3 - 2 * 1 = 0 in the example. To meet it is rare, with equal u_i or not.
    Public notes on the paper (Memory4ever/AI-System-Design) say so, too.
    """

    def share_that_cancels(A: Tensor, u: Tensor) -> Tensor:
        log_r = torch.stack([0 * u + 0.5, u.log()], -1).flatten(0, 1)  # shared token, the rest
        batch = losses.Batch(log_r, 0 * log_r, log_r, log_r == log_r, 4, 2)
        s = losses.sequence_ratio(batch, "product").view(A.shape)
        return ((A * s).sum(1).abs() < 1e-12 * A.norm(dim=1) * s.norm(dim=1)).double().mean()

    A, log_u = draws[0].randn(2, 100_000, 4)
    A = A - A.mean(1, keepdim=True)
    evidence.equal(0, share_that_cancels(A, log_u.exp()))
    evidence.record_left(share_that_cancels(A, torch.ones_like(A)))
    example = torch.tensor([[[2.0, 1, -1, -2]], [[2, 1, 3, 1]]], dtype=torch.float64)
    evidence.equal(1, share_that_cancels(*example))


@claim("C6", "grpo", "dr_grpo", "dapo")
def c6(name, draws, evidence):
    """The clipped surrogate's min pushes a shared token back to pi_old: -rho P above the clip
    range, +rho P below it.

    Source: DFPO (words P, formula D)

    min(r A, clip(r, 1-e_low, 1+e_high) A) has the slope r A or 0 in log pi. Which of the two
    depends on the sign of A. Above 1 + e_high the winners (A > 0) are switched off and the losers
    stay. Below 1 - e_low it is the other way round.

    A shared token has one ratio rho for all answers. Let P be the sum of the positive advantages;
    the negative ones then sum to -P. The coefficients add up to

      rho (P - P) = 0   inside the clip range,
      -rho P            above it, where only the losers act,
      +rho P            below it, where only the winners act.

    So clipping does not merely stop an update. It pushes a token that is irrelevant for the reward
    back towards pi_old. All this is multiplied by the weight of a token in the method's average.
    For GRPO the claim is checked on answers of equal length only (see C8).
    """
    hyper = defaults(getattr(losses, name))
    low, high = 1 - hyper["eps_low"], 1 + hyper["eps_high"]
    for draw in draws:
        if name == "grpo" and not draw.equal_lengths:
            continue
        rho, A, measured = push_shared(name, draw, 0.6)
        P = A.clamp(min=0).sum(1)
        rho = rho[:, 0]
        outside = torch.where(rho > high, -rho * P, torch.where(rho < low, rho * P, 0))
        evidence.equal(outside, measured)


@claim("C7", "grpo_symmetric", "cispo", only_if="the min is dropped")
def c7(name, draws, evidence):
    """A clip that ignores the sign of A cancels for every ratio; equal eps_low and eps_high alone
    do not.

    Source: DFPO "GRPO-fix" (S; definition D)

    clip(r, 1-e_low, 1+e_high) A without the min has the slope r A inside the range and 0 outside
    it, for winners and losers alike. The sum at a shared token is rho sum_i A_i = 0 inside the
    range and 0 outside it. "Symmetric" means symmetric in the sign of A, not in the numbers. With
    the min, dr_grpo with eps_low = eps_high = 0.2 still leaves what C6 says ("left"). Advantages
    that are not centred show that the gate is really open inside the range.

    cispo clips the ratio itself, detached, and has no gate. So the sum is clip(rho) sum_i A_i,
    which is 0 as well, and a single visitor outside the range keeps a gradient of bounded weight.
    DFPO has no clip. With eps (ours) it is clipped in the same way, so its cancellation (C9, C10)
    stays: the sum is that of C9 or C10 inside the range and 0 outside it.
    """
    bounds = {"eps_low": 0.2, "eps_high": 0.2}
    for draw, shift in itertools.product(draws, (0, 0.5)):
        rho, A, measured = push_shared(name, draw, 0.6, draw.adv + shift, **bounds)
        inside = (0.8 <= rho) & (rho <= 1.2)
        weight = rho.clamp(0.8, 1.2) if name == "cispo" else rho * inside
        evidence.equal((weight * A).sum(1), measured)
        if not shift:
            evidence.record_left(push_shared("dr_grpo", draw, 0.6, **bounds)[2])


@claim(
    "C8",
    "grpo",
    "gspo",
    *FACTORISED,
    only_if="all T_i are equal, or the normaliser is a common factor",
)
def c8(name, draws, evidence):
    """Dividing by the answer's length leaves rho sum_i A_i / T_i at a shared token, even on-policy.

    Source: the normalisers of GRPO, GSPO, Dr. GRPO and DAPO (D)

    With the average (1/G) sum_i (1/T_i) sum_t the shared token has the weight 1/T_i, another one in
    every answer. It gets rho sum_i A_i / T_i, and for GSPO sum_i s_i A_i / T_i. That is 0 for all A
    only if all T_i are equal. No old policy is involved: GRPO as published violates the condition
    in its first, on-policy step.

    The budget mean 1/(N L) (Dr. GRPO) and the number of tokens in the batch (DAPO) are common
    factors, so with them the token cancels. Length is the third mechanism that breaks cancellation,
    beside the sequence ratio (C4) and the min (C6). The paper's own toy does not show it, because
    it drops the factor 1/T_i. The claim is checked on-policy, and for token ratios inside the clip
    range.
    """
    for draw, spread in itertools.product(draws, (0.0,) if name == "gspo" else (0.0, 0.15)):
        rho, A, measured = push_shared(name, draw, spread)
        predicted = (A if name == "reinforce" else rho * A).sum(1)
        evidence.equal(predicted, measured)
        if average_of(name) == "answer" and not draw.equal_lengths:
            evidence.record_left(predicted)


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

    Source: DFPO Eq. 17 (S)

    With w~_i = min_j s_j for all i, every part S of the group has

      sum_{i in S} w~_i A_i = (min_j s_j) sum_{i in S} A_i.

    That is 0 whenever the advantages in S sum to zero. So a token cancels where the whole group
    shares it, and also where a zero-sum part of the group shares it. Any other constant would do
    the same; the minimum is the cautious one. The weight is detached, as in the paper (words S).
    Else the gradient of s_j, j the only minimum, would be left at a shared token: with the
    geometric ratio (1/G) (s_j / T_j) sum_i A_i l_i, l_i the log-prob of answer i (derived, not
    measured here).
    """
    for draw in draws:
        w, A = two_zero_sum_parts(draw)
        out = losses.min_replace(w, A)
        evidence.equal(False, out.requires_grad)
        evidence.equal([[min(row)] * draw.G for row in w.tolist()], out)
        evidence.equal([0] * 3, (out * A)[:, : draw.G // 2].sum(1))


@claim("C10", "adv_orthogonal", only_if="the whole group shares the token")
def c10(name, draws, evidence):
    """Adv-Orthogonal cancels at tokens that the whole group shares, but not on zero-sum parts of
    it.

    Source: DFPO Eq. 18 (S); limits (D)

    The transform is w~ = w - (A.w / ||A||^2) A. It has A.w~ = A.w - A.w = 0, so the whole group
    cancels. It keeps the sum of the weights, because sum_i A_i = 0. For G = 2 and A = (-a, a),
    w~_1 = w_1 + (w_2 - w_1)/2 is the mean of the two weights: a group constant.

    On a zero-sum part S of the group there remains ("left")

      sum_S w_i A_i - (A.w / ||A||^2) sum_S A_i^2.

    Weights may turn negative and push winners down. Take A = (1,1,1,1,-1,-1,-1,-1) and w =
    (3,.1,...,.1). Then A.w / 8 = .3625, and three winners end at .1 - .3625 = -.2625.
    """
    w = torch.tensor([[3, *[0.1] * 7]], dtype=torch.float64)
    A = torch.tensor([[1, 1, 1, 1, -1, -1, -1, -1]], dtype=torch.float64)
    evidence.equal([-0.2625] * 3, losses.adv_orthogonal(w, A)[0, 1:4])
    for draw in draws:
        w, A = two_zero_sum_parts(draw)
        out = losses.adv_orthogonal(w, A)
        evidence.equal(False, out.requires_grad)
        evidence.equal(w.sum(1), out.sum(1))
        evidence.equal([0] * 3, (out * A).sum(1))
        if draw.G > 3:
            half, removed = slice(draw.G // 2), (A * w).sum(1) / (A * A).sum(1)
            left = (w * A)[:, half].sum(1) - removed * (A * A)[:, half].sum(1)
            evidence.equal(left, (out * A)[:, half].sum(1))
            evidence.record_left(left.detach())


@claim("C11", *DFPO, "recentred", only_if="the policy has not moved")
def c11(name, draws, evidence):
    """On-policy both transforms are the identity: DFPO is REINFORCE until the policy moves, and so
    is recentred.

    Source: DFPO Eq. 17 and 18 (D)

    On-policy all ratios are 1, so all s_i = 1. The minimum of the group is then 1. And A.s = sum_i
    A_i = 0, so Adv-Orthogonal has nothing to project away. recentred has the mean of A_i - A_j over
    j, which is A_i. So every token gets c = A_i / L, which is REINFORCE. "left" is the mean
    |c - A_i / L| once the ratios differ.
    """
    for draw, spread in itertools.product(draws, (0.0, 0.6)):
        batch = draw.batch(spread)
        c = coefficients(getattr(losses, name)(batch), batch)
        plain = torch.where(draw.mask, draw.rows(draw.adv) / draw.max_tokens, 0)
        if spread:
            evidence.record_left((c - plain)[draw.mask])
        else:
            evidence.equal(plain, c)
