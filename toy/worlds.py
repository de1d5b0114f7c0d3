"""Worlds in which every group can be enumerated: ways that an answer may go, right or wrong.

Nothing is sampled. All groups of G answers stand in one batch, and each counts with its
probability. So a push is the expected one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

import losses
from toy.policy import Policy, count_orders, tabular


class Outcome(NamedTuple):
    """What may become of an answer."""

    way: int  # its first token, which other answers may share
    chance: float  # of what follows the tokens that it may share
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

    def batch(self, logp: Tensor, shares: Tensor, scale: str) -> losses.Batch:
        """On-policy, for P policies one below the other. logp: (P N, T); shares: (P, groups).

        A is that of `scale`; or, if it is "exact", R minus what the policy expects. Raises
        ValueError for "batch": all groups, each once, are nobody's batch.
        """
        if scale == "batch":
            raise ValueError('the enumerated groups are no batch, so the scale cannot be "batch"')
        if scale == "exact":
            J = shares @ self.rewards.view(-1, self.G).mean(1)  # (P,)
            A = self.rewards - J[:, None]  # (P, N)
        else:
            A = losses.group_advantages(self.rewards, self.G, scale)
        return self.weigh(logp, shares, A)

    def weigh(self, logp: Tensor, shares: Tensor, A: Tensor) -> losses.Batch:
        """The batch in which each group counts by its share. A: (N,) or (P, N).

        Losses are homogeneous in A, so each group's A carries its share. It also carries the number
        of groups, over which a loss takes the mean.
        """
        adv = (A * (shares * shares.numel()).repeat_interleave(self.G, 1)).flatten()  # (P N,)
        mask = self.mask.repeat(len(shares), 1)
        adv = adv[:, None].expand(mask.shape)
        return losses.Batch(logp, logp.detach(), adv, mask, self.G, mask.shape[1])


class World(Groups):
    """All groups of answers that go several ways, and how often the policy goes each."""

    def __init__(self, G: int, outcomes: list[Outcome], shares: list[float]):
        super().__init__(outcomes, G)
        self.outcomes, self.shares = outcomes, shares

    def mean(self, f: Callable[[Outcome], float], *ways: int) -> float:
        """The mean of f(outcome), given that the answer goes one of these ways."""
        chances = [(o, o.chance * self.shares[o.way]) for o in self.outcomes if o.way in ways]
        return sum(p * f(o) for o, p in chances) / sum(p for _, p in chances)

    def logits(self) -> Tensor:
        return torch.tensor(self.shares, dtype=torch.float64).log().requires_grad_()

    def expected_batch(self, logits: Tensor, scale: str) -> losses.Batch:
        """By the logits of the ways, which are all that is learnt; each group counts as it is
        probable."""
        logp = torch.zeros(self.mask.shape, dtype=torch.float64)
        logp[:, 0] = logits.log_softmax(0)[self.way]
        return self.batch(logp, self.probabilities(logp)[None], scale)


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

    def batch(self, off_policy: bool, average: str = "budget", scale: str = "mean") -> losses.Batch:
        """All groups at once.

        An average over tokens has a random denominator; here it is that of very many groups.
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
        return replace(groups.batch(self.logp.clone(), shares[None], scale), logp_old=logp_old)
