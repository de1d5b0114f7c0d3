"""What the papers claim about token gradient cancellation, one function per claim, which measures it.

verify.py lists the claims, runs them and prints the table. A claim takes a module that keeps the contract of losses.py,
the name of the function in it that it speaks of, random trees, and the evidence to add to. It compares two numbers: the
*measured* one is autograd's, through the real functions of that module; the *predicted* one is a formula in plain
Python on this page, which shares no code with them.

The docstring of a claim: what it shows; where it comes from (P stated by the paper, S known second-hand, D derived
here); why it is so. Everything is about the token coefficients c_{i,t} = -N dLoss/dlogp_{i,t}. M1..M5 say that each
function is what its paper writes, C1..C17 what follows for a token that several answers share. G answers per group;
answer i has T_i tokens, advantage A_i, token ratios r_{i,t} and sequence ratio s_i; L is the generation budget.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_columns

import losses
from claims.trees import Draw, ascent, coefficients
from toy.policy import EOS, Policy, kl, tabular

# What the papers say a method is; behind the predicted side of every claim.
NORMALISER = {
    "reinforce": "constant",
    "grpo": "seq-mean",
    "grpo_symmetric": "constant",
    "dr_grpo": "constant",
    "dapo": "token-mean",
    "gspo": "seq-mean",
    "dfpo_min": "constant",
    "dfpo_orthogonal": "constant",
    "pos_only": "seq-mean",
    "token_grpo": "token-mean",
    "lopti_low": "token-mean",
    "lopti_high": "token-mean",
}
NEIGHBOURS = (
    "token_grpo",
    "lopti_low",
    "lopti_high",
)  # the surrogates of Advantage Reweighting and Lopti
ALL = tuple(name for name in NORMALISER if name not in NEIGHBOURS)
DFPO = ("dfpo_min", "dfpo_orthogonal")
CLIP = defaultdict(lambda: (0.2, 0.2), dapo=(0.2, 0.28), gspo=(3e-4, 4e-4))
UNCLIPPED = {"eps_low": math.inf, "eps_high": math.inf}
# gspo's own clip range is made for long answers; in a small tree few shared tokens are likelier
# than lopti's 0.5.
WIDER = {"gspo": {"eps_low": 0.2, "eps_high": 0.28}, "lopti_high": {"eta": 0.0}}

# ---------------- M: each function is what its paper writes


def share(name: str, d: Draw, i: int) -> float:
    """N times the weight of one token of answer i in the average that the method takes."""
    if NORMALISER[name] == "seq-mean":
        return 1 / d.T[i]
    if NORMALISER[name] == "constant":
        return 1 / d.max_tokens
    return d.N / (d.tokens_in_use if name == "dapo" else sum(d.T))


def is_open(name: str, r: float, a: float, low: float, high: float) -> bool:
    """Whether a clipped surrogate lets the gradient through; with a min, that depends on the advantage's sign."""
    above, below = r > 1 + high, r < 1 - low
    if name == "grpo_symmetric":
        return not (above or below)
    return not (above and a > 0 or below and a < 0)


def formula(
    name: str, d: Draw, spread: float, adv: Tensor, eps=None, kl=0.0, ratio="geometric", eta=0.5
):
    """Loss value and coefficients of a method, with two loops over plain numbers. -> float, (N, T)."""
    low, high = eps if isinstance(eps, tuple) else CLIP[name]  # one number: of DFPO
    log_r, logp, ref, A = (x.tolist() for x in (d.log_ratio(spread), d.logp, d.logp_ref, adv))
    s, mean = (
        d.sequence_ratios(spread, ratio),
        [sum(row[:T_i]) / T_i for row, T_i in zip(A, d.T, strict=True)],
    )
    value, c = 0.0, [[0.0] * len(row) for row in A]
    for i in range(d.N):
        group, per_token = d.group(i), share(name, d, i)
        if name == "dapo" and not any(d.adv[j] for j in group):
            continue
        weight = 1.0
        if name == "dfpo_min":
            weight = min(s[j] for j in group)
        if name == "dfpo_orthogonal":
            weight = s[i] - mean[i] * sum(mean[j] * s[j] for j in group) / (
                sum(mean[j] ** 2 for j in group) or 1
            )
        for t in range(d.T[i]):
            if name in ("reinforce", *DFPO):
                rests = abs(math.exp(log_r[i][t]) - 1) > (eps or math.inf)
                term, slope = (0, 0) if rests else (weight * A[i][t] * logp[i][t], weight * A[i][t])
            else:
                r, a = (s[i], mean[i]) if name == "gspo" else (math.exp(log_r[i][t]), A[i][t])
                a = max(a, 0) if name == "pos_only" else a
                term = slope = r * a
                if not is_open(name, r, a, low, high):
                    term, slope = min(max(r, 1 - low), 1 + high) * a, 0
                if name.startswith("lopti") and (math.exp(logp[i][t] - log_r[i][t]) <= eta) != (
                    name == "lopti_low"
                ):
                    term = slope = 0
            if kl:
                q = math.exp(ref[i][t] - logp[i][t])
                term, slope = term - kl * (q - math.log(q) - 1), slope - kl * (1 - q)
            value -= per_token * term / d.N
            c[i][t] = per_token * slope
    return value, torch.tensor(c, dtype=torch.float64)


def m1(L, name, draws, e):
    """Each loss, and every one of its token coefficients, is what the paper's formula gives.
    each method's paper (P; dfpo and grpo-symmetric S)

    A loss that is identically 0 would pass every check of the form "the sum is 0", so the
    coefficients themselves come first. `formula` computes them from the definition with two nested
    loops. The min is written as a gate: the gradient of min(r A, clip(r) A) is r A, but 0 for a
    winner above 1 + e_high and for a loser below 1 - e_low. Checked on- and off-policy, with
    default and with unequal clip ranges, with advantages that differ from token to token, with and
    without GRPO's KL term (k3: q - log q - 1, q = pi_ref/pi; its slope in log pi is 1 - q), with
    both sequence ratios of DFPO, with two thresholds of Lopti, and on batches in which one group
    has no advantage at all.
    """
    cases = [(0.0, False, {}), (0.6, False, {}), (0.6, True, {})]
    if name not in ("reinforce", *DFPO):
        cases.append((0.6, True, {"eps_low": 0.1, "eps_high": 0.4}))
    if name == "grpo":
        cases.append((0.6, False, {"kl": 0.1}))
    if name == "gspo":
        cases.append((1.5e-3, False, {}))
    if name in DFPO:
        cases.append((0.6, True, {"ratio": "product"}))
    if name in ("lopti_low", "lopti_high"):
        cases.append((0.6, True, {"eta": 0.25}))
    for d, (spread, reshaped, hyper) in itertools.product(draws, cases):
        adv = d.rows(d.adv) * (1 + 0.5 * d.noise if reshaped else 1)
        batch = d.batch(L, spread, adv=adv)
        loss = getattr(L, name)(batch, **hyper)
        eps = (hyper["eps_low"], hyper["eps_high"]) if "eps_low" in hyper else None
        value, c = formula(
            name, d, spread, adv, eps, **{k: v for k, v in hyper.items() if not k.startswith("eps")}
        )
        e.equal(c, coefficients(loss, batch))
        e.equal(value, loss)


def m2(L, name, draws, e):
    """A batch without tokens, or without a difference in reward, gives loss 0 and gradient 0, never NaN.
    pitfalls of public implementations (D)

    0/0 lurks in every mean over tokens and in A/||A||^2, inf - inf in every exp of a padded
    position. Here all positions are masked and hold garbage, or all advantages are 0 while the
    ratios are not 1.
    """
    for d in draws:
        empty, equal = d.batch(L, 0.6), d.batch(L, 0.6, adv=[0.0] * d.N)
        empty.mask = torch.zeros_like(empty.mask)
        for batch in (empty, equal):
            loss = getattr(L, name)(batch)
            e.equal(torch.zeros(d.mask.shape), coefficients(loss, batch))
            e.equal(0, loss)


def m3(L, name, draws, e):
    """Advantages are centred per group; "std" divides by the unbiased deviation + 1e-4; equal rewards give exactly 0.
    GRPO sec. 4.1.2, Dr. GRPO (P)

    A_i = R_i - mean(R) for "mean", over sqrt(sum_j (R_j - mean(R))^2 / (G - 1)) + 1e-4 for "std".
    Three rewards of 0.1 have a float mean that is not 0.1, and a deviation of 1e-17: the result
    must be 0 and not rounding noise.
    """
    for d in draws:
        rewards = [
            round(x, 1) if d.equal_lengths else float(x > 0)
            for x in d.randn(d.N + 2 * d.G).tolist()
        ]
        rewards[: d.G] = [0.1] * d.G
        for scale in ("mean", "std"):
            predicted = []
            for i, reward in enumerate(rewards):
                R = [rewards[j] for j in d.group(i)]
                mean = sum(R) / d.G
                std = math.sqrt(sum((x - mean) ** 2 for x in R) / (d.G - 1))
                predicted.append(
                    0
                    if min(R) == max(R)
                    else (reward - mean) / (std + 1e-4 if scale == "std" else 1)
                )
            measured = L.group_advantages(torch.tensor(rewards, dtype=torch.float64), d.G, scale)
            e.equal(predicted, measured)
            e.equal([0] * d.G, measured[: d.G], tolerance=1e-300)
    e.raises(L.group_advantages, torch.zeros(4), 1, "std")
    e.raises(L.group_advantages, torch.zeros(5), 2, "std")
    e.raises(L.group_advantages, torch.zeros(4), 2, "max")
    e.raises(L.group_advantages, torch.zeros(4).long(), 2, "std")


def m4(L, name, draws, e):
    """METHODS gives each loss the advantage scale of its paper: only Dr. GRPO leaves the standard deviation out.
    each method's paper (P; dfpo and grpo-symmetric S)

    A method is three choices: the scale of its advantages, an optional credit rule, and its loss
    functions.
    """
    for key in ALL:
        method = L.METHODS[key.replace("_", "-")]
        e.equal(True, method.passes == (getattr(L, key),))
        e.equal(
            True, method.scale == ("mean" if key == "dr_grpo" else "std") and method.credit is None
        )


def m5(L, name, draws, e):
    """A Batch or an OldPolicy in which one tensor has another shape, or whose rows are not whole groups, is refused.
    contract of losses.py (D)

    Broadcasting would turn an (N, 1) advantage, or one column too few, into a product of another
    shape and a wrong loss without a word; half a group would be compared with strangers.
    """
    good = dict(vars(draws[0].batch(L)))
    for field in ("logp_old", "adv", "mask", "logp_ref"):
        e.raises(L.Batch, **good | {field: good[field][:, 1:]})
    for wrong in (
        {"group_size": 1},
        {"group_size": draws[0].N + 1},
        {"max_tokens": 0},
        {"mask": good["mask"].double()},
    ):
        e.raises(L.Batch, **good | wrong)
    empty = {name: x[:0] if isinstance(x, Tensor) else x for name, x in good.items()}
    e.raises(L.Batch, **empty)
    first = slice(0, good["group_size"])
    e.equal(good["logp_ref"][first], L.Batch(**good)[first].logp_ref)
    d = draws[0]
    good = dict(tokens=d.tokens, mask=d.mask, logp=d.logp, rewards=d.noise[:, 0], group_size=d.G)
    good |= dict(hidden=d.noise[..., None], head=d.noise[:, :1], kept_mask=d.mask)
    for field in ("mask", "logp", "kept_mask", "hidden"):
        e.raises(L.OldPolicy, **good | {field: good[field][:, 1:]})
    for wrong in (
        {"rewards": d.noise[1:, 0]},
        {"head": d.noise},
        {"group_size": 1},
        {"group_size": d.N + 1},
    ):
        e.raises(L.OldPolicy, **good | wrong)
    L.OldPolicy(**good)


# ---------------- C: the design condition


def c1(L, name, draws, e):
    """The gradient of any loss is (1/N) sum c (e_a - pi) phi^T: its coefficients are all there is to know about it.
    DFPO, linear-softmax policy (P)

    log pi(a|h) = z_a - log sum_b exp(z_b) with z = W phi(h), so d log pi(a|h) / dz = e_a - pi(.|h),
    and dz/dW puts phi(h) beside it: grad_W log pi(a|h) = (e_a - pi(.|h)) phi(h)^T. A loss reaches W
    through the log-probabilities only, hence by the chain rule -grad_W Loss = (1/N) sum_{i,t}
    c_{i,t} grad_W log pi(a_{i,t}|h_{i,t}). Tokens with the same history and action have the same
    grad log pi; there the coefficients simply add up, and that sum is what all of C2..C17 is about.
    Checked with dense random features and a loss that is no method at all.
    """
    for d in draws:
        features = defaultdict(lambda d=d: d.randn(3))
        policy = Policy(d.randn(d.vocabulary, 3).requires_grad_(), features.__getitem__, d.longest)
        logp = d.fill(pad_columns(policy.log_probs(d.prompts, d.answers)[0], (0, 1)))
        k = d.randn(*d.mask.shape)
        loss = torch.where(d.mask, k * torch.sin(logp), 0).sum()
        c = L.token_coefficients(loss, logp)
        e.equal(torch.where(d.mask, -d.N * k * torch.cos(logp), 0), c)
        e.equal(False, c.requires_grad)
        by_hand = torch.zeros_like(policy.W)
        for (p, y), visits in d.tree.items():
            by_hand += (
                sum(c[i, t].item() for i, t in visits)
                / d.N
                * policy.grad_log_prob((p, *y[:-1]), y[-1])
            )
        e.equal(by_hand, ascent(loss, policy.W))


def c2(L, name, draws, e):
    """Token-factorised and unclipped, a fully shared token gets rho sum_i A_i: 0 for every ratio rho.
    DFPO Eq. 2, the design condition (S)

    J = (1/(N L)) sum_i sum_t r_{i,t} A_i. At a token that all G answers share, r is one number rho
    and grad log pi is the same for all of them: the node gets (rho / (N L)) (sum_i A_i) grad log
    pi. The weight is a common factor, and centred advantages cancel. In general the condition reads
    sum_i A_i grad w_{i,t*} = 0. REINFORCE has 1 in place of rho, DAPO the number of tokens in place
    of N L. Checked with centred advantages, and with others, where the sum must not vanish.
    """
    hyper = {} if name == "reinforce" else UNCLIPPED
    for d, shift in itertools.product(draws, (0, 0.7)):
        adv = [a + shift * (a != 0) for a in d.adv]
        predicted = [
            (1 if name == "reinforce" else rho)
            * sum(adv[i] for i in rows)
            * share(name, d, rows[0])
            for rho, rows, _ in d.at_shared(0.9)
        ]
        e.equal(predicted, d.node_sums(getattr(L, name)(d.batch(L, 0.9, adv=adv), **hyper)))


def c3(L, name, draws, e):
    """Two answers with A_1 = -A_2: a shared token gets (rho/2) (A_1 + A_2) grad log pi = 0.
    DFPO, two answers, token-factorised (S)

    C2 for G = 2 as the paper writes it, without a length normaliser: J = (1/2) sum_i sum_t r_{i,t}
    A_i. So the measured sum of the coefficients is divided by G = 2 and multiplied by L.
    """
    for d, shift in itertools.product(draws, (0, 0.3)):
        adv = [a + shift for a in d.adv]
        predicted = [rho / 2 * (adv[rows[0]] + adv[rows[1]]) for rho, rows, _ in d.at_shared(0.9)]
        sums = d.node_sums(getattr(L, name)(d.batch(L, 0.9, adv=adv), **UNCLIPPED))
        e.equal(predicted, sums / 2 * d.max_tokens)


def c4(L, name, draws, e):
    """A sequence ratio leaves sum_i A_i s_i (product) or sum_i A_i s_i / T_i (geometric) at a shared token.
    DFPO, two answers, sequence-coupled (S); geometric ratio (D)

    J = (1/G) sum_i s_i A_i. For the product, d s_i / dlogp_{i,t} = s_i = rho u_i, where u_i =
    prod_{t != t*} r_{i,t} is what the rest of answer i did. For G = 2, A_1 = -A, A_2 = +A the
    shared token gets (A rho / 2) (u_2 - u_1): tokens that come after it pull it up or down. For the
    geometric ratio d s_i / dlogp_{i,t} = s_i / T_i, and the node gets (1/G) sum_i A_i s_i / T_i.
    The values of both ratios are checked as well.
    """
    for d in draws:
        batch, geometric, product = (
            d.batch(L, 0.6),
            d.sequence_ratios(0.6),
            d.sequence_ratios(0.6, "product"),
        )
        nodes = d.at_shared()
        if name == "gspo":
            left = [sum(d.adv[i] * geometric[i] / d.T[i] for i in rows) for _, rows, _ in nodes]
            e.equal(left, d.node_sums(L.gspo(batch, **UNCLIPPED)))
            continue
        e.equal(geometric, L.sequence_ratio(batch))
        e.equal(product, L.sequence_ratio(batch, "product"))
        e.raises(L.sequence_ratio, batch, "harmonic")
        left = [
            sum(d.adv[i] * product[i] for i in rows) for _, rows, _ in nodes
        ]  # for G = 2, A rho (u_2 - u_1)
        e.equal(left, d.node_sums(-(L.sequence_ratio(batch, "product") * batch.adv[:, 0]).mean()))


def c5a(L, name, draws, e):
    """Under sequence coupling a shared token cancels with probability 0: of very many random groups none does.
    DFPO Cor. 3.3 (S)

    The sum is rho (A.u). For given A != 0 the set {u : A.u = 0} is a hyperplane through the origin
    of R^G; it has no volume, so continuous random u miss it almost surely. Compared: A.u itself,
    and the number of groups of 4, out of 100 000, with |A.u| < 1e-12 |A| |u|.
    """
    d, groups, G = draws[0], 100_000, 4
    log_r, A = 0.5 * d.randn(groups * G, 2), d.randn(groups, G)
    A -= A.mean(1, keepdim=True)
    batch = L.Batch(
        log_r,
        torch.zeros_like(log_r),
        A.view(-1, 1).expand(-1, 2),
        torch.ones_like(log_r) > 0,
        G,
        2,
    )
    s = L.sequence_ratio(batch, "product").view(groups, G)
    e.equal((A * log_r.exp().prod(1).view(groups, G)).sum(1), (A * s).sum(1))
    e.equal(0, ((A * s).sum(1).abs() < 1e-12 * A.norm(dim=1) * s.norm(dim=1)).sum())


def c5b(L, name, draws, e):
    """A shared token cancels although its u_i differ: A = (1, 1, -2), u = (1, 3, 2). Equal u is not necessary.
    DFPO Cor. 3.3 (S); counterexample (D)

    Equal u is sufficient: A.u = u sum_i A_i = 0. It is necessary only for G = 2, where the
    hyperplane A.u = 0 is the line u_1 = u_2. For G = 3 it is a plane and contains more than that
    line: 1 * 1 + 1 * 3 - 2 * 2 = 0. What remains of the statement is its measure (C5a). "left" is
    how far apart the u_i are although the token cancels.
    """
    A, u = (torch.tensor(x, dtype=torch.float64) for x in ([1, 1, -2], [1, 3, 2]))
    for rho in (0.5, 1.0, 1.7):
        logp = draws[0].randn(3, 2).requires_grad_()
        log_r = torch.stack([torch.full_like(u, rho).log(), u.log()], 1)
        batch = L.Batch(
            logp, logp.detach() - log_r, A[:, None].expand(3, 2), torch.ones(3, 2) > 0, 3, 2
        )
        e.equal(
            0, coefficients(-(L.sequence_ratio(batch, "product") * A).mean(), batch)[:, 0].sum()
        )
        e.left(u.max() - u.min())


def c6(L, name, draws, e):
    """The clipped surrogate's min pushes a shared token back to pi_old: -rho P above the clip range, +rho P below it.
    DFPO (words P, formula D)

    min(r A, clip(r) A) has gradient r A or 0, and which of them depends on the sign of A: above 1 +
    e_high winners are switched off and losers stay, below 1 - e_low it is the other way round. A
    shared token has one ratio rho. With P = sum of the positive advantages = -(sum of the negative
    ones) the coefficients add up to rho (P - P) = 0 inside the range, -rho P above it, +rho P below
    it. The token is irrelevant for the reward, and yet it is pushed. All this times the weight of a
    token in the method's average; GRPO on answers of equal length only (see C8).
    """
    low, high = CLIP[name]
    for d in draws:
        if name == "grpo" and not d.equal_lengths:
            continue
        predicted = []
        for rho, rows, _ in d.at_shared(0.6):
            P = sum(max(d.adv[i], 0) for i in rows) * share(name, d, rows[0])
            predicted.append(-rho * P if rho > 1 + high else rho * P if rho < 1 - low else 0)
        e.equal(predicted, d.node_sums(getattr(L, name)(d.batch(L, 0.6))))


def c7(L, name, draws, e):
    """A gate that ignores the sign of A cancels for every ratio; equal eps_low and eps_high alone do not.
    DFPO "GRPO-fix" (S; definition D)

    clip(r) A without the min has gradient r A inside the range and 0 outside it, for winners and
    losers alike: the sum at a shared token is rho sum_i A_i = 0 inside and 0 outside. "Symmetric"
    means in the sign of A, not in the numbers: dr_grpo with eps_low = eps_high = 0.2 still leaves
    what C6 says ("left"). Advantages that are not centred show that the gate is really open inside.
    """
    for d, shift in itertools.product(draws, (0, 0.5)):
        adv = [a + shift for a in d.adv]
        predicted = [
            rho
            * sum(adv[i] for i in rows if is_open(name, rho, adv[i], 0.2, 0.2))
            * share(name, d, rows[0])
            for rho, rows, _ in d.at_shared(0.6)
        ]
        e.equal(
            predicted,
            d.node_sums(getattr(L, name)(d.batch(L, 0.6, adv=adv), eps_low=0.2, eps_high=0.2)),
        )
        if name == "dr_grpo" and not shift:
            e.left(predicted)


def c8(L, name, draws, e):
    """Dividing by the answer's length leaves rho sum_i A_i / T_i at a shared token, even on-policy.
    the normalisers of GRPO, GSPO, Dr. GRPO and DAPO (D)

    With (1/G) sum_i (1/T_i) sum_t the shared token has weight 1/T_i, another one in every answer.
    It gets rho sum_i A_i / T_i, for GSPO sum_i s_i A_i / T_i, which is 0 for all A only if all T_i
    are equal. No old policy is involved: GRPO as published violates the condition in its first,
    on-policy step. A constant normaliser (Dr. GRPO) and the number of tokens in the batch (DAPO)
    are common factors and cancel. Checked on-policy, and for token ratios inside the clip range.
    """
    for d, spread in itertools.product(draws, (0.0,) if name == "gspo" else (0.0, 0.15)):
        predicted = [
            (1 if name == "reinforce" else rho) * sum(d.adv[i] * share(name, d, i) for i in rows)
            for rho, rows, _ in d.at_shared(spread)
        ]
        e.equal(predicted, d.node_sums(getattr(L, name)(d.batch(L, spread))))
        if NORMALISER[name] == "seq-mean" and not d.equal_lengths:
            e.left(predicted)


def two_zero_sum_parts(d: Draw) -> tuple[Tensor, Tensor]:
    """Weights and advantages of 3 groups; the first G//2 advantages sum to zero, and so do the others. (3, G) each."""
    A, half = d.randn(3, d.G), d.G // 2
    A[:, :half] -= A[:, :half].mean(1, keepdim=True)
    A[:, half:] -= A[:, half:].mean(1, keepdim=True)
    return d.randn(3, d.G).exp().requires_grad_(), A


def c9(L, name, draws, e):
    """Min-Replace gives the group one weight, min_j s_j: any part of it whose advantages sum to zero cancels.
    DFPO Eq. 17 (S)

    sum_{i in S} w~_i A_i = (min_j s_j) sum_{i in S} A_i, which is 0 whenever the advantages in S
    sum to zero: at tokens that the whole group shares, and at those that a zero-sum part of it
    shares. Any other constant would do the same; the minimum is the cautious one. The weight is
    detached (C12).
    """
    for d in draws:
        if name == "dfpo_min":
            e.equal([0] * len(d.shared), d.node_sums(L.dfpo_min(d.batch(L, 0.9))))
            continue
        w, A = two_zero_sum_parts(d)
        out = L.min_replace(w, A)
        e.equal(False, out.requires_grad)
        e.equal([[min(row)] * d.G for row in w.tolist()], out)
        e.equal([0] * 3, (out * A)[:, : d.G // 2].sum(1))


def c9e(L, name, draws, e):
    """A clip that is blind to the sign of A (eps) leaves DFPO's cancellation as it is, and keeps its trust region.
    DFPO under a clip (D, ours)

    Tokens whose ratio lies outside 1 +- eps rest. All visitors of a node have one ratio, so they
    rest together: what is left is 0 or what it was. The coefficients are compared with `formula`,
    on every token.
    """
    for d, k in zip(draws, itertools.cycle((0.15, 0.3)), strict=False):
        batch = d.batch(L, 0.6)
        loss = getattr(L, name)(batch, eps=k)
        value, c = formula(name, d, 0.6, d.rows(d.adv), k)
        e.equal(c, coefficients(loss, batch))
        e.equal(value, loss)
        e.equal([0] * len(d.shared), d.node_sums(loss))


def c10(L, name, draws, e):
    """Adv-Orthogonal cancels at tokens that the whole group shares, but not on zero-sum parts of it.
    DFPO Eq. 18 (S); limits (D)

    w~ = w - (A.w / ||A||^2) A has A.w~ = A.w - A.w = 0, and the same sum as w, because sum_i A_i =
    0. For G = 2 and A = (-a, a), w~_1 = w_1 + (w_2 - w_1)/2 is the mean: a group constant. On a
    zero-sum part S of the group there remains sum_S w_i A_i - (A.w / ||A||^2) sum_S A_i^2 ("left").
    Weights may turn negative and push winners down: with A = (1,1,1,1,-1,-1,-1,-1) and w =
    (3,.1,...,.1), A.w / 8 = .3625, and three winners end at .1 - .3625 = -.2625.
    """
    if name == "adv_orthogonal":
        w, A = (
            torch.tensor([x], dtype=torch.float64)
            for x in ([3, *[0.1] * 7], [1, 1, 1, 1, -1, -1, -1, -1])
        )
        e.equal([-0.2625] * 3, L.adv_orthogonal(w, A)[0, 1:4])
        e.equal(w, L.adv_orthogonal(w, 0 * A))
    for d in draws:
        if name == "dfpo_orthogonal":
            e.equal([0] * len(d.shared), d.node_sums(L.dfpo_orthogonal(d.batch(L, 0.9))))
            continue
        w, A = two_zero_sum_parts(d)
        out = L.adv_orthogonal(w, A)
        e.equal(False, out.requires_grad)
        e.equal([sum(row) for row in w.tolist()], out.sum(1))
        e.equal([0] * 3, (out * A).sum(1))
        if d.G > 3:
            part = []
            for w_g, A_g in zip(w.tolist(), A.tolist(), strict=True):
                pairs = list(zip(w_g, A_g, strict=True))
                removed = sum(x * a for x, a in pairs) / sum(a * a for a in A_g)
                part.append(sum((x - removed * a) * a for x, a in pairs[: d.G // 2]))
            e.equal(part, (out * A)[:, : d.G // 2].sum(1))
            e.left(part)
        w, A = d.randn(3, 2).exp(), d.randn(3, 1) * torch.tensor([[-1.0, 1.0]])
        e.equal([[sum(row) / 2] * 2 for row in w.tolist()], L.adv_orthogonal(w, A))


def c11(L, name, draws, e):
    """On-policy both transforms are the identity: DFPO is REINFORCE until the policy moves.
    DFPO Eq. 17 and 18 (D)

    With all s_i = 1 the minimum is 1, and A.s = sum_i A_i = 0, so nothing is projected away: every
    token gets c = A_i / L. "left" is the mean |c - A_i / L| once the ratios differ.
    """
    for d, spread in itertools.product(draws, (0.0, 0.6)):
        batch = d.batch(L, spread)
        c = coefficients(getattr(L, name)(batch), batch)
        plain = torch.where(d.mask, d.rows(d.adv) / d.max_tokens, 0)
        if spread:
            e.left((c - plain)[d.mask])
        else:
            e.equal(plain, c)


def c12(L, name, draws, e):
    """Without the stop-gradient both transforms leave a term at a shared token, although sum_i w~_i A_i = 0.
    DFPO (words S, formula D)

    J = (1/G) sum_i w~_i(theta) A_i l_i, l_i = sum_t log pi, has two derivatives. That of l_i gives
    sum_i w~_i A_i = 0. That of w~ gives, with d s_j / dlogp_{j,t} = s_j / T_j for the geometric
    ratio,

      Min-Replace, j* = argmin_j s_j:                  (1/G) (s_{j*} / T_{j*}) sum_i A_i l_i
      Adv-Orthogonal, P = I - A A^T / ||A||^2:         (1/G) (A*l)^T P (s/T)

    Neither is 0 ("left"). Checked: both losses as they are cancel; with a weight built on the
    module's own sequence_ratio and not detached, exactly this is left.
    """
    for d in draws:
        e.equal([0] * len(d.shared), d.node_sums(getattr(L, name)(d.batch(L, 0.6))))
        batch, A = d.batch(L, 0.6), torch.tensor(d.adv, dtype=torch.float64).view(-1, d.G)
        s = L.sequence_ratio(batch).view(-1, d.G)
        l_i = torch.where(d.mask, batch.logp, 0).sum(1).view(-1, d.G)
        if name == "dfpo_min":
            w = s.min(1, keepdim=True).values
        else:
            w = s - (A * s).sum(1, keepdim=True) / (A * A).sum(1, keepdim=True).clamp(min=1e-30) * A
        s_i, Al, predicted = d.sequence_ratios(0.6), (A * l_i).flatten().tolist(), []
        for _, rows, _ in d.at_shared():
            if name == "dfpo_min":
                j = min(rows, key=s_i.__getitem__)
                predicted.append(s_i[j] / d.T[j] * sum(Al[i] for i in rows))
            else:
                along = sum(d.adv[i] * s_i[i] / d.T[i] for i in rows) / (
                    sum(d.adv[i] ** 2 for i in rows) or 1
                )
                predicted.append(sum(Al[i] * (s_i[i] / d.T[i] - along * d.adv[i]) for i in rows))
        e.equal(predicted, d.node_sums(-(w * A * l_i).sum() / d.N))
        e.left(predicted)


def c13(L, name, draws, e):
    """A step eta g moves a token by KL = (eta^2/2) g^T F(h) g + O(eta^3): halving eta divides the remainder by 8.
    DFPO Prop. 3.1 (S); kernel (D)

    At eta = 0, KL(pi_{theta + eta g}(.|h) || pi_theta(.|h)) has no constant and no linear term (it
    is a minimum), and its second derivative is the Fisher matrix F(h). So whatever a shared token
    is left with makes its distribution drift, though no reward asks for it; where the condition
    holds it stays where it is. g is the loss's own ascent direction, off-policy. Compared for
    dr_grpo, outside the clip range: 8 and the sum of |remainder| at eta = 1e-3 over that at 5e-4;
    for grpo_symmetric and dfpo_min: 0 and the drift itself. The KL is positive only if g is outside
    ker F(h): to add one number to all logits of h is a step, but no drift; checked too.
    """
    remainder = {1e-3: 0.0, 5e-4: 0.0}
    for d in draws[::3]:
        batch = d.batch(L, 0.3, offset=0.35) if name == "dr_grpo" else d.batch(L, 0.6)
        g = d.N * ascent(getattr(L, name)(batch), d.policy.W)
        for p, y in d.shared[:2]:
            h = (p, *y[:-1])
            if name != "dr_grpo":
                e.equal(0, kl(d.policy.step(g, 0.5), d.policy, h))
                continue
            F = d.policy.fisher(h)
            for eta in remainder:
                second_order = eta**2 / 2 * float(g.flatten() @ F @ g.flatten())
                remainder[eta] += abs(kl(d.policy.step(g, eta), d.policy, h) - second_order)
            shift = d.policy.phi(h).expand_as(g)
            e.equal(
                [0, 0],
                [shift.flatten() @ F @ shift.flatten(), kl(d.policy.step(shift, 0.5), d.policy, h)],
            )
    if name == "dr_grpo":
        e.equal(8, remainder[1e-3] / remainder[5e-4], tolerance=0.1)


def c14(L, name, draws, e):
    """Equal rewards do not give d log(pi(y_a)/pi(y_b)) = eta c (k_a - k_b): equal k can still drive two answers apart.
    DFPO Cor. 3.2, Eq. 5 (S); exact formula and counterexample (D)

    To first order a function f of theta changes by eta <grad f, g>; take f = log pi(y_a) - log
    pi(y_b). Equal rewards mean g = A (k_a grad log pi(y_a) + k_b grad log pi(y_b)) with weights k.
    Write n_a, n_b for the squared norms of the two gradients and x for their inner product: the
    change is eta A (k_a n_a - k_b n_b + (k_b - k_a) x). That is Eq. 5 with c = A (n - x) if n_a =
    n_b = n: equal norms are enough (theory.md asks for x = 0 as well; then c = A n). For p = (.4,
    .4, .2) that gives c = 1, though x = -.44; checked, and with disjoint parameters. With unequal
    norms take p = (.6, .3, .1) and k_a = k_b = 1/2: g = ((e_a - p) + (e_b - p))/2 = (-.1, .2, -.1),
    so g_a - g_b = -.3: the likelier answer loses, though k_a = k_b and Eq. 5 says 0 ("left").
    Checked as well, to one decimal: halving eta divides the remainder by 4.
    """

    def log_odds(policy: Policy, prompts, answers) -> Tensor:
        logp, _ = policy.log_probs(prompts, answers)
        return logp[0].sum() - logp[1].sum()

    def slope(policy: Policy, prompts, answers, k) -> tuple[Tensor, Tensor]:
        """d log(pi(y_a)/pi(y_b)) / d eta along the loss's own ascent direction, and that direction."""
        logp, mask = policy.log_probs(prompts, answers)
        adv = torch.tensor(k, dtype=torch.float64)[:, None].expand(mask.shape)
        g = 2 * ascent(L.reinforce(L.Batch(logp, logp.detach(), adv, mask, 2, 1)), policy.W)
        return (ascent(-log_odds(policy, prompts, answers), policy.W) * g).sum(), g

    x, remainder = (0,), {1e-3: 0.0, 5e-4: 0.0}
    for d in draws:
        features = defaultdict(lambda d=d: d.randn(4))
        dense = Policy(d.randn(5, 4).requires_grad_(), features.__getitem__, 3)
        answers, k = [(1, 2, EOS), (2, EOS)], d.randn(2).tolist()
        measured, g = slope(dense, [x, x], answers, k)
        a, b = (dense.grad_log_prob_answer(x, y) for y in answers)
        e.equal(((a - b) * (k[0] * a + k[1] * b)).sum(), measured)
        before = log_odds(dense, [x, x], answers).item()
        for eta in remainder:
            change = log_odds(dense.step(g, eta), [x, x], answers).item() - before
            remainder[eta] += abs(change - eta * measured.item())
        disjoint = Policy(d.randn(3, 1).repeat(1, 2).requires_grad_(), tabular([(0,), (1,)]), 1)
        n = float((disjoint.grad_log_prob(x, 1) ** 2).sum())
        e.equal(n * (k[0] - k[1]), slope(disjoint, [(0,), (1,)], [(1,), (1,)], k)[0])
    e.equal(4, round(remainder[1e-3] / remainder[5e-4], 1))
    W = torch.tensor([[0.4], [0.4], [0.2]], dtype=torch.float64).log().requires_grad_()
    e.equal(
        0.7 - 0.1, slope(Policy(W, tabular([x]), 1), [x, x], [(0,), (1,)], [0.7, 0.1])[0]
    )  # equal norms
    W = torch.tensor([[0.6], [0.3], [0.1]], dtype=torch.float64).log().requires_grad_()
    measured, _ = slope(Policy(W, tabular([x]), 1), [x, x], [(0,), (1,)], [0.5, 0.5])
    e.equal(-0.3, measured)
    e.left(measured)


def tax(w: list[float], A: list[float]) -> float:
    """|S_v| Cov(w, A) over the visitors of one node."""
    return sum((x - sum(w) / len(w)) * (a - sum(A) / len(A)) for x, a in zip(w, A, strict=True))


def visitors(d: Draw, *cs: Tensor) -> Iterator[tuple[list, ...]]:
    """For every node: the visits (i, t) with A_i != 0, their A_i, and for each c their weights w = c/A."""
    numbers = [c.tolist() for c in cs]
    for visits in d.tree.values():
        used = [(i, t) for i, t in visits if d.adv[i]]
        if used:
            yield (
                used,
                [d.adv[i] for i, _ in used],
                *([c[i][t] / d.adv[i] for i, t in used] for c in numbers),
            )


def c15(L, name, draws, e):
    """A node gets credit, wbar sum A_i, plus tax, |S_v| Cov(w, A), which is 0 for every A only if w is constant on it.
    learning tax (D)

    Over the answers S_v through a node, sum w_i A_i = wbar sum A_i + sum (w_i - wbar) A_i, and the
    second sum is |S_v| Cov(w, A). The first is what these answers earned more than their siblings:
    credit. The second depends on who else shares the prefix and on what comes after it, not on this
    token: tax. A constant w has w_i - wbar = 0. For any other, the advantages A = w - wbar are
    taxed with ||w - wbar||^2 > 0 ("left", over sum |c|). learning_tax is compared as a whole, node
    by node (what the node gets, less its credit), for constant w, and for that worst A;
    prefix_nodes with a dictionary of prefixes; and dfpo_min, whose weight is one constant, with 0
    at every node.
    """
    for d in draws:
        if name == "prefix_nodes":
            nodes = L.prefix_nodes(d.tokens, d.mask, d.G)
            mine, theirs = (x[d.mask][:, None] == x[d.mask] for x in (d.nodes, nodes))
            e.equal(mine.double(), theirs.double())
            e.equal((~d.mask).double(), (nodes < 0).double())
            e.equal(-1, nodes.min())
            e.equal(True, nodes.dtype == torch.int64)
            continue
        if name == "dfpo_min":
            batch = d.batch(L, 0.6)
            for _, A, w in visitors(d, coefficients(L.dfpo_min(batch), batch)):
                e.equal(0, tax(w, A))
            continue
        c, A = d.fill(d.randn(*d.mask.shape)), torch.tensor(d.adv, dtype=torch.float64)
        nodes = [node for node in visitors(d, c) if len(node[0]) > 1]
        sizes = [sum(abs(x * a) for x, a in zip(w, A_v, strict=True)) for _, A_v, w in nodes]
        whole = sum(abs(tax(w, A_v)) for _, A_v, w in nodes) / sum(sizes) if nodes else 0
        e.equal(whole, L.learning_tax(c, A, d.nodes, d.mask))
        for (visits, A_v, w), size in list(zip(nodes, sizes, strict=True))[:3]:
            alone = torch.zeros_like(d.mask)
            alone[tuple(zip(*visits, strict=True))] = True
            credit = sum(w) / len(w) * sum(A_v)
            total = sum(x * a for x, a in zip(w, A_v, strict=True))
            e.equal(abs(total - credit), size * L.learning_tax(c, A, d.nodes, alone))
        e.equal(0, L.learning_tax(0 * c, A, d.nodes, d.mask))
        e.equal(0, L.learning_tax(d.fill((2 + d.noise) * d.rows(A)), A, d.nodes, d.mask))
        w = d.randn(d.N)
        worst = (w.view(-1, d.G) - w.view(-1, d.G).mean(1, keepdim=True)).flatten()
        first = (
            torch.arange(d.mask.shape[1]).expand(d.mask.shape) == 0
        )  # a token that the whole group shares
        predicted = sum(x * x for x in worst.tolist()) / sum(abs(x) for x in (w * worst).tolist())
        e.equal(predicted, L.learning_tax(d.fill(d.rows(w * worst)), worst, d.nodes, first))
        e.left(predicted)


def c16(L, name, draws, e):
    """Off-policy only plain-product, unclipped sequence weights are unbiased: cancellation is paid for with bias.
    exact enumeration (D)

    E_old[s f(y)] = E_theta[f(y)] for the plain product s. With groups from the old policy and A_i =
    R_i - mean_j R_j, E[s_i A_i grad log pi(y_i)] = (1 - 1/G) grad J - (1/G) sum_{j != i} E[s_i grad
    log pi(y_i)] E[R_j], and the last sum is 0, because E_theta[grad log pi] = 0. On-policy s = 1,
    and every method with a constant normaliser has this mean (over L). Off-policy the geometric
    root, the clip, the minimum over the group and the projection on A each break E_old[s f] =
    E_theta[f]. Here all groups of 3 of a toy with 7 answers are enumerated, for 6 toys. "left" is
    |E g - unbiased| / |unbiased|, off-policy; the table of the price shows the mean cosine with
    grad J and L |E g| / |grad J|, before and after the projection of C17.
    """
    prices = []
    for world in (d.all_groups for d in draws[::4]):
        unbiased = (1 - 1 / world.G) * world.exact / world.max_tokens
        on, off = (
            world.batch(L, off_policy, token_mean=name == "dapo") for off_policy in (False, True)
        )
        if name == "sequence_ratio":
            product, geometric = (
                ascent(
                    -(L.sequence_ratio(off, kind) * off.adv[:, 0]).mean() / world.max_tokens,
                    world.policy.W,
                )
                for kind in ("product", "geometric")
            )
            e.equal(unbiased, product)
            e.left((geometric - unbiased).norm() / unbiased.norm())
            continue
        loss_on, loss_off = (getattr(L, name)(batch, **WIDER.get(name, {})) for batch in (on, off))
        projected = losses.project(loss_off, off.logp, off.adv[:, 0], world.nodes, world.mask)
        g_on, g_off, g_projected = (
            ascent(loss, world.policy.W) for loss in (loss_on, loss_off, projected)
        )
        if NORMALISER[name] == "constant":
            e.equal(unbiased, g_on)
        e.left((g_off - unbiased).norm() / unbiased.norm())
        for g in (g_on, g_off, g_projected):
            cosine = (g * world.exact).sum() / g.norm() / world.exact.norm()
            prices.append([cosine, world.max_tokens * g.norm() / world.exact.norm()])
    if prices:
        e.cells = torch.tensor(prices).view(-1, 6).mean(0).tolist()


def projected(L, d: Draw, batch, loss: Tensor) -> Tensor:
    return L.project(loss, batch.logp, torch.tensor(d.adv, dtype=torch.float64), d.nodes, d.mask)


def projections(L, draws) -> Iterator[tuple]:
    """Method after method, each on its own tree: the draw, its batch and loss, the coefficients before and after.

    The losses are the reference's: these claims are about `project` alone.
    """
    methods = [(name, {}) for name in ALL] + [("grpo", {"kl": 0.1})]
    for d, (name, hyper) in zip(draws, itertools.cycle(methods), strict=False):
        batch = d.batch(losses, 0.6)
        loss = getattr(losses, name)(batch, **hyper)
        yield (
            d,
            batch,
            loss,
            coefficients(loss, batch),
            coefficients(projected(L, d, batch, loss), batch),
        )


def c17a(L, name, draws, e):
    """The node-mean projection of any loss has no tax at any node, fully shared or not.
    node-mean projection (D, ours)

    Replace w_{i,t} by its mean wbar_v over the visitors of its node, and ascend (1/N) sum
    c'.detach() log pi with c' = wbar_v A_i. Answers with A_i = 0 have no w; they keep their c and
    count nowhere.

      (a) w' is constant on S_v, so Cov(w', A) = 0.
      (b) The credit wbar_v sum A_i stays: the mean of a constant is the constant.
      (c) The mean is the constant closest to w in L2: an orthogonal projection, hence linear, idempotent, w - w' sums
          to 0.
      (d) A node with one visitor has w' = w: where answers differ, the loss and its clip are what they were.
      (e) Where the whole group shares, c' = mean(w) A_i: a group constant, with the mean for the minimum.
      (f) Exchangeable methods have nothing to remove.

    Min-Replace has (a) but throws the clip away; Adv-Orthogonal has neither (a) nor (d). For the
    bias see C16's table.
    """
    for d, _, _, _, after in projections(L, draws):
        for _, A, w in visitors(d, after):
            e.equal(0, max(w) - min(w))
            e.equal(0, tax(w, A))


def c17b(L, name, draws, e):
    """The projection leaves the credit of every node as it was.
    node-mean projection (D, ours); derivation: C17a
    """
    for d, _, _, before, after in projections(L, draws):
        for _, A, w, w_after in visitors(d, before, after):
            e.equal(sum(w) / len(w) * sum(A), sum(w_after) / len(w) * sum(A))


def c17c(L, name, draws, e):
    """The projection gives the closest exchangeable weights (w - w' sums to 0 at a node); it is linear and idempotent.
    node-mean projection (D, ours); derivation: C17a
    """
    for d, batch, loss, before, after in projections(L, draws):
        for _, _, w, w_after in visitors(d, before, after):
            e.equal(sum(w), sum(w_after))
        e.equal(after, coefficients(projected(L, d, batch, projected(L, d, batch, loss)), batch))
        other = losses.gspo(batch)
        mixed = 2 * coefficients(projected(L, d, batch, other), batch) - 3 * after
        e.equal(mixed, coefficients(projected(L, d, batch, 2 * other - 3 * loss), batch))


def c17d(L, name, draws, e):
    """Tokens that only one answer visits keep their coefficient, the clip included; so do answers with A_i = 0.
    node-mean projection (D, ours); derivation: C17a
    """
    for d, batch, loss, before, after in projections(L, draws):
        kept = torch.tensor([not a for a in d.adv])[:, None] & d.mask
        for visits in d.tree.values():
            if len(visits) == 1:
                kept[visits[0]] = True
        e.equal(before[kept], after[kept])
        nothing = L.project(loss, batch.logp, torch.zeros(d.N).double(), d.nodes, d.mask)
        e.equal(before, coefficients(nothing, batch))


def c17e(L, name, draws, e):
    """Where the whole group shares, the projection is a group constant, the mean weight: the sum is 0.
    node-mean projection (D, ours); derivation: C17a
    """
    for d, _, _, before, after in projections(L, draws):
        for visits, A, w in visitors(d, before):
            if len(visits) == d.G:
                at = tuple(zip(*visits, strict=True))
                e.equal([sum(w) / len(w) * a for a in A], after[at])
                e.equal(0, after[at].sum())


def c17f(L, name, draws, e):
    """The projection is the identity on methods that are exchangeable already: reinforce, grpo-symmetric, dfpo-min.
    node-mean projection (D, ours); derivation: C17a
    """
    for d, method in itertools.product(draws, ("reinforce", "grpo_symmetric", "dfpo_min")):
        batch = d.batch(losses, 0.6)
        loss = getattr(losses, method)(batch)
        e.equal(coefficients(loss, batch), coefficients(projected(L, d, batch, loss), batch))


def c17g(L, name, draws, e):
    """Nodes merged by their last k tokens: still no tax at any node, merged or not; each merged node keeps its credit.
    node-mean projection, merged nodes (D, ours); derivation: C17a

    A node of the prefix tree lies within one merged node, on which w' is constant: so w' is
    constant there, too. But its credit, wbar sum A_i, is now taken at the merged mean: it stays for
    the merged node only, and a token that one answer alone reached gives up its own weight to
    others like it ("left": the change of a prefix node's credit).
    """
    for (d, batch, loss, before, _), k in zip(
        projections(L, draws), itertools.cycle((1, 2, 3)), strict=False
    ):
        nodes = L.prefix_nodes(d.tokens, d.mask, d.G, k)
        A = torch.tensor(d.adv, dtype=torch.float64)
        after = coefficients(L.project(loss, batch.logp, A, nodes, d.mask), batch)
        merged, weights, weights_after = (
            {},
            (before / A[:, None]).tolist(),
            (after / A[:, None]).tolist(),
        )
        for i, y in enumerate(d.answers):
            for t in range(len(y)) if d.adv[i] else ():
                merged.setdefault((i // d.G, ((None,) * k + y[: t + 1])[-k:]), []).append((i, t))
        for visits in merged.values():
            mean = sum(weights[i][t] for i, t in visits) / len(visits)
            e.equal([mean] * len(visits), [weights_after[i][t] for i, t in visits])
        for _, adv, w, w_after in visitors(d, before, after):
            e.equal(0, tax(w_after, adv))
            e.left((sum(w_after) - sum(w)) / len(w) * sum(adv))


# What is left at a fully shared token, regime by regime: 0 nothing, x something.
REGIMES = (
    "on-policy, equal T_i",
    "on-policy, unequal T_i",
    "off-policy, inside the clip",
    "off-policy, outside it",
)
AUDIT = {
    "reinforce": "0000",
    "grpo": "0x0x",
    "grpo_symmetric": "0000",
    "dr_grpo": "000x",
    "dapo": "000x",
    "gspo": "0xxx",
    "dfpo_min": "0000",
    "dfpo_orthogonal": "0000",
    "pos_only": "xxxx",
    "token_grpo": "000x",
    "lopti_low": "000x",
    "lopti_high": "000x",
    "project": "0000",
}


def audit(L, name, draws, e):
    """What each method leaves at a token that the whole group shares, in four regimes.
    C2..C12 and C17 together (D)

    The mean over all draws of |sum_i c_i| / sum_i |c_i| at fully shared nodes: 0 = the answers
    cancel, 1 = all push the same way. Off-policy the answers of a group are equally long, so that
    C8 does not mix in. GSPO gets the clip range 0.2/0.28: its own is made for long answers;
    lopti_high gets eta 0, so that it takes every token. The row "project" puts one method after
    another through the projection of C17.
    """
    methods = itertools.cycle(ALL)
    for k, (spread, offset) in enumerate(((0, 0), (0, 0), (0.15, 0), (0.3, 0.35))):
        left = []
        for d in draws:
            if d.equal_lengths == (k == 1):
                continue
            source, method = (losses, next(methods)) if name == "project" else (L, name)
            batch = d.batch(source, spread, offset)
            loss = getattr(source, method)(batch, **WIDER.get(method, {}))
            c = coefficients(projected(L, d, batch, loss) if name == "project" else loss, batch)
            for _, rows, t in d.at_shared():
                size = float(c[list(rows), t].abs().sum())
                left += [abs(float(c[list(rows), t].sum())) / size] if size else []
        e.cells.append(sum(left) / len(left) if left else 0.0)
        if AUDIT[name][k] == "0":
            e.equal([0] * len(left), left)
        else:
            e.left(e.cells[-1])
