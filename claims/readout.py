"""Answers together with the hidden states that predict their tokens: what NTHR's claims need.

A hidden state h in R^d predicts a token, and g = e_y - pi(.|h) is the prediction error. In the
output embeddings W, log pi(y|h) has the gradient g h^T. So two tokens help or hurt each other by
<g, g'> <h, h'>. An answer is correct if its reward is 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from claims.trees import LARGE, Draw


class Readout:
    """The answers of a draw with random hidden states, read at temperature 0.7.

    Padding holds garbage. The first group is mixed. The second is all right or all wrong, or it has
    no reward of 1.
    """

    def __init__(self, draw: Draw):
        V = LARGE if draw.kind == "steep" else draw.vocabulary + 5  # five ids occur in no answer
        self.draw = draw
        self.h = draw.randn(*draw.mask.shape, 4)  # (N, T, 4)
        head = draw.randn(V, 4)
        log_pi = (self.h @ head.T).log_softmax(-1)
        self.g = one_hot(draw.tokens, V) - log_pi.exp()  # (N, T, V)
        G, R = draw.G, (draw.randn(draw.N) > 0).double()
        R[:2] = torch.tensor([1.0, 0.0])
        R[2 : min(3, G)] = 1 - 1e-6 if draw.kind else 0.5
        if draw.N > G and draw.equal_lengths:
            R[G : 2 * G] = R[G].item()
        elif draw.N > G:
            R[G] = 1.5 if draw.kind else 0.5
        self.correct = R == 1  # (N,)
        self.facts = dict(tokens=draw.tokens, mask=draw.mask, group_size=G, rewards=R)
        self.facts["logp"] = draw.fill(log_pi.gather(2, draw.tokens[..., None])[..., 0])
        hidden = torch.where(draw.mask[..., None], self.h, math.nan)
        self.reading = dict(hidden=hidden, head=0.7 * head, temperature=0.7)

    def scores(self, full_vocab: bool = False) -> tuple[Tensor, Tensor]:
        """The sum of <g, g'> <h, h'> over the correct tokens of the group, and a correct answer's
        own part in the sums of its tokens. (N, T) both, 0 outside mixed groups.

        g is kept on the ids of the group's answers, or on all.
        """
        draw = self.draw
        scores, own = torch.zeros(2, *draw.mask.shape, dtype=torch.float64)
        for start in range(0, draw.N, draw.G):
            group = draw.group(start)
            if not 0 < self.correct[group].sum() < draw.G:
                continue
            answer, t = draw.mask[group].nonzero(as_tuple=True)
            answer = answer + start
            ids = slice(None) if full_vocab else draw.tokens[answer, t].unique()
            g, h = self.g[answer, t][:, ids], self.h[answer, t]
            pairs = (g @ g.T) * (h @ h.T)  # (K, K), pair by pair, no matrix M
            pairs = pairs * self.correct[answer]  # with the tokens of correct answers
            scores[answer, t] = pairs.sum(1)
            own[answer, t] = (pairs * (answer[:, None] == answer)).sum(1)
        return scores, own

    def selected(self, beta: float = 1.0, self_term: bool = False) -> Tensor:
        """The tokens of wrong answers whose score exceeds tau. (N, T) bool."""
        draw, (scores, own) = self.draw, self.scores()
        found = torch.zeros_like(draw.mask)
        counted = scores if self_term else scores - own
        for i in range(draw.N):
            right = [j for j in draw.group(i) if self.correct[j]]
            if right and i not in right:
                tau = beta * min(float(counted[j].sum()) / draw.T[j] for j in right)
                found[i] = draw.mask[i] & (scores[i] > tau)
        return found
