"""Answers together with the hidden states that predict their tokens: what NTHR's claims need.

A hidden state h in R^d predicts a token, and g = e_y - pi(.|h) is the prediction error. In the
output embeddings W, log pi(y|h) has the gradient g h^T. So two tokens help or hurt each other by
<g, g'> <h, h'>. An answer is correct if its reward is 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property

import torch
from torch import Tensor

from claims.trees import LARGE, Draw
from toy.policy import Policy


class Readout:
    """The answers of a draw, read by a policy with dense features at temperature 0.7.

    Padding holds garbage.
    """

    def __init__(self, draw: Draw):
        features = defaultdict(lambda: draw.randn(4))
        self.draw = draw
        self.answers = [tuple(draw.ids[a] for a in y) for y in draw.answers]
        # (V, 4); five ids or more occur in no answer
        self.head = draw.randn(LARGE if draw.kind == "steep" else draw.vocabulary + 5, 4)
        policy = Policy(self.head, features.__getitem__, draw.longest)
        logp, _ = policy.log_probs(draw.prompts, self.answers)
        self.logp = torch.full(draw.mask.shape, 1e4, dtype=torch.float64)
        self.hidden = torch.full((*draw.mask.shape, 4), math.nan, dtype=torch.float64)
        self.g = {}  # (i, t) -> prediction error (V,)
        self.h = {}  # (i, t) -> hidden state (4,)
        for i, (x, y) in enumerate(zip(draw.prompts, self.answers, strict=True)):
            for t, token in enumerate(y):
                self.h[i, t] = policy.phi(x + y[:t])
                self.g[i, t] = -policy.probs(x + y[:t])
                self.g[i, t][token] += 1
                self.hidden[i, t] = self.h[i, t]
                self.logp[i, t] = logp[i, t]
        self.R = self._rewards()

    def _rewards(self) -> list[float]:
        """Mixed in the first group; the second is all right or all wrong, or has no reward of 1."""
        draw, G = self.draw, self.draw.G
        R = (draw.randn(draw.N) > 0).double().tolist()
        R[:3] = [1.0, 0.0, 1 - 1e-6 if draw.kind else 0.5][:G]
        if draw.N > G:
            other = 1.5 if draw.kind else 0.5
            R[G : 2 * G] = [R[G]] * G if draw.equal_lengths else [other, *R[G + 1 : 2 * G]]
        return R

    def old(self, module):
        """What a credit rule knows, as the OldPolicy of a module, with scores pair by pair."""
        draw = self.draw
        rewards = torch.tensor(self.R, dtype=torch.float64)
        scores, own_scores = self.scores
        return module.OldPolicy(
            draw.tokens,
            draw.mask,
            self.logp,
            rewards,
            draw.G,
            gen=torch.Generator().manual_seed(draw.seed),
            scores=draw.fill(scores),
            own_scores=draw.fill(own_scores),
        )

    def groups(self):
        """(rows, correct rows, wrong rows) of every group."""
        for start in range(0, self.draw.N, self.draw.G):
            rows = range(start, start + self.draw.G)
            yield rows, [i for i in rows if self.R[i] == 1], [i for i in rows if self.R[i] != 1]

    def mixed(self):
        """The groups with correct and with wrong answers."""
        return (group for group in self.groups() if group[1] and group[2])

    def visits(self, rows) -> list[tuple[int, int]]:
        return [(i, t) for i in rows for t in range(self.draw.T[i])]

    def ids(self, rows) -> set[int]:
        return {a for i in rows for a in self.answers[i]}

    @cached_property
    def scores(self) -> tuple[Tensor, Tensor]:
        """With g on the ids that the group's answers hold."""
        return self.score_by_pairs(full_vocab=False)

    def score_by_pairs(self, full_vocab: bool) -> tuple[Tensor, Tensor]:
        """The sum of <g, g'> <h, h'> over the correct tokens of the group, and a correct answer's
        own part in the sums of its tokens. (N, T) both, 0 outside mixed groups."""
        scores, own = torch.zeros(2, *self.draw.mask.shape, dtype=torch.float64)
        for rows, winners, _ in self.mixed():
            ids = range(len(self.head)) if full_vocab else self.ids(rows)
            visits = self.visits(rows)
            g = torch.stack([self.g[at] for at in visits])[:, sorted(ids)]
            h = torch.stack([self.h[at] for at in visits])
            pairs = (g @ g.T) * (h @ h.T)  # (K, K), pair by pair, no matrix M
            correct = torch.tensor([i in winners for i, _ in visits])
            at = tuple(zip(*visits, strict=True))
            scores[at] = pairs[:, correct].sum(1)
            answer = torch.tensor([i for i, _ in visits])
            own[at] = (pairs * (answer[:, None] == answer)).sum(1) * correct
        return scores, own


def selected_by_pairs(readout: Readout, beta: float, self_term: bool) -> set:
    """The tokens (i, t) of wrong answers whose score exceeds tau."""
    scores, own = (x.tolist() for x in readout.scores)
    selected = set()
    for _, winners, losers in readout.mixed():
        means = []
        for i in winners:
            total = sum(
                scores[i][t] - (0 if self_term else own[i][t]) for _, t in readout.visits([i])
            )
            means.append(total / readout.draw.T[i])
        tau = beta * min(means)
        selected |= {(i, t) for i, t in readout.visits(losers) if scores[i][t] > tau}
    return selected


def smaller_half(draws: list[Draw]) -> list[Draw]:
    """The half of the draws with the smaller groups: loops over pairs of tokens are slow."""
    by_size = sorted(draws, key=lambda draw: sum(draw.T) * draw.G / draw.N)
    return by_size[: (len(draws) + 1) // 2]
