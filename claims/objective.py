"""C29 and C30: what an update ascends on-policy, if all answers have one divisor.

The expected update is a field of arrows over policies. If it is the gradient of something, training
climbs that. If not, there is nothing that training as a whole makes larger.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import fmean, stdev

import torch

import losses
from claims.choice import binary_world, factor, measure_push
from claims.evidence import ascent, claim
from toy.worlds import Outcome, World

EPS = 1e-4  # what group_advantages adds to the std
RARE = 1e-13  # a share that is as good as none

# ---------------- C29a: rewards 0 and 1


@claim("C29a", "group_advantages", extremes=False)
def c29a(name, draws, evidence):
    """With rewards 0 and 1 the expected update is K(p) grad p, so it climbs the integral of K. K is
    what being right is worth, E[A(right) - A(wrong)] over the siblings.

    Source: what a group's update ascends (D). The frame: 2510.13651, 2510.23049 (S, abstracts).
    maxrl: 2602.02710 (S)

    Measured: the push on two noisy ways, G = 2 to 6 and 8. For "batch": two groups that answer one
    question. The table has the formula's K.
    """
    for (k, draw), scale in itertools.product(enumerate(draws[:6]), ("mean", "std", "maxrl")):
        q, share = tuple(draw.randn(2).sigmoid().tolist()), float(draw.randn(1).sigmoid())
        world = binary_world((2, 3, 4, 5, 6, 8)[k], q, share)
        p = share * q[0] + (1 - share) * q[1]
        predicted = factor(world.G, p, scale) * share * (1 - share) * (q[0] - q[1])
        evidence.equal(predicted, measure_push("reinforce", world, scale)[0])
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


def pass_at(k: int, G: int) -> list[float]:
    """c_m for m = 1 to G - 1 right answers in a group: the zero-sum rule that trains pass@k."""
    ways = [(math.comb(G - 1 - k, m - 1), math.comb(G - 2, m - 1)) for m in range(1, G)]
    return [k / (G - 1) * some / all_ for some, all_ in ways]


def measure_K(name: str, c: list[float], p: float) -> float:
    """Of the rule that gives (G - m) c_m to right and -m c_m to wrong answers, if m are right."""
    G = len(c) + 1
    world = binary_world(G, (1.0, 0.0), p)
    logits = world.logits()
    batch = world.expected_batch(logits, "mean")  # 1 - m/G and -m/G
    right = world.rewards.view(-1, G).sum(1).long()  # (groups,)
    factors = G * torch.tensor([0.0, *c, 0.0], dtype=torch.float64)[right]
    batch = replace(batch, adv=batch.adv * factors.repeat_interleave(G)[:, None])
    return float(ascent(getattr(losses, name)(batch), logits)[0]) / (p * (1 - p))


@claim("C29b", "reinforce", extremes=False)
def c29b(name, draws, evidence):
    """If the advantages of every group sum to 0, K is a polynomial of degree at most G - 2, and
    each of these has one such rule. So they train pass@k without bias for k < G, and never pass@G.

    Source: the price of cancelling (D; we know of no other text that says "never"). Estimators of
    pass@k: PKPO 2505.15201, MaxPO 2606.06080 (S, abstracts)

    Measured: at G = 2 to 6 and G chances p, K of the rule for each pass@k; and of a random rule the
    difference of order G - 1 over evenly spaced p, which is 0 for a polynomial of a lower degree.
    "left": this difference for the K of pass@G.
    """
    for G in range(2, 7):
        chances = [k / (G + 1) for k in range(1, G + 1)]

        def difference(K: list[float], G=G) -> float:
            return sum((-1) ** j * math.comb(G - 1, j) * x for j, x in enumerate(K))

        for k in range(1, G):
            K = [measure_K(name, pass_at(k, G), p) for p in chances]
            evidence.equal([k * (1 - p) ** (k - 1) for p in chances], K, what=f"pass@{k}")
        c = draws[G % len(draws)].randn(G - 1).tolist()
        evidence.equal(0, difference([measure_K(name, c, p) for p in chances]), what="the degree")
        evidence.record_left(difference([G * (1 - p) ** (G - 1) for p in chances]))


# ---------------- C29c: rewards of three levels


def compare(x: float, others: tuple[float, ...], scale: str) -> float:
    """The advantage of the reward x among its siblings', in plain numbers."""
    group = [x, *others]
    if max(group) == min(group):
        return 0.0
    mean = fmean(group)
    return (x - mean) / {"mean": 1.0, "std": stdev(group) + EPS, "maxrl": mean}[scale]


def cycle(levels: list[float], S: tuple[float, ...], scale: str) -> float:
    """D(x,y|S) + D(y,z|S) + D(z,x|S) with D(x,y|S) = A(x; y,S) - A(y; x,S)."""
    pairs = zip(levels, [*levels[1:], levels[0]], strict=True)
    return sum(compare(a, (b, *S), scale) - compare(b, (a, *S), scale) for a, b in pairs)


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


@claim("C29c", "reinforce", extremes=False)
def c29c(name, draws, evidence):
    """For sure rewards a rule climbs something for every policy exactly if A is a score of the
    group minus a function of the siblings. R minus the mean is that. Divided by the group's std it
    is not, once there are three levels.

    Source: what a group's update ascends (D; we know of no other text that says so of the std).
    2510.13651 and, for G = 2, 2502.18548 (S, abstracts)

    Measured: the curl of the expected update on three ways, for G = 2 to 4 and three scales: 0 for
    the mean scale alone. "left": the curl over (G-1) pi_1 pi_2 pi_3 for the others.
    """
    scales = ("mean", "std", "maxrl")
    for scale, (k, draw) in itertools.product(scales, enumerate(draws[:3])):
        G, levels = 2 + k, sorted(draw.randn(3).sigmoid().tolist())
        pi = draw.randn(3).softmax(0).tolist()
        world = World(G, [Outcome(way, 1.0, x, 1) for way, x in enumerate(levels)], pi)
        mean = 0.0  # of the cycle, over G - 2 siblings
        for S in itertools.product(range(3), repeat=G - 2):
            chance = math.prod(pi[s] for s in S)
            mean += chance * cycle(levels, tuple(levels[s] for s in S), scale)
        evidence.equal((G - 1) * math.prod(pi) * mean, curl(name, world, scale))
        if scale == "mean":
            evidence.equal(0, mean)
        else:
            evidence.record_left(mean)


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

STD = {4: 0.2411, 8: 0.0795, 16: 0.0338}  # by G: the share from which the rare way grows
OWN_STD = 0.1190  # the same for a format that weighs .5, ways right with .3 and .9, and G = 8


def push_rare(name: str, G: int, share: float, scale: str) -> float:
    """The usual way earns .1 surely. A rare one earns 1 with chance .45, and else nothing."""
    rare = [Outcome(1, 0.45, 1.0, 1), Outcome(1, 0.55, 0.0, 1)]
    world = World(G, [Outcome(0, 1.0, 0.1, 1), *rare], [1 - share, share])
    return float(measure_push(name, world, scale)[1]) / (share * (1 - share))


def push_by_parts(
    name: str, G: int, share: float, weight: float, usual: float, rare: float
) -> float:
    """On the rare way, if format and correctness are each divided by their own std, and added.

    The usual way has the format, the rare one has not; then the chances to be right. A loss is
    linear in A, so the parts may be pushed one by one.
    """
    parts = (weight, (0.0, 1.0)), (1.0, (rare, usual))  # chances of the rare and the usual way
    worlds = [(w, binary_world(G, chances, share)) for w, chances in parts]
    return sum(w * float(measure_push(name, world, "std")[0]) for w, world in worlds)


@claim("C30", "reinforce", extremes=False)
def c30(name, draws, evidence):
    """A crumb can hold a policy for good. The usual way earns .1 surely, a rare one 1 with chance
    .45: with the std and G = 8 the rare one dies out below a share of .08. With the mean scale it
    always grows.

    Source: the crumb (D). Each part's own std: GDPO 2601.05242 (S, abstract)

    Measured: the push on the rare way with the mean scale; with the std, just below and just above
    .2411, .0795 and .0338 at G = 4, 8 and 16 (at G = 2 it never grows); with each part's own std,
    where it always grows, but only from .1190 on if the format weighs .5, and the ways are right
    with chance .3 and .9.
    """
    for G, share in itertools.product((2, 4, 8, 16), (RARE, 0.5, 0.99)):
        evidence.equal((1 - 1 / G) * (0.45 - 0.1), push_rare(name, G, share, "mean"))
        evidence.equal(True, push_by_parts(name, G, share, 0.1, 0.0, 0.45) > 0, what="own std")
        if G == 2:
            evidence.equal(True, push_rare(name, G, share, "std") < 0, what="pairs")
    for side in (-5e-5, 5e-5):
        for G, share in STD.items():
            grows = push_rare(name, G, share + side, "std") > 0
            evidence.equal(side > 0, grows, what=f"whether it grows at G = {G}")
        grows = push_by_parts(name, 8, OWN_STD + side, 0.5, 0.3, 0.9) > 0
        evidence.equal(side > 0, grows, what="whether it grows with each part's own std")


def advantage_among(usual: list[tuple[float, float]], R: float) -> float:
    """The std's mean advantage of the reward R among 7 answers of a way that earns two rewards,
    each (chance, reward)."""
    (p, low), (q, high) = usual
    groups = (
        (math.comb(7, j) * p ** (7 - j) * q**j, (low,) * (7 - j) + (high,) * j) for j in range(8)
    )
    return sum(chance * compare(R, others, "std") for chance, others in groups)


@claim("C30b", "reinforce", extremes=False)
def c30b(name, draws, evidence):
    """The std refuses much only where prompts are hard and the bonus is small: up to .40 of J at
    best, and nothing if the bonus weighs as much as half of being right.

    Source: the crumb (D)

    Measured: at G = 8 and a share of 1e-13, the push on a rare way without the format that is
    always or never right; the usual way has it, and is right with chance q0. Between the two the
    push is linear, so it is 0 at a chance q1, and the table has q1 - q0 - the format's weight.
    """
    for weight in (0.1, 0.2, 0.5):
        row = []
        for q0 in (0.0, 0.05, 0.1, 0.2, 0.3):
            usual, pushes = [(1 - q0, weight), (q0, 1 + weight)], []
            outcomes = [Outcome(0, *end, 1) for end in usual]
            for R in (0.0, 1.0):
                world = World(8, [*outcomes, Outcome(1, 1.0, R, 1)], [1 - RARE, RARE])
                pushes.append(float(measure_push(name, world, "std")[1]) / RARE)
                evidence.equal(advantage_among(usual, R), pushes[-1])
            wrong, right = pushes
            row.append(max(0.0, wrong / (wrong - right) - q0 - weight))  # 0: it would lose
        evidence.equal(weight < 0.5, max(row) > 0, what="whether it refuses a gain")
        evidence.rows.append([f"weight {weight}", *row])
