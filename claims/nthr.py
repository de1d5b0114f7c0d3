"""N4: negative gradients (NTHR). What does a step do to the likelihood of a correct answer?

A step on one question should make its correct answers likelier. Delta(x) is the mean over the
correct answers of ln pi_theta'(y) - ln pi_theta(y), summed over tokens, where theta' comes after
one update on that question alone. The likelihood is called lazy (lazy likelihood displacement) if
Delta(x) is below a small epsilon, or negative. Wrong answers that resemble correct ones cause this:
to push them down pushes the correct ones down, too.
"""

from __future__ import annotations

import torch

from claims.evidence import Readout, ascent, claim
from llm import neighbours


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
