"""Answers together with the hidden states that predict their tokens: what NTHR's claims need.

A hidden state h in R^d predicts a token, and g = e_y - pi(.|h) is the prediction error. In the
output embeddings W, log pi(y|h) has the gradient g h^T. So two tokens help or hurt each other by
<g, g'> <h, h'>. An answer is correct if its reward is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from claims.trees import LARGE, Draw


class Readout:
    """The answers of a draw with random hidden states, read at temperature 0.7.

    Padding holds garbage.
    """

    def __init__(self, draw: Draw):
        V = LARGE if draw.kind == "steep" else draw.vocabulary + 5  # five ids occur in no answer
        self.draw = draw
        self.h = draw.randn(*draw.mask.shape, 4)  # (N, T, 4)
        head = draw.randn(V, 4)
        log_pi = (self.h @ head.T).log_softmax(-1)
        self.g = one_hot(draw.tokens, V) - log_pi.exp()  # (N, T, V)
        self.R = self._rewards()
        self.facts = dict(tokens=draw.tokens, mask=draw.mask, group_size=draw.G)
        self.facts["logp"] = draw.fill(log_pi.gather(2, draw.tokens[..., None])[..., 0])
        self.facts["rewards"] = torch.tensor(self.R, dtype=torch.float64)
        hidden = torch.where(draw.mask[..., None], self.h, math.nan)
        self.reading = dict(hidden=hidden, head=0.7 * head, temperature=0.7)

    def _rewards(self) -> list[float]:
        """Mixed in the first group; the second is all right or all wrong, or has no reward of 1."""
        draw, G = self.draw, self.draw.G
        R = (draw.randn(draw.N) > 0).double().tolist()
        R[:3] = [1.0, 0.0, 1 - 1e-6 if draw.kind else 0.5][:G]
        if draw.N > G:
            other = 1.5 if draw.kind else 0.5
            R[G : 2 * G] = [R[G]] * G if draw.equal_lengths else [other, *R[G + 1 : 2 * G]]
        return R

    def groups(self) -> Iterator[tuple[range, list[int]]]:
        """The rows of every group, and which of them are correct."""
        for start in range(0, self.draw.N, self.draw.G):
            rows = range(start, start + self.draw.G)
            yield rows, [i for i in rows if self.R[i] == 1]

    def visits(self, rows) -> list[tuple[int, int]]:
        return [(i, t) for i in rows for t in range(self.draw.T[i])]

    def scores(self, full_vocab: bool = False) -> tuple[Tensor, Tensor]:
        """The sum of <g, g'> <h, h'> over the correct tokens of the group, and a correct answer's
        own part in the sums of its tokens. (N, T) both, 0 outside mixed groups.

        g is kept on the ids of the group's answers, or on all.
        """
        scores, own = torch.zeros(2, *self.draw.mask.shape, dtype=torch.float64)
        for rows, correct in self.groups():
            if not 0 < len(correct) < len(rows):
                continue
            at = tuple(zip(*self.visits(rows), strict=True))
            ids = slice(None) if full_vocab else self.draw.tokens[at].unique()
            g, h, answer = self.g[at][:, ids], self.h[at], torch.tensor(at[0])
            pairs = (g @ g.T) * (h @ h.T)  # (K, K), pair by pair, no matrix M
            is_correct = torch.isin(answer, torch.tensor(correct))
            scores[at] = pairs[:, is_correct].sum(1)
            own[at] = (pairs * (answer[:, None] == answer)).sum(1) * is_correct
        return scores, own

    def old(self, module):
        """What a credit rule knows, as the OldPolicy of a module, with scores pair by pair."""
        scores, own_scores = map(self.draw.fill, self.scores())
        gen = torch.Generator().manual_seed(self.draw.seed)
        return module.OldPolicy(**self.facts, gen=gen, scores=scores, own_scores=own_scores)

    def selected(self, beta: float, self_term: bool) -> set[tuple[int, int]]:
        """The tokens (i, t) of wrong answers whose score exceeds tau."""
        scores, own = (x.tolist() for x in self.scores())
        found = set()
        for rows, correct in self.groups():
            means = []
            for i in correct:
                total = sum(scores[i]) - (0.0 if self_term else sum(own[i]))
                means.append(total / self.draw.T[i])
            tau = beta * min(means) if means else math.inf
            wrong = [i for i in rows if i not in correct]
            found |= {(i, t) for i, t in self.visits(wrong) if scores[i][t] > tau}
        return found
