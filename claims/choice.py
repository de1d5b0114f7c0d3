"""C18 and C19: what a bias in a choice costs.

Answers take one of several ways. Siblings compete: a softmax takes from one what it gives to
another. So a tax moves a way only as far as it differs from the tax of its siblings, and it costs
reward only where it moves a better way down. The same is true of the min.

The push on a way's logit is the gradient of the expected objective. It is measured through the
losses, over all groups of G answers, each with its probability (toy/worlds.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

import losses
from claims.evidence import Draw, ascent, claim
from claims.formulas import DFPO, average_of, fitting
from toy.worlds import Outcome, World

# ---------------- C18: what a tax costs


def random_worlds(draws: list[Draw], binary: bool) -> Iterator[World]:
    """Three ways that may each end in four kinds of answers; rewards are 0 and 1, or random."""
    for draw, G in zip(draws[::3], (2, 3, 4) * len(draws), strict=False):
        outcomes = []
        for way in range(3):
            chances, rewards = draw.randn(4).softmax(0).tolist(), draw.randn(4)
            lengths = torch.randint(1, 9, (4,), generator=draw.generator).tolist()
            rewards = [0.0, 1.0, 0.0, 1.0] if binary else rewards.tolist()
            kinds = zip(chances, rewards, lengths, strict=True)
            outcomes += [Outcome(way, *kind) for kind in kinds]
        yield World(G, outcomes, draw.randn(3).softmax(0).tolist())


def measure_push(name: str, world: World, scale: str, logits: Tensor | None = None) -> Tensor:
    """On the logit of each way, at the world's shares or at other logits. (ways,)."""
    logits = world.logits() if logits is None else logits
    return ascent(getattr(losses, name)(world.expected_batch(logits, scale)), logits)


def predict_push(name: str, world: World, scale: str) -> list[float]:
    """pi_a (f_a - fbar), with f_a = K E[w_i (R_i - J) | a] and fbar = sum pi_a f_a.

    With the scale "std" rewards must be 0 and 1: then J is the chance to be right.
    """
    longest = max(o.length for o in world.outcomes)
    per_answer = average_of(name) == "answer"
    ways = range(len(world.shares))
    J = world.mean(lambda o: o.reward, *ways)
    K = factor(world.G, J, scale)

    def earn(o: Outcome) -> float:
        return K * (o.reward - J) / (o.length if per_answer else longest)

    fbar = world.mean(earn, *ways)
    return [p * (world.mean(earn, way) - fbar) for way, p in enumerate(world.shares)]


def factor(G: int, p: float, scale: str) -> float:
    """K(p) of C29a: what being right is worth if answers are right with chance p."""
    if scale == "mean":
        return 1 - 1 / G
    K = 0.0
    for m in range(1, G):  # right answers in the group
        divisor = math.sqrt(m * (G - m) / G / (G - 1)) + 1e-4
        K += math.comb(G, m) * p ** (m - 1) * (1 - p) ** (G - m - 1) * m * (G - m) / G**2 / divisor
    return K


@claim(
    "C18",
    "grpo",
    "gspo",
    "reinforce",
    "grpo_symmetric",
    "dr_grpo",
    *DFPO,
    only_if="on-policy; w depends on its own answer alone; A is R minus the group's mean, or R is "
    "0 or 1",
)
def c18(name, draws, evidence):
    """The expected push on logit a is pi_a (f_a - fbar) with f_a = K (wbar_a (Q_a - J) +
    Cov(w, R | a)): a tax costs where it makes a worse way's f the larger one.

    Source: what a tax costs (D)

    Measured: three ways of four kinds of answers with random lengths, G = 2 to 4: with the std and
    rewards 0 and 1, then undivided and graded. "left": how far the std turns the latter (C29c).
    """
    for scale in ("std", "mean"):
        for world in random_worlds(draws, binary=scale == "std"):
            push = measure_push(name, world, scale)
            evidence.equal(predict_push(name, world, scale), push)
            if scale == "mean":
                other = measure_push(name, world, "std")
                evidence.record_left((other / other.norm() - push / push.norm()).norm())


# ---------------- C19: what the min costs

MIN = ("grpo", "dr_grpo", "gspo")


def binary_world(G: int, q: tuple[float, float], share: float) -> World:
    """Two ways that are right with these chances; all answers have one length."""
    outcomes = []
    for way in (0, 1):
        outcomes += [Outcome(way, q[way], 1.0, 1), Outcome(way, 1 - q[way], 0.0, 1)]
    return World(G, outcomes, [share, 1 - share])


@claim(
    "C19",
    *MIN,
    "grpo_symmetric",
    "cispo",
    only_if="both ratios have left the clip range",
)
def c19(name, draws, evidence):
    """The min pushes a choice of two back, whichever way is better, by (1-q_u) b + q_d (1-b) where
    the credit is q_u - q_d.

    Source: what the min costs (D)

    Measured: random ways with both ratios outside the clip range, with and without the std. A clip
    blind to the sign pushes nothing there, cispo by the credit. "left": the min's push over the
    credit.
    """
    loss_fn = getattr(losses, name)
    for k, draw in enumerate(draws[::2]):
        up, down = draw.randn(2).sigmoid().tolist()
        p, new = (x + 0.2 * float(draw.randn(1).sigmoid()) for x in (0.2, 0.75))
        b, world = p * up + (1 - p) * down, binary_world(2 + k % 4, (up, down), p)
        predicted = {"grpo_symmetric": 0.0, "cispo": up - down}
        predicted = predicted.get(name, -(1 - up) * b - down * (1 - b))
        if name in MIN:
            evidence.record_left(predicted / (up - down))
        for scale in ("mean", "std"):
            push = predicted * new * (1 - new) * factor(world.G, b, scale)
            logits = torch.tensor([new, 1 - new], dtype=torch.float64).log().requires_grad_()
            old = world.expected_batch(world.logits(), scale)  # groups of the old policy
            batch = replace(old, logp=logits.log_softmax(0)[world.way][:, None])
            evidence.equal([push, -push], ascent(loss_fn(batch, **fitting(loss_fn)), logits))
