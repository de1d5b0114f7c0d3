"""N3 and N4: negative gradients (NTHR). What does a step do to the likelihood of a correct answer?

A step on one question should make its correct answers likelier. Delta(x) is the mean over the
correct answers of ln pi_theta'(y) - ln pi_theta(y), summed over tokens, where theta' comes after
one update on that question alone. The likelihood is called lazy (lazy likelihood displacement) if
Delta(x) is below a small epsilon, or negative. Wrong answers that resemble correct ones cause this:
to push them down pushes the correct ones down, too.

h_{i,k} in R^d is the last hidden state, after the final norm, that predicts token k of answer i.
g_{i,k} = e_{y_k} - pi(.|h_{i,k}) is its prediction error. N+ answers of a group are correct (reward
1), N- are wrong, and p = N+/G. Where + or - stands at an answer, it is a correct or a wrong one.
"""

from __future__ import annotations

import torch

from claims.evidence import claim
from claims.readout import Readout
from claims.trees import ascent
from llm import neighbours


@claim("N3", "reinforce", extremes=False)
def n3(module, name, draws, evidence):
    """A step changes the log-likelihood of a correct answer by (I) - (II) + (III) - (IV), exactly
    to first order.

    Source: NTHR Theorem 4.4 (P; terms D)

    The features are unconstrained: W and every hidden state are free parameters. Only h_x, which
    predicts the first token of all answers, is shared. The gradient of log pi(y_k) is g h^T in W,
    and W^T g in h. The flow ascends sum_j A_j log pi(y_j), on-policy, where A_j is p+ for a correct
    answer and -p- for a wrong one (M3). So d/dt ln pi(y_i+) is the inner product of that ascent
    direction with the gradient of log pi(y_i+).

    W's part gives <g, g'> <h, h'> over all pairs of a token of y_i+ and a token of any answer:

      (I)   = p+ sum_k sum_{i'} sum_{k''} <g+_{i,k}, g+_{i',k''}> <h+_{i,k}, h+_{i',k''}>
      (II)  = p- sum_k sum_j sum_{k'} <g+_{i,k}, g-_{j,k'}> <h+_{i,k}, h-_{j,k'}>

    where i' runs over the correct answers, i included, and j over the wrong ones. The part of the
    hidden states gives the token with itself, and at h_x all pairs of first tokens:

      (III) = p+ [ sum_{k>=2} ||W^T g+_{i,k}||^2
                   + sum_{i'} <W^T g+_{i,1}, W^T g+_{i',1}> ]
      (IV)  = p- sum_j <W^T g+_{i,1}, W^T g-_{j,1}>

    The Group Weighted Hidden Embedding Score is GWHES = (II) - (I). The larger it is, the lazier is
    the likelihood.
    """
    for draw in draws:
        G, width = draw.G, draw.mask.shape[1]
        R = torch.tensor([1.0, 0.0, *(draw.randn(G - 2) > 0)], dtype=torch.float64)
        p = R.mean()
        A = (R - p) / (p * (1 - p)).sqrt()
        tokens, mask = draw.tokens[:G], draw.mask[:G]
        W = draw.randn(draw.vocabulary, 3).requires_grad_()
        h_x = draw.randn(1, 1, 3).requires_grad_()
        h_rest = draw.randn(G, width - 1, 3).requires_grad_()
        free = (W, h_x, h_rest)
        hidden = torch.cat([h_x.expand(G, 1, 3), h_rest], 1)
        logp = (hidden @ W.T).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        adv = A[:, None].expand(G, width)
        batch = module.Batch(logp, logp.detach(), adv, mask, G, draw.max_tokens)
        flow = [G * draw.max_tokens * ascent(module.reinforce(batch), x) for x in free]
        measured = []
        for i in R.nonzero():
            slopes = [ascent(-logp[i][mask[i]].sum(), x) for x in free]
            measured.append(sum((a * b).sum() for a, b in zip(slopes, flow, strict=True)))
        answer, t = at = mask.nonzero(as_tuple=True)
        probs = (hidden[at] @ W.T).softmax(-1)
        g = torch.eye(draw.vocabulary, dtype=torch.float64)[tokens[at]] - probs
        both = (g @ g.T) * (hidden[at] @ hidden[at].T)  # (K, K), all pairs of tokens
        of_hidden = (g @ W) @ (g @ W).T
        first = (t[:, None] == 0) & (t == 0)  # at h_x; elsewhere a token meets itself only
        of_hidden = torch.where(first | torch.eye(len(t)).bool(), of_hidden, 0)
        sums = (both + of_hidden) @ A[answer]  # (I) + (III) by p+, (II) + (IV) by -p-
        predicted = [sums[answer == i].sum() for i in R.nonzero()]
        evidence.equal(torch.stack(predicted), torch.stack(measured))


@claim("N4", "nthr_scores")
def n4(module, name, draws, evidence):
    """One matrix a group replaces the double sum: sum_{i,k''} <g, g'> <h, h'> = g^T M h with M =
    sum of g' h'^T.

    Source: NTHR Eq. 7 and App. 7.4 (P); boundary and restriction (D)

    For one pair, <g, g'> <h, h'> = g^T (g' h'^T) h. The matrix in the middle does not depend on the
    token whose score is asked for. So it is summed once over all tokens of the correct answers: M.
    For G answers of T tokens that takes G T (|V*| d) products in place of (G T)^2 (|V*| + d), where
    V* are the ids that g is kept on. The paper, too, sums over the correct tokens first.

    Two things follow. Summed over the correct answers, (II) of N3 is p- times the summed scores of
    the wrong tokens: both are the same sum over all pairs of one correct and one wrong token. So a
    wrong token with s > 0 pushes the correct answers down, and one with s < 0 lifts them. That
    makes tau = 0 a natural boundary for NTHR's selection (M6). To first order, without the push on
    such a token (eta = 0) the correct answers gain |c| s; `python -m toy.nthr` measures whole
    steps.

    V* are the token ids that occur in the answers of this prompt. e_y lies in V*, so outside of it
    g = -pi, and the product of two such entries is positive. Leaving them out lowers <g, g'> by the
    sum of pi pi' over the ids outside V*. The score changes by that times <h, h'>, which has either
    sign. The softmax keeps its full denominator; renormalised on V* it would be another policy's.
    This is what makes a vocabulary of 150 000 affordable.

    Measured: all scores, and the part that a correct answer has in those of its own tokens, on V*
    and on all ids, against a loop over pairs.
    """
    for draw in draws:
        readout = Readout(draw)
        scores = getattr(module, name, neighbours.nthr_scores)
        for full_vocab in (False, True):
            measured = scores(**readout.facts, **readout.reading, full_vocab=full_vocab)
            for x, y in zip(readout.scores(full_vocab), measured, strict=True):
                evidence.equal(x, y)
