"""C21 to C28: a baseline at every prefix, what it moves, and what it does to the noise.

A prefix is the prompt and what an answer has said so far. The visitors of a prefix are the
answers of the group that take a token there. `prefix_baseline` compares the push of each visitor
with that of the others. C22 says when this moves no expected update, C27 what it does to the noise,
and C28 why that is little at a token that the whole group shares. C21 is about weights that cancel
and have no bias off-policy, and C25 about a sampler that is not the trainer.

Every group of answers is enumerated, with the probability that the old policy gives it. The policy
there is a table: each prefix has logits of its own. What holds for their gradients holds for every
parametrisation, by the chain rule.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import losses
from claims.choice import off_policy_batch
from claims.evidence import TOLERANCE, Draw, ascent, claim, pushes_of
from claims.formulas import UNCLIPPED, fitting
from toy.worlds import Groups, Outcome, Toy, World

toy_of = cache(Toy)  # one toy for all methods


def toys_of(draws: list[Draw]) -> list[Toy]:
    """Some toys, in groups of 2, 3 and 4."""
    return [toy_of(draw.seed, G) for draw, G in zip(draws[::2], (2, 3, 4) * 4, strict=False)]


# ---------------- C21: a baseline that cancels without bias


@claim(
    "C21",
    "recentred",
    only_if="s is the plain product, and A is R minus the group's mean",
    extremes=False,
)
def c21(name, draws, evidence):
    """The recentred baseline cancels at every ratio and is unbiased off-policy.

    Source: exact enumeration (D, ours); setting: C16

    Measured: the expected update over all groups of 2, 3 and 4 answers of 12 toys. "left": how far
    the geometric ratio's update is off, as a share of it. M1 compares each coefficient with the
    formula, and AUDIT shows that the whole group cancels.
    """
    for toy in toys_of(draws):
        off = toy.batch(off_policy=True)
        evidence.equal(toy.unbiased, ascent(losses.recentred(off), toy.policy.W))
        geometric = ascent(losses.recentred(off, "geometric"), toy.policy.W)
        evidence.record_left((geometric - toy.unbiased).norm() / toy.unbiased.norm())


# ---------------- C22: a baseline at every prefix moves no expected update

# With a fixed baseline the coefficient of an answer is made of that answer alone, or it is not.
OWN = ("reinforce", "grpo", "grpo_symmetric", "dr_grpo", "gspo")
OWN += ("cispo", "pos_only")  # their divisor, the number of tokens, is a constant here
OTHERS = ("dfpo_min", "dfpo_orthogonal", "recentred", "balanced")


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
    *OTHERS,
    only_if="c_i is made of answer i alone, and the baseline of A is a fixed number",
    extremes=False,
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
    extremes=False,
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


# ---------------- C25: a sampler that is not the trainer


@claim("C25", "reinforce", only_if="no weight is capped or masked", extremes=False)
def c25(name, draws, evidence):
    """Weights u = prod_t pi_trainer/pi_sampler leave (G - 1) (J_trainer - J_sampler), in
    expectation, at a first token that all answers have for sure, if A is R minus the group's mean:
    noise, as long as nothing caps them.

    Source: TIS and MIS (D, ours); TRL's default with vLLM, 0 above 3: its GRPOConfig (P)

    Measured: the expected sum and the expected update over all groups of 2 to 4 answers to a
    choice, with no cap. "left": the bias of the update with 0 above 3. reinforce weighs all tokens
    of an answer alike, so a group's coefficients sum to what a token gets that all share.
    """
    cases = zip(draws[::2], (2, 3, 4) * 4, strict=False)
    for (draw, G), largest in itertools.product(cases, (math.inf, 3)):
        logits, R = draw.randn(2, 4), draw.randn(4)
        p, q = logits.softmax(1)
        answers = [Outcome(way, 1.0, reward, 1) for way, reward in enumerate(R.tolist())]
        now = logits[0].clone().requires_grad_()
        batch = off_policy_batch(World(G, answers, q.tolist()), now, "mean")
        u = losses.sequence_ratio(batch, "product").detach()
        loss = losses.reinforce(replace(batch, adv=(u * (u <= largest))[:, None] * batch.adv))
        update, unbiased = ascent(loss, now), (1 - 1 / G) * p * (R - p @ R)
        if largest < math.inf:
            evidence.record_left((update - unbiased).norm() / unbiased.norm())
            continue
        evidence.equal(unbiased, update, what="the expected update")
        left = G * pushes_of(loss, batch).mean()  # each group counts as it is probable
        evidence.equal((G - 1) * (p - q) @ R, left, what="the expected sum")


# ---------------- C27: what a baseline at every prefix does to the noise


def pushes(groups: Groups, logp: Tensor, logp_old: Tensor, b: float | None) -> tuple[Tensor, ...]:
    """Of every group the probability, (groups,), and the push of every token under grpo without a
    clip: without `prefix_baseline` and with it, (groups, G, T) each. b None: the group's mean."""
    A, width = losses.group_advantages(groups.rewards, groups.G, "mean"), logp.shape[1]
    if b is not None:
        A = groups.rewards - b
    adv = A[:, None].expand(logp.shape)
    batch = losses.Batch(logp.requires_grad_(), logp_old, adv, groups.mask, groups.G, width)
    loss = losses.grpo(batch, **UNCLIPPED)
    both = loss, losses.prefix_baseline(loss, batch, groups.nodes)
    c = [pushes_of(x, batch).view(-1, groups.G, width) for x in both]
    return groups.probabilities(logp_old), *c


def measure_noise(outcomes: list[Outcome], n: int, logits, logits_old, b: float) -> Tensor:
    """Per visitor, if n answers take a way each, which is learnt, and then end somehow: without
    `prefix_baseline` and with it. (2,)."""
    groups = Groups(outcomes, n)
    logp, logp_old = torch.zeros(2, *groups.mask.shape, dtype=torch.float64)
    logp[:, 0] = logits.log_softmax(0)[groups.way]
    logp_old[:, 0] = logits_old.log_softmax(0)[groups.way]
    odds, *both = pushes(groups, logp, logp_old, b)
    scores = (one_hot(groups.way) - logits.softmax(0)).view(-1, n, len(logits))  # grad log pi
    updates = [(c[:, :, :1] * scores).sum(1) for c in both]  # (groups, ways)
    return torch.stack([odds @ x.square().sum(1) - (odds @ x).square().sum() for x in updates]) / n


def predict_noise(outcomes: list[Outcome], n: int, logits, logits_old, b: float) -> Tensor:
    """What measure_noise measures, by C27, and t. (3,)."""
    p, q = logits.softmax(0), logits_old.softmax(0)
    way = [o.way for o in outcomes]
    odds = q.new_tensor([o.chance for o in outcomes]) * q[way]
    x = q.new_tensor([(o.reward - b) / o.length for o in outcomes])
    s = ((p / q)[:, None] * (torch.eye(len(p)) - p))[way]  # r grad log pi
    mu, size = odds @ x, s.square().sum(1)
    e, S = x - mu, odds @ size
    V, k, g2 = odds @ e**2, odds @ (e * size), (odds * x @ s).square().sum()
    without = odds @ (x**2 * size) - g2
    change = (V * S + g2) / (n - 1) - mu**2 * S - 2 * mu * k
    return torch.stack([without, without + change, mu**2 / (mu**2 + V)])


@claim("C27", "prefix_baseline", only_if="c/r is iid over the n visitors", extremes=False)
def c27(name, draws, evidence):
    """At a token that earns nothing `prefix_baseline` multiplies the noise of n visitors by
    (1 - t) n/(n-1), which pays only if t is above 1/n. Here t = mu^2/(mu^2 + V), mu and V being the
    mean and the variance of c/r at the prefix. A token that earns something has a longer law.

    Source: the law of the noise (D, ours)

    Measured: both laws for a choice over all groups of 2 to 5 visitors with random rewards and
    lengths, off-policy, with grpo unclipped. "left": the short law's error where the token earns
    something. The table is on-policy, with rewards 0 and 1.
    """
    for j, draw in enumerate(draws[::2]):
        ways, n, b = 2 + j % 2, 2 + j // 2 % 4, float(draw.randn(1))
        logits, rewards = draw.randn(2, ways), draw.randn(2).tolist()  # now, before
        T = torch.randint(1, 9, (2,), generator=draw.generator).tolist()
        ends = [*zip(draw.randn(2).softmax(0).tolist(), rewards, T, strict=True)]
        for earns in (0, 1):
            outcomes = [
                Outcome(way, p, R + earns * way, T) for way in range(ways) for p, R, T in ends
            ]
            *predicted, t = predict_noise(outcomes, n, *logits, b)
            measured = measure_noise(outcomes, n, *logits, b)
            law, ratio = (1 - t) * n / (n - 1), measured[1] / measured[0]
            if earns:
                evidence.equal(predicted, measured)
                evidence.record_left(ratio - law)
            else:
                evidence.equal(law, ratio, what="the short law")
    for title, chance, *ways in (
        ("earns nothing; right .9", 0.5, 0.9, 0.9),
        ("earns nothing; right .7", 0.5, 0.7, 0.7),
        ("an even choice; right .95, .85", 0.5, 0.95, 0.85),
        ("a good way, taken with .1; right .9, else .1", 0.1, 0.9, 0.1),
    ):
        logits = torch.tensor([chance, 1 - chance], dtype=torch.float64).log()
        outcomes = [
            Outcome(w, p, R, 1) for w, q in enumerate(ways) for p, R in ((q, 1), (1 - q, 0))
        ]
        world = outcomes, 4, logits, logits, 0.5
        measured, (*_, t) = measure_noise(*world), predict_noise(*world)
        numbers = t, (1 - t) * 4 / 3, measured[1] / measured[0]
        evidence.rows.append([title, *map(float, numbers)])


# ---------------- C27b: how much is decided

# Worlds of luck: the environment draws one of these evenly. Each is a chance to be right, and the
# mean of 1 - p of the policy's next token: .5 if that is even, little if it is sure.
LUCK = {
    "right .9 or .1": ((0.9, 0.5), (0.1, 0.5)),
    "right .7 or .3": ((0.7, 0.5), (0.3, 0.5)),
    "no luck": ((0.5, 0.5), (0.5, 0.5)),
    "right .95, .05, .5; sure, sure, even": ((0.95, 0.05), (0.05, 0.05), (0.5, 0.5)),
    "right .78, .22, .5; even, even, sure": ((0.78, 0.5), (0.22, 0.5), (0.5, 0.05)),
}


def count_decided(draw: Draw, R: Tensor, size: Tensor) -> list[float]:
    """What `decided` returns, in loops; size (N, T) is how much each token counts."""
    visits = defaultdict(list)  # of a prefix
    for (p, y), at in draw.tree.items():
        visits[p, y[:-1]] += at
    sums = torch.zeros(5, dtype=torch.float64)
    for at in visits.values():
        n = len(at)
        for i, t in at if n > 1 else []:
            others = (sum(R[j] for j, _ in at) - R[i]) / (n - 1)
            total = R.view(-1, draw.G)[i // draw.G].var()
            terms = (1, R[i] * (R[i] - others), total, n, n / (n - 1))
            sums += size[i, t] * torch.tensor(terms, dtype=torch.float64)
    count, within, total, n, price = sums.tolist()
    return [1 - within / total, n / count, 1 - draw.G / (draw.G - 1) * count / price]


@claim("C27b", "decided", extremes=False)
def c27b(name, draws, evidence):
    """`decided` finds rho^2, the share of Var(R) that earlier tokens decide, nearly, if a token
    counts 1 - p. Then a baseline at every prefix lowers the noise of tokens that earn nothing
    about where decided is above break_even. If all tokens count alike, that may be wrong.

    Source: C27's t, averaged over prefixes, is rho^2 if b = E[R] (D, ours)

    Measured: its three numbers on random trees, against loops. Then, over all groups of 8 in worlds
    of luck, whether it is within .015 of rho^2, and whether noise falls at an equal expected push,
    with the group's mean. "left": its distance from rho^2 if all tokens count alike.
    """
    for draw in draws:
        R, logp = draw.randn(draw.N), draw.logp.detach()
        for size, given in ((1 - logp.exp(), (draw.fill(logp),)), (draw.mask, ())):
            found = losses.decided(R, draw.nodes, draw.mask, draw.G, *given)
            evidence.equal(count_decided(draw, R, size), list(found.values()), what="a number")
        none = losses.decided(0 * R, draw.nodes, draw.mask, draw.G)
        evidence.equal(0, len(none), what="how many numbers there are if no reward differs")
    G = 8
    for title, luck in LUCK.items():
        ends = [(way, q, R) for way, (p, _) in enumerate(luck) for R, q in ((1.0, p), (0.0, 1 - p))]
        groups = Groups([Outcome(way, q / len(luck), R, 2) for way, q, R in ends], G)
        mask = groups.mask & (torch.arange(2) > 0)  # the environment's draw is no token of ours
        right, surprise = torch.tensor(luck, dtype=torch.float64).T
        odds, *both = pushes(groups, *torch.zeros(2, *mask.shape, dtype=torch.float64), None)
        alone = (1 - 1 / len(luck)) ** (G - 1)
        longer = (1 - alone / G) / (1 - 1 / G)  # the expected push, by C22c
        sizes = surprise[groups.way].view(-1, G)
        noise = [odds @ (c[:, :, 1] ** 2 * sizes).sum(1) for c in both]
        noise = float(noise[1] / noise[0] / longer**2)
        # A token that counts 1 - p may also count for how probable its group is.
        counts = [odds[:, None] * size for size in (sizes, torch.ones_like(sizes))]
        logps = [torch.log1p(-x).view(-1, 1).expand(mask.shape) for x in counts]
        facts = groups.rewards, groups.nodes, mask, G
        (found, _, bound), (alike, *_) = (losses.decided(*facts, x).values() for x in logps)
        within, J = surprise @ (right * (1 - right)) / surprise.sum(), right.mean()
        rho2 = float(1 - within / (J * (1 - J)))
        evidence.equal(True, abs(found - rho2) < 0.015, what="whether it is near rho^2")
        evidence.equal(found > bound, noise < 1, what="whether the noise falls")
        evidence.record_left(alike - rho2)
        evidence.rows.append([title, rho2, found, alike, bound, noise])


# ---------------- C28: a token that the whole group shares


@claim(
    "C28",
    "prefix_baseline",
    only_if="the token earns nothing, E[R] = b at the prefix, and 0 < m <= w <= M",
    extremes=False,
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
        noise = measure_noise([Outcome(way, *end) for way in (0, 1) for end in ends], n, *even, b)
        return 1 - noise[1] / noise[0] * (n - 1) / n

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
