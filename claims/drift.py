"""C13 and C14: what happens to a token whose pushes do not cancel.

AUDIT says when a shared token has a net push. These two say what the net push does: the token's
distribution drifts, and answers of equal reward can be driven apart. Both are checked in small
worlds (toy/worlds.py), with every group of three answers.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import losses
from claims.evidence import claim, equal
from toy.worlds import Toy, carry


@claim("C13", "dr_grpo")
def c13(name, tree):
    """An update eta g moves the distribution at a prefix h by KL = (eta^2/2) g^T F(h) g + O(eta^3),
    where F(h) is the Fisher matrix.

    Source: DFPO Prop. 3.1 (S); kernel (D)

    Proof: the update adds eta z with z = g phi(h) to the logits, so p_eta is proportional to p_0
    exp(eta z). With psi(eta) = log E_0[exp(eta z)] the KL of p_eta against p_0 is E_eta[eta z -
    psi] = eta psi' - psi. Let k1 be the mean and k2 the variance of z under p_0. Then psi = eta k1
    + (eta^2/2) k2 + O(eta^3), so the KL is (eta^2/2) k2 + O(eta^3).

    Here k2 = Var_0(z) = E_0[(g . grad log pi)^2] = g^T F(h) g. So a net push on a shared token
    makes its distribution drift, although no reward asks for it. The distribution stays only if g
    is in the kernel of F(h), for example if g adds one number to all logits. (Measured: the KL and
    its first two derivatives at eta = 0.)
    """
    toy, h = Toy(tree.seed), ()
    g = toy.expected_update(getattr(losses, name), off_policy=False)
    eta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    old = toy.policy.probs(h).log()
    new = (old + eta * (g @ toy.policy.phi(h))).log_softmax(0)
    kl = new.exp() @ (new - old)
    [slope] = torch.autograd.grad(kl, eta, create_graph=True)
    [curvature] = torch.autograd.grad(slope, eta)
    equal([0, 0], torch.stack([kl, slope]), "the KL and its slope")
    equal(g.flatten() @ toy.policy.fisher(h) @ g.flatten(), curvature, "the curvature of the KL")


@claim("C14", "reinforce", "dfpo_min", "dfpo_orthogonal")
def c14(name, tree):
    """Where two answers of equal reward part, d(z_a - z_b) = eta c (k_a - k_b), if no third answer
    takes their tokens and the pushes cancel there. Equal norms are not needed.

    Source: DFPO Cor. 3.2, Eq. 5 (S); identity and condition (D)
    """
    toy = Toy(tree.seed)
    batch, _ = toy.groups.batch(toy.logp_old, "mean")
    batch = replace(batch, logp=toy.logp.clone())
    c = losses.token_pushes(getattr(losses, name)(batch), batch.logp)  # off-policy
    update = carry(c, batch.logp, toy.policy.W)
    for h in ((), (1,), (2,)):
        C = torch.zeros(3, dtype=torch.float64)  # the sum of the pushes, for each token after h
        for y, pushes in zip(toy.rows, c.tolist(), strict=True):
            if len(y) > len(h) and y[: len(h)] == h:
                C[y[len(h)]] += pushes[len(h)]
        equal(
            C - C.sum() * toy.policy.probs(h), update @ toy.policy.phi(h), "the move of the logits"
        )
    equal(torch.zeros(len(c) // 3), c[:, 0].view(-1, 3).sum(1), "the net push at the beginning")
