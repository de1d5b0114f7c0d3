"""C18 and C29c: what a bias in a choice costs, and what an update ascends.

Each answer follows one of several strategies, a "way" in the code. Strategies compete, because a
softmax takes from one what it gives to another. So a tax moves a strategy only as far as it differs
from the tax of the others, and it costs reward only where it moves a better strategy down.

The push on a strategy's logit is the gradient of the expected objective. It is measured through the
losses, over all groups of G answers, each with its probability (toy/worlds.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

import losses
from claims.evidence import Tree, claim, equal
from claims.formulas import DFPO, FORMULAS
from toy.worlds import Outcome, World


def random_world(tree: Tree) -> World:
    """Groups of two to four; three strategies with four kinds of answers each."""
    outcomes = []
    for way in range(3):
        chances, rewards = tree.randn(4).softmax(0).tolist(), tree.randn(4).tolist()
        lengths = torch.randint(1, 9, (4,), generator=tree.generator).tolist()
        outcomes += [Outcome(way, *kind) for kind in zip(chances, rewards, lengths, strict=True)]
    return World(2 + tree.N % 3, outcomes, tree.randn(3).softmax(0).tolist())


def predict_push(name: str, world: World) -> list[float]:
    """pi_a (f_a - fbar), with f_a = (1 - 1/G) E[w_i (R_i - E[R]) | a] and fbar = sum pi_a f_a."""
    longest = max(o.length for o in world.outcomes)
    own_length = FORMULAS[name][1] == "answer"
    ways = range(len(world.shares))
    expected = world.mean(lambda o: o.reward, *ways)

    def earn(o: Outcome) -> float:
        return (1 - 1 / world.G) * (o.reward - expected) / (o.length if own_length else longest)

    fbar = world.mean(earn, *ways)
    return [p * (world.mean(earn, way) - fbar) for way, p in enumerate(world.shares)]


@claim("C18", "grpo", "gspo", "reinforce", "grpo_symmetric", "dr_grpo", *DFPO)
def c18(name, tree):
    """On-policy, the expected push on logit a is pi_a (f_a - fbar) with f_a = K (wbar_a (Q_a -
    E[R]) + Cov(w, R | a)). So a tax costs reward where it gives a worse strategy the larger f. It
    holds if w depends on its own answer only, and A is R minus the group's mean, or R is 0 or 1
    (the latter is proved, not measured).

    Source: what a tax costs (D)
    """
    world = random_world(tree)
    push = world.expected_push(getattr(losses, name), "mean")
    equal(predict_push(name, world), push, f"G = {world.G}")


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
def c29c(name, tree):
    """On-policy, with one divisor and a fixed reward for each strategy, the expected update climbs
    an objective for every policy exactly if A is a score of the group minus a function of the
    siblings. R minus the mean has this form. Divided by the group's std it does not, once there are
    three levels of reward.

    Source: what a group's update ascends (D; we know of no other text that says this of the std).
    2510.13651 and, for G = 2, 2502.18548 (S, abstracts)
    """
    loss, levels = getattr(losses, name), sorted(tree.randn(3).sigmoid().tolist())
    pi = tree.randn(3).softmax(0).tolist()
    for G in (2, 3):
        world = World(G, [Outcome(way, 1.0, x, 1) for way, x in enumerate(levels)], pi)
        equal(0, curl(loss, world, "mean"), "the curl of R minus the mean")
        turned = curl(loss, world, "std")
        assert turned < 0, f"the curl with the std is {turned:.3g}, but must be negative"
        if G == 2:  # the std of a pair is its difference over the root of 2
            x, y, z = levels
            predicted = sum(d / (abs(d) / math.sqrt(2) + 1e-4) for d in (x - y, y - z, z - x))
            equal(math.prod(pi) * predicted, turned, "the curl with the std")
