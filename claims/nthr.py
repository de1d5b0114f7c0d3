"""M6 and N4: negative gradients (NTHR). What does a step do to the likelihood of a correct answer?

A step on one question should make its correct answers likelier. Delta(x) is the mean over the
correct answers of ln pi_theta'(y) - ln pi_theta(y), summed over tokens, where theta' comes after
one update on that question alone. The likelihood is called lazy (lazy likelihood displacement) if
Delta(x) is below a small epsilon, or negative. Wrong answers that resemble correct ones cause this:
to push them down pushes the correct ones down, too.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import losses
from claims.evidence import LARGE, Draw, ascent, claim
from llm import neighbours


class Readout:
    """The answers of a draw with random hidden states, read at temperature 0.7.

    Padding holds garbage. Rewards are 0, a half (no right answer) and 1. The first group is mixed.
    In some draws a second one is all right or all wrong.
    """

    def __init__(self, draw: Draw):
        V = LARGE if draw.kind == "steep" else draw.vocabulary + 5  # five ids occur in no answer
        self.draw = draw
        self.h = draw.randn(*draw.mask.shape, 4)  # (N, T, 4)
        self.head = draw.randn(V, 4)
        log_pi = (self.h @ self.head.T).log_softmax(-1)
        self.g = one_hot(draw.tokens, V) - log_pi.exp()  # (N, T, V)
        G = draw.G
        R = torch.randint(0, 3, (draw.N,), generator=draw.generator).double() / 2
        R[:2] = torch.tensor([0.0, 1.0])
        if draw.equal_lengths:
            R[G : 2 * G] = R[-1].item()
        self.correct = R == 1  # (N,)
        self.facts = dict(tokens=draw.tokens, mask=draw.mask, group_size=G, rewards=R)
        self.facts["logp"] = draw.fill(log_pi.gather(2, draw.tokens[..., None])[..., 0])
        hidden = torch.where(draw.mask[..., None], self.h, math.nan)
        self.reading = dict(hidden=hidden, head=0.7 * self.head, temperature=0.7)

    def scores(self, full_vocab: bool) -> tuple[Tensor, Tensor]:
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
            pairs = (g @ g.T) * (h @ h.T) * self.correct[answer]  # (K, K), no matrix M
            scores[answer, t] = pairs.sum(1)
            own[answer, t] = (pairs * (answer[:, None] == answer)).sum(1)
        return scores, own


@claim("M6", "nthr", "nthr_random")
def m6(name, draws, evidence):
    """NTHR multiplies by eta the negative advantages of wrong tokens scoring above tau; its control
    as many, by chance.

    Source: NTHR sec. 5.2, Algorithm 1, App. 7.3 (P); the self term is open

    Measured: both rules against a loop over answers, with random scores, for both readings of the
    self term and three eta. Of the control: how many tokens of each answer, and their factor.
    """
    settings = {}, {"eta": 0.0}, {"beta": 0.5, "self_term": True, "eta": 0.3}
    for draw, hyper in itertools.product(draws, settings):
        readout = Readout(draw)
        correct = readout.correct
        scores, own_scores = (draw.fill(x) for x in draw.randn(2, *draw.mask.shape))
        gen = torch.Generator().manual_seed(draw.seed)
        old = losses.OldPolicy(**readout.facts, gen=gen, scores=scores, own_scores=own_scores)
        adv = torch.where(draw.mask, draw.randn(*draw.mask.shape), -1)
        measured = getattr(losses, name)(adv, old, **hyper)
        counted = scores if "self_term" in hyper else scores - own_scores
        softened = torch.zeros_like(draw.mask)
        for i in range(draw.N):
            right = [j for j in draw.group(i) if correct[j]]
            if right and i not in right:
                means = [counted[j, : draw.T[j]].mean() for j in right]
                tau = hyper.get("beta", 1) * min(means)
                softened[i] = draw.mask[i] & (scores[i] > tau) & (adv[i] < 0)
        if name == "nthr_random":
            by_chance = measured != adv
            evidence.equal(softened.sum(1), by_chance.sum(1))
            evidence.equal(False, (by_chance & ~draw.mask).any())
            softened = by_chance
        p = correct.double().view(-1, draw.G).mean(1).repeat_interleave(draw.G)
        eta = hyper.get("eta", 2 * draw.rows((0.5 - p).abs()))
        evidence.equal(torch.where(softened, eta * adv, adv), measured)


@claim("N4", "nthr_scores")
def n4(name, draws, evidence):
    """A wrong token pushes the correct answers down by its score, sum <g, g'> <h, h'> over their
    tokens; one matrix a group replaces the double sum.

    Source: NTHR Theorem 4.4, sec. 5.2 and App. 7.4 (P); boundary and restriction (D)

    Measured: all scores, and a correct answer's own part in those of its tokens, on V* and on all
    ids, against pairs; and the sum over the wrong tokens, as the inner product of two gradients in
    W.
    """
    for draw in draws:
        readout = Readout(draw)
        for full_vocab in (False, True):
            measured = neighbours.nthr_scores(
                **readout.facts, **readout.reading, full_vocab=full_vocab
            )
            for x, y in zip(readout.scores(full_vocab), measured, strict=True):
                evidence.equal(x, y)
        W = readout.head.requires_grad_()
        logp = (readout.h @ W.T).log_softmax(-1).gather(2, draw.tokens[..., None])[..., 0]
        first = draw.mask & (torch.arange(draw.N) < draw.G)[:, None]  # the first group is mixed
        right, wrong = (first & draw.rows(x) for x in (readout.correct, ~readout.correct))
        product = (ascent(-logp[right].sum(), W) * ascent(-logp[wrong].sum(), W)).sum()
        evidence.equal(product, measured[0][wrong].sum())
