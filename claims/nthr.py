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

    h_{i,k} in R^d is the last hidden state, after the final norm, that predicts token k of answer
    i, and g_{i,k} = e_{y_k} - pi(.|h_{i,k}) is its prediction error. N+ answers of a group are
    correct (reward 1), and p = N+/G. Where + or - stands at an answer, it is a correct or a wrong
    one. On-policy the step ascends sum_j A_j log pi(y_j), where A_j is p+ for a correct answer and
    -p- for a wrong one (M3).

    The gradient of log pi(y_k) in the output matrix W is g h^T. So the inner product of two tokens'
    gradients is <g, g'> <h, h'>. The part of W in d/dt ln pi(y_i+) is the sum over all pairs of a
    token of y_i+ and a token of any answer, (I) - (II) with

      (I)   = p+ sum_k sum_{i'} sum_{k''} <g+_{i,k}, g+_{i',k''}> <h+_{i,k}, h+_{i',k''}>
      (II)  = p- sum_k sum_j sum_{k'} <g+_{i,k}, g-_{j,k'}> <h+_{i,k}, h-_{j,k'}>

    where i' runs over the correct answers, i included, and j over the wrong ones. The Group
    Weighted Hidden Embedding Score is GWHES = (II) - (I). The larger it is, the lazier is the
    likelihood. The theorem also lets the hidden states move: its (III) and (IV) are sums of
    <W^T g, W^T g'>, over tokens with themselves and over pairs of first tokens. The score leaves
    them out.

    Summed over the correct answers, (II) is p- times the summed scores of the wrong tokens: both
    are the same sum over all pairs of one correct and one wrong token. So a wrong token with s > 0
    pushes the correct answers down, and one with s < 0 lifts them. That makes tau = 0 a natural
    boundary for NTHR's selection (M6). To first order, without the push on such a token (eta = 0)
    the correct answers gain |c| s; `python -m toy.nthr` measures whole steps.

    For one pair, <g, g'> <h, h'> = g^T (g' h'^T) h. The matrix in the middle does not depend on the
    token whose score is asked for. So it is summed once over all tokens of the correct answers: M,
    and s = g^T M h. For G answers of T tokens that takes G T (|V*| d) products in place of
    (G T)^2 (|V*| + d), where V* are the ids that g is kept on. The paper, too, sums over the
    correct tokens first.

    V* are the token ids that occur in the answers of this prompt. e_y lies in V*, so outside of it
    g = -pi, and the product of two such entries is positive. Leaving them out lowers <g, g'> by the
    sum of pi pi' over the ids outside V*. The score changes by that times <h, h'>, which has either
    sign. The softmax keeps its full denominator; renormalised on V* it would be another policy's.
    This is what makes a vocabulary of 150 000 affordable.

    Measured: all scores, and the part that a correct answer has in those of its own tokens, on V*
    and on all ids, against a loop over pairs. And the sum of the wrong tokens' scores, by autograd:
    the inner product in W of the gradients of all correct and of all wrong answers.
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
