"""Worlds in which every group of answers can be enumerated. An answer follows a strategy.

Nothing is sampled. One batch holds all groups of G answers, and each counts with its probability.
So training follows the expected update, the mean over all groups that the policy could sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

import losses
from losses import Batch
from toy.policy import Policy, count_orders, tabular


class Outcome(NamedTuple):
    """What may become of an answer."""

    way: int  # its strategy: the first token, which other answers may share
    chance: float  # the probability of what follows the tokens that it may share
    reward: float
    length: int
    plan: int | None = None  # a choice at the second token; none follows


class Groups:
    """Every group of G independent answers, all of them in one batch. N rows = groups x G.

    There may be several worlds, one below the other. Each has a policy of its own.
    """

    def __init__(self, worlds: list[list[Outcome]], G: int):
        self.G, self.picks, rows, world, orders = G, [], [], [], []
        for k, outcomes in enumerate(worlds):
            for pick in itertools.combinations_with_replacement(range(len(outcomes)), G):
                self.picks += pick  # which outcome each row is
                rows += [outcomes[i] for i in pick]
                world += [k] * G
                orders.append(count_orders(pick))
        self.orders = torch.tensor(orders)  # (groups,)
        self.world = torch.tensor(world)  # (N,) of each row
        self.way = torch.tensor([row.way for row in rows])  # (N,)
        self.plan = torch.tensor([-1 if row.plan is None else row.plan for row in rows])
        self.chance = torch.tensor([row.chance for row in rows], dtype=torch.float64)
        self.rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
        place = torch.arange(max(row.length for row in rows))  # (T,)
        self.mask = place < torch.tensor([[row.length] for row in rows])
        # Only strategies are shared. Plans are, too, but nothing is chosen after a plan, so no
        # prefix baseline needs to know who shares one.
        tokens = torch.where(place == 0, self.way[:, None], torch.arange(len(rows))[:, None])
        self.nodes = losses.prefix_nodes(tokens, self.mask, G)

    def probabilities(self, logp: Tensor) -> Tensor:
        """Of every group under the policy of its world. (N, T) -> (groups,)."""
        chances = self.chance * logp.detach().sum(1).exp()  # (N,)
        return chances.view(-1, self.G).prod(1) * self.orders

    def batch(self, logp: Tensor, scale: str) -> tuple[Batch, Tensor]:
        """All groups on-policy; and how much each row counts, (N,), which sums to 1 in a world.

        `scale` decides A. "batch" divides by the std of a very large batch of the world's one
        prompt; "exact" subtracts the policy's expected reward from R. The reference is the policy.
        """
        counts = self.probabilities(logp).repeat_interleave(self.G) / self.G

        def expect(x: Tensor) -> Tensor:
            """The mean of x over all answers of a row's world. (N,) -> (N,)."""
            return torch.zeros_like(x).index_add(0, self.world, counts * x)[self.world]

        A = self.rewards - expect(self.rewards)
        if scale == "batch":
            A = losses.group_advantages(self.rewards, self.G, "mean") / (expect(A**2).sqrt() + 1e-4)
        elif scale != "exact":
            A = losses.group_advantages(self.rewards, self.G, scale)
        adv, old, L = A[:, None].expand_as(logp), logp.detach(), self.mask.shape[1]
        tokens = self.nodes.clamp(min=0)  # equal where prefixes are
        return Batch(logp, old, adv, self.mask, self.G, L, old, tokens, self.rewards), counts


# ---------------- policies whose only logits are those of the choices


def way_log_probs(groups: Groups, logits: Tensor) -> Tensor:
    """log pi of all tokens, with one logit for each strategy. (worlds, W) -> (N, T)."""
    logp = logits.log_softmax(1)[groups.world, groups.way][:, None]
    return pad(logp, (0, groups.mask.shape[1] - 1))  # no choice follows it: log pi = 0


def plan_log_probs(groups: Groups, logits: Tensor) -> Tensor:
    """log pi of all tokens, with one logit for strategy 0 against 1 and one for plan 0 against 1.
    (worlds, 2) -> (N, T)."""
    choices = torch.stack([groups.way, groups.plan], 1)  # (N, 2): 0, 1, or -1 for none
    logp = logsigmoid((1 - 2 * choices) * logits[groups.world])  # (N, 2)
    return pad(logp.masked_fill(choices < 0, 0.0), (0, groups.mask.shape[1] - 2))


# ---------------- training by expected updates, in several worlds at once


class Row(NamedTuple):
    """A line of a table: a loss, its advantage, and whether it has a prefix baseline."""

    loss: Callable[[Batch], Tensor]
    scale: str = "std"  # as losses.group_advantages, or "exact": R minus the expected reward
    prefix_baseline: bool = False


# GRPO with each baseline. All other rows measure A from the group mean.
MEAN = "grpo, group mean"
BOTH = "grpo, expected-reward and prefix baseline"
LOCAL = "grpo, group mean and prefix baseline"
ROWS = {
    MEAN: Row(losses.grpo),
    "grpo, expected-reward baseline": Row(losses.grpo, "exact"),
    BOTH: Row(losses.grpo, "exact", prefix_baseline=True),
    LOCAL: Row(losses.grpo, prefix_baseline=True),
    # Its own clip, 3e-4, is made for long answers.
    "gspo": Row(partial(losses.gspo, eps_low=0.02, eps_high=0.02)),
    "dr-grpo": Row(losses.dr_grpo, "mean"),
    "cispo": Row(losses.cispo),
    "dfpo-min": Row(losses.dfpo_min),
}
SIZE = 0.1  # the length of the first update where there is no rate


def weighed_pushes(row: Row, batch: Batch, counts: Tensor, nodes: Tensor) -> Tensor:
    """How much each row counts, (N,), times its pushes. (N, T).

    It is not A that is weighed, because a loss with a KL term is not proportional to A.
    """
    loss = row.loss(batch)
    if row.prefix_baseline:
        loss = losses.prefix_baseline(loss, batch, nodes)
    return counts[:, None] * losses.token_pushes(loss, batch.logp)


def ascend(
    row: Row,
    batch: Batch,
    counts: Tensor,
    nodes: Tensor,
    policy: Callable[[Tensor], Tensor],
    weights: Tensor,
) -> Tensor:
    """The gradient of a row's J by the weights. policy: weights -> logp of the batch's tokens."""
    weights = weights.detach().requires_grad_()
    batch = replace(batch, logp=policy(weights))
    c = weighed_pushes(row, batch, counts, nodes)
    return carry(c, batch.logp, weights)


def carry(pushes: Tensor, logp: Tensor, weights: Tensor) -> Tensor:
    """The gradient of sum c logp by the weights, with the pushes c (N, T) as fixed numbers."""
    # Not grad(logp, weights, pushes): given these, torch imports sympy, which takes half a second.
    return torch.autograd.grad((pushes * logp).sum(), weights, retain_graph=True)[0]


def adam(rate: float):
    """Adam: push -> what is added to the weights. Importing torch's own costs two seconds."""
    m = v = k = 0.0

    def step(push: Tensor) -> Tensor:
        nonlocal m, v, k
        k += 1
        m, v = 0.9 * m + 0.1 * push, 0.95 * v + 0.05 * push**2
        return rate * (m / (1 - 0.9**k)) / ((v / (1 - 0.95**k)).sqrt() + 1e-8)

    return step


def train(
    row: Row,
    groups: Groups,
    policy: Callable[[Groups, Tensor], Tensor],
    start: Tensor,
    updates: int,
    batches: int,
    step: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The logits at the start and after every update, (batches * updates + 1, worlds, K).

    policy: way_log_probs or plan_log_probs. start: (worlds, K). step: adam(rate); by default plain
    gradient ascent, whose first update has the length SIZE.
    """
    path, policy = [start], partial(policy, groups)
    for _ in range(batches):
        batch, counts = groups.batch(policy(path[-1]), row.scale)
        batch.logp_ref = policy(start)
        for _ in range(updates):
            push = ascend(row, batch, counts, groups.nodes, policy, path[-1])
            step = step or partial(torch.mul, SIZE / push.norm(dim=1, keepdim=True))
            path.append(path[-1] + step(push))
    return torch.stack(path)


# ---------------- worlds of the claims


class World(Groups):
    """All groups of answers, and how often the policy follows each strategy."""

    def __init__(self, G: int, outcomes: list[Outcome], shares: list[float]):
        super().__init__([outcomes], G)
        self.outcomes, self.shares = outcomes, shares

    def mean(self, f: Callable[[Outcome], float], *ways: int) -> float:
        """The mean of f(outcome), given that the answer follows one of these strategies."""
        chances = [(o, o.chance * self.shares[o.way]) for o in self.outcomes if o.way in ways]
        return sum(p * f(o) for o, p in chances) / sum(p for _, p in chances)

    def logits(self) -> Tensor:
        return torch.tensor(self.shares, dtype=torch.float64).log()

    def expected_push(
        self,
        loss: Callable[[Batch], Tensor],
        scale: str,
        logits: Tensor | None = None,
    ) -> Tensor:
        """On the logit of each strategy, at the world's shares or other logits. (strategies,)."""
        logits = self.logits() if logits is None else logits
        policy = partial(way_log_probs, self)
        batch, counts = self.batch(policy(logits[None]), scale)
        return ascend(Row(loss), batch, counts, self.nodes, policy, logits[None])[0]


class Toy:
    """Every group of answers to one prompt of a policy with 7 answers of one or two tokens.

    Groups come from the policy itself or from an old one, whose ratios differ at both tokens.
    """

    def __init__(self, seed: int, G: int = 3):
        generator = torch.Generator().manual_seed(seed)
        W, step, R = torch.randn(3, 3, 3, generator=generator, dtype=torch.float64)
        phi = tabular([(), (1,), (2,)])
        self.policy = Policy(W.requires_grad_(), phi, horizon=2)
        self.old = self.policy.step(step, 0.5)
        answers = [y for y, _ in self.policy.answers(())]
        reward = dict(zip(answers, R.flatten().tolist(), strict=False))
        self.exact = self.policy.grad_expected_reward((), reward.__getitem__)
        outcomes = [Outcome(y[0], 1.0, reward[y], len(y), *y[1:]) for y in answers]
        self.groups = Groups([outcomes], G)
        self.rows = [answers[k] for k in self.groups.picks]
        self.logp, self.logp_old = map(self.log_probs, (self.policy, self.old))
        self.unbiased = (1 - 1 / G) * self.exact / 2  # what an unbiased update expects; L = 2

    def log_probs(self, policy: Policy) -> Tensor:
        return policy.log_probs([()] * len(self.rows), self.rows)

    def expected_update(
        self,
        loss: Callable[[Batch], Tensor],
        off_policy: bool,
        scale: str = "mean",
        prefix_baseline: bool = False,
    ) -> Tensor:
        """Over all groups of the policy or of the old one, which is also the reference. (V, D)."""
        logp_old = self.logp_old if off_policy else self.logp.detach()
        batch, counts = self.groups.batch(logp_old, scale)
        batch = replace(batch, logp=self.logp.clone(), logp_ref=self.logp_old)
        c = weighed_pushes(Row(loss, scale, prefix_baseline), batch, counts, self.groups.nodes)
        return carry(c, batch.logp, self.policy.W)
