"""M1 to M3: each loss of losses.py is its formula, as we read it in the paper or in its sources.

A loss that is always 0 would pass every claim of the form "the sum is 0". So these claims come
first. They compare each loss, number by number, with a twin in plain Python, which is written from
that formula and shares no code with losses.py. A misreading is in both.

The twin of a loss is a row of FORMULAS: a function of an answer y, a place t and the loss's
hyperparameters hyper (hyper.eps_low, ...), and the name of a divisor. The function returns two
plain numbers: what token t of answer y adds to J, and the slope of that in log pi of this token.

    y.logp[t]  log pi of the token       y.r[t]    its ratio pi / pi_old
    y.old[t]   log pi_old                y.s       the answer's sequence ratio; geometric, unless
    y.ref[t]   log pi_ref                          the loss has the hyperparameter ratio
    y.adv[t]   the token's advantage     y.T       the answer's length
    y.A        their mean, the answer's  y.group   the answers to its prompt, y included

The divisors are:

    answer                  its own length: (1/N) sum_i (1/T_i) sum_t
    budget                  the constant L: (1/(N L)) sum_i sum_t
    tokens                  the token mean: sum_i sum_t over the number of tokens in the batch
    tokens of mixed groups  the same over groups whose advantages are not all 0
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev
from types import SimpleNamespace

import torch
from torch import Tensor

import losses
from claims.evidence import claim, equal

UNCLIPPED = {"eps_low": math.inf, "eps_high": math.inf}
DFPO = ("dfpo_min", "dfpo_orthogonal")


def fitting(name: str) -> Callable[[losses.Batch], Tensor]:
    """A loss for small trees: a clip range that is made for long answers is widened."""
    loss = getattr(losses, name)
    if losses.defaults(loss).get("eps_high", 1.0) < 0.1:
        return partial(loss, eps_low=0.2, eps_high=0.28)
    # few shared tokens have a probability above lopti's 0.5
    return partial(loss, eta=0.0) if name == "lopti_high" else loss


# ---------------- the twin of losses.py


class Answer:
    """Answer i of a batch in plain numbers, as a formula sees it."""

    def __init__(self, batch: losses.Batch, i: int, ratio: str):
        def numbers(x: Tensor) -> list[float]:
            return list(itertools.compress(x[i].tolist(), batch.mask[i].tolist()))

        self.logp, self.old, self.adv = map(numbers, (batch.logp, batch.logp_old, batch.adv))
        self.ref = numbers(batch.logp_ref)
        self.T = len(self.logp)
        log_r = [now - old for now, old in zip(self.logp, self.old, strict=True)]
        self.r = [math.exp(x) for x in log_r]
        self.s = math.exp(sum(log_r) / (max(1, self.T) if ratio == "geometric" else 1))
        self.A = sum(self.adv) / max(1, self.T)
        self.group = [self]  # all answers to its prompt, itself included


def reinforce(y, t, hyper):
    return y.adv[t] * y.logp[t], y.adv[t]


def clip(r, hyper):
    return min(max(r, 1 - hyper.eps_low), 1 + hyper.eps_high)


def ppo(r, a, hyper):
    """PPO's clip, min(r A, clip(r) A). The slope is r A, but 0 for a winner above the range and for
    a loser below it.
    """
    closed = r > 1 + hyper.eps_high and a > 0 or r < 1 - hyper.eps_low and a < 0
    return (clip(r, hyper) * a, 0.0) if closed else (r * a, r * a)


def surrogate(y, t, hyper):
    return ppo(y.r[t], y.adv[t], hyper)


def grpo(y, t, hyper):
    value, slope = ppo(y.r[t], y.adv[t], hyper)
    log_q = y.ref[t] - y.logp[t]
    k3, k3_slope = math.exp(log_q) - log_q - 1, 1 - math.exp(log_q)
    if hyper.kl_ratio:  # r k3; the slope of r is r
        k3, k3_slope = y.r[t] * k3, -y.r[t] * log_q
    return value - hyper.kl * k3, slope - hyper.kl * k3_slope


def without_min(y, t, hyper):
    inside = 1 - hyper.eps_low <= y.r[t] <= 1 + hyper.eps_high
    return clip(y.r[t], hyper) * y.adv[t], y.r[t] * y.adv[t] if inside else 0.0


def gspo(y, t, hyper):
    return ppo(y.s, y.A, hyper)


def cispo(y, t, hyper):
    slope = clip(y.r[t], hyper) * y.adv[t]
    return slope * y.logp[t], slope


def dfpo_min(y, t, hyper):
    inside = abs(y.r[t] - 1) <= hyper.eps
    slope = min(x.s for x in y.group) * y.adv[t] if inside else 0.0
    return slope * y.logp[t], slope


def dfpo_orthogonal(y, t, hyper):
    norm = sum(x.A**2 for x in y.group) or 1.0
    w = y.s - y.A * sum(x.A * x.s for x in y.group) / norm
    slope = w * y.adv[t] if abs(y.r[t] - 1) <= hyper.eps else 0.0
    return slope * y.logp[t], slope


def pos_only(y, t, hyper):
    return ppo(y.r[t], max(y.adv[t], 0.0), hyper)


def lopti_low(y, t, hyper):
    return surrogate(y, t, hyper) if math.exp(y.old[t]) < hyper.eta else (0.0, 0.0)


def lopti_high(y, t, hyper):
    return (0.0, 0.0) if math.exp(y.old[t]) < hyper.eta else surrogate(y, t, hyper)


# For each loss: what token t of answer y adds to J with its slope in log pi; then the divisor.
FORMULAS = {
    "reinforce": (reinforce, "budget"),
    "grpo": (grpo, "answer"),
    "dr_grpo": (surrogate, "budget"),
    "dapo": (surrogate, "tokens of mixed groups"),
    "gspo": (gspo, "answer"),
    "cispo": (cispo, "tokens"),
    "grpo_symmetric": (without_min, "budget"),
    "dfpo_min": (dfpo_min, "budget"),
    "dfpo_orthogonal": (dfpo_orthogonal, "budget"),
    "pos_only": (pos_only, "tokens"),
    "nthr_grpo": (surrogate, "tokens"),
    "token_grpo": (surrogate, "tokens"),
    "lopti_low": (lopti_low, "tokens"),
    "lopti_high": (lopti_high, "tokens"),
}


def shares(name: str, batch: losses.Batch) -> Tensor:
    """N times the weight that the method's divisor gives to one token of each answer. (N,)."""
    average, T = FORMULAS[name][1], batch.mask.sum(1).double()
    if average == "answer":
        return 1 / T.clamp(min=1)
    if average == "budget":
        return torch.full_like(T, 1 / batch.max_tokens)
    counted = torch.ones_like(T)
    if average == "tokens of mixed groups":
        mixed = batch.adv.reshape(len(T) // batch.group_size, -1).any(1)
        counted = mixed.repeat_interleave(batch.group_size).double()
    return counted * len(T) / (counted @ T).clamp(min=1)


def formula(name: str, batch: losses.Batch, **hyper) -> tuple[float, Tensor]:
    """The value of a loss and its pushes c = -N dLoss/dlogp, (N, T), 0 on padding.

    Computed by two loops over plain numbers. Hyperparameters that are not given are those of
    losses.py.
    """
    given = SimpleNamespace(**losses.defaults(getattr(losses, name)) | hyper)
    weights, G = shares(name, batch).tolist(), batch.group_size
    answers = [Answer(batch, i, getattr(given, "ratio", "geometric")) for i in range(len(weights))]
    value, c = 0.0, torch.zeros(batch.mask.shape, dtype=torch.float64)
    for i, (y, weight) in enumerate(zip(answers, weights, strict=True)):
        y.group = answers[i - i % G : i - i % G + G]
        terms = [FORMULAS[name][0](y, t, given) for t in range(y.T)]
        value -= sum(weight * term for term, _ in terms) / len(answers)
        c[i, batch.mask[i]] = c.new_tensor([weight * slope for _, slope in terms])
    return value, c


# ---------------- the claims

CASES = [(0.0, {}), (0.6, {}), (0.6, {"eps_low": 0.1, "eps_high": 0.4}), (0.6, {"eps": 0.3})]
CASES += [(0.6, {"ratio": "product"}), (0.6, {"kl": 0.1}), (0.6, {"kl": 0.1, "kl_ratio": True})]
CASES += [(0.6, {"eta": 0.25})]


@claim("M1", *FORMULAS)
def m1(name, tree):
    """Each loss, and the push on every token, is what its formula gives.

    Source: each method's paper (P; DFPO's transforms S, its losses and grpo-symmetric D)

    Proof: by definition. The twin of a loss shares no code with it.
    """
    loss_fn = getattr(losses, name)
    known, adv = losses.defaults(loss_fn), tree.rows(tree.adv) * (1 + 0.5 * tree.noise)
    for spread, hyper in CASES:
        if hyper.keys() <= known.keys():
            batch = tree.batch(spread, adv=adv)
            loss, (value, c) = loss_fn(batch, **hyper), formula(name, batch, **hyper)
            equal(c, losses.token_pushes(loss, batch.logp), f"the pushes of {name}, {hyper}")
            equal(value, loss, f"the value of {name}, {hyper}")


@claim("M2", *FORMULAS)
def m2(name, tree):
    """A batch without tokens, or without a difference in reward, gives loss 0 and gradient 0, never
    NaN.

    Source: pitfalls of public implementations (D)

    Proof: two things can go wrong. A mean over no tokens divides 0 by 0, as does A / ||A||^2, so a
    divisor of 0 becomes 1. And exp overflows on the garbage in the padding. So the mask comes
    before the exp, because afterwards the gradient is 0 * inf.
    """
    empty = replace(tree.batch(0.6), mask=tree.mask & False)
    for batch in (empty, tree.batch(0.6, adv=0 * tree.adv)):
        loss = getattr(losses, name)(batch)
        equal(torch.zeros(tree.mask.shape), losses.token_pushes(loss, batch.logp), name)
        equal(0, loss, name)


@claim("M3", "group_advantages")
def m3(name, tree):
    """Advantages are centred per group. The scale "std" divides them by the unbiased std + 1e-4,
    and "batch" by the std of all rewards + 1e-4. Equal rewards give exactly 0.

    Source: GRPO sec. 4.1.2, Dr. GRPO, NTHR Lemma 4.2 (P); TRL's "batch" (P)

    Proof: R_i - mean(R) sums to 0, and the sum stays 0 if all are divided by one number. Equal
    rewards need a rule of their own, because three rewards of 0.1 have a float std of 1e-17 and a
    mean that is not 0.1. So the largest reward is compared with the smallest.
    """
    rewards = 0.7 + tree.size * tree.randn(tree.N + tree.G)  # in the wide tree they nearly agree
    rewards[: tree.G] = 0.1
    for scale in losses.SCALES:
        predicted = [0.0] * tree.G
        for R in rewards[tree.G :].view(-1, tree.G).tolist():
            std = {"mean": 1, "std": stdev(R) + 1e-4, "batch": stdev(rewards.tolist()) + 1e-4}
            predicted += [(x - fmean(R)) / std[scale] for x in R]
        measured = losses.group_advantages(rewards, tree.G, scale)
        equal(predicted, measured, scale)
        assert not measured[: tree.G].any()
