"""C15 to C17: the learning tax, its price, and two projections that take it away.

A node v = (h, a) of the prefix tree is a history and the token taken there; S_v are the answers
that pass through it. What a loss does to the node is the sum of c_i = w_i A_i over S_v. Here w_i is
the effective weight that the loss gives to the advantage A_i. Weights that are equal for all
visitors of a node are called exchangeable.

C15 and C17 speak of one batch, C17h and C17i of what is expected before it is drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import losses
from claims.evidence import TOLERANCE, claim
from claims.formulas import FORMULAS, average_of, fitting, single_losses
from claims.trees import Draw, ascent, coefficients
from toy.worlds import Outcome, Toy, World


def visitors(draw: Draw, c: Tensor) -> Iterator[tuple[list[tuple[int, int]], list, list]]:
    """For every node: the visits (i, t) with A_i != 0, their A_i, and their w = c/A."""
    c, adv = c.tolist(), draw.adv.tolist()
    for visits in draw.tree.values():
        used = [(i, t) for i, t in visits if adv[i]]
        if used:
            A = [adv[i] for i, _ in used]
            yield used, A, [c[i][t] / a for (i, t), a in zip(used, A, strict=True)]


# ---------------- C15: the tax is a covariance


@claim("C15", "learning_tax", "prefix_nodes", only_if="w is constant on the node")
def c15(module, name, draws, evidence):
    """A batch gives a node credit, wbar sum A_i, plus tax, |S_v| Cov(w, A): 0 for every A only if w
    is constant.

    Source: learning tax (D)

    Let S_v be the answers through a node v, w_i = c_i / A_i their weights, and wbar the mean weight
    over S_v. Then

      sum w_i A_i = wbar sum A_i + sum (w_i - wbar) A_i = credit + tax,

    and the second sum is |S_v| Cov(w, A). The first is what these answers earned more than their
    siblings: the empirical advantage of taking the token a at h. TEMPO (2509.18314) had both the
    tree's nodes and this credit before. The second depends on who else shares the prefix and on
    what comes after it, not on this token. This divides one batch. What is expected divides
    otherwise: wbar and sum A_i are correlated, too, so the expected credit of a batch still has a
    part of the tax in it (C17h).

    A constant w has w_i - wbar = 0, so its tax is 0 for every A. For any other w, the advantages A
    = w - wbar are taxed with ||w - wbar||^2 > 0. So the tax is 0 for every possible A exactly where
    w is exchangeable. Min-Replace is so at every node (C9), Adv-Orthogonal
    has no tax at fully shared nodes (C10).

    The number for a whole batch is sum_v |tax_v| / sum_v sum_{S_v} |c_i|, over nodes with at least
    two visitors. Full exchangeability gives 0. Answers with A_i = 0 have no w and are left out. w
    is always taken against the answer's own advantage A_i, also for methods with a credit rule:
    what such a rule breaks on purpose should show. The number needs token ids and dLoss/dlogp only,
    so it can be logged for any model, any loss and every step.

    What a 0 does not say: that the expected push is credit alone (C17h), or that single visitors
    pay nothing, whom the number leaves out. What a number above 0 does not say: that a token
    drifts. A tax that all siblings pay alike per visit cancels between them.

    learning_tax is compared with a loop over nodes for random coefficients ("left": its value), and
    with 0 for constant w. prefix_nodes is compared with a dictionary of prefixes.
    """
    check = check_prefix_nodes if name == "prefix_nodes" else check_learning_tax
    for draw in draws:
        check(module, draw, evidence)


def check_prefix_nodes(module, draw: Draw, evidence) -> None:
    nodes = module.prefix_nodes(draw.tokens, draw.mask, draw.G)
    predicted, measured = (x[draw.mask][:, None] == x[draw.mask] for x in (draw.nodes, nodes))
    evidence.equal(predicted.double(), measured.double())
    evidence.equal((~draw.mask).double(), (nodes == -1).double())
    evidence.equal(True, nodes.dtype == torch.int64)


def check_learning_tax(module, draw: Draw, evidence) -> None:
    c = draw.fill(draw.randn(*draw.mask.shape))
    taxes = sizes = 0.0
    for visits, A, w in visitors(draw, c):
        if len(visits) > 1:
            wbar = sum(w) / len(w)
            taxes += abs(sum((x - wbar) * a for x, a in zip(w, A, strict=True)))
            sizes += sum(abs(x * a) for x, a in zip(w, A, strict=True))
    whole = taxes / sizes if sizes else 0
    evidence.equal(whole, module.learning_tax(c, draw.adv, draw.nodes, draw.mask))
    evidence.record_left(whole)
    for constant in (0 * c, draw.fill((2 + draw.noise) * draw.rows(draw.adv))):
        evidence.equal(0, module.learning_tax(constant, draw.adv, draw.nodes, draw.mask))


# ---------------- C16: the price


def with_formula(module) -> list[str]:
    """The single losses whose average is known; M1 names the others."""
    return [name for name in single_losses(module) if name in FORMULAS]


@claim(
    "C16",
    "sequence_ratio",
    with_formula,
    only_if="on-policy, or the weight is the plain product",
    extremes=False,
)
def c16(module, name, draws, evidence):
    """Off-policy a weight for each answer is unbiased if it is the answer's own plain product. The
    other methods here pay for cancellation with bias.

    Source: exact enumeration (D)

    Let s be the plain product of an answer's token ratios. Then E_old[s f(y)] = E_theta[f(y)] for
    every f. Take groups of independent answers from the old policy, and A_i = R_i - mean_j R_j. The
    mean contains R_i itself with the weight 1/G, and E[s_i R_i grad log pi(y_i)] = grad J. So

      E[s_i A_i grad log pi(y_i)]
        = (1 - 1/G) grad J - (1/G) sum_{j != i} E[s_i grad log pi(y_i)] E[R_j],

    and the last sum is 0, because E_theta[grad log pi] = 0. On-policy s = 1, and every method with
    a budget mean has this expected update, over L.

    Off-policy the geometric root, the clip, the minimum over the group and the projection on A each
    break E_old[s f] = E_theta[f]. So these methods buy cancellation with bias. It need not be:
    recentred moves the baseline in place of the weights, and is unbiased (C21). To show how much,
    all groups of 3 of a toy with 7 answers are enumerated, for 6 toys. "left" is
    |E g - unbiased| / |unbiased|, off-policy. The table of the price shows the mean cosine with
    grad J and L |E g| / |grad J|, before and after the node mean of C17.
    """
    prices = []
    for toy in (Toy(draw.seed) for draw in draws[::4]):
        W = toy.policy.W
        average = "budget" if name == "sequence_ratio" else average_of(name)
        on, off = toy.batch(False, average), toy.batch(True, average)
        if name == "sequence_ratio":
            ratios = (module.sequence_ratio(off, kind) for kind in ("product", "geometric"))
            unbiased, update = (ascent(-(s * off.adv[:, 0]).mean() / 2, W) for s in ratios)
        else:
            loss_fn = partial(getattr(module, name), **fitting(getattr(module, name)))
            loss = loss_fn(off)
            projected = apply_projection(losses, "node mean", off, loss, toy.groups.nodes)
            unbiased, update = ascent(loss_fn(on), W), ascent(loss, W)
            for g in (unbiased, update, ascent(projected, W)):
                cosine = (g * toy.exact).sum() / g.norm() / toy.exact.norm()
                prices.append([cosine, 2 * g.norm() / toy.exact.norm()])
        if average == "budget":
            evidence.equal(toy.unbiased, unbiased)
        bias = (update - toy.unbiased).norm() / toy.unbiased.norm()
        if bias > TOLERANCE:  # a method of your own may have none
            evidence.record_left(bias)
    if prices:
        evidence.rows.append([name, *torch.tensor(prices).view(-1, 6).mean(0).tolist()])


# ---------------- C17: the projection in one batch


def project_unbiased(module, loss: Tensor, batch, advantages: Tensor, nodes: Tensor) -> Tensor:
    """The projection's second kind: at nodes with several visitors the expected tax is 0 (C17i).

    w' = wbar + (wbar - w)(1 - n/G)/(n - 1) at a node with n >= 2 of G visitors. Answers with
    A_i = 0 keep their c and count neither in n nor in G. Single visitors keep their w. It is built
    on the module's `project`. scalar, Batch, (N,), (N, T) -> scalar to minimise. (D, ours)
    """
    c = module.token_coefficients(loss, batch.logp)
    projected = module.project(loss, batch.logp, advantages, nodes, batch.mask)
    c_mean = module.token_coefficients(projected, batch.logp)
    used = batch.mask & (advantages != 0)[:, None]
    _, place, visitors = nodes[used].unique(return_inverse=True, return_counts=True)
    n = torch.ones_like(c).masked_scatter(used, visitors[place].to(c.dtype))
    G = (advantages != 0).view(-1, batch.group_size).sum(1).clamp(min=1)  # (P,)
    G = G.repeat_interleave(batch.group_size)[:, None]  # (N, 1)
    c = c_mean + (c_mean - c) * (1 - n / G) / (n - 1).clamp(min=1)
    return -(c * batch.logp).masked_fill(~batch.mask, 0.0).sum() / len(batch.logp)


def apply_projection(module, kind: str, batch, loss: Tensor, nodes: Tensor) -> Tensor:
    """A loss after a kind of projection of a module; any other kind leaves it as it is."""
    A = batch.adv[:, 0]
    if kind == "node mean":
        loss = module.project(loss, batch.logp, A, nodes, batch.mask)
    if kind == "unbiased":
        loss = project_unbiased(module, loss, batch, A, nodes)
    return loss


def check_batches(module, draws, evidence, kind: str) -> None:
    """Each coefficient after a kind of projection. Method after method, each on its own tree.

    The losses are the reference's: these claims are about the projection alone.
    """
    methods = [(name, {}) for name in single_losses(losses)] + [("grpo", {"kl": 0.1})]
    for draw, (name, hyper) in zip(draws, itertools.cycle(methods), strict=False):
        batch = draw.batch(losses, 0.6)
        loss = getattr(losses, name)(batch, **hyper)
        predicted = coefficients(loss, batch)
        for visits, A, w in visitors(draw, predicted):
            n, wbar = len(visits), sum(w) / len(w)
            G = int((draw.adv[draw.group(visits[0][0])] != 0).sum())
            k = (1 - n / G) / (n - 1) if kind == "unbiased" and n > 1 else 0
            for at, a, x in zip(visits, A, w, strict=True):
                predicted[at] = (wbar + (wbar - x) * k) * a
        projected = apply_projection(module, kind, batch, loss, draw.nodes)
        evidence.equal(predicted, coefficients(projected, batch))


@claim("C17", "project")
def c17(module, name, draws, evidence):
    """The node mean of any loss has no tax at any node of any batch, and each node keeps its
    credit.

    Source: node-mean projection (D, ours)

    Replace each weight w_{i,t} = c_{i,t} / A_i by its mean wbar_v over the visitors S_v of the
    token's node v. Then ascend (1/N) sum c'_{i,t} log pi with c'_{i,t} = wbar_v A_i, detached.
    Answers with A_i = 0 have no w; they keep their c and count nowhere.

      (a) w' is constant on S_v, so Cov(w', A) = 0: no tax, at any node.
      (b) The batch's credit wbar_v sum A_i stays: the mean of a constant is the constant.
      (c) The mean is the constant that is closest to w in L2. So this is an orthogonal projection
          on the exchangeable weights: it is linear and idempotent, and w - w' sums to 0.
      (d) A node with one visitor has w' = w. Where answers differ, the loss and its clip are what
          they were, so the trust region stays where it does its work.
      (e) Where the whole group shares the token, c' = mean(w) A_i: a group constant, as with
          Min-Replace, but with the mean instead of the minimum. The sum is wbar sum A_i = 0, if
          the loss leaves answers with A_i = 0 alone. All but recentred do.
      (f) Methods that are exchangeable already (reinforce, grpo-symmetric, cispo, dfpo-min) have
          nothing to remove.

    The result is stop-gradient by construction, because c' is detached. Neither transform of DFPO
    has (a) and (d) together: Min-Replace has (a) but no clip, and Adv-Orthogonal acts on whole
    answers. C16's table shows what the projection does to the bias.

    All this is about one batch. In expectation a part of the tax stays, because wbar_v depends on
    the rewards of the visitors that A_i is made of (C17h).

    Measured: every coefficient after the projection is wbar_v A_i, from which (a) to (f) follow.
    With no advantages at all nothing changes.
    """
    check_batches(module, draws, evidence, "node mean")
    for draw in draws:
        batch = draw.batch(losses, 0.6)
        loss = losses.grpo(batch)
        nothing = module.project(loss, batch.logp, 0 * draw.adv, draw.nodes, draw.mask)
        evidence.equal(coefficients(loss, batch), coefficients(nothing, batch))


# ---------------- C17: the projection in expectation


def random_worlds(draws: list[Draw], ways: int, kinds: int, rewards=()) -> Iterator[World]:
    """Each way may end in as many kinds of answers as that, with these rewards or random ones."""
    for draw, G in zip(draws[::3], (2, 3, 4) * len(draws), strict=False):
        outcomes = []
        for way in range(ways):
            chances = draw.randn(kinds).softmax(0).tolist()
            lengths = torch.randint(1, 9, (kinds,), generator=draw.generator).tolist()
            random_rewards = draw.randn(kinds).tolist()
            kinds_of_way = zip(chances, rewards or random_rewards, lengths, strict=True)
            outcomes += [Outcome(way, *kind) for kind in kinds_of_way]
        yield World(G, outcomes, draw.randn(ways).softmax(0).tolist())


def expected_sums(module, world: World, kind: str) -> Tensor:
    """P(n answers go a way) E[sum of their c | n] for n = 1, ..., G. (ways, G).

    Measured over all groups, on-policy, through grpo and a kind of projection.
    """
    batch = world.expected_batch(world.logits(), "mean")
    loss = apply_projection(module, kind, batch, losses.grpo(batch), world.nodes)
    c = coefficients(loss, batch)[:, 0].view(-1, world.G, 1) / len(world.orders)
    visits = one_hot(world.way).view(-1, world.G, len(world.shares))  # (groups, G, ways)
    n, total = visits.sum(1), (c * visits).sum(1)  # (groups, ways)
    return torch.stack([(total * (n == k)).sum(0) for k in range(1, world.G + 1)], 1)


def expected_parts(world: World, way: int) -> tuple[list[float], list[float]]:
    """A way's credit and its tax before a projection, for n = 1, ..., G: the formulas of C17h."""
    others = {*range(len(world.shares))} - {way}
    w = world.mean(lambda o: 1 / o.length, way)
    reward = world.mean(lambda o: o.reward, way)
    gap = reward - world.mean(lambda o: o.reward, *others)
    covariance = world.mean(lambda o: o.reward / o.length, way) - w * reward
    p, G = world.shares[way], world.G
    credit, tax = [], []
    for n in range(1, G + 1):
        chance = math.comb(G, n) * p**n * (1 - p) ** (G - n)
        credit.append(chance * n * (1 - n / G) * w * gap)
        tax.append(chance * n * (1 - 1 / G) * covariance)
    return credit, tax


def check_what_stays(module, evidence, world: World, kind: str, by_n: list, in_all: list) -> None:
    """A projection leaves all credit, and of the expected tax these shares: by n, and by way."""
    before, after = (expected_sums(module, world, x) for x in ("grpo", kind))
    for way, share_in_all in enumerate(in_all):
        credit, tax = expected_parts(world, way)
        parts = list(zip(credit, tax, by_n, strict=True))
        evidence.equal([x + y for x, y, _ in parts], before[way])
        evidence.equal([x + share * y for x, y, share in parts], after[way])
        evidence.equal(sum(credit) + share_in_all * sum(tax), after[way].sum())


@claim(
    "C17h",
    "project",
    only_if="A is R minus the group's mean, and w depends on its own answer alone",
    extremes=False,
)
def c17h(module, name, draws, evidence):
    """In expectation the node mean leaves (G - n)/(n (G - 1)) of the tax at a node with n visitors:
    0 if all share it.

    Source: bias of the node mean (D, ours)

    Let n of G independent answers visit a node v. The expected sum of w_i A_i over them, given n,
    divides into credit, n E[w_i] E[A_i], and tax, n Cov(w_i, A_i). Here i is one of the visitors.

    Let A_i = R_i - mean_j R_j, and let w_i depend on answer i alone, as 1/T_i does. For an answer
    that visits v, let m be the mean of w, q_v that of R, and C the covariance of both. Let q_o be
    the mean reward of the other answers. Then

      sum_{S_v} A_i = (1 - n/G) sum_{S_v} R_i - (n/G) sum_{not S_v} R_j.

    Answers are independent, so E[w_i R_j] = E[w_i] E[R_j] for i != j, and E[w_i R_i] = C + m q_v.
    Hence, with credit = n (1 - n/G) m (q_v - q_o),

      E[sum w_i A_i]   = credit + n (1 - 1/G) C,
      E[wbar sum A_i]  = credit + (1 - n/G) C.

    The first is what the loss does to v. The second is what the node mean does: all of the credit,
    and of the tax the share

      (1 - n/G) / (n (1 - 1/G)) = (G - n) / (n (G - 1)).

    That is all of it for n = 1, and nothing for n = G. The cause is that wbar is made of the same
    answers as sum A_i. The tax of a batch, sum (w_i - wbar) A_i, has the expectation (n - 1) C
    only. That is too small, as a sample covariance is without Bessel's correction. Multiplied by
    n (G - 1) / (G (n - 1)) it is unbiased.

    Now let p be the probability of v, and q = 1 - p. Then n is binomial, the expected tax is
    (G - 1) p C, and of this the node mean leaves (q - q^G) C, the share

      (q + q^2 + ... + q^(G-1)) / (G - 1).

    It is larger for rarer nodes. That can do what the tax itself does not. In one softmax the logit
    of way a is pushed by p_a (f_a - fbar), up to a factor. Here f_a is the expected sum at a over
    p_a, and fbar = sum p_a f_a: what all ways have alike drops out. Let there be two ways, exactly
    alike. Their log-odds move by 2 p_a p_b (f_a - f_b). Without a projection f is the same for
    both, tax included, and nothing moves. The node mean leaves more of the tax to each visitor of
    the rarer one. So for C < 0 the commoner way grows, and for C > 0 the rarer one. No reward asks
    for it, and the learning tax of every batch is 0: `python -m toy.alike`. With a third way, f_a -
    f_b is as stated, but the odds of a and b also depend on the third one's f.

    If all ways are alike, who visits v says nothing about w and A. Then S_v is a random part of the
    group. Given the group, the loss has the expectation (n/G) sum w_i A_i, and the tax of the batch
    has (n - 1)/(G - 1) sum w_i A_i. The difference is the same share of the first as above. So with
    alike ways the shares hold for any weights and any centred advantages.

    Otherwise the condition is needed. A standard deviation, a clip or a weight of the whole group
    ties an answer to the others. The same is true of graded rewards, where one answer may happen to
    have A_i = 0 and then counts nowhere.

    Measured: all groups of 2 to 4 answers, each with its probability, on three ways with random
    rewards and lengths, through grpo on-policy with centred rewards. "left" is the share of the tax
    that stays.
    """
    for world in random_worlds(draws, ways=3, kinds=2):
        G = world.G
        shares = world.shares
        by_n = [(G - n) / (n * (G - 1)) for n in range(1, G + 1)]
        in_all = [sum((1 - p) ** k for k in range(1, G)) / (G - 1) for p in shares]
        check_what_stays(module, evidence, world, "node mean", by_n, in_all)
        evidence.record_left(in_all)


@claim(
    "C17i",
    "project",
    only_if="two answers or more visit the node, no A_i is 0 in a mixed group, and as C17h",
)
def c17i(module, name, draws, evidence):
    """The unbiased kind leaves none of the expected tax, but in a batch a zero-sum part of a group
    does not cancel.

    Source: unbiased projection (D, ours); setting: C17h

    Take w'_i = wbar + (wbar - w_i) k with k = (1 - n/G) / (n - 1), at nodes with n >= 2 visitors.
    With tax = sum (w_i - wbar) A_i this gives

      sum w'_i A_i = wbar sum A_i - k tax.

    C17h has the expectations of both: credit + (1 - n/G) C and (n - 1) C. So the sum is credit
    alone, in expectation. In other words, the kind takes from the loss the unbiased estimate of its
    tax, (1 + k) tax, and 1 + k = n (G - 1) / (G (n - 1)). For n = G it is the node mean, k = 0, so
    a token that the whole group shares cancels exactly. The mean of w' is wbar, as before.

    A single visitor has no sibling to be compared with: n = 1 says nothing about C. Its tax stays.
    For a node of probability p that is, as a share of the node's expected tax,

      P(n = 1) (1 - 1/G) C / ((G - 1) p C) = q^(G-1),  q = 1 - p:

    the chance that none of an answer's siblings goes its way. With the node mean it is the average
    of q, ..., q^(G-1), which is more if G > 2. Rare ways keep most of it here, too. So alike ways
    are still driven apart or together, at first more slowly: `python -m toy.alike`.

    The price is (a) of C17. Where a part of the group shares a token and its advantages sum to 0,
    the node mean gives 0 and this kind -k tax, against what the loss has. It is 0 in expectation
    only. On random trees every coefficient is compared with w' A_i.

    Answers with A_i = 0 are left out of n and G. With graded rewards a single answer of a mixed
    group may have A_i = 0, if G > 2. Then the share that stays is not q^(G-1), but usually more.
    "left" is by how much it differs, for the rewards 1, .5 and 0 at random chances and lengths, on
    average of groups of 2 to 4.

    This kind is not in losses.py: claims/tax.py builds `project_unbiased` on its `project`.
    """
    for world in random_worlds(draws, ways=3, kinds=2):
        by_n = [float(n == 1) for n in range(1, world.G + 1)]
        in_all = [(1 - p) ** (world.G - 1) for p in world.shares]
        check_what_stays(module, evidence, world, "unbiased", by_n, in_all)
    for world in random_worlds(draws, ways=3, kinds=3, rewards=(1.0, 0.5, 0.0)):
        after = expected_sums(module, world, "unbiased").sum(1)
        for way, share in enumerate(world.shares):
            credit, tax = map(sum, expected_parts(world, way))
            evidence.record_left((after[way] - credit) / tax - (1 - share) ** (world.G - 1))
    check_batches(module, draws, evidence, "unbiased")
