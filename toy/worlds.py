"""Worlds in which every group of answers can be enumerated. An answer follows a strategy.

Nothing is sampled. One batch holds all groups of G answers, and each counts with its probability.
So training follows the expected update, the mean over all groups that the policy could sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad
from torch.optim import SGD, Adam, Optimizer

import losses
from losses import Batch
from toy.policy import Policy, count_orders, tabular


class Outcome(NamedTuple):
    """What may become of an answer."""

    way: int  # its strategy: the first token, which other answers may share
    chance: float  # the probability of what follows the tokens that it may share
    reward: float
    length: int
    plan: int | None = None  # a second token that it may share; after that all answers differ


class Groups:
    """Every group of G independent answers, all of them in one batch. N rows = groups x G."""

    def __init__(self, outcomes: list[Outcome], G: int):
        picks = [*itertools.combinations_with_replacement(range(len(outcomes)), G)]
        self.picks = torch.tensor(picks).flatten()  # (N,) which outcome each row is
        rows = [outcomes[k] for pick in picks for k in pick]
        self.G = G
        self.orders = torch.tensor([count_orders(pick) for pick in picks])  # (groups,)
        self.way = torch.tensor([row.way for row in rows])  # (N,)
        self.plan = torch.tensor([-1 if row.plan is None else row.plan for row in rows])
        self.chance = torch.tensor([row.chance for row in rows], dtype=torch.float64)
        self.rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
        place = torch.arange(max(row.length for row in rows))  # (T,)
        self.mask = place < torch.tensor([[row.length] for row in rows])
        tokens = torch.where(place == 0, self.way[:, None], torch.arange(len(rows))[:, None])
        shared = (place == 1) & (self.plan >= 0)[:, None]
        tokens = torch.where(shared, -1 - self.plan[:, None], tokens)
        self.nodes = losses.prefix_nodes(tokens, self.mask, G)

    def probabilities(self, logp: Tensor) -> Tensor:
        """Of every group under a policy. (N, T) -> (groups,)."""
        chances = self.chance * logp.detach().sum(1).exp()  # (N,)
        return chances.view(-1, self.G).prod(1) * self.orders

    def batch(self, logp: Tensor, scale: str, shares: Tensor | None = None) -> Batch:
        """All groups on-policy, for P policies one below the other. logp: (P N, T).

        `scale` decides A. "batch" divides by the std of a very large batch of this one prompt;
        "exact" subtracts the policy's expected reward from R. shares: how much each group counts,
        (P, groups); by default its probability.
        """
        if shares is None:
            policies = logp.chunk(len(logp) // len(self.rewards))
            shares = torch.stack([self.probabilities(x) for x in policies])
        counts = (shares / self.G).repeat_interleave(self.G, 1)  # (P, N): how much each row counts
        above = self.rewards - (counts @ self.rewards)[:, None]  # (P, N): R - expected reward
        if scale == "exact":
            A = above
        elif scale == "batch":
            std = (counts * above**2).sum(1, keepdim=True).sqrt()  # (P, 1)
            A = losses.group_advantages(self.rewards, self.G, "mean") / (std + 1e-4)
        else:
            A = losses.group_advantages(self.rewards, self.G, scale)
        # Losses are homogeneous in A, so A carries how much its row counts. It also carries the
        # number of rows, over which a loss takes the mean.
        mask = self.mask.repeat(len(shares), 1)
        adv = (A * counts * counts.numel()).view(-1, 1).expand(mask.shape)
        return Batch(logp, logp.detach(), adv, mask, self.G, mask.shape[1])


# ---------------- policies whose only logits are those of the choices


def way_log_probs(groups: Groups, logits: Tensor) -> Tensor:
    """log pi of all tokens, one logit for each strategy, under P policies. (P, W) -> (P N, T)."""
    logp = logits.log_softmax(1)[:, groups.way].view(-1, 1)
    return pad(logp, (0, groups.mask.shape[1] - 1))  # no choice follows it: log pi = 0


def plan_log_probs(groups: Groups, logits: Tensor) -> Tensor:
    """log pi of all tokens, with one logit for strategy 0 against 1 and one for plan 0 against 1,
    under P policies. (P, 2) -> (P N, T)."""
    choices = torch.stack([groups.way, groups.plan], 1)  # (N, 2): 0, 1, or -1 for none
    logp = logsigmoid((1 - 2 * choices) * logits[:, None])  # (P, N, 2)
    logp = logp.masked_fill(choices < 0, 0.0).flatten(0, 1)
    return pad(logp, (0, groups.mask.shape[1] - 2))


# ---------------- training by expected updates, several policies at once


class Row(NamedTuple):
    """A line of a table: a loss, its advantage, and whether it has a prefix baseline."""

    loss: Callable[[Batch], Tensor]
    scale: str = "std"  # as losses.group_advantages, or "exact": R minus the expected reward
    prefix_baseline: bool = False


# GRPO with each baseline. All other rows measure A from the group mean.
MEAN = "grpo, group mean"
EXACT = "grpo, expected-reward baseline"
BOTH = "grpo, expected-reward and prefix baseline"
LOCAL = "grpo, group mean and prefix baseline"
ROWS = {
    MEAN: Row(losses.grpo),
    EXACT: Row(losses.grpo, "exact"),
    BOTH: Row(losses.grpo, "exact", prefix_baseline=True),
    LOCAL: Row(losses.grpo, prefix_baseline=True),
    # Its own clip, 3e-4, is made for long answers.
    "gspo": Row(partial(losses.gspo, eps_low=0.02, eps_high=0.02)),
    "dr-grpo": Row(losses.dr_grpo, "mean"),
    "cispo": Row(losses.cispo),
    "grpo-symmetric": Row(losses.grpo_symmetric),
    "reinforce": Row(losses.reinforce),
    "dfpo-min": Row(losses.dfpo_min),
    "dfpo-min, eps 0.2": Row(partial(losses.dfpo_min, eps=0.2)),  # this clip is ours
}
SIZE = 0.1  # the length of the first update where there is no rate
PLAIN = partial(SGD, lr=1.0)  # theta += rate * push
ADAM = partial(Adam, lr=1.0, betas=(0.9, 0.95))


def compute_push(
    row: Row, batch: Batch, nodes: Tensor, weights: Tensor, policy: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The gradient of a row's J by the weights, and the pushes, (N, T).

    policy: weights -> log pi of the batch's tokens, (N, T).
    """
    weights = weights.detach().requires_grad_()
    batch = replace(batch, logp=policy(weights))
    loss = row.loss(batch)
    if row.prefix_baseline:
        loss = losses.prefix_baseline(loss, batch, nodes)
    c = losses.token_pushes(loss, batch.logp)
    return torch.autograd.grad(batch.logp, weights, c / len(c))[0], c


def train(
    row: Row,
    groups: Groups,
    policy: Callable[[Groups, Tensor], Tensor],
    starts: Tensor,
    updates: int,
    batches: int,
    rates: Tensor | float | None = None,
    optimizer: Callable[..., Optimizer] = PLAIN,
) -> tuple[Tensor, float]:
    """The logits of P policies at the start and after every update, (batches * updates + 1, P, K);
    and the tax share of a batch's last update, the mean over all batches.

    policy: way_log_probs or plan_log_probs. starts: (P, K). rates: one for all policies, or one for
    each, (P, 1), which may have one start, (1, K); by default the first update has the length SIZE.
    """
    if isinstance(rates, Tensor):
        starts = starts.expand(len(rates), -1)
    forward = partial(policy, groups)
    first = groups.nodes.numel() * torch.arange(len(starts))  # policies share no node
    nodes = (groups.nodes + first[:, None, None]).flatten(0, 1)  # (P N, T)
    # The optimiser, whose own rate is 1, moves this tensor from 0. Each policy's rate scales it.
    moved = torch.zeros_like(starts)
    step = optimizer([moved])
    path, taxes = [starts], []
    for _ in range(batches):
        batch = groups.batch(forward(path[-1]), row.scale)
        for _ in range(updates):
            push, c = compute_push(row, batch, nodes, path[-1], forward)
            if rates is None:
                rates = SIZE / push.norm(dim=1, keepdim=True)
            moved.grad = -push
            step.step()
            path.append(starts + rates * moved)
        taxes.append(losses.learning_tax(c, batch.adv[:, 0], nodes, batch.mask))
    return torch.stack(path), fmean(taxes)


# ---------------- worlds of the claims


class World(Groups):
    """All groups of answers, and how often the policy follows each strategy."""

    def __init__(self, G: int, outcomes: list[Outcome], shares: list[float]):
        super().__init__(outcomes, G)
        self.outcomes, self.shares = outcomes, shares

    def mean(self, f: Callable[[Outcome], float], *ways: int) -> float:
        """The mean of f(outcome), given that the answer follows one of these strategies."""
        chances = [(o, o.chance * self.shares[o.way]) for o in self.outcomes if o.way in ways]
        return sum(p * f(o) for o, p in chances) / sum(p for _, p in chances)

    def logits(self) -> Tensor:
        return torch.tensor(self.shares, dtype=torch.float64).log().requires_grad_()

    def expected_batch(self, logits: Tensor, scale: str) -> Batch:
        """All groups, each with its probability; the weights are the logits of the strategies."""
        return self.batch(way_log_probs(self, logits[None]), scale)


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
        self.groups = Groups(outcomes, G)
        self.rows = [answers[k] for k in self.groups.picks]
        self.logp, self.logp_old = map(self.log_probs, (self.policy, self.old))
        self.unbiased = (1 - 1 / G) * self.exact / 2  # what an unbiased update expects; L = 2

    def log_probs(self, policy: Policy) -> Tensor:
        return policy.log_probs([()] * len(self.rows), self.rows)[0]

    def batch(self, off_policy: bool, average: str = "budget", scale: str = "mean") -> Batch:
        """All groups at once.

        A token mean has a random denominator; here it is that of very many groups.
        """
        logp_old = self.logp_old if off_policy else self.logp.detach()
        groups, shares = self.groups, self.groups.probabilities(logp_old)
        counted = torch.ones_like(shares)
        if "tokens" in average:
            counted = groups.mask.view(len(shares), -1).sum(1)
        if "mixed" in average:
            rewards = groups.rewards.view(-1, groups.G)
            counted = counted * (rewards.amax(1) > rewards.amin(1))
        shares = shares * counted.double().mean() / (shares * counted).sum()
        return replace(groups.batch(self.logp.clone(), scale, shares[None]), logp_old=logp_old)
