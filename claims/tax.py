"""C15 and C16: the tax on a node, and the price of methods that do not pay it.

A node v = (h, a) of the prefix tree is a prefix and the token taken there; S_v are the answers that
pass through it. The net push on the node is the sum of c_i = w_i A_i over S_v. Here w_i is the
effective weight that the loss gives to the advantage A_i. Weights that are equal for all visitors
of a node are called exchangeable.
"""

from __future__ import annotations

import losses
from claims.evidence import claim, equal, not_zero
from claims.formulas import DFPO, fitting
from toy.worlds import Toy

# ---------------- C15: the tax is a covariance


@claim("C15", "learning_tax", "prefix_nodes")
def c15(name, tree):
    """The net push on a node of a batch is credit, wbar sum_i A_i, plus tax, |S_v| Cov(w, A). If w
    does not depend on A, the tax is 0 for every A only if w is constant.

    Source: the learning tax of DFPO as a covariance (D); TEMPO (2509.18314) had the tree's nodes
    and this credit before

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
    if name == "prefix_nodes":
        nodes = losses.prefix_nodes(tree.tokens, tree.mask, tree.G)
        together = [x[tree.mask][:, None] == x[tree.mask] for x in (tree.nodes, nodes)]
        equal(*together, "whether two tokens share a node")
        return equal(~tree.mask, nodes == -1, "whether it is padding")
    c = tree.fill(tree.randn(*tree.mask.shape))
    taxes = sizes = 0.0
    for visits in tree.visits.values():
        used = [(i, t) for i, t in visits if tree.adv[i]]
        if len(used) > 1:
            A = tree.adv[[i for i, _ in used]]
            w = c[tuple(zip(*used, strict=True))] / A
            taxes += ((w - w.mean()) * A).sum().abs()
            sizes += (w * A).abs().sum()
    equal(taxes / sizes, losses.learning_tax(c, tree.adv, tree.nodes, tree.mask), "the tax share")


# ---------------- C16: the price


# Losses with one divisor that push all tokens. The token mean is a constant here, because the batch
# holds every group.
UNBIASED = ("reinforce", "grpo_symmetric", "dr_grpo", *DFPO)
PARALLEL = ("dapo", "cispo", "nthr_grpo", "token_grpo", "lopti_high")


@claim("C16", *UNBIASED, *PARALLEL)
def c16(name, tree):
    """On-policy, a loss with one divisor has an unbiased expected update. Off-policy, weighting
    each answer by its own plain product of ratios has (not measured), and the methods here do not.

    Source: exact enumeration (D)

    Proof: let E be the mean under the new policy. With the plain product, E_old[s f(y)] = E[f(y)]
    for every f. A_i = R_i - mean(R) contains R_i with the weight 1 - 1/G. So for independent
    answers from the old policy

        E_old[s_i A_i grad log pi(y_i)]
            = (1 - 1/G) grad E[R] - (1/G) sum_{j != i} E[grad log pi(y_i)] E_old[R_j],

    and the last sum is 0, because E[grad log pi] = 0. On-policy s = 1, so every method with the
    constant divisor L has this expected update over L. Off-policy the geometric root, the clip, the
    minimum over the group and the projection on A each break the first equation. So DFPO buys
    cancellation with bias.
    """
    toy = Toy(tree.seed)
    on, off = (toy.expected_update(fitting(name), off_policy) for off_policy in (False, True))
    if name in UNBIASED:
        equal(toy.unbiased, on, "the update on-policy")
    equal(toy.exact / toy.exact.norm(), on / on.norm(), "its direction")
    not_zero(off / off.norm() - toy.exact / toy.exact.norm(), "the bias off-policy")
