"""C29 and C30: what an update ascends on-policy, if all answers have one divisor.

The expected update is a field of arrows over policies. If it is the gradient of an objective,
training climbs that objective. If not, training as a whole climbs nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from statistics import fmean, stdev

import losses
from claims.choice import binary_world, factor
from claims.evidence import claim
from toy.worlds import Outcome, World

RARE = 1e-13  # a share that is practically 0

# ---------------- C29a: rewards 0 and 1


@claim("C29a", "group_advantages")
def c29a(name, draws, evidence):
    """On-policy, with one divisor and rewards 0 and 1, the expected update is K(p) grad p, so it
    climbs the integral of K. K is what being right is worth: E[A(right) - A(wrong)] over the
    siblings.

    Source: what a group's update ascends (D). The frame: 2510.13651, 2510.23049 (S, abstracts)

    Measured: the push on two strategies that are right at random, G = 2 to 6 and 8, with and
    without the std.
    """
    for (k, draw), scale in itertools.product(enumerate(draws[:6]), ("mean", "std")):
        q, share = tuple(draw.randn(2).sigmoid().tolist()), float(draw.randn(1).sigmoid())
        world = binary_world((2, 3, 4, 5, 6, 8)[k], q, share)
        p = share * q[0] + (1 - share) * q[1]
        predicted = factor(world.G, p, scale) * share * (1 - share) * (q[0] - q[1])
        evidence.equal(predicted, world.expected_push(losses.reinforce, scale)[0])


# ---------------- C29c: rewards of three levels


def compare(x: float, others: tuple[float, ...], scale: str) -> float:
    """The advantage of the reward x among the rewards of its siblings, in plain numbers."""
    group = [x, *others]
    if max(group) == min(group):
        return 0.0
    mean = fmean(group)
    return (x - mean) / {"mean": 1.0, "std": stdev(group) + 1e-4}[scale]


def cycle(levels: list[float], S: tuple[float, ...], scale: str) -> float:
    """D(x,y|S) + D(y,z|S) + D(z,x|S) with D(x,y|S) = A(x; y,S) - A(y; x,S)."""
    pairs = zip(levels, [*levels[1:], levels[0]], strict=True)
    return sum(compare(a, (b, *S), scale) - compare(b, (a, *S), scale) for a, b in pairs)


def curl(loss: Callable, world: World, scale: str) -> float:
    """dv_0/dtheta_1 - dv_1/dtheta_0 of the expected update v, by differences of sixth order."""
    h, total = 0.02, 0.0
    weights = (1, 3 / 4), (2, -3 / 20), (3, 1 / 60)
    for (a, b), (k, weight), sign in itertools.product(((0, 1), (1, 0)), weights, (1, -1)):
        logits = world.logits()
        logits[b] += sign * k * h
        push = world.expected_push(loss, scale, logits)[a]
        total += (b - a) * sign * weight / h * float(push)
    return total


@claim("C29c", "reinforce")
def c29c(name, draws, evidence):
    """On-policy, with one divisor and a fixed reward for each strategy, the expected update climbs
    an objective for every policy exactly if A is a score of the group minus a function of the
    siblings. R minus the mean has this form. Divided by the group's std it does not, once there are
    three levels of reward.

    Source: what a group's update ascends (D; we know of no other text that says this of the std).
    2510.13651 and, for G = 2, 2502.18548 (S, abstracts)

    Measured: the curl of the expected update on three strategies, for G = 2 to 4: 0 with the mean
    scale. "otherwise": the curl over (G-1) pi_1 pi_2 pi_3 with the std.
    """
    scales = ("mean", "std")
    for scale, (k, draw) in itertools.product(scales, enumerate(draws[:3])):
        G, levels = 2 + k, sorted(draw.randn(3).sigmoid().tolist())
        pi = draw.randn(3).softmax(0).tolist()
        world = World(G, [Outcome(way, 1.0, x, 1) for way, x in enumerate(levels)], pi)
        mean = 0.0  # of the cycle, over G - 2 siblings
        for S in itertools.product(range(3), repeat=G - 2):
            chance = math.prod(pi[s] for s in S)
            mean += chance * cycle(levels, tuple(levels[s] for s in S), scale)
        evidence.equal((G - 1) * math.prod(pi) * mean, curl(getattr(losses, name), world, scale))
        if scale == "mean":
            evidence.equal(0, mean)
        else:
            evidence.record_otherwise(mean)


# ---------------- C30: a format bonus

STD = {4: 0.2411, 8: 0.0795, 16: 0.0338}  # by G: the share above which the rare strategy grows


def push_rare(name: str, G: int, share: float, scale: str, right: float = 0.45) -> float:
    """On a rare strategy that earns 1 if right and otherwise 0; the usual one always earns 0.1."""
    rare = [Outcome(1, right, 1.0, 1), Outcome(1, 1 - right, 0.0, 1)]
    world = World(G, [Outcome(0, 1.0, 0.1, 1), *rare], [1 - share, share])
    return float(world.expected_push(getattr(losses, name), scale)[1]) / (share * (1 - share))


@claim("C30", "reinforce")
def c30(name, draws, evidence):
    """A format bonus can hold a policy for good, even on-policy and at equal lengths. For example,
    the usual strategy always earns 0.1, and a rare one earns 1 with probability 0.45. With the std
    and G = 8 the rare one dies out below a share of 0.08. With the mean scale it always grows.

    Source: the world "crumb" (D). The std under noise: 2508.11800 (S, abstract)

    Measured: the push on the rare strategy. With the mean scale; with the std, just below and just
    above 0.2411, 0.0795 and 0.0338 at G = 4, 8 and 16; and that at G = 2, or at a vanishing share,
    it grows exactly if it is right more often than not.
    """
    for G, share in itertools.product((2, 4, 8, 16), (RARE, 0.5, 0.99)):
        evidence.equal((1 - 1 / G) * (0.45 - 0.1), push_rare(name, G, share, "mean"))
        if share == RARE or G == 2:
            for right in (0.49, 0.51):
                grows = push_rare(name, G, share, "std", right) > 0
                evidence.equal(right > 0.5, grows, what=f"whether it grows at G = {G}")
    for side, (G, share) in itertools.product((-5e-5, 5e-5), STD.items()):
        grows = push_rare(name, G, share + side, "std") > 0
        evidence.equal(side > 0, grows, what=f"whether it grows at G = {G}")
