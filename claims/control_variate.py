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

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import losses
from claims.evidence import claim, equal
from claims.formulas import UNCLIPPED, fitting
from toy.worlds import Groups, Outcome, Toy, way_log_probs

# ---------------- C22: a prefix baseline, and when it moves no expected update

# The losses whose pushes depend on their own answer only, if the baseline of A is fixed.
OWN = ("reinforce", "grpo", "grpo_symmetric", "dr_grpo", "gspo")
OWN += ("cispo", "pos_only")  # their divisor, the number of tokens, is a constant here


@claim("C22", "prefix_baseline")
def c22(name, tree):
    """After `prefix_baseline` the pushes of any loss sum to 0 in every batch, at every token that
    all visitors of its prefix take, if there are two or more visitors.

    Source: leave-one-out baselines that depend on the state (Williams 1992; VIMCO; RLOO; VinePPO;
    GiGPO 2505.10978; Leave-Two-Out 2606.06080), here applied after the clip. We know of no text
    that reads cancelling as such a baseline (D, ours)
    """
    batch, k = tree.batch(0.6), tree.randn(*tree.mask.shape)
    loss = -(k * batch.logp)[tree.mask].sum() / tree.N
    compared = losses.prefix_baseline(loss, batch, tree.nodes)
    equal(loss, compared, "the loss's value")
    c, r = losses.token_pushes(compared, batch.logp), tree.log_ratio(0.6).exp()
    visitors = defaultdict(list)  # of each prefix
    for (p, y), visits in tree.visits.items():
        visitors[p, y[:-1]] += visits
    for visits in visitors.values():
        at, n = tuple(zip(*visits, strict=True)), len(visits)
        x = (k / r)[at]
        mean_of_others = (x.sum() - x) / max(1, n - 1)  # 0 if there is no other
        equal(k[at] - r[at] * mean_of_others, c[at], "a push")
        if n > 1 and len(tree.nodes[at].unique()) == 1:  # they all take one token
            equal(0, c[at].sum() / (1 + c[at].abs().sum()), "the net push")


@claim("C22b", *OWN, "dfpo_min")
def c22b(name, tree):
    """`prefix_baseline` does not move the expected update of a loss that judges each answer alone,
    if A_i = R_i - b with a fixed b and the old policy can draw every token. Off-policy it moves the
    update of dfpo-min, whose weights depend on the group (not measured).

    Source: E_old[r grad log pi(a|h)] = 0, as for every baseline (Williams 1992); D for c after the
    clip; setting: C22
    """
    toy = Toy(tree.seed, 2 + tree.N % 3)
    for off_policy in (False, True):
        before, after = (
            toy.expected_update(fitting(name), off_policy, "exact", prefix_baseline=x)
            for x in (False, True)
        )
        if name in OWN or not off_policy:
            equal(before, after, "the expected update")


# ---------------- C27: what a prefix baseline does to the noise


def compare_noise(outcomes: list[Outcome], n: int, logits: Tensor, logits_old: Tensor) -> Tensor:
    """The noise with `prefix_baseline` over the noise without it, if each of n answers takes a
    strategy, which is learned, and then an end. The loss is grpo without a clip, with A = R.
    """
    groups = Groups([outcomes], n)
    logp, logp_old = (way_log_probs(groups, x[None]) for x in (logits, logits_old))
    batch, counts = groups.batch(logp_old, "mean")
    adv = groups.rewards[:, None].expand_as(logp)
    batch = replace(batch, logp=logp.requires_grad_(), adv=adv)
    loss = losses.grpo(batch, **UNCLIPPED)
    scores = one_hot(groups.way) - logits.softmax(0)  # grad log pi of the strategy, in its logits
    odds, noise = n * counts[::n], []
    for x in (loss, losses.prefix_baseline(loss, batch, groups.nodes)):
        updates = (
            (losses.token_pushes(x, batch.logp)[:, :1] * scores).view(-1, n, len(logits)).sum(1)
        )
        noise.append(odds @ updates.square().sum(1) - (odds @ updates).square().sum())
    return noise[1] / noise[0]


@claim("C27", "prefix_baseline")
def c27(name, tree):
    """At a token that earns nothing, `prefix_baseline` multiplies the noise of n visitors by (1 -
    t) n/(n-1), so it lowers the noise only if t is above 1/n. Here t = mu^2/(mu^2 + V), where mu
    and V are the mean and the variance of c/r at the prefix, and c/r is iid over the visitors.

    Source: the law of the noise (D, ours)
    """
    n, logits = 2 + tree.N % 4, tree.randn(2, 3)  # now, before
    chance, A = tree.randn(2).softmax(0), tree.randn(2)
    T = torch.randint(1, 9, (2,), generator=tree.generator)
    t = (chance @ (A / T)) ** 2 / (chance @ (A / T) ** 2)
    ends = [*zip(chance, A, T, strict=True)]
    outcomes = [Outcome(way, *end) for way in range(3) for end in ends]
    law = (1 - t) * n / (n - 1)
    equal(law, compare_noise(outcomes, n, *logits), f"the noise at n = {n}")


def noise_table() -> list[list]:
    """What cancelling buys: for 4 visitors, A = R - 0.5 and rewards 0 and 1, the token, t, the law
    and the noise. Below 1 the baseline helps.
    """
    rows = []
    for title, share, q1, q2 in (
        ("earns nothing; right 0.9", 0.5, 0.9, 0.9),
        ("earns nothing; right 0.7", 0.5, 0.7, 0.7),
        ("good strategy, taken with 0.1; right 0.9, other 0.1", 0.1, 0.9, 0.1),
    ):
        kinds = (0, q1, 0.5), (0, 1 - q1, -0.5), (1, q2, 0.5), (1, 1 - q2, -0.5)
        ends = [Outcome(*kind, 1) for kind in kinds]
        logits = torch.tensor([share, 1 - share], dtype=torch.float64).log()
        t = 4 * (share * q1 + (1 - share) * q2 - 0.5) ** 2
        rows.append([title, t, (1 - t) * 4 / 3, float(compare_noise(ends, 4, logits, logits))])
    return rows
