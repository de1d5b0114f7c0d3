"""Answers together with the hidden states that predict their tokens: what NTHR's claims need.

A hidden state h in R^d predicts a token, and g = e_y - pi(.|h) is the prediction error. In the
output embeddings W, log pi(y|h) has the gradient g h^T. So two tokens help or hurt each other by
<g, g'> <h, h'>. An answer is correct if its reward is 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache

import torch
from torch import Tensor

from claims.trees import LARGE, Draw
from toy.policy import Policy, pad

GROUPS = 200  # sampled ones, for the claims that are about shares


# ---------------- a draw's answers


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

    def old(self, module, seed: int = 0):
        """What the old policy's pass leaves to a credit rule, as the OldPolicy of a module."""
        draw = self.draw
        return module.OldPolicy(
            draw.tokens,
            draw.mask,
            self.logp,
            torch.tensor(self.R, dtype=torch.float64),
            draw.G,
            temperature=0.7,
            hidden=self.hidden,
            head=0.7 * self.head,
            gen=torch.Generator().manual_seed(draw.seed + seed),
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

    def sums(self, rows, winners, ids, self_term: bool = True) -> Tensor:
        """sum of <g, g'> <h, h'> over the winners' tokens, for each of the rows' K tokens. (K,).

        g is restricted to the ids given.
        """
        visits = self.visits(rows)
        g = torch.stack([self.g[at] for at in visits])[:, sorted(ids)]
        h = torch.stack([self.h[at] for at in visits])
        pairs = (g @ g.T) * (h @ h.T)  # (K, K), pair by pair, no matrix M
        if not self_term:
            pairs.fill_diagonal_(0)
        return pairs[:, [i in winners for i, _ in visits]].sum(1)


def scores_by_pairs(readout: Readout, full_vocab: bool, self_term: bool = True) -> dict:
    """(i, t) -> score, in mixed groups only."""
    scores = {}
    for rows, winners, _ in readout.mixed():
        ids = range(len(readout.head)) if full_vocab else readout.ids(rows)
        sums = readout.sums(rows, winners, ids, self_term).tolist()
        scores |= zip(readout.visits(rows), sums, strict=True)
    return scores


def selected_by_pairs(
    readout: Readout, beta: float = 1.0, self_term: bool = True, full_vocab: bool = False
) -> set:
    """The tokens (i, t) of wrong answers whose score exceeds tau."""
    scores = scores_by_pairs(readout, full_vocab, self_term)
    selected = set()
    for _, winners, losers in readout.mixed():
        means = [sum(scores[at] for at in readout.visits([i])) / readout.draw.T[i] for i in winners]
        tau = beta * min(means)
        selected |= {at for at in readout.visits(losers) if scores[at] > tau}
    return selected


def smaller_half(draws: list[Draw]) -> list[Draw]:
    """The half of the draws with the smaller groups: loops over pairs of tokens are slow."""
    by_size = sorted(draws, key=lambda draw: sum(draw.T) * draw.G / draw.N)
    return by_size[: (len(draws) + 1) // 2]


# ---------------- sampled groups


class Sampled:
    """A group of 8 answers sampled from a random policy, some of them right and some wrong."""

    G = 8
    V = 8
    max_tokens = 6
    prompt = (0,)

    def __init__(self, generator: torch.Generator):
        def randn(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        common = randn(6)
        features = {}

        def phi(h):  # hidden states of a language model have much in common
            return features.setdefault(h, common + randn(6))

        W = 0.5 * randn(self.V, 6)
        self.policy = Policy(W.requires_grad_(), phi, self.max_tokens)
        while True:
            self.answers = self.policy.sample(self.prompt, self.G, generator)
            self.R = [float(sum(y) % 3 == 0) for y in self.answers]
            if 0 < sum(self.R) < self.G:
                break
        self.tokens, self.mask = pad(self.answers)
        self.logp, _ = self.policy.log_probs([self.prompt] * self.G, self.answers)
        self.probs = self.logp.detach().exp()
        self.hidden = torch.zeros(*self.tokens.shape, 6, dtype=torch.float64)
        self.norms = torch.zeros(self.tokens.shape, dtype=torch.float64)  # ||g|| ||h||
        for i, y in enumerate(self.answers):
            for t, token in enumerate(y):
                history = (*self.prompt, *y[:t])
                self.hidden[i, t] = phi(history)
                self.norms[i, t] = self.policy.grad_log_prob(history, token).norm()

    def old(self, module):
        return module.OldPolicy(
            self.tokens,
            self.mask,
            self.logp.detach(),
            torch.tensor(self.R, dtype=torch.float64),
            self.G,
            hidden=self.hidden,
            head=self.policy.W.detach(),
            gen=torch.Generator().manual_seed(int(self.tokens.sum())),
        )

    def adv(self, module) -> Tensor:
        rewards = torch.tensor(self.R, dtype=torch.float64)
        return module.group_advantages(rewards, self.G, "std")[:, None] * self.mask

    def batch(self, module, adv: Tensor):
        logp_old = self.logp.detach()
        return module.Batch(self.logp, logp_old, adv, self.mask, self.G, self.max_tokens)

    def winners_likelihood(self, policy: Policy) -> Tensor:
        """Mean log-likelihood of the correct answers."""
        right = [y for y, reward in zip(self.answers, self.R, strict=True) if reward]
        return policy.log_probs([self.prompt] * len(right), right)[0].sum() / len(right)


@lru_cache(1)
def sampled(seed: int) -> list[Sampled]:
    """GROUPS of them, the same ones for every claim."""
    generator = torch.Generator().manual_seed(seed)
    return [Sampled(generator) for _ in range(GROUPS)]
