"""What the projection does where a token earns nothing: two ways to answer that are worth the same.

    python -m toy.alike    the tables

An answer takes one of two ways. Then it is right or wrong, with the same chances on both ways. So
nothing speaks for one of them. Right and wrong answers differ in length, and grpo divides by the
length. Nothing is sampled: all groups of G answers are enumerated, and each counts with its
probability. A push is the expected one, on-policy, on the logit of the first way. toy/README.md
says what came out.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

import losses
from toy.figure import parse_arguments
from toy.policy import count_orders

RIGHT = 0.6  # the chance to be right
ALIKE = ((24, 4), (24, 4))  # lengths: of the first way's right and wrong answers, of the second's
EXCHANGED = ((4, 24), (4, 24))
UNLIKE = ((16, 16), (4, 24))
SIZES = (4, 8, 12)  # G
UPDATES = {4: 300, 8: 100}  # G: how many
STEP = 4.0  # the learning rate
KINDS = ("grpo", "node mean", "unbiased")


class Outcome(NamedTuple):
    """What may become of an answer."""

    way: int  # its first token, which other answers may share
    chance: float  # of what follows the tokens that it may share
    reward: float
    length: int
    plan: int | None = None  # a second token that it may share; after that all answers differ


class Groups:
    """Every group of G independent answers, all of them in one batch. N rows = groups x G.

    With copies there are as many of each group, one after the other all.
    """

    def __init__(self, outcomes: list[Outcome], G: int, copies: int = 1):
        picks = [*itertools.combinations_with_replacement(range(len(outcomes)), G)] * copies
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
        """On-policy. shares: how much each group counts, (groups,).

        Losses are homogeneous in A, so each group's A carries its share. It also carries the number
        of groups, over which a loss takes the mean.
        """
        weight = (shares * len(shares)).repeat_interleave(self.G)  # (N,)
        A = losses.group_advantages(self.rewards, self.G, scale) * weight
        adv = A[:, None].expand(self.mask.shape)
        return losses.Batch(logp, logp.detach(), adv, self.mask, self.G, self.mask.shape[1])

    def expected_batch(self, logits: Tensor, scale: str) -> losses.Batch:
        """By the logits of the ways, which are all that is learnt; each group counts as it is
        probable."""
        logp = torch.zeros(self.mask.shape, dtype=torch.float64)
        logp[:, 0] = logits.log_softmax(0)[self.way]
        return self.batch(logp, self.probabilities(logp), scale)


def apply_projection(module, kind: str, batch: losses.Batch, loss: Tensor, nodes: Tensor) -> Tensor:
    """A loss after a kind of projection of a module; any other kind leaves it as it is."""
    A = batch.adv[:, 0]
    if kind == "node mean":
        loss = module.project(loss, batch.logp, A, nodes, batch.mask)
    if kind == "unbiased":
        loss = module.project_unbiased(loss, batch, A, nodes)
    return loss


def make_groups(lengths: tuple[tuple[int, int], ...], G: int) -> Groups:
    outcomes = []
    for way, (right, wrong) in enumerate(lengths):
        outcomes += [Outcome(way, RIGHT, 1.0, right), Outcome(way, 1 - RIGHT, 0.0, wrong)]
    return Groups(outcomes, G)


def remove_expected_tax(c: Tensor, A: Tensor, groups: Groups) -> Tensor:
    """The projection's unbiased kind, at the first token: at a way with several visitors, the
    expected tax is 0 (C17i).

    w' = wbar + (wbar - w)(1 - n/G)/(n - 1), with the mean wbar over the n visitors. (N,), (N,) ->
    (N,).
    """
    way = groups.way.view(-1, groups.G)
    same = (way[:, :, None] == way[:, None]).double()  # (groups, G, G)
    w = (c / A).nan_to_num().view(-1, groups.G)  # 0 where all rewards are equal, as A is 0 there
    n = same.sum(2)
    mean = (same @ w[..., None])[..., 0] / n
    w = mean + (mean - w) * (1 - n / groups.G) / (n - 1).clamp(min=1)
    return w.flatten() * A


def expected_push(groups: Groups, start: float, kind: str, scale: str) -> tuple[float, float]:
    """On the first way's logit, if `start` is that way's share; and the learning tax."""
    logits = torch.tensor([start, 1 - start], dtype=torch.float64).log().requires_grad_()
    batch = groups.expected_batch(logits, scale)
    A, loss = batch.adv[:, 0], losses.grpo(batch)
    if kind == "node mean":
        loss = losses.project(loss, batch.logp, A, groups.nodes, batch.mask)
    c = losses.token_coefficients(loss, batch.logp)
    if kind == "unbiased":
        c[:, 0] = remove_expected_tax(c[:, 0], A, groups)
    tax = losses.learning_tax(c, A, groups.nodes, groups.mask)
    return float(torch.autograd.grad(batch.logp, logits, c / len(c))[0][0]), tax


def train(groups: Groups, start: float, kind: str) -> tuple[float, float]:
    """GRPO's share of the first way at the end, and the mean learning tax."""
    share, taxes = start, []
    for _ in range(UPDATES[groups.G]):
        push, tax = expected_push(groups, share, kind, losses.METHODS["grpo"].scale)
        taxes.append(tax)
        log_odds = math.log(share / (1 - share)) + 2 * STEP * push  # the other logit falls as much
        share = 1 / (1 + math.exp(-log_odds))
    return share, sum(taxes) / len(taxes)


def main(argv: list[str] | None = None):
    parse_arguments(__doc__, argv, {})
    torch.set_num_threads(1)
    print("Expected push on the first way's logit, advantages R - mean R\n")
    print(f"{'':28}" + "".join(f"{f'G = {G}':>10}" for G in SIZES))
    for name, lengths, start in (("alike", ALIKE, 0.7), ("unlike", UNLIKE, 0.5)):
        for kind in KINDS:
            groups = [make_groups(lengths, G) for G in SIZES]
            pushes = [expected_push(x, start, kind, "mean")[0] for x in groups]
            cells = [f"{x if abs(x) > 1e-9 else 0:>10.5f}" for x in pushes]
            print(f"{f'{name}, from {start}':18}{kind:10}" + "".join(cells))
    print("\nShare of the first way after training, advantages of GRPO, and mean learning tax\n")
    for name, lengths in (("alike, from 0.7", ALIKE), ("lengths exchanged", EXCHANGED)):
        for G, updates in UPDATES.items():
            groups = make_groups(lengths, G)
            for kind in KINDS:
                share, tax = train(groups, 0.7, kind)
                where = f"{name:19}G = {G}, {updates} updates  {kind:10}"
                print(f"{where}{share:>8.3f}{tax:>8.3f}")


if __name__ == "__main__":
    main()
