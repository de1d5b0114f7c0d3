"""C15 and C16: the learning tax, and the price of methods that do not pay it.

A node v = (h, a) of the prefix tree is a prefix and the token taken there; S_v are the answers
that pass through it. What a loss does to the node is the sum of c_i = w_i A_i over S_v. Here w_i is
the effective weight that the loss gives to the advantage A_i. Weights that are equal for all
visitors of a node are called exchangeable.
"""

from __future__ import annotations

import torch

import losses
from claims.evidence import TOLERANCE, ascent, claim
from claims.formulas import FORMULAS, average_of, fitting
from toy.worlds import Toy

# ---------------- C15: the tax is a covariance


@claim("C15", "learning_tax", "prefix_nodes", only_if="w does not depend on A")
def c15(name, draws, evidence):
    """A batch gives a node credit, wbar sum A_i, plus tax, |S_v| Cov(w, A), which is 0 for every A
    only if w is constant.

    Source: learning tax (D); TEMPO (2509.18314) had the tree's nodes and this credit before

    Measured: learning_tax against a loop over nodes for random pushes ("left": its value);
    prefix_nodes against a dictionary of prefixes.
    """
    for draw in draws:
        if name == "prefix_nodes":
            nodes = losses.prefix_nodes(draw.tokens, draw.mask, draw.G)
            together = [x[draw.mask][:, None] == x[draw.mask] for x in (draw.nodes, nodes)]
            evidence.equal(*together, what="whether two tokens share a node")
            evidence.equal(~draw.mask, nodes == -1, what="whether it is padding")
            continue
        c = draw.fill(draw.randn(*draw.mask.shape))
        taxes = sizes = 0.0
        for visits in draw.tree.values():
            used = [(i, t) for i, t in visits if draw.adv[i]]
            if len(used) > 1:
                A = draw.adv[[i for i, _ in used]]
                w = c[tuple(zip(*used, strict=True))] / A
                taxes += ((w - w.mean()) * A).sum().abs()
                sizes += (w * A).abs().sum()
        whole = taxes / sizes if sizes else 0
        measured = losses.learning_tax(c, draw.adv, draw.nodes, draw.mask)
        evidence.equal(whole, measured, what="the tax share")
        evidence.record_left(whole)


# ---------------- C16: the price


@claim("C16", "sequence_ratio", *FORMULAS, only_if="on-policy, or the weight is the plain product")
def c16(name, draws, evidence):
    """Off-policy a weight for each answer is unbiased if it is the answer's own plain product; most
    methods here are biased. On-policy each of them ascends in these toys.

    Source: exact enumeration (D)

    Measured: expected updates over all groups of 3 in 6 toys, in closed form where one is known:
    for the plain product, and on-policy for each loss with one divisor. "left": |E g - unbiased| /
    |unbiased| off-policy.
    """
    prices = []
    for toy in (Toy(draw.seed) for draw in draws[::4]):
        W = toy.policy.W
        if name == "sequence_ratio":
            off = toy.batch(off_policy=True)
            ratios = (losses.sequence_ratio(off, kind) for kind in ("product", "geometric"))
            unbiased, update = (ascent(-(s * off.adv[:, 0]).mean() / 2, W) for s in ratios)
            evidence.equal(toy.unbiased, unbiased)
            evidence.record_left((update - unbiased).norm() / unbiased.norm())
            continue
        average, loss, row = average_of(name), getattr(losses, name), []
        for off_policy in (False, True):
            g = ascent(loss(toy.batch(off_policy, average), **fitting(loss)), W)
            cosine = float((g * toy.exact).sum() / g.norm() / toy.exact.norm())
            row += [cosine, 2 * g.norm() / toy.exact.norm()]
            if not off_policy:
                evidence.equal(True, cosine > 0, what="whether it ascends on-policy")
            if not off_policy and average == "budget":
                evidence.equal(toy.unbiased, g)
        prices.append(row)
        bias = (g - toy.unbiased).norm() / toy.unbiased.norm()  # off-policy
        if bias > TOLERANCE:  # a method of your own may have none
            evidence.record_left(bias)
    if prices:
        evidence.rows.append([name, *torch.tensor(prices).mean(0).tolist()])
