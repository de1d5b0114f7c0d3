"""C15 and C16: the learning tax, and the price of methods that do not pay it.

A node v = (h, a) of the prefix tree is a history and the token taken there; S_v are the answers
that pass through it. What a loss does to the node is the sum of c_i = w_i A_i over S_v. Here w_i is
the effective weight that the loss gives to the advantage A_i. Weights that are equal for all
visitors of a node are called exchangeable.
"""

from __future__ import annotations

import torch

import losses
from claims.evidence import TOLERANCE, ascent, claim
from claims.formulas import FORMULAS, every_loss, fitting
from toy.worlds import Toy

# ---------------- C15: the tax is a covariance


@claim("C15", "learning_tax", "prefix_nodes", only_if="w does not depend on A")
def c15(name, draws, evidence):
    """A batch gives a node credit, wbar sum A_i, plus tax, |S_v| Cov(w, A): 0 for every A only if w
    is constant.

    Source: learning tax (D)

    Let S_v be the answers through a node v, w_i = c_i / A_i their weights, and wbar the mean weight
    over S_v. Then

      sum w_i A_i = wbar sum A_i + sum (w_i - wbar) A_i = credit + tax,

    and the second sum is |S_v| Cov(w, A). The first is what these answers earned more than their
    siblings: the empirical advantage of taking the token a at h. TEMPO (2509.18314) had both the
    tree's nodes and this credit before. The second depends on who else shares the prefix and on
    what comes after it, not on this token.

    A constant w has w_i - wbar = 0, so its tax is 0 for every A. Let w not depend on A. If it is
    not constant, the advantages A = w - wbar are taxed with ||w - wbar||^2 > 0. So then the tax is
    0 for every possible A exactly where w is exchangeable. Min-Replace is so at every node (C9).
    Adv-Orthogonal's w does depend on A: it is not constant, and has no tax at fully shared nodes
    (C10).

    This divides one batch. What is expected divides otherwise, because wbar and sum A_i are made of
    the same answers. Let n of G independent answers visit the node, let A be R minus the group's
    mean, let w_i depend on answer i alone, and C = Cov(w, R) over the answers that visit. Then
    E[sum w_i A_i] has the tax n (1 - 1/G) C in it, but E[sum (w_i - wbar) A_i] = (n - 1) C, which
    is smaller, as a sample covariance is without Bessel's correction. So the tax of a batch times
    n (G - 1) / (G (n - 1)) is the expected tax on average. The rest, (1 - n/G) C, stands in the
    batch's credit.

    The number for a whole batch is sum_v |tax_v| / sum_v sum_{S_v} |c_i|, over nodes with at least
    two visitors. Full exchangeability gives 0. Answers with A_i = 0 have no w and are left out. w
    is always taken against the answer's own advantage A_i, also for methods with a credit rule:
    what such a rule breaks on purpose should show. The number needs token ids and dLoss/dlogp only,
    so it can be logged for any model, any loss and every step.

    What a 0 does not say: that the expected push is credit alone, or that single visitors pay
    nothing, whom the number leaves out. What a number above 0 does not say: that a token
    drifts. A tax that all siblings pay alike per visit cancels between them.

    learning_tax is compared with a loop over nodes for random coefficients ("left": its value), and
    with 0 for constant w. prefix_nodes is compared with a dictionary of prefixes.
    """
    for draw in draws:
        if name == "prefix_nodes":
            nodes = losses.prefix_nodes(draw.tokens, draw.mask, draw.G)
            together = [x[draw.mask][:, None] == x[draw.mask] for x in (draw.nodes, nodes)]
            evidence.equal(*together)
            evidence.equal(~draw.mask, nodes == -1)
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
        evidence.equal(whole, losses.learning_tax(c, draw.adv, draw.nodes, draw.mask))
        evidence.record_left(whole)
        for constant in (0 * c, draw.fill((2 + draw.noise) * draw.rows(draw.adv))):
            evidence.equal(0, losses.learning_tax(constant, draw.adv, draw.nodes, draw.mask))


# ---------------- C16: the price


@claim(
    "C16",
    "sequence_ratio",
    every_loss,
    only_if="on-policy, or the weight is the plain product",
    extremes=False,
)
def c16(name, draws, evidence):
    """Off-policy a weight for each answer is unbiased if it is the answer's own plain product; most
    methods here are biased. On-policy each of them ascends in these toys.

    Source: exact enumeration (D)

    Let s be the plain product of an answer's token ratios. Then E_old[s f(y)] = E_theta[f(y)] for
    every f. Take groups of independent answers from the old policy, and A_i = R_i - mean_j R_j. The
    mean contains R_i itself with the weight 1/G, and E[s_i R_i grad log pi(y_i)] = grad J. So

      E[s_i A_i grad log pi(y_i)]
        = (1 - 1/G) grad J - (1/G) sum_{j != i} E[s_i grad log pi(y_i)] E[R_j],

    and the last sum is 0, because E_theta[grad log pi] = 0. On-policy s = 1, and every method with
    a budget mean has this expected update, over L.

    Off-policy the geometric root, the clip, the minimum over the group and the projection on A each
    break E_old[s f] = E_theta[f]. So Min-Replace and Adv-Orthogonal buy cancellation with bias. It
    need not be: recentred moves the baseline in place of the weights, and is unbiased (C21).

    To show how much, all groups of 3 of a toy with 7 answers are enumerated, for 6 toys. "left" is
    |E g - unbiased| / |unbiased|, off-policy. The table of the price shows the mean cosine with
    grad J and L |E g| / |grad J| for A = R minus the mean, which is what the proof is about. Its
    rewards are graded. So the scale "std", with which METHODS ships most methods, turns the update
    on-policy already (C29c). The rows of dapo, cispo and the other token means have the divisor of
    an infinite batch. lopti_high and off_policy_mask get the hyperparameters of AUDIT, and gspo its
    clip range.

    A descent is cancelled as well as an ascent, and may be its own formula. So a positive cosine
    with grad J is required on-policy, of every loss, in every toy. This is no law: C18 and C30 have
    worlds in which grpo, gspo or the std descend.
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
        average = FORMULAS[name][1] if name in FORMULAS else ""
        loss, row = getattr(losses, name), []
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
