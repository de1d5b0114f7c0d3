"""C22 and C27: a prefix baseline, what it moves, and what it does to the noise.

A prefix is the prompt and the answer so far. The visitors of a prefix are the answers of the group
that take a token there. `prefix_baseline` compares the push of each visitor with the pushes of the
others. C22 says when pushes then cancel and when the expected update stays, and C27 what happens to
the noise.

Every group of answers is enumerated, with the probability that the old policy gives it. The policy
is a table: each prefix has logits of its own. What holds for their gradients holds for every
parametrisation, by the chain rule.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import losses
from claims.choice import binary_world
from claims.evidence import Draw, claim, pushes_of
from claims.formulas import DFPO, UNCLIPPED, fitting
from toy.worlds import Groups, Outcome, Toy


def toys_of(draws: list[Draw]) -> list[Toy]:
    """Some random worlds, in groups of 2, 3 and 4."""
    return [Toy(draw.seed, G) for draw, G in zip(draws[::2], (2, 3, 4) * 4, strict=False)]


# ---------------- C22: a prefix baseline, and when it moves no expected update

# The losses whose pushes depend on their own answer only, if the baseline of A is fixed.
OWN = ("reinforce", "grpo", "grpo_symmetric", "dr_grpo", "gspo")
OWN += ("cispo", "pos_only")  # their divisor, the number of tokens, is a constant here


@claim("C22", "prefix_baseline")
def c22(name, draws, evidence):
    """After `prefix_baseline` the pushes of any loss sum to 0 in every batch, at every token that
    all visitors of its prefix take, if there are two or more visitors.

    Source: leave-one-out baselines that depend on the state (Williams 1992; VIMCO; RLOO; VinePPO;
    GiGPO 2505.10978; Leave-Two-Out 2606.06080), here applied after the clip. We know of no text
    that reads cancelling as such a baseline (D, ours)

    Measured: the sums, for a loss with random pushes on random trees off-policy; and that the loss
    keeps its value.
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
                pushes = c[tuple(zip(*at, strict=True))]
                net = pushes.sum() / (1 + pushes.abs().sum())
                evidence.equal(0, net, what="the net push")


def expected_updates(loss: Callable, toy: Toy, off_policy: bool, scale: str) -> list[Tensor]:
    """Without `prefix_baseline` and with it. (V, D) both."""
    return [toy.expected_update(loss, off_policy, scale, x) for x in (False, True)]


@claim(
    "C22b",
    *OWN,
    *DFPO,
    only_if="c_i depends on answer i only, the baseline of A is fixed, and the old policy can draw "
    "every token",
)
def c22b(name, draws, evidence):
    """`prefix_baseline` does not move the expected update of a loss that judges each answer alone,
    if A_i = R_i - b with a fixed b and the old policy can draw every token.

    Source: E_old[r grad log pi(a|h)] = 0, as for every baseline (Williams 1992); D for c after the
    clip; setting: C22

    Measured: the update with the baseline and without it, over all groups of 2, 3 and 4 answers in
    12 random worlds, on-policy and off-policy. "otherwise": how far it moves the update of methods
    whose pushes depend on the group.
    """
    for off_policy, toy in itertools.product((False, True), toys_of(draws)):
        before, after = expected_updates(fitting(name), toy, off_policy, "exact")
        if name in OWN:
            evidence.equal(before, after)
        else:
            evidence.record_otherwise((after - before).norm() / before.norm())


def leak(toy: Toy, off_policy: bool) -> Tensor:
    """C22c's sum over prefixes for w/r = 1/T, in loops over the answers. (V, D)."""
    G, total = toy.groups.G, torch.zeros_like(toy.exact)
    sampler = toy.old if off_policy else toy.policy
    rewards = dict(zip(toy.rows, toy.groups.rewards.tolist(), strict=True))
    for h in ((), (1,), (2,)):  # the prefixes at which a token is chosen
        t = len(h)
        visits = [(y, q) for y, q in sampler.answers(()) if len(y) > t and y[:t] == h]
        P = sum(q for _, q in visits)
        w_over_r = sum(q / len(y) for y, q in visits) / P
        r = toy.policy.probs(h) / sampler.probs(h)
        scores = [x * toy.policy.grad_log_prob(h, a) for a, x in enumerate(r)]
        earned = sum(q * rewards[y] * scores[y[t]] for y, q in visits) / P
        total += P / G * (1 - (1 - P) ** (G - 1)) * w_over_r * earned
    return total


@claim(
    "C22c",
    "prefix_baseline",
    only_if="A is R minus the group's mean, and the weight of A does not depend on the reward",
)
def c22c(name, draws, evidence):
    """If A subtracts the group's mean, `prefix_baseline` does move the expected update: by (P/G) (1
    - (1-P)^(G-1)) E_old[w/r|h] sum_a grad pi(a|h) Q_old(h,a) at each prefix.

    Source: the leak of the group's mean (D, ours); setting: C22b

    Measured: the change of the update over all groups of 2 to 4 answers in 12 random worlds,
    on-policy and off-policy, for grpo without a clip (w/r = 1/T_i). "otherwise": how far the change
    differs with PPO's clip off-policy, where the weight depends on the reward.
    """
    unclipped = partial(losses.grpo, **UNCLIPPED)
    for toy, off_policy in itertools.product(toys_of(draws), (False, True)):
        predicted = leak(toy, off_policy)
        before, after = expected_updates(unclipped, toy, off_policy, "mean")
        evidence.equal(predicted, after - before)
        if off_policy:
            before, after = expected_updates(losses.grpo, toy, off_policy, "mean")
            evidence.record_otherwise((after - before - predicted).norm() / predicted.norm())


# ---------------- C27: what a prefix baseline does to the noise


def compare_noise(outcomes: list[Outcome], n: int, logits: Tensor, logits_old: Tensor) -> Tensor:
    """The noise with `prefix_baseline` over the noise without it, if each of n answers takes a
    strategy, which is learned, and then an end. The loss is grpo without a clip, with A = R.
    """
    groups = Groups([outcomes], n)
    logp, logp_old = torch.zeros(2, *groups.mask.shape, dtype=torch.float64)
    logp[:, 0] = logits.log_softmax(0)[groups.way]
    logp_old[:, 0] = logits_old.log_softmax(0)[groups.way]
    adv = groups.rewards[:, None].expand(logp.shape)
    batch = losses.Batch(logp.requires_grad_(), logp_old, adv, groups.mask, n, logp.shape[1])
    loss = losses.grpo(batch, **UNCLIPPED)
    scores = one_hot(groups.way) - logits.softmax(0)  # grad log pi of the strategy, in its logits
    odds, noise = groups.probabilities(logp_old), []
    for x in (loss, losses.prefix_baseline(loss, batch, groups.nodes)):
        updates = (pushes_of(x, batch)[:, :1] * scores).view(-1, n, len(logits)).sum(1)
        noise.append(odds @ updates.square().sum(1) - (odds @ updates).square().sum())
    return noise[1] / noise[0]


@claim(
    "C27",
    "prefix_baseline",
    only_if="the token earns nothing, and c/r is iid over its visitors",
)
def c27(name, draws, evidence):
    """At a token that earns nothing, `prefix_baseline` multiplies the noise of n visitors by (1 -
    t) n/(n-1), so it lowers the noise only if t is above 1/n. Here t = mu^2/(mu^2 + V), where mu
    and V are the mean and the variance of c/r at the prefix.

    Source: the law of the noise (D, ours)

    Measured: the noise with the baseline over the noise without it, for three strategies, over all
    groups of 2 to 5 visitors with random advantages and lengths, off-policy, with grpo unclipped.
    "otherwise": the law's error where one of the strategies earns more. The table is on-policy,
    with rewards 0 and 1.
    """
    for j, draw in enumerate(draws[::2]):
        n, logits = 2 + j % 4, draw.randn(2, 3)  # now, before
        chance, A = draw.randn(2).softmax(0), draw.randn(2)
        T = torch.randint(1, 9, (2,), generator=draw.generator)
        t = (chance @ (A / T)) ** 2 / (chance @ (A / T) ** 2)
        law, ends = (1 - t) * n / (n - 1), [*zip(chance, A, T, strict=True)]
        outcomes = [Outcome(way, *end) for way in range(3) for end in ends]
        evidence.equal(law, compare_noise(outcomes, n, *logits))
        earning = [o._replace(reward=o.reward + o.way) for o in outcomes]
        evidence.record_otherwise(compare_noise(earning, n, *logits) - law)
    for title, share, *right in (
        ("earns nothing; right 0.9", 0.5, 0.9, 0.9),
        ("earns nothing; right 0.7", 0.5, 0.7, 0.7),
        ("an even choice; right 0.95, 0.85", 0.5, 0.95, 0.85),
        ("good strategy, taken with 0.1; right 0.9, other 0.1", 0.1, 0.9, 0.1),
    ):
        world = binary_world(4, right, share)
        outcomes = [o._replace(reward=o.reward - 0.5) for o in world.outcomes]
        measured = compare_noise(outcomes, 4, world.logits(), world.logits())
        t = 4 * (share * right[0] + (1 - share) * right[1] - 0.5) ** 2
        evidence.rows.append([title, t, (1 - t) * 4 / 3, float(measured)])
