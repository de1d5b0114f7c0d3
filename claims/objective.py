"""C29 and C30: what an update ascends on-policy, if all answers have one divisor.

The expected update is a field of arrows over policies. If it is the gradient of something, training
climbs that. If not, there is nothing that training as a whole makes larger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import fmean, stdev

import torch
from torch import Tensor

import losses
from claims.choice import binary_world, factor, measure_push
from claims.evidence import ascent, claim
from toy.worlds import Outcome, World

EPS = 1e-4  # what group_advantages adds to the std
LARGE = 2.0**40  # times rewards: then EPS is nothing
RARE = 1e-13  # a share that is as good as none

# ---------------- C29a: rewards 0 and 1


@claim("C29a", "group_advantages", "pos_only", extremes=False)
def c29a(name, draws, evidence):
    """With rewards 0 and 1 the expected update is K(p) grad p, so it climbs the integral of K. K is
    what being right is worth, E[A(right) - A(wrong)] over the siblings.

    Source: what a group's update ascends (D). The frame: 2510.13651, 2510.23049 (S, abstracts).
    maxrl: 2602.02710 (S)

    Measured: the push on two noisy ways, G = 2 to 6 and 8. For "batch": two groups that answer one
    question. The table has the formula's K.
    """
    loss = "pos_only" if name == "pos_only" else "reinforce"
    for (k, draw), scale in itertools.product(enumerate(draws[:6]), ("mean", "std", "maxrl")):
        q, share = tuple(draw.randn(2).sigmoid().tolist()), float(draw.randn(1).sigmoid())
        world = binary_world((2, 3, 4, 5, 6, 8)[k], q, share)
        p = share * q[0] + (1 - share) * q[1]
        K = factor(world.G, p, scale) * (1 - p if name == "pos_only" else 1)
        evidence.equal(K * share * (1 - share) * (q[0] - q[1]), measure_push(loss, world, scale)[0])
    if name == "pos_only":
        return
    for G, p in itertools.product((2, 3), (0.1, 0.6)):
        K = 0.0
        for rewards in itertools.product((0.0, 1.0), repeat=2 * G):
            R = torch.tensor(rewards, dtype=torch.float64)
            chance = math.prod(p if r else 1 - p for r in rewards)
            A = losses.group_advantages(R, G, "batch")
            K += chance * float((A * R).mean()) / (p * (1 - p))
        evidence.equal((1 - 1 / G) / (1 - 1 / (2 * G)) * factor(2 * G, p, "std"), K)
    for scale in ("mean", "std", "maxrl"):
        evidence.rows.append([f"K, {scale}", *(factor(8, p, scale) for p in CHANCES)])
    evidence.rows.append(["groups without a signal", *(p**8 + (1 - p) ** 8 for p in CHANCES)])


CHANCES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)

# ---------------- C29b: the price of cancelling


def pass_at(k: int, G: int) -> list[Fraction]:
    """c_m for m = 1 to G - 1 right answers in a group: the zero-sum rule that trains pass@k."""
    ways = [(math.comb(G - 1 - k, m - 1), math.comb(G - 2, m - 1)) for m in range(1, G)]
    return [Fraction(k * some, (G - 1) * all_) for some, all_ in ways]


def expand(beta: list[Fraction]) -> list[Fraction]:
    """The coefficients of sum_j beta_j C(n, j) p^j (1-p)^(n-j), lowest power first."""
    n, K = len(beta) - 1, [Fraction(0)] * len(beta)
    for j, power in itertools.combinations_with_replacement(range(n + 1), 2):
        sign = (-1) ** (power - j)
        K[power] += sign * math.comb(n, j) * math.comb(n - j, power - j) * beta[j]
    return K


def train_with(c: list[Fraction]) -> list[Fraction]:
    """K of the rule that gives (G - m) c_m to right and -m c_m to wrong answers, if m are right."""
    G = len(c) + 1
    right = [*((G - m) * c[m - 1] for m in range(1, G)), 0]  # by right siblings
    wrong = [0, *(-m * c[m - 1] for m in range(1, G))]
    return expand([a - b for a, b in zip(right, wrong, strict=True)])


@claim("C29b", "reinforce", extremes=False)
def c29b(name, draws, evidence):
    """If the advantages of every group sum to 0, K is a polynomial of degree at most G - 2, and
    each of these has one such rule. So they train pass@k without bias for k < G, and never pass@G.

    Source: the price of cancelling (D; we know of no other text that says "never"). Estimators of
    pass@k: PKPO 2505.15201, MaxPO 2606.06080 (S, abstracts)

    Measured: G = 2 to 6 in exact fractions; then each rule as the advantages of a Batch.
    """
    for G in range(2, 7):
        c = [Fraction(float(x)).limit_denominator(99) for x in draws[G % len(draws)].randn(G - 1)]
        K = train_with(c)
        evidence.equal(True, K == [(G - 1) * x for x in expand(c)] + [0])
        for k in range(1, G + 1):
            of_pass = expand([Fraction(k)] + [Fraction(0)] * (k - 1)) + [0] * (G - k)
            evidence.equal(k < G, of_pass[G - 1] == 0, what=f"pass@{k} at G = {G}")
            if k == G:
                continue
            c = pass_at(k, G)
            evidence.equal(True, train_with(c) == of_pass, what=f"pass@{k} at G = {G}")
            p = 0.3
            world = binary_world(G, (1.0, 0.0), p)
            logits = world.logits()
            batch = world.expected_batch(logits, "mean")
            m = world.rewards.view(-1, G).sum(1).long()  # (groups,)
            factors = torch.tensor([0, *map(float, c), 0], dtype=torch.float64)[m]
            adv = batch.adv * (G * factors).repeat_interleave(G)[:, None]
            push = ascent(getattr(losses, name)(replace(batch, adv=adv)), logits)[0]
            evidence.equal(k * (1 - p) ** (k - 1) * p * (1 - p), push)


# ---------------- C29c: rewards of three levels


def compare(x: float, others: Iterable[float], scale: str) -> float:
    """The advantage of the reward x among its siblings', in plain numbers."""
    group = [x, *others]
    if max(group) == min(group):
        return 0.0
    mean = fmean(group)
    return (x - mean) / {"mean": 1.0, "std": stdev(group) + EPS, "maxrl": mean}[scale]


def winners(x: float, others: Iterable[float], scale: str) -> float:
    return max(0.0, compare(x, others, scale))


def cycle(rule: Callable[..., float], levels: Sequence[float], S: tuple, scale: str) -> float:
    """D(x,y|S) + D(y,z|S) + D(z,x|S) with D(x,y|S) = A(x; y,S) - A(y; x,S)."""
    pairs = zip(levels, [*levels[1:], levels[0]], strict=True)
    return sum(rule(a, (b, *S), scale) - rule(b, (a, *S), scale) for a, b in pairs)


def curl(loss: str, world: World, scale: str) -> float:
    """dv_0/dtheta_1 - dv_1/dtheta_0 of the expected update v, by differences of sixth order."""
    h, total = 0.02, 0.0
    for (a, b), (k, weight) in itertools.product(
        ((0, 1), (1, 0)), ((1, 3 / 4), (2, -3 / 20), (3, 1 / 60))
    ):
        for sign in (1, -1):
            logits = world.logits().detach()
            logits[b] += sign * k * h
            push = measure_push(loss, world, scale, logits.requires_grad_())[a]
            total += (1 if a == 0 else -1) * sign * weight / h * float(push)
    return total


@claim("C29c", "reinforce", "pos_only", extremes=False)
def c29c(name, draws, evidence):
    """For sure rewards a rule climbs something for every policy exactly if A is a score of the
    group minus a function of the siblings. R minus the mean is that. Divided by the group's std it
    is not, once there are three levels.

    Source: what a group's update ascends (D; we know of no other text that says so of the std).
    2510.13651 and, for G = 2, 2502.18548 (S, abstracts)

    Measured: the curl of the expected update on three ways, and what an orbit conserves at G = 2.
    "left": the curl over (G-1) pi_1 pi_2 pi_3, where there is one.
    """
    scales, rule = ("mean", "std", "maxrl"), compare
    if name == "pos_only":
        scales, rule = ("mean",), winners
    for scale, (k, draw) in itertools.product(scales, enumerate(draws[:3])):
        G, levels = 2 + k, sorted(draw.randn(3).sigmoid().tolist())
        pi = draw.randn(3).softmax(0).tolist()
        world = World(G, [Outcome(way, 1.0, x, 1) for way, x in enumerate(levels)], pi)
        mean = 0.0  # of the cycle, over G - 2 siblings
        for S in itertools.product(range(3), repeat=G - 2):
            chance = math.prod(pi[s] for s in S)
            mean += chance * cycle(rule, levels, tuple(levels[s] for s in S), scale)
        evidence.equal((G - 1) * math.prod(pi) * mean, curl(name, world, scale))
        if scale != "mean" or rule == winners and G > 2:
            evidence.record_left(mean)
    if name == "pos_only":
        return
    ways = [[(1.0, 0.7)], [(0.4, 1.0), (0.6, 0.5)], [(0.72, 0.75), (0.28, 0.1)]]
    M = [
        [sum(p * q * compare(x, (y,), "std") for p, x in a for q, y in b) for b in ways]
        for a in ways
    ]
    centre = [M[1][2], M[2][0], M[0][1]]
    pi = draws[0].randn(3).softmax(0).tolist()
    world = World(2, [Outcome(way, p, x, 1) for way in range(3) for p, x in ways[way]], pi)
    push = measure_push(name, world, "std")
    evidence.equal([True] * 3, [a > 0 for a in centre])
    evidence.equal(0, sum(a / p * v for a, p, v in zip(centre, pi, push, strict=True)))


# ---------------- C29d: the median rule


@claim("C29d", "reinforce", extremes=False)
def c29d(name, draws, evidence):
    """With the std, a rare way among answers that all earn c gets (G-1)/sqrt(G) (P(R > c) -
    P(R < c)), nearly. So sizes do not count: it is a median rule.

    Source: the median rule (D). The std under noise: 2508.11800 (S, abstract)

    Measured: a way of share 1e-13 with five random rewards, with the 1e-4 in the formula. "left":
    what the 1e-4 changes.
    """
    for k, draw in enumerate(draws[:6]):
        G, c = 2 + k % 3, float(draw.randn(1))
        chances, rewards = draw.randn(5).softmax(0).tolist(), draw.randn(5).tolist()
        kinds = list(zip(chances, rewards, strict=True))
        outcomes = [Outcome(0, 1.0, c, 1), *(Outcome(1, p, R, 1) for p, R in kinds)]
        push = measure_push(name, World(G, outcomes, [1 - RARE, RARE]), "std")[1] / RARE
        sizes = [(p, R - c, abs(R - c) / math.sqrt(G) + EPS) for p, R in kinds]
        evidence.equal(sum(p * (1 - 1 / G) * d / size for p, d, size in sizes), push)
        signs = sum(p * math.copysign(1, d) for p, d, _ in sizes)
        evidence.record_left(push - (G - 1) / math.sqrt(G) * signs)


# ---------------- C30: the crumb


def by_counts(G: int, levels: Sequence[float]) -> Callable[..., Tensor]:
    """E[A | R = x] for each level x, as a function of the levels' chances: the std's A by how many
    of the G - 1 siblings have each level."""
    x = torch.tensor(levels, dtype=torch.float64)  # (levels,)
    some = torch.cartesian_prod(*[torch.arange(G)] * (len(x) - 1))
    some = some[some.sum(1) < G]
    others = torch.cat([some, G - 1 - some.sum(1, keepdim=True)], 1).double()  # (S, levels)
    group = others[:, None] + torch.eye(len(x))  # (S, own level, levels)
    mean = (group * x).sum(-1, keepdim=True) / G
    std = ((group * (x - mean) ** 2).sum(-1) / (G - 1)).sqrt()
    A = ((x - mean[..., 0]) / (std + EPS)).masked_fill(group.amax(-1) == G, 0.0)
    orders = math.lgamma(G) - torch.lgamma(others + 1).sum(1)

    def expect(chances: Tensor) -> Tensor:
        return (orders + torch.xlogy(others, chances).sum(1)).exp() @ A

    return expect


def escape(favour: Callable[[float], float]) -> float:
    """The share from which a rare way grows: where favour is 0. 0: from any; 1: from none."""
    low, high = 1e-12, 1 - 1e-12
    if favour(low) > 0 or favour(high) < 0:
        return float(favour(high) < 0)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if favour(middle) > 0 else (middle, high)
    return low


def crumb(G: int, share: float) -> World:
    """The usual way earns .1 surely. A rare one earns 1 with chance .45, and else nothing."""
    rare = [Outcome(1, 0.45, 1.0, 1), Outcome(1, 0.55, 0.0, 1)]
    return World(G, [Outcome(0, 1.0, 0.1, 1), *rare], [1 - share, share])


def crumb_threshold(G: int) -> float:
    expect = by_counts(G, (0.1, 1.0, 0.0))
    usual, rare = (torch.tensor(x, dtype=torch.float64) for x in ([1, 0, 0], [0, 0.45, 0.55]))
    return escape(lambda s: float((rare - usual) @ expect((1 - s) * usual + s * rare)))


def own_std(G: int, q: tuple[float, float], weight: float, share: float) -> float:
    """What favours the rare way if format and correctness are each divided by their own std and
    added, over share (1 - share), by C29a. The usual way has the format, the rare one has not.

    q: the chances of the usual and the rare way to be right.
    """
    right = factor(G, (1 - share) * q[0] + share * q[1], "std")
    return right * (q[1] - q[0]) - weight * factor(G, 1 - share, "std")


def measure_own_std(G: int, q: tuple[float, float], weight: float, share: float) -> float:
    """A loss is linear in A, so the components may be pushed one by one."""
    parts = [(weight, (0.0, 1.0)), (1.0, q[::-1])]  # chances of the rare and of the usual way
    worlds = [(w, binary_world(G, chances, share)) for w, chances in parts]
    push = sum(w * measure_push("reinforce", world, "std")[0] for w, world in worlds)
    return float(push) / (share * (1 - share))


@claim("C30", "reinforce", extremes=False)
def c30(name, draws, evidence):
    """A crumb can hold a policy for good. The usual way earns .1 surely, a rare one 1 with chance
    .45: with the std and G = 8 the rare one dies out below a share of .08. With the mean scale it
    always grows.

    Source: the crumb (D). Each part's own std: GDPO 2601.05242 (S, abstract)

    Measured: the push on the rare way, which is 0 at the std's threshold, with the mean scale, and
    with each part's own std. The batch's std of identical prompts is that of a larger group (C29a).
    """
    rows: dict[str, list[float]] = {}
    for G in (2, 4, 8, 16):
        found = {
            "std": crumb_threshold(G),
            "batch's std, 32 groups of this prompt": crumb_threshold(32 * G),
            "each part's own std": escape(lambda share, G=G: own_std(G, (0, 0.45), 0.1, share)),
        }
        for row, share in found.items():
            rows.setdefault(row, []).append(share)
        if found["std"] < 1:
            evidence.equal(0, measure_push(name, crumb(G, found["std"]), "std")[1])
        for share in (RARE, 0.5):
            mean = measure_push(name, crumb(G, share), "mean")[1] / (share * (1 - share))
            evidence.equal((1 - 1 / G) * (0.45 - 0.1), mean)
            for case in ((0.0, 0.45), 0.1), ((0.3, 0.9), 0.5):
                evidence.equal(own_std(G, *case, share), measure_own_std(G, *case, share))
    refused = escape(lambda share: own_std(8, (0.3, 0.9), 0.5, share))
    for row, shares in rows.items():
        evidence.rows.append([row, *("never" if s == 1 else f"{s:.4f}" for s in shares)])
    last = "the same; format weighs .5, right .3 and .9"
    evidence.rows.append([last, "", "", f"{refused:.4f}", ""])


@claim("C30b", "reinforce", extremes=False)
def c30b(name, draws, evidence):
    """The std refuses much only where prompts are hard and the bonus is small: up to .40 of J at
    best, and nothing if the bonus weighs as much as half of being right.

    Source: the crumb (D)

    Measured: at G = 8 and a share of 1e-13 the push is 0 where the gain is that of the table. The
    usual way has the format, and is right with chance q0. The rare one never has it.
    """
    for weight in (0.1, 0.2, 0.5):
        row = []
        for q0 in (0.0, 0.05, 0.1, 0.2, 0.3):
            usual = torch.tensor([0, 0, 1 - q0, q0], dtype=torch.float64)
            wrong, right, *_ = by_counts(8, (0.0, 1.0, weight, 1 + weight))(usual).tolist()
            q1 = wrong / (wrong - right)  # the rare way's chance to be right
            outcomes = [Outcome(0, 1 - q0, weight, 1), Outcome(0, q0, 1 + weight, 1)]
            outcomes += [Outcome(1, q1, 1.0, 1), Outcome(1, 1 - q1, 0.0, 1)]
            world = World(8, outcomes, [1 - RARE, RARE])
            evidence.equal(0, measure_push(name, world, "std")[1] / RARE)
            row.append(max(0.0, q1 - q0 - weight))  # 0: what it refuses would lose
        evidence.rows.append([f"weight {weight}", *row])
