"""C15 and C16: the tax on a node, and the price of methods that do not pay it.

A node v = (h, a) of the prefix tree is a prefix and the token taken there; S_v are the answers that
pass through it. The net push on the node is the sum of c_i = w_i A_i over S_v. Here w_i is the
effective weight that the loss gives to the advantage A_i. Weights that are equal for all visitors
of a node are called exchangeable.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import losses
from claims.evidence import TOLERANCE, claim
from claims.formulas import FORMULAS, average_of, fitting
from toy.worlds import Toy

# ---------------- C15: the tax is a covariance


@claim("C15", "learning_tax", "prefix_nodes", only_if="w does not depend on A")
def c15(name, draws, evidence):
    """The net push on a node of a batch is credit, wbar sum_i A_i, plus tax, |S_v| Cov(w, A). The
    tax is 0 for every A only if w is constant.

    Source: the learning tax of DFPO as a covariance (D); TEMPO (2509.18314) had the tree's nodes
    and this credit before

    Measured: learning_tax against a loop over nodes for random pushes, and prefix_nodes against a
    dictionary of prefixes. "otherwise": the tax share.

    Proof: with w_i = c_i / A_i and its mean wbar over S_v, the net push on the node is

        sum_i w_i A_i = wbar sum_i A_i + sum_i (w_i - wbar) A_i.

    A constant w makes the second sum 0. If w does not depend on A and is not constant, the
    advantages A = w - wbar are taxed by ||w - wbar||^2 > 0. So for such a w the tax is 0 for every
    A exactly if w is constant. The condition matters: Adv-Orthogonal makes w depend on A, is not
    constant, and has no tax at fully shared nodes (C10).

    At the root, credit is what the token earned. At a deeper node it is not: over the n visitors of
    a prefix h, sum_i A_i is n times the mean of R at h minus the mean of R in the group, whatever
    token follows. So credit includes what earlier tokens earned. This part is noise, not bias
    (C22b).

    The tax share of a batch is sum_v |tax_v| over the sum of |c_i| at the same nodes, those with
    two or more visitors. Answers with A_i = 0 have no w and do not count. A_i is the answer's own
    advantage, also under a credit rule. A tax share does not show that a token drifts, because a
    tax that is the same for all siblings cancels between them (C18).
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
        evidence.record_otherwise(whole)


# ---------------- C16: the price


def cosine(x: Tensor, y: Tensor) -> float:
    return float((x * y).sum() / x.norm() / y.norm())


def weighed(batch: losses.Batch, ratio: str) -> Tensor:
    """The loss if each answer adds s A / L to J, with L = 2."""
    return -(losses.sequence_ratio(batch, ratio) * batch.adv[:, 0]).mean() / 2


@claim("C16", "sequence_ratio", *FORMULAS, only_if="on-policy, or the weight is the plain product")
def c16(name, draws, evidence):
    """Off-policy, weighting each answer by its own plain product of ratios gives an unbiased
    update. Most methods here are biased. On-policy, each of them ascends in these worlds.

    Source: exact enumeration (D)

    Measured: expected updates over all groups of 3 in 6 random worlds. A closed form is known for
    the plain product and, on-policy, for each loss with the divisor L. "otherwise": 1 - cosine of
    the update and the gradient of the expected reward, off-policy.

    Proof: let E be the mean under the new policy. With the plain product, E_old[s f(y)] = E[f(y)]
    for every f. A_i = R_i - mean(R) contains R_i with the weight 1 - 1/G. So for independent
    answers from the old policy

        E_old[s_i A_i grad log pi(y_i)]
            = (1 - 1/G) grad E[R] - (1/G) sum_{j != i} E[grad log pi(y_i)] E_old[R_j],

    and the last sum is 0, because E[grad log pi] = 0. On-policy s = 1, so every method with the
    constant divisor L has this expected update over L. Off-policy the geometric root, the clip, the
    minimum over the group and the projection on A each break the first equation. So DFPO buys
    cancellation with bias.

    No law says that each loss ascends on-policy (C18). The check requires it in these worlds,
    because a loss and its formula might both have the wrong sign.
    """
    rows = []
    for toy in (Toy(draw.seed) for draw in draws[::4]):
        if name == "sequence_ratio":
            for ratio in losses.RATIOS:
                g = toy.expected_update(partial(weighed, ratio=ratio), off_policy=True)
                if ratio == "product":
                    evidence.equal(toy.unbiased, g)
                else:
                    evidence.record_otherwise(1 - cosine(g, toy.exact))
            continue
        on, off = (toy.expected_update(fitting(name), off_policy) for off_policy in (False, True))
        rows.append([cosine(on, toy.exact), cosine(off, toy.exact)])
        evidence.equal(True, rows[-1][0] > 0, what="whether it ascends on-policy")
        if average_of(name) == "budget":
            evidence.equal(toy.unbiased, on)
        if rows[-1][1] < 1 - TOLERANCE:  # a method of your own may have no bias
            evidence.record_otherwise(1 - rows[-1][1])
    if rows:
        evidence.rows.append([name, *torch.tensor(rows).mean(0).tolist()])
