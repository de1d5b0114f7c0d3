"""C13 and C14: what happens to a token that is not left alone.

C2 to C11 say when a shared token keeps a gradient. Here is what that gradient does: the token's
distribution drifts, and answers of equal reward can be driven apart.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

import losses
from claims.evidence import ascent, claim, coefficients
from toy.policy import kl


@claim("C13", "dr_grpo", extremes=False)
def c13(name, draws, evidence):
    """A step eta g moves a token by KL = (eta^2/2) g^T F(h) g + O(eta^3): halving eta divides the
    remainder by 8.

    Source: DFPO Prop. 3.1 (S); kernel (D)

    Write p_eta for pi_{theta + eta g}(.|h), and f(eta) = KL(p_eta || p_0) = sum_a p_eta log(p_eta /
    p_0). Probabilities sum to 1, so sum_a p_eta' = 0, and f' = sum_a p_eta' log(p_eta / p_0). At
    eta = 0 both f and f' are 0. The second derivative there is

      f'' = sum_a p_0' (log p_0)' = E_a[<g, grad log pi(a|h)>^2] = g^T F(h) g

    with the Fisher matrix F(h) = E_a[grad log pi(a|h) grad log pi(a|h)^T]. The next term is of
    third order, so halving eta divides the remainder by 8.

    So whatever gradient a shared token is left with makes its distribution drift, though no reward
    asks for it. Where the condition C2 holds, the token stays where it is. The KL is positive only
    if g is outside the kernel of F(h). To add one number to all logits of h is a step, but no
    drift.

    g is the ascent direction of a loss that does not cancel, off-policy and outside the clip range.
    8 is compared with the sum of |remainder| at eta = 1e-3 over that at 5e-4, to one digit behind
    the point.
    """
    remainder = {1e-3: 0.0, 5e-4: 0.0}
    for draw in draws[::3]:
        g = draw.N * ascent(getattr(losses, name)(draw.batch(0.3, 0.35)), draw.policy.W)
        for p, y in draw.shared[:2]:
            h = (p, *y[:-1])
            F = draw.policy.fisher(h)
            for eta in remainder:
                second_order = eta**2 / 2 * float(g.flatten() @ F @ g.flatten())
                drift = kl(draw.policy.step(g, eta), draw.policy, h)
                remainder[eta] += abs(drift - second_order)
    evidence.equal(8, round(remainder[1e-3] / remainder[5e-4], 1))


@claim(
    "C14",
    "reinforce",
    "dfpo_min",
    "dfpo_orthogonal",
    "recentred",
    only_if="the coefficients cancel where the answers part",
    extremes=False,
)
def c14(name, draws, evidence):
    """Equal rewards give d(z_a - z_b) = eta c (k_a - k_b) where two answers part, if no third one
    takes their tokens and the coefficients cancel there: equal norms are not needed.

    Source: DFPO Cor. 3.2, Eq. 5 (S); identity and condition (D)

    The corollary is about two answers y_a and y_b of equal reward and advantage A, which a method
    weighs by k_a and k_b: d log(pi(y_a)/pi(y_b)) = eta c (k_a - k_b).

    Take one softmax with logits z and probabilities p. Let C_k be the summed coefficients of the
    answers that take token k, and S their sum over all tokens. The step eta sum_k C_k (e_k - p) is
    eta (C - S p). So, exactly and not to first order only,

      d(z_a - z_b) = eta [(C_a - C_b) - S (p_a - p_b)],

    and z_a - z_b is log(pi_a / pi_b). If the coefficients cancel, S = 0, the second term is gone.
    With one answer on each token what is left is eta A (k_a - k_b): Eq. 5. So what Eq. 5 needs is
    that the coefficients cancel over all tokens of this softmax. Equal norms or disjoint
    parameters, as it is often read, are not needed.

    Without the condition it is wrong: p = (.6, .3, .1), A = 1, k_a = k_b = 1/2 has S = 1 and moves
    log(p_a / p_b) by -.3 eta, though k_a = k_b ("left"). The third answer of that group, on the
    third token, has A = -2. With it and the same k, S = 0 and the drift is exactly 0: to cancel is
    enough. This is the best case for DFPO. (Public notes on the paper,
    Memory4ever/AI-System-Design, have the first half of this example.)

    Over several softmaxes this survives at one of them: where the two answers part, if the whole
    group is still together there. Before it they share all tokens, and nothing differs. After it
    they share no softmax. Where an answer walks alone, log pi of the rest grows by eta A k times
    the squared norms of its scores, to first order. These differ from answer to answer, by length
    if by nothing else. So equal k still drives two whole answers apart, also where all
    coefficients cancel. A split that only a part of the group reaches has S = what its node gets,
    not 0.

    S = 0 asks for more than that shared tokens cancel. It sums over different tokens, whose ratios
    differ off-policy. Coefficients that are one number for a whole answer, and sum to 0 over the
    group, have it: those of reinforce, both of DFPO's, recentred. grpo-symmetric and cispo have it
    on-policy only.

    Measured, off-policy: the identity at every history of every tree; S = 0 where the whole group
    is together; and the example, by autograd.
    """
    for draw in draws:
        batch = draw.batch(0.6)
        loss = getattr(losses, name)(batch)
        c, g = coefficients(loss, batch), draw.N * ascent(loss, draw.policy.W)
        visits = defaultdict(list)  # of a history: the answer and the token that it takes there
        for (p, y), at in draw.tree.items():
            visits[(p, *y[:-1])] += [(i, t, y[-1]) for i, t in at]
        for h, here in visits.items():
            C = torch.zeros(draw.vocabulary, dtype=torch.float64)
            for i, t, token in here:
                C[token] += c[i, t]
            S = C.sum()
            size = 1 + C.abs().sum()
            dz = g @ draw.policy.phi(h)
            evidence.equal((C - S * draw.policy.probs(h)) / size, dz / size)
            if len(here) == draw.G:
                evidence.equal(0, S / size)
    without = drift_in_one_softmax((1.0, 1.0))
    evidence.equal([-0.3, 0], [without, drift_in_one_softmax((1.0, 1.0, -2.0))])
    evidence.record_left(without)


def drift_in_one_softmax(adv: tuple[float, ...]) -> Tensor:
    """Of log(p_a / p_b) per eta, with p = (.6, .3, .1), one answer on each token, all k = 1/2."""
    z = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log().requires_grad_()
    g = 0.5 * ascent(-(z.log_softmax(0)[: len(adv)] * torch.tensor(adv)).sum(), z)
    return g[0] - g[1]
