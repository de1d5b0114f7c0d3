"""C18: what a learning tax costs. Which way of several grows, in expectation and on-policy.

Answers take one of several ways. Siblings compete: a softmax takes from one what it gives to
another. So a tax moves a way only as far as it differs from the tax of its siblings, and it costs
reward only where it moves a better way down.

The push on a way's logit is the gradient of the expected objective. It is measured through the
losses, over all groups of G answers, each with its probability (toy/worlds.py).
"""

from __future__ import annotations

import math

from torch import Tensor

from claims.evidence import claim
from claims.formulas import DFPO, average_of
from claims.tax import random_worlds
from claims.trees import ascent
from toy.worlds import Outcome, World

OWN_WEIGHT = ("grpo", "gspo", "reinforce", "grpo_symmetric", "dr_grpo", *DFPO)


def measure_push(module, name: str, world: World, scale: str) -> Tensor:
    """On the logit of each way. (ways,)."""
    logits = world.logits()
    return ascent(getattr(module, name)(world.expected_batch(logits, scale)), logits)


def predict_push(name: str, world: World, K: float) -> list[float]:
    """pi_a (f_a - fbar), with f_a = K E[w_i (R_i - J) | a] and fbar = sum pi_a f_a."""
    longest = max(o.length for o in world.outcomes)
    per_answer = average_of(name) == "answer"
    ways = range(len(world.shares))
    J = world.mean(lambda o: o.reward, *ways)

    def earn(o: Outcome) -> float:
        return K * (o.reward - J) / (o.length if per_answer else longest)

    fbar = world.mean(earn, *ways)
    return [p * (world.mean(earn, way) - fbar) for way, p in enumerate(world.shares)]


def factor(G: int, b: float, scale: str) -> float:
    """K: the mean advantage of a right answer over 1 - b, if answers are right with chance b."""
    if scale == "mean":
        return 1 - 1 / G
    mean = 0.0
    for k in range(G - 1):  # right siblings; if all are right, there is no advantage
        share = (k + 1) / G
        std = math.sqrt(G / (G - 1) * share * (1 - share))
        chance = math.comb(G - 1, k) * b**k * (1 - b) ** (G - 1 - k)
        mean += chance * (1 - share) / (std + 1e-4)
    return mean / (1 - b)


@claim(
    "C18",
    *OWN_WEIGHT,
    only_if="on-policy; w depends on its own answer alone; A is R minus the group's mean, or R is "
    "0 or 1",
    extremes=False,
)
def c18(module, name, draws, evidence):
    """The expected push on logit a is pi_a (f_a - fbar) with f_a = K (wbar_a (Q_a - J) +
    Cov(w, R | a)): a tax costs where it makes a worse way's f the larger one.

    Source: what a tax costs (D)

    Groups of G independent answers come from the policy itself. One choice has the probabilities
    pi_a. Q_a is the mean reward of the answers that take a, J that of all answers. Let the weight
    w_i of answer i depend on answer i alone, as 1/T_i does. Answer i's gradient for the logit of a
    is w_i A_i (1[i takes a] - pi_a), so the expected push is

      pi_a f_a - pi_a sum_b pi_b f_b = pi_a (f_a - fbar),  f_a = E[w_i A_i | i takes a].

    Let A_i = R_i - mean_j R_j = (1 - 1/G) R_i - (1/G) sum_{j != i} R_j. The siblings are
    independent of answer i, so

      f_a = (1 - 1/G) E[w_i (R_i - J) | a] = (1 - 1/G) (wbar_a (Q_a - J) + Cov(w, R | a)).

    The first term is the credit. The second is C17h's expected tax, per visitor. Two things follow.

      A covariance that all siblings have alike is also in fbar. It moves nothing: it is an error of
      the baseline, noise without drift. So the size of the learning tax does not say what it costs.
      A constant weight has no covariance, and f_a - f_b = (1 - 1/G) w (Q_a - Q_b). Of two ways the
      better one always grows. The token mean of DAPO and CISPO is no constant: it divides by the
      tokens of the siblings, too. In a batch of one pair it can move the worse way up.

    No tax does not mean no preference. Let each way have answers of one length, so that 1/T_i is a
    constant there and its tax is 0. Then f_A - f_B is (1 - 1/G) times

      w_A (Q_A - J) - w_B (Q_B - J) = (w_A Q_A - w_B Q_B) - (w_A - w_B) J.

    Let A be worse and shorter. As long as J is below J* = (w_A Q_A - w_B Q_B) / (w_A - w_B), A is
    favoured. As J* < Q_A, B overtakes A in the end, but that may take long: Q = .6, .7 and 0,
    T = 4, 40 and 16 and the shares .01, .01 and .98 begin at J = .013 and have J* = .589.

    Rewards 0 and 1. Let a way be right with chance q, the policy with chance b = sum pi_a q_a. Let
    1/T_right and 1/T_wrong be the means of 1/T_i over the way's right and wrong answers. Then

      f = K (q (1 - b) / T_right - (1 - q) b / T_wrong),  K = 1 - 1/G.

    This form also holds for the std scale, with another K. Given R_i, the advantage A_i depends on
    the siblings only. Let u be its mean if R_i = 1, and -v if R_i = 0. Advantages sum to 0, so
    b u = (1 - b) v. Then u = K (1 - b) and v = K b, where K depends on G and b alone:

      K = 1/(1 - b) sum_k C(G-1, k) b^k (1-b)^(G-1-k) (1 - m) / (std + 1e-4),  m = (k + 1)/G,

    over k = 0, ..., G - 2 right siblings, and std = sqrt(G/(G-1) m (1 - m)). K is the same for all
    ways, so it decides how fast they move, and f/K where to. For a constant weight 1/L this is
    f = K (q - b)/L: the way that is right more often grows, at every b.

    With 1/T_i the worse of two ways grows if its f is the larger one: right answers that are short,
    wrong ones that are long. The learning tax may be as large where nothing of the kind happens
    (python -m toy.tax).

    An example that ends there for good: way A is right with chance q, at the lengths T_r if right
    and T_w if wrong; way B is always wrong, at the length T_B. If s is the share of A, then b = s q
    and

      f_A - f_B = K (q (1 - s q)/T_r - (1 - q) s q/T_w + s q/T_B).

    That is positive at s = 0 and linear in s, up to K. It is 0 at

      share* = (1/T_r) / (q/T_r + (1-q)/T_w - 1/T_B),

    where training ends if share* is below 1, that is if (1 - q)(1/T_w - 1/T_r) > 1/T_B: the wrong
    answers of A are short and those of B are long. The expected reward then stays at q share*. For
    q = 1 that cannot be, and with a constant weight A takes all.

    Off-policy a sequence ratio, a clip and its min make w depend on the policy's moves, too. Then f
    is another. C19 has it for two ways outside the clip range.

    Measured: three ways with two kinds of answers each, with random rewards and lengths, groups of
    2 to 4. Then the same with all ways alike: the push is 0. Then two ways with rewards 0 and 1 and
    both scales, where with a constant weight the better way must grow. "left": how far the std
    turns the vector of pushes if rewards are graded, because it ties w_i A_i to the whole group.
    """
    for world in random_worlds(draws, ways=3, kinds=2):
        push = measure_push(module, name, world, "mean")
        evidence.equal(predict_push(name, world, 1 - 1 / world.G), push)
        other = measure_push(module, name, world, "std")
        evidence.record_left((other / other.norm() - push / push.norm()).norm())
        alike = [o._replace(way=way) for way in range(3) for o in world.outcomes if o.way == 0]
        push = measure_push(module, name, World(world.G, alike, world.shares), "mean")
        evidence.equal([0.0] * 3, push)
    for world in random_worlds(draws, ways=2, kinds=4, rewards=(0.0, 1.0, 0.0, 1.0)):
        q = [world.mean(lambda o: o.reward, way) for way in (0, 1)]
        b = world.mean(lambda o: o.reward, 0, 1)
        for scale in ("mean", "std"):
            push = measure_push(module, name, world, scale)
            evidence.equal(predict_push(name, world, factor(world.G, b, scale)), push)
            if average_of(name) != "answer":
                evidence.equal(q[0] > q[1], bool(push[0] > push[1]))
