"""C15 to C17: the learning tax, its price, and the projection that removes it.

A node v = (h, a) of the prefix tree is a history and the token taken there; S_v are the answers
that pass through it. What a loss does to the node is the sum of c_i = w_i A_i over S_v. Here w_i is
the effective weight that the loss gives to the advantage A_i. Weights that are equal for all
visitors of a node are called exchangeable.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

import losses
from claims.formulas import ALL, NORMALISER, WIDER
from claims.trees import Draw, ascent, coefficients


def tax(w: list[float], A: list[float]) -> float:
    """|S_v| Cov(w, A) over the visitors of one node."""
    return sum((x - sum(w) / len(w)) * (a - sum(A) / len(A)) for x, a in zip(w, A, strict=True))


def visitors(draw: Draw, *cs: Tensor) -> Iterator[tuple[list, ...]]:
    """For every node: the visits (i, t) with A_i != 0, their A_i, and for each c their w = c/A."""
    numbers = [c.tolist() for c in cs]
    for visits in draw.tree.values():
        used = [(i, t) for i, t in visits if draw.adv[i]]
        if used:
            weights = ([c[i][t] / draw.adv[i] for i, t in used] for c in numbers)
            yield used, [draw.adv[i] for i, _ in used], *weights


# ---------------- C15: the tax is a covariance


def c15(module, name, draws, evidence):
    """A node gets credit, wbar sum A_i, plus tax, |S_v| Cov(w, A), which is 0 for every A only if w
    is constant on it.

    Source: learning tax (D)

    Let S_v be the answers through a node v, w_i = c_i / A_i their weights, and wbar the mean weight
    over S_v. Then

      sum w_i A_i = wbar sum A_i + sum (w_i - wbar) A_i = credit + tax,

    and the second sum is |S_v| Cov(w, A). The first is what these answers earned more than their
    siblings: the empirical advantage of taking the token a at h. The second depends on who else
    shares the prefix and on what comes after it, not on this token.

    A constant w has w_i - wbar = 0, so its tax is 0 for every A. For any other w, the advantages A
    = w - wbar are taxed with ||w - wbar||^2 > 0 ("left", over sum |c|). So the tax is 0 for every
    possible A exactly where w is exchangeable. Min-Replace is so at every node (C9), Adv-Orthogonal
    has no tax at fully shared nodes (C10).

    The number for a whole batch is sum_v |tax_v| / sum_v sum_{S_v} |c_i|, over nodes with at least
    two visitors. 0 means full exchangeability. Answers with A_i = 0 have no w and are left out. w
    is always taken against the answer's own advantage A_i, also for methods with a credit rule:
    what such a rule breaks on purpose should show. The number needs token ids and dLoss/dlogp only,
    so it can be logged for any model, any loss and every step.

    learning_tax is compared as a whole, and node by node: the absolute value of what the node gets
    minus its credit. It is compared with 0 for constant w, and for that worst A. prefix_nodes is
    compared with a dictionary of prefixes. dfpo_min, whose weight is one constant, is compared with
    0 at every node.
    """
    check = {
        "prefix_nodes": check_prefix_nodes,
        "dfpo_min": check_constant_weight,
        "learning_tax": check_learning_tax,
    }[name]
    for draw in draws:
        check(module, draw, evidence)


def check_prefix_nodes(module, draw: Draw, evidence) -> None:
    nodes = module.prefix_nodes(draw.tokens, draw.mask, draw.G)
    predicted, measured = (x[draw.mask][:, None] == x[draw.mask] for x in (draw.nodes, nodes))
    evidence.equal(predicted.double(), measured.double())
    evidence.equal((~draw.mask).double(), (nodes < 0).double())
    evidence.equal(-1, nodes.min())
    evidence.equal(True, nodes.dtype == torch.int64)


def check_constant_weight(module, draw: Draw, evidence) -> None:
    batch = draw.batch(module, 0.6)
    for _, A, w in visitors(draw, coefficients(module.dfpo_min(batch), batch)):
        evidence.equal(0, tax(w, A))


def check_learning_tax(module, draw: Draw, evidence) -> None:
    c = draw.fill(draw.randn(*draw.mask.shape))
    A = torch.tensor(draw.adv, dtype=torch.float64)
    nodes = [node for node in visitors(draw, c) if len(node[0]) > 1]
    sizes = [sum(abs(x * a) for x, a in zip(w, A_v, strict=True)) for _, A_v, w in nodes]
    whole = sum(abs(tax(w, A_v)) for _, A_v, w in nodes) / sum(sizes) if nodes else 0
    evidence.equal(whole, module.learning_tax(c, A, draw.nodes, draw.mask))
    for (visits, A_v, w), size in list(zip(nodes, sizes, strict=True))[:3]:
        alone = torch.zeros_like(draw.mask)
        alone[tuple(zip(*visits, strict=True))] = True
        credit = sum(w) / len(w) * sum(A_v)
        total = sum(x * a for x, a in zip(w, A_v, strict=True))
        measured = size * module.learning_tax(c, A, draw.nodes, alone)
        evidence.equal(abs(total - credit), measured)
    evidence.equal(0, module.learning_tax(0 * c, A, draw.nodes, draw.mask))
    constant = draw.fill((2 + draw.noise) * draw.rows(A))
    evidence.equal(0, module.learning_tax(constant, A, draw.nodes, draw.mask))
    w = draw.randn(draw.N)
    by_group = w.view(-1, draw.G)
    worst = (by_group - by_group.mean(1, keepdim=True)).flatten()
    # the first token, which the whole group shares
    first = torch.arange(draw.mask.shape[1]).expand(draw.mask.shape) == 0
    predicted = sum(x * x for x in worst.tolist()) / sum(abs(x) for x in (w * worst).tolist())
    c = draw.fill(draw.rows(w * worst))
    evidence.equal(predicted, module.learning_tax(c, worst, draw.nodes, first))
    evidence.record_left(predicted)


# ---------------- C16: the price


def c16(module, name, draws, evidence):
    """Off-policy only plain-product, unclipped sequence weights are unbiased: cancellation is paid
    for with bias.

    Source: exact enumeration (D)

    Let s be the plain product of an answer's token ratios. Then E_old[s f(y)] = E_theta[f(y)] for
    every f. Take groups of independent answers from the old policy, and A_i = R_i - mean_j R_j. The
    mean contains R_i itself with the weight 1/G, and E[s_i R_i grad log pi(y_i)] = grad J. So

      E[s_i A_i grad log pi(y_i)]
        = (1 - 1/G) grad J - (1/G) sum_{j != i} E[s_i grad log pi(y_i)] E[R_j],

    and the last sum is 0, because E_theta[grad log pi] = 0. On-policy s = 1, and every method with
    a budget mean has this expected update, over L.

    Off-policy the geometric root, the clip, the minimum over the group and the projection on A each
    break E_old[s f] = E_theta[f]. So what cancels shared tokens is bought with bias. To show how
    much, all groups of 3 of a toy with 7 answers are enumerated, for 6 toys. "left" is |E g -
    unbiased| / |unbiased|, off-policy. The table of the price shows the mean cosine with grad J and
    L |E g| / |grad J|, before and after the projection of C17.
    """
    prices = []
    for world in (draw.all_groups for draw in draws[::4]):
        W = world.policy.W
        unbiased = (1 - 1 / world.G) * world.exact / world.max_tokens
        token_mean = name == "dapo"
        on = world.batch(module, off_policy=False, token_mean=token_mean)
        off = world.batch(module, off_policy=True, token_mean=token_mean)
        if name == "sequence_ratio":
            updates = {}
            for kind in ("product", "geometric"):
                J = (module.sequence_ratio(off, kind) * off.adv[:, 0]).mean() / world.max_tokens
                updates[kind] = ascent(-J, W)
            evidence.equal(unbiased, updates["product"])
            evidence.record_left((updates["geometric"] - unbiased).norm() / unbiased.norm())
            continue
        loss = getattr(module, name)
        hyper = WIDER.get(name, {})
        loss_off = loss(off, **hyper)
        projected = losses.project(loss_off, off.logp, off.adv[:, 0], world.nodes, world.mask)
        g_on, g_off, g_projected = (ascent(x, W) for x in (loss(on, **hyper), loss_off, projected))
        if NORMALISER[name] == "budget-mean":
            evidence.equal(unbiased, g_on)
        evidence.record_left((g_off - unbiased).norm() / unbiased.norm())
        for g in (g_on, g_off, g_projected):
            cosine = (g * world.exact).sum() / g.norm() / world.exact.norm()
            prices.append([cosine, world.max_tokens * g.norm() / world.exact.norm()])
    if prices:
        evidence.rows.append([name, *torch.tensor(prices).view(-1, 6).mean(0).tolist()])


# ---------------- C17: the node-mean projection


def projected(module, draw: Draw, batch, loss: Tensor) -> Tensor:
    """A loss after the projection of the module under test."""
    A = torch.tensor(draw.adv, dtype=torch.float64)
    return module.project(loss, batch.logp, A, draw.nodes, draw.mask)


def projections(module, draws) -> Iterator[tuple]:
    """Method after method, each on its own tree: (draw, batch, loss, c before, c after).

    The losses are the reference's: these claims are about `project` alone.
    """
    methods = [(name, {}) for name in ALL] + [("grpo", {"kl": 0.1})]
    for draw, (name, hyper) in zip(draws, itertools.cycle(methods), strict=False):
        batch = draw.batch(losses, 0.6)
        loss = getattr(losses, name)(batch, **hyper)
        after = coefficients(projected(module, draw, batch, loss), batch)
        yield draw, batch, loss, coefficients(loss, batch), after


def c17a(module, name, draws, evidence):
    """The node-mean projection of any loss has no tax at any node, fully shared or not.

    Source: node-mean projection (D, ours)

    Replace each weight w_{i,t} = c_{i,t} / A_i by its mean wbar_v over the visitors S_v of the
    token's node v. Then ascend (1/N) sum c'_{i,t} log pi with c'_{i,t} = wbar_v A_i, detached.
    Answers with A_i = 0 have no w; they keep their c and count nowhere.

      (a) w' is constant on S_v, so Cov(w', A) = 0: no tax, at any node.
      (b) The credit wbar_v sum A_i stays: the mean of a constant is the constant.
      (c) The mean is the constant that is closest to w in L2. So this is an orthogonal projection
          on the exchangeable weights: it is linear and idempotent, and w - w' sums to 0.
      (d) A node with one visitor has w' = w. Where answers differ, the loss and its clip are what
          they were, so the trust region stays where it does its work.
      (e) Where the whole group shares the token, c' = mean(w) A_i: a group constant, as with
          Min-Replace, but with the mean instead of the minimum.
      (f) Methods that are exchangeable already have nothing to remove.

    The result is stop-gradient by construction, because c' is detached. Neither transform of DFPO
    has (a) and (d) together: Min-Replace has (a) but no clip, and Adv-Orthogonal acts on whole
    answers. C16's table shows what the projection does to the bias.
    """
    for draw, _, _, _, after in projections(module, draws):
        for _, A, w in visitors(draw, after):
            evidence.equal(0, max(w) - min(w))
            evidence.equal(0, tax(w, A))


def c17b(module, name, draws, evidence):
    """The projection leaves the credit of every node as it was.

    Source: node-mean projection (D, ours); derivation: C17a

    The credit of a node is the mean weight of its visitors times the sum of their advantages. The
    projection gives every visitor that mean weight, and the mean of a constant is the constant.
    """
    for draw, _, _, before, after in projections(module, draws):
        for _, A, w, w_after in visitors(draw, before, after):
            evidence.equal(sum(w) / len(w) * sum(A), sum(w_after) / len(w) * sum(A))


def c17c(module, name, draws, evidence):
    """The projection gives the closest exchangeable weights (w - w' sums to 0 at a node); it is
    linear and idempotent.

    Source: node-mean projection (D, ours); derivation: C17a

    Among all constants k, sum (w_i - k)^2 is smallest at the mean, where sum (w_i - k) = 0. So w -
    w' is orthogonal to every weight that is constant on the node: an orthogonal projection. Such a
    map is linear, and to apply it twice changes nothing more.
    """
    for draw, batch, loss, before, after in projections(module, draws):
        for _, _, w, w_after in visitors(draw, before, after):
            evidence.equal(sum(w), sum(w_after))
        twice = projected(module, draw, batch, projected(module, draw, batch, loss))
        evidence.equal(after, coefficients(twice, batch))
        other = losses.gspo(batch)
        mixed = 2 * coefficients(projected(module, draw, batch, other), batch) - 3 * after
        of_the_mix = projected(module, draw, batch, 2 * other - 3 * loss)
        evidence.equal(mixed, coefficients(of_the_mix, batch))


def c17d(module, name, draws, evidence):
    """Tokens that only one answer visits keep their coefficient, the clip included; so do answers
    with A_i = 0.

    Source: node-mean projection (D, ours); derivation: C17a

    The mean over one visitor is that visitor's own weight, so c' = c. Where answers differ, the
    method's clip stays as it is. An answer with A_i = 0 has no weight w = c / A_i. The projection
    leaves it out of every mean and leaves its c, for instance a KL term's, as it was.
    """
    for draw, batch, loss, before, after in projections(module, draws):
        unchanged = torch.tensor([not a for a in draw.adv])[:, None] & draw.mask
        for visits in draw.tree.values():
            if len(visits) == 1:
                unchanged[visits[0]] = True
        evidence.equal(before[unchanged], after[unchanged])
        zero = torch.zeros(draw.N, dtype=torch.float64)
        nothing = module.project(loss, batch.logp, zero, draw.nodes, draw.mask)
        evidence.equal(before, coefficients(nothing, batch))


def c17e(module, name, draws, evidence):
    """Where the whole group shares, the projection is a group constant, the mean weight: the sum is
    0.

    Source: node-mean projection (D, ours); derivation: C17a

    At a fully shared node S_v is the whole group, so every answer gets the mean weight of the
    group. The sum is wbar sum_i A_i, and centred advantages sum to 0.
    """
    for draw, _, _, before, after in projections(module, draws):
        for visits, A, w in visitors(draw, before):
            if len(visits) == draw.G:
                at = tuple(zip(*visits, strict=True))
                evidence.equal([sum(w) / len(w) * a for a in A], after[at])
                evidence.equal(0, after[at].sum())


def c17f(module, name, draws, evidence):
    """The projection is the identity on methods that are exchangeable already: reinforce,
    grpo-symmetric, dfpo-min.

    Source: node-mean projection (D, ours); derivation: C17a

    All visitors of a node have one ratio. So reinforce (w = 1/L), grpo-symmetric (r/L inside the
    range, 0 outside) and dfpo-min (min_j s_j / L) give them one weight, and that is its own mean.
    """
    for draw, method in itertools.product(draws, ("reinforce", "grpo_symmetric", "dfpo_min")):
        batch = draw.batch(losses, 0.6)
        loss = getattr(losses, method)(batch)
        after = coefficients(projected(module, draw, batch, loss), batch)
        evidence.equal(coefficients(loss, batch), after)


def c17g(module, name, draws, evidence):
    """Nodes merged by their last k tokens: still no tax at any node, merged or not; each merged
    node keeps its credit.

    Source: node-mean projection, merged nodes (D, ours); derivation: C17a

    Shared tokens also occur off the common prefix. With context k, tokens count as one node if the
    group's answers agree in the last k tokens, wherever these stand. A node of the prefix tree
    lies within one merged node, on which w' is constant; so w' is constant on it, too, and has no
    tax. But its credit, wbar sum A_i, is now taken at the merged mean: it stays for the merged node
    only. A token that one answer alone reached gives up its own weight to others like it ("left":
    the change of a prefix node's credit).
    """
    contexts = itertools.cycle((1, 2, 3))
    for (draw, batch, loss, before, _), k in zip(
        projections(module, draws), contexts, strict=False
    ):
        nodes = module.prefix_nodes(draw.tokens, draw.mask, draw.G, k)
        A = torch.tensor(draw.adv, dtype=torch.float64)
        after = coefficients(module.project(loss, batch.logp, A, nodes, draw.mask), batch)
        w_before = (before / A[:, None]).tolist()
        w_after = (after / A[:, None]).tolist()
        merged = {}
        for i, y in enumerate(draw.answers):
            for t in range(len(y)) if draw.adv[i] else ():
                last_tokens = ((None,) * k + y[: t + 1])[-k:]
                merged.setdefault((i // draw.G, last_tokens), []).append((i, t))
        for visits in merged.values():
            mean = sum(w_before[i][t] for i, t in visits) / len(visits)
            evidence.equal([mean] * len(visits), [w_after[i][t] for i, t in visits])
        for _, adv, old, new in visitors(draw, before, after):
            evidence.equal(0, tax(new, adv))
            evidence.record_left((sum(new) - sum(old)) / len(old) * sum(adv))
