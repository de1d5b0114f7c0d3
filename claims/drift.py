"""C13 and C14: what happens to a token whose pushes do not cancel.

C2 to C11 say when a shared token has a net push. These two say what the net push does: the token's
distribution drifts, and answers of equal reward can be driven apart.
"""

from __future__ import annotations

from collections import defaultdict

import torch

import losses
from claims.evidence import ascent, claim, pushes_of
from toy.policy import kl


@claim("C13", "dr_grpo")
def c13(name, draws, evidence):
    """An update eta g moves the distribution at a prefix h by KL = (eta^2/2) g^T F(h) g + O(eta^3),
    where F(h) is the Fisher matrix.

    Source: DFPO Prop. 3.1 (S); kernel (D)

    Measured: the mean KL of the updates by eta g and -eta g, in which odd orders vanish, over the
    formula's, at eta = 1e-3. g is the direction of a loss with a net push on the token. It is
    scaled so that 1 is the largest number that it adds to a logit.

    Proof: the update adds eta z with z = g phi(h) to the logits, so p_eta is proportional to p_0
    exp(eta z). With psi(eta) = log E_0[exp(eta z)] the KL of p_eta against p_0 is E_eta[eta z -
    psi] = eta psi' - psi. Let k1 be the mean and k2 the variance of z under p_0. Then psi = eta k1
    + (eta^2/2) k2 + O(eta^3), so the KL is (eta^2/2) k2 + O(eta^3).

    Here k2 = Var_0(z) = E_0[(g . grad log pi)^2] = g^T F(h) g. So a net push on a shared token
    makes its distribution drift, although no reward asks for it. The distribution stays only if g
    is in the kernel of F(h), for example if g adds one number to all logits.
    """
    eta = 1e-3
    for draw in draws[::3]:
        direction = ascent(getattr(losses, name)(draw.batch(0.3, 0.35)), draw.policy.W)
        for p, y in draw.shared[:2]:
            h = (p, *y[:-1])
            largest = (direction @ draw.policy.phi(h)).abs().max()
            if largest == 0:  # all advantages are 0
                continue
            g = (direction / largest).flatten()
            predicted = eta**2 / 2 * g @ draw.policy.fisher(h) @ g
            steps = (draw.policy.step(direction / largest, x) for x in (eta, -eta))
            ratio = sum(kl(step, draw.policy, h) for step in steps) / 2 / predicted
            evidence.equal(True, bool(abs(ratio - 1) < 1e-5), what="whether it is the formula's")


@claim(
    "C14",
    "reinforce",
    "dfpo_min",
    "dfpo_orthogonal",
    only_if="the pushes cancel where the answers part",
)
def c14(name, draws, evidence):
    """Where two answers of equal reward part, d(z_a - z_b) = eta c (k_a - k_b), if no third answer
    takes their tokens and the pushes cancel there. Equal norms are not needed.

    Source: DFPO Cor. 3.2, Eq. 5 (S); identity and condition (D)

    Measured: the identity of the proof, off-policy, at every prefix of every tree; and the sum S of
    all pushes at prefixes where the whole group is still together. "otherwise": S where only some
    answers are.
    """
    for draw in draws:
        batch = draw.batch(0.6)
        loss = getattr(losses, name)(batch)
        c, g = pushes_of(loss, batch), draw.N * ascent(loss, draw.policy.W)
        visits = defaultdict(list)  # of a prefix: the answer and the token that it takes there
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
            else:
                evidence.record_otherwise(S / size)
