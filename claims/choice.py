"""C18 and C19: what a bias in a choice costs.

Each answer follows one of several strategies, a "way" in the code. Strategies compete, because a
softmax takes from one what it gives to another. So a tax moves a strategy only as far as it differs
from the tax of the others, and it costs reward only where it moves a better strategy down. The same
holds for PPO's clip.

The push on a strategy's logit is the gradient of the expected objective. It is measured through the
losses, over all groups of G answers, each with its probability (toy/worlds.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

import losses
from claims.evidence import Draw, claim
from claims.formulas import DFPO, average_of, fitting
from toy.worlds import Outcome, World

# ---------------- C18: what a tax costs


def random_worlds(draws: list[Draw], binary: bool) -> Iterator[World]:
    """Three strategies with four kinds of answers each; rewards are 0 and 1, or random."""
    for draw, G in zip(draws[::3], (2, 3, 4) * len(draws), strict=False):
        outcomes = []
        for way in range(3):
            chances, rewards = draw.randn(4).softmax(0).tolist(), draw.randn(4)
            lengths = torch.randint(1, 9, (4,), generator=draw.generator).tolist()
            rewards = [0.0, 1.0, 0.0, 1.0] if binary else rewards.tolist()
            kinds = zip(chances, rewards, lengths, strict=True)
            outcomes += [Outcome(way, *kind) for kind in kinds]
        yield World(G, outcomes, draw.randn(3).softmax(0).tolist())


def predict_push(name: str, world: World, scale: str) -> list[float]:
    """pi_a (f_a - fbar), with f_a = K E[w_i (R_i - E[R]) | a] and fbar = sum pi_a f_a.

    With the scale "std" rewards must be 0 and 1: then E[R] is the probability of a right answer.
    """
    longest = max(o.length for o in world.outcomes)
    per_answer = average_of(name) == "answer"
    ways = range(len(world.shares))
    expected = world.mean(lambda o: o.reward, *ways)
    K = factor(world.G, expected, scale)

    def earn(o: Outcome) -> float:
        return K * (o.reward - expected) / (o.length if per_answer else longest)

    fbar = world.mean(earn, *ways)
    return [p * (world.mean(earn, way) - fbar) for way, p in enumerate(world.shares)]


def factor(G: int, p: float, scale: str) -> float:
    """K(p) of C29a: what being right is worth if answers are right with probability p."""
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
    only_if="on-policy; w depends on its own answer only; A is R minus the group's mean, or R is "
    "0 or 1",
)
def c18(name, draws, evidence):
    """On-policy, the expected push on logit a is pi_a (f_a - fbar) with f_a = K (wbar_a (Q_a -
    E[R]) + Cov(w, R | a)). So a tax costs reward where it gives a worse strategy the larger f.

    Source: what a tax costs (D)

    Measured: three strategies of four kinds of answers with random lengths, G = 2 to 4: with the
    std and rewards 0 and 1, then without the std and with graded rewards. "otherwise": how far the
    std turns the push for graded rewards (C29c).
    """
    loss = getattr(losses, name)
    for scale in ("std", "mean"):
        for world in random_worlds(draws, binary=scale == "std"):
            push = world.expected_push(loss, scale)
            evidence.equal(predict_push(name, world, scale), push)
            if scale == "mean":
                other = world.expected_push(loss, "std")
                evidence.record_otherwise((other / other.norm() - push / push.norm()).norm())


# ---------------- C19: what PPO's clip costs

MIN = ("grpo", "dr_grpo", "gspo")


def binary_world(G: int, q: tuple[float, float], share: float) -> World:
    """Two strategies that are right with the probabilities q; all answers have one length."""
    outcomes = []
    for way in (0, 1):
        outcomes += [Outcome(way, q[way], 1.0, 1), Outcome(way, 1 - q[way], 0.0, 1)]
    return World(G, outcomes, [share, 1 - share])


@claim(
    "C19",
    *MIN,
    "grpo_symmetric",
    "cispo",
    only_if="both ratios are outside the clip range",
)
def c19(name, draws, evidence):
    """Outside its range PPO's clip pushes a choice of two strategies back, whichever is better, by
    (1-q_u) b + q_d (1-b), where the credit is q_u - q_d.

    Source: what PPO's clip costs (D)

    Measured: random strategies with both ratios outside the clip range, with and without the std. A
    sign-blind clip pushes nothing there, and cispo pushes by the credit. "otherwise": the push
    under PPO's clip over the credit.
    """
    for k, draw in enumerate(draws[::2]):
        up, down = draw.randn(2).sigmoid().tolist()
        p, new = (x + 0.2 * float(draw.randn(1).sigmoid()) for x in (0.2, 0.75))
        b, world = p * up + (1 - p) * down, binary_world(2 + k % 4, (up, down), p)
        predicted = {"grpo_symmetric": 0.0, "cispo": up - down}
        predicted = predicted.get(name, -(1 - up) * b - down * (1 - b))
        if name in MIN:
            evidence.record_otherwise(predicted / (up - down))
        for scale in ("mean", "std"):
            push = predicted * new * (1 - new) * factor(world.G, b, scale)
            logits = torch.tensor([new, 1 - new], dtype=torch.float64).log()
            measured = world.expected_push(fitting(name), scale, logits, old=world.logits())
            evidence.equal([push, -push], measured)
