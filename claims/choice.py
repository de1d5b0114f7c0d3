"""C18 to C20: what a bias in a choice costs.

Answers take one of several ways. Siblings compete: a softmax takes from one what it gives to
another. So a tax moves a way only as far as it differs from the tax of its siblings, and it costs
reward only where it moves a better way down. The same is true of the min and of the std.

The push on a way's logit is the gradient of the expected objective. It is measured through the
losses, over all groups of G answers, each with its probability (toy/worlds.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

import losses
from claims.evidence import Draw, ascent, claim
from claims.formulas import DFPO, average_of
from toy.worlds import Outcome, World

# ---------------- C18: what a tax costs

OWN_WEIGHT = ("grpo", "gspo", "reinforce", "grpo_symmetric", "dr_grpo", *DFPO)


def random_worlds(draws: list[Draw], ways: int, binary: bool = False) -> Iterator[World]:
    """Each way may end in four kinds of answers; rewards are 0 and 1, or random."""
    for draw, G in zip(draws[::3], (2, 3, 4) * len(draws), strict=False):
        outcomes = []
        for way in range(ways):
            chances, rewards = draw.randn(4).softmax(0).tolist(), draw.randn(4)
            lengths = torch.randint(1, 9, (4,), generator=draw.generator).tolist()
            rewards = [0.0, 1.0, 0.0, 1.0] if binary else rewards.tolist()
            kinds = zip(chances, rewards, lengths, strict=True)
            outcomes += [Outcome(way, *kind) for kind in kinds]
        yield World(G, outcomes, draw.randn(ways).softmax(0).tolist())


def measure_push(name: str, world: World, scale: str, logits: Tensor | None = None) -> Tensor:
    """On the logit of each way, at the world's shares or at other logits. (ways,)."""
    logits = world.logits() if logits is None else logits
    return ascent(getattr(losses, name)(world.expected_batch(logits, scale)), logits)


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


def factor(G: int, p: float, scale: str) -> float:
    """K(p) of C29a: what being right is worth if answers are right with chance p."""
    if scale == "mean":
        return 1 - 1 / G
    if scale == "maxrl":
        return sum((1 - p) ** k for k in range(G - 1))
    K = 0.0
    for m in range(1, G):  # right answers in the group
        divisor = math.sqrt(m * (G - m) / G / (G - 1)) + 1e-4
        K += math.comb(G, m) * p ** (m - 1) * (1 - p) ** (G - m - 1) * m * (G - m) / G**2 / divisor
    return K


@claim(
    "C18",
    *OWN_WEIGHT,
    only_if="on-policy; w depends on its own answer alone; A is R minus the group's mean, or R is "
    "0 or 1",
    extremes=False,
)
def c18(name, draws, evidence):
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

    The first term is the credit. The second is the expected tax, per visitor. Two things follow.

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
    is another. C19 has it for two ways and the min.

    Measured: three ways with four kinds of answers each, with random rewards and lengths, groups
    of 2 to 4. Then two ways with rewards 0 and 1 and both scales, where with a constant weight the
    better way must grow. "left": how far the std turns the vector of pushes if rewards are graded,
    because it ties w_i A_i to the whole group.
    """
    for world in random_worlds(draws, ways=3):
        push = measure_push(name, world, "mean")
        evidence.equal(predict_push(name, world, 1 - 1 / world.G), push)
        other = measure_push(name, world, "std")
        evidence.record_left((other / other.norm() - push / push.norm()).norm())
    for world in random_worlds(draws, ways=2, binary=True):
        q = [world.mean(lambda o: o.reward, way) for way in (0, 1)]
        b = world.mean(lambda o: o.reward, 0, 1)
        for scale in ("mean", "std"):
            push = measure_push(name, world, scale)
            evidence.equal(predict_push(name, world, factor(world.G, b, scale)), push)
            if average_of(name) != "answer":
                evidence.equal(q[0] > q[1], bool(push[0] > push[1]))


# ---------------- C19: what the min costs

MIN = ("grpo", "dr_grpo", "gspo")


def binary_world(G: int, q: tuple[float, float], share: float) -> World:
    """Two ways that are right with these chances; all answers have one length."""
    outcomes = []
    for way in (0, 1):
        outcomes += [Outcome(way, q[way], 1.0, 1), Outcome(way, 1 - q[way], 0.0, 1)]
    return World(G, outcomes, [share, 1 - share])


def off_policy_batch(world: World, logits: Tensor, scale: str) -> losses.Batch:
    """Groups of the old policy, which has the world's shares, where the ways have these logits by
    now. All answers have one token."""
    old = world.expected_batch(world.logits(), scale)
    return replace(old, logp=logits.log_softmax(0)[world.way][:, None])


@claim(
    "C19",
    *MIN,
    "grpo_symmetric",
    "cispo",
    only_if="both ratios have left the clip range",
    extremes=False,
)
def c19(name, draws, evidence):
    """The min pushes a choice of two back, whichever way is better, by (1-q_u) b + q_d (1-b) where
    the credit is q_u - q_d.

    Source: what the min costs (D)

    One choice of two ways, right with the chances q_u and q_d, no difference in length, rewards 0
    and 1. The old policy takes the first way with probability p and is right with chance
    b = p q_u + (1-p) q_d. Updates on its groups have moved p up to p', so that the first way's
    ratio p'/p is above 1 and the second's, (1-p')/(1-p), below. By C18 the mean advantage of a
    right answer is K (1-b), of a wrong one -K b. Each answer pushes the first logit with r A (1-p')
    or -r A p', and r (1-p') = p'(1-p')/p on the first way, r p' = p'(1-p')/(1-p) on the second. So
    without a clip the expected push is p'(1-p') K times

      q_u (1-b) - (1-q_u) b - q_d (1-b) + (1-q_d) b = q_u - q_d,

    the credit. Outside the range the min stops the winners of the first way, the first of these
    four terms, and the losers of the second, the last term. What it leaves depends on which ratios
    are outside:

      both              -((1-q_u) b + q_d (1-b))
      only the first's  b q_u - q_d
      only the second's q_u - q_d - b (1-q_d)

    The first line is never positive. It is 0 only for q_u = 1, q_d = 0, and where b is 0 or 1, so
    that nothing is learnt. It pulls the choice back to the old policy whichever way is better. And
    it is a sum, where the credit is a difference: at q_u = .6, q_d = .5, p = .5 it is 4.45 times
    the credit. So after a first update that leaves the clip range, a second one may undo more than
    the first has done.

    The other two lines may have either sign. A rare way leaves the range long before the other one
    does: p = .01 becomes .02 at q_u = .9, q_d = 0. The push is then b q_u - q_d = .0081, forwards,
    but only a hundredth of the credit.

    A clip that is blind to the sign stops two terms for each ratio that is outside: it leaves 0,
    b - q_d or q_u - b. For q_u > q_d none of these is negative. cispo keeps all four up to a ratio
    of 5.

    `python -m toy.gate` has what follows for a whole training. Measured on random
    ways, p, p' and G with both ratios outside, and on the same ways from .01 to .02 and from .9 to
    .95, for both scales of the advantage. "left": the size of the push over that of the credit,
    where both are outside.
    """
    loss_fn = getattr(losses, name)
    hyper = {"eps_low": 0.2, "eps_high": 0.2} if name == "gspo" else {}
    for k, draw in enumerate(draws[::2]):
        up, down = draw.randn(2).sigmoid().tolist()
        p, new = (x + 0.2 * float(draw.randn(1).sigmoid()) for x in (0.2, 0.75))
        cases = [(p, new), (0.01, 0.02), (0.9, 0.95)]
        for (p, new), scale in itertools.product(cases, ("mean", "std")):
            b, world = p * up + (1 - p) * down, binary_world(2 + k % 4, (up, down), p)
            terms = [up * (1 - b), -(1 - up) * b, -down * (1 - b), (1 - down) * b]
            first, second = new / p <= 1.2, (1 - new) / (1 - p) >= 0.8  # whether they are inside
            open_ = [True] * 4
            if name in MIN:
                open_ = [first, True, True, second]
            elif name == "grpo_symmetric":
                open_ = [first, first, second, second]
            predicted = sum(itertools.compress(terms, open_))
            if name in MIN and not (first or second):
                evidence.record_left(predicted / (up - down))
            predicted *= new * (1 - new) * factor(world.G, b, scale)
            logits = torch.tensor([new, 1 - new], dtype=torch.float64).log().requires_grad_()
            loss = loss_fn(off_policy_batch(world, logits, scale), **hyper)
            evidence.equal([predicted, -predicted], ascent(loss, logits))
