"""C22, C27 and C28: a baseline at every prefix, what it moves, and what it does to the noise.

A prefix is the prompt and what an answer has said so far. The visitors of a prefix are the
answers of the group that take a token there. `prefix_baseline` compares the push of each visitor
with that of the others. C22 says when this moves no expected update, C27 what it does to the noise,
and C28 why that is little at a token that the whole group shares.

Every group of answers is enumerated, with the probability that the old policy gives it. The policy
there is a table: each prefix has logits of its own. What holds for their gradients holds for every
parametrisation, by the chain rule.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import losses
from claims.evidence import TOLERANCE, Draw, ascent, claim, pushes_of
from claims.formulas import DFPO, UNCLIPPED, fitting
from toy.worlds import Groups, Outcome, Toy

toy_of = cache(Toy)  # one toy for all methods


def toys_of(draws: list[Draw]) -> list[Toy]:
    """Some toys, in groups of 2, 3 and 4."""
    return [toy_of(draw.seed, G) for draw, G in zip(draws[::2], (2, 3, 4) * 4, strict=False)]


# ---------------- C22: a baseline at every prefix moves no expected update

# With a fixed baseline the coefficient of an answer is made of that answer alone, or it is not.
OWN = ("reinforce", "grpo", "grpo_symmetric", "dr_grpo", "gspo")
OWN += ("cispo", "pos_only")  # their divisor, the number of tokens, is a constant here


@claim("C22", "prefix_baseline")
def c22(name, draws, evidence):
    """After `prefix_baseline` the pushes of any loss sum to 0, in every batch, at every token that
    all visitors of its prefix take, if there are two or more.

    Source: leave-one-out baselines that depend on the state (Williams 1992; VIMCO; RLOO; VinePPO;
    GiGPO 2505.10978; Leave-Two-Out 2606.06080), here after the clip. We know of no text that says
    that cancelling is that (D, ours)

    Measured: the sums, for a loss with random coefficients on random trees off-policy; and that the
    loss keeps its value.
    """
    for draw in draws:
        batch, k = draw.batch(0.6), draw.randn(*draw.mask.shape)
        loss = -(k * batch.logp)[draw.mask].sum() / draw.N
        compared = losses.prefix_baseline(loss, batch, draw.nodes)
        evidence.equal(loss, compared, what="the loss's value")
        c = pushes_of(compared, batch)
        visitors = Counter()  # of each prefix
        for (p, y), at in draw.tree.items():
            visitors[p, y[:-1]] += len(at)
        for (p, y), at in draw.tree.items():
            if 1 < len(at) == visitors[p, y[:-1]]:  # they all take this token
                left = c[tuple(zip(*at, strict=True))]
                evidence.equal(0, left.sum() / (1 + left.abs().sum()), what="what is left")


def expected_updates(loss_fn: Callable, toy: Toy, off_policy: bool, scale: str) -> list[Tensor]:
    """Without `prefix_baseline` and with it. (V, D) both."""
    batch = toy.batch(off_policy, scale=scale)
    loss = loss_fn(batch)
    compared = losses.prefix_baseline(loss, batch, toy.groups.nodes)
    return [ascent(x, toy.policy.W) for x in (loss, compared)]


@claim(
    "C22b",
    *OWN,
    *DFPO,
    only_if="c_i is made of answer i alone, and the baseline of A is a fixed number",
)
def c22b(name, draws, evidence):
    """`prefix_baseline` does not move the expected update of a loss that judges each answer alone,
    with A_i = R_i - b and a fixed b.

    Source: E_old[r grad log pi(a|h)] = 0, as for every baseline (Williams 1992); D for c after the
    clip; setting: C22

    Measured: the update with it and without, over all groups of 2, 3 and 4 answers of 12 toys,
    on-policy and off-policy. "left": by how much it moves the update of methods that look at the
    group.
    """
    loss_fn = getattr(losses, name)
    loss_fn = partial(loss_fn, **fitting(loss_fn))
    for off_policy, toy in itertools.product((False, True), toys_of(draws)):
        before, after = expected_updates(loss_fn, toy, off_policy, "exact")
        if name in OWN:
            evidence.equal(before, after)
        else:
            evidence.record_left((after - before).norm() / before.norm())


def leak(toy: Toy, off_policy: bool) -> Tensor:
    """C22c's sum over prefixes for w/r = 1/T, in loops over the answers. (V, D)."""
    G, total = toy.groups.G, torch.zeros_like(toy.exact)
    sampler = toy.old if off_policy else toy.policy
    rewards = dict(zip(toy.rows, toy.groups.rewards.tolist(), strict=True))
    answers = dict(sampler.answers(()))
    for h in {y[:t] for y in answers for t in range(len(y))}:
        visits = {y: q for y, q in answers.items() if len(y) > len(h) and y[: len(h)] == h}
        P, w_over_r, earned = sum(visits.values()), 0.0, 0.0
        r = toy.policy.probs(h) / sampler.probs(h)
        for y, q in visits.items():
            a = y[len(h)]
            w_over_r += q / P / len(y)
            earned += q / P * rewards[y] * r[a] * toy.policy.grad_log_prob(h, a)
        total += P / G * (1 - (1 - P) ** (G - 1)) * w_over_r * earned
    return total


@claim(
    "C22c",
    "prefix_baseline",
    only_if="A is R minus the group's mean, and the weight of A knows no reward",
)
def c22c(name, draws, evidence):
    """With the group's mean as baseline, `prefix_baseline` does move the expected update: by
    (P/G) (1 - (1-P)^(G-1)) E_old[w/r|h] sum_a grad pi(a|h) Q_old(h,a) at each prefix.

    Source: the leak of the group's mean (D, ours); setting: C22b

    Measured: the change of the update over all groups of 2 to 4 answers of 12 toys, on-policy and
    off-policy, for grpo without a clip (w/r = 1/T_i). "left": by how much the change differs with
    the min, off-policy, where the weight looks at the reward.
    """
    unclipped = partial(losses.grpo, **UNCLIPPED)
    for toy, off_policy in itertools.product(toys_of(draws), (False, True)):
        predicted = leak(toy, off_policy)
        before, after = expected_updates(unclipped, toy, off_policy, "mean")
        evidence.equal(predicted, after - before)
        if off_policy:
            before, after = expected_updates(losses.grpo, toy, off_policy, "mean")
            evidence.record_left((after - before - predicted).norm() / predicted.norm())


# ---------------- C27: what a baseline at every prefix does to the noise


def compare_noise(outcomes: list[Outcome], n: int, logits, logits_old, b: float) -> Tensor:
    """The noise with `prefix_baseline` over that without, under grpo without a clip, if n answers
    take a way each, which is learnt, and then end somehow."""
    groups = Groups(outcomes, n)
    logp, logp_old = torch.zeros(2, *groups.mask.shape, dtype=torch.float64)
    logp[:, 0] = logits.log_softmax(0)[groups.way]
    logp_old[:, 0] = logits_old.log_softmax(0)[groups.way]
    adv = (groups.rewards - b)[:, None].expand(logp.shape)
    batch = losses.Batch(logp.requires_grad_(), logp_old, adv, groups.mask, n, logp.shape[1])
    loss = losses.grpo(batch, **UNCLIPPED)
    scores = one_hot(groups.way) - logits.softmax(0)  # grad log pi of the way, in its logits
    odds, noise = groups.probabilities(logp_old), []
    for x in (loss, losses.prefix_baseline(loss, batch, groups.nodes)):
        updates = (pushes_of(x, batch)[:, :1] * scores).view(-1, n, len(logits)).sum(1)
        noise.append(odds @ updates.square().sum(1) - (odds @ updates).square().sum())
    return noise[1] / noise[0]


@claim(
    "C27", "prefix_baseline", only_if="the token earns nothing, and c/r is iid over its visitors"
)
def c27(name, draws, evidence):
    """`prefix_baseline` multiplies the noise of n visitors by (1 - t) n/(n-1), which pays only if t
    is above 1/n. Here t = mu^2/(mu^2 + V), mu and V being the mean and the variance of c/r at the
    prefix.

    Source: the law of the noise (D, ours)

    Measured: the noise with it over that without, for a choice over all groups of 2 to 5 visitors
    with random rewards and lengths, off-policy, with grpo unclipped. "left": the law's error where
    one of the ways earns more. The table is on-policy, with rewards 0 and 1.
    """
    for j, draw in enumerate(draws[::2]):
        ways, n, b = 2 + j % 2, 2 + j // 2 % 4, float(draw.randn(1))
        logits = draw.randn(2, ways)  # now, before
        chances, rewards = draw.randn(2).softmax(0), draw.randn(2)
        lengths = torch.randint(1, 9, (2,), generator=draw.generator)
        c_over_r = (rewards - b) / lengths
        t = (chances @ c_over_r) ** 2 / (chances @ c_over_r**2)
        ends = [*zip(chances.tolist(), rewards.tolist(), lengths.tolist(), strict=True)]
        for earns in (0, 1):
            outcomes = [
                Outcome(way, p, R + earns * way, T) for way in range(ways) for p, R, T in ends
            ]
            measured, law = compare_noise(outcomes, n, *logits, b), (1 - t) * n / (n - 1)
            if earns:
                evidence.record_left(measured - law)
            else:
                evidence.equal(law, measured)
    for title, chance, *ways in (
        ("earns nothing; right .9", 0.5, 0.9, 0.9),
        ("earns nothing; right .7", 0.5, 0.7, 0.7),
        ("an even choice; right .95, .85", 0.5, 0.95, 0.85),
        ("a good way, taken with .1; right .9, else .1", 0.1, 0.9, 0.1),
    ):
        shares = torch.tensor([chance, 1 - chance], dtype=torch.float64)
        outcomes = [
            Outcome(w, p, R, 1) for w, q in enumerate(ways) for p, R in ((q, 1), (1 - q, 0))
        ]
        mu = float(shares @ torch.tensor(ways).double()) - 0.5
        t = mu**2 / 0.25  # R - b is 1/2 or -1/2
        measured = compare_noise(outcomes, 4, shares.log(), shares.log(), 0.5)
        evidence.rows.append([title, t, (1 - t) * 4 / 3, float(measured)])


# ---------------- C28: a token that the whole group shares


@claim(
    "C28",
    "prefix_baseline",
    only_if="the token earns nothing, E[R] = b at the prefix, and 0 < m <= w <= M",
)
def c28(name, draws, evidence):
    """With c = w (R - b) a baseline at a token that the whole group shares takes at most the share
    ((M - m)/(M + m))^2 off its noise, and pays G/(G-1): it can pay only if
    M/m > (sqrt G + 1)/(sqrt G - 1), which is 2.09 at G = 8 and 3 at G = 4.

    Source: a bound on C27's t (D, ours)

    Measured: t over all groups of 2 to 4 answers with random rewards and lengths (w = 1/T, b = E R)
    is within the bound. It is the bound for the table's worlds: right with chance M/(M+m) and the
    weight M, else wrong with m. "left": how t changes with b.
    """
    even = torch.zeros(2, 2, dtype=torch.float64)  # logits of two ways, now and before

    def measure_t(ends: list[tuple], n: int, b: float) -> Tensor:
        outcomes = [Outcome(way, *end) for way in (0, 1) for end in ends]
        return 1 - compare_noise(outcomes, n, *even, b) * (n - 1) / n

    for j, draw in enumerate(draws[::2]):
        n, chances, R = 2 + j % 3, draw.randn(3).softmax(0), draw.randn(3)
        T = torch.randint(1, 9, (3,), generator=draw.generator)
        ends, b = [*zip(chances.tolist(), R.tolist(), T.tolist(), strict=True)], float(chances @ R)
        t, most = measure_t(ends, n, b), float((T.max() - T.min()) / (T.max() + T.min())) ** 2
        evidence.equal(True, bool(t <= most + TOLERANCE), what="whether t is within the bound")
        evidence.record_left(measure_t(ends, n, b + 1) - t)
    for short, long in ((2, 3), (1, 2), (1, 3), (1, 6)):
        q, most = long / (short + long), ((long - short) / (long + short)) ** 2
        row = [f"{long / short:g}", most]
        for n in (4, 8):
            t = measure_t([(q, 1.0, short), (1 - q, 0.0, long)], n, q)
            evidence.equal(most, t, what="t where the bound is sharp")
            row.append(float(1 - t) * n / (n - 1))
        evidence.rows.append(row)
