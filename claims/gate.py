"""C19 to C21: what the min and graded rewards cost, and a baseline that cancels without bias."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import losses
from claims.cost import factor, measure_push
from claims.evidence import claim
from claims.trees import ascent, coefficients
from toy.worlds import Outcome, Toy, World

# ---------------- C19: what the min costs

MIN = ("grpo", "dr_grpo", "gspo")


def binary_world(G: int, q: tuple[float, float], share: float) -> World:
    """Two ways that are right with these chances; all answers have one length."""
    outcomes = []
    for way in (0, 1):
        outcomes += [Outcome(way, q[way], 1.0, 1), Outcome(way, 1 - q[way], 0.0, 1)]
    return World(G, outcomes, [share, 1 - share])


def push_off_policy(module, name: str, world: World, share: float, scale: str) -> Tensor:
    """On both logits, from groups of the old policy, where way 0 has that share by now. (2,)."""
    old = world.expected_batch(world.logits(), scale)
    logits = torch.tensor([share, 1 - share], dtype=torch.float64).log().requires_grad_()
    logp = logits.log_softmax(0)[world.way][:, None]
    hyper = {"eps_low": 0.2, "eps_high": 0.2} if name == "gspo" else {}
    return ascent(getattr(module, name)(replace(old, logp=logp), **hyper), logits)


@claim("C19", *MIN, "grpo_symmetric", "cispo", "reinforce", "recentred", extremes=False)
def c19(module, name, draws, evidence):
    """Outside the clip range the min pushes a choice back, whichever way is better, by (1-q_u) b +
    q_d (1-b) where the credit is q_u - q_d.

    Source: what the min costs (D)

    One choice of two ways, right with the chances q_u and q_d, no difference in length, rewards 0
    and 1. The old policy takes the first way with probability p and is right with chance
    b = p q_u + (1-p) q_d. Updates on its groups have moved p up to p', so far that both ratios,
    p'/p and (1-p')/(1-p), have left the clip range. By C18 the mean advantage of a right answer is
    K (1-b), of a wrong one -K b. Each answer pushes the first logit with r A (1-p') or -r A p', and
    r (1-p') = p'(1-p')/p on the first way, r p' = p'(1-p')/(1-p) on the second. So without a clip
    the expected push is

      p'(1-p') K (q_u (1-b) - (1-q_u) b - q_d (1-b) + (1-q_d) b) = p'(1-p') K (q_u - q_d),

    the credit. Above the range the min stops the winners of the first way, below it the losers of
    the second. Of the four terms it leaves the second and the third,

      -p'(1-p') K ((1-q_u) b + q_d (1-b)).

    This is never positive, and 0 only for q_u = 1, q_d = 0. It pulls the choice back to the old
    policy whichever way is better. And it is a sum, where the credit is a difference: at q_u = .6,
    q_d = .5, p = .5 it is 4.45 times the credit. So after a first update that leaves the clip
    range, a second one may undo more than the first has done. A clip that is blind to the sign
    stops all four terms: 0. cispo keeps all four up to a ratio of 5. reinforce has p (1-p) K (q_u -
    q_d): its weight is 1. recentred has exactly the gradient at p', p'(1-p') (1 - 1/G) (q_u - q_d).

    `python -m toy.gate` has what follows for a whole training, and its limits. Measured on random
    ways, p, p' and G, for both scales of the advantage. "left": the size of the push over that of
    the credit.
    """
    for k, draw in enumerate(draws[::2]):
        up, down = draw.randn(2).sigmoid().tolist()
        p, new = (x + 0.2 * float(draw.randn(1).sigmoid()) for x in (0.2, 0.75))
        b, world = p * up + (1 - p) * down, binary_world(2 + k % 4, (up, down), p)
        for scale in ("mean", "std"):
            if name == "recentred" and scale == "std":
                continue  # the std of the group is tied to the siblings' ratios
            K = factor(world.G, b, scale)
            size = new * (1 - new) * K * ((1 - up) * b + down * (1 - b))
            credit = new * (1 - new) * K * (up - down)
            predicted = {
                "reinforce": p * (1 - p) * K * (up - down),
                "grpo_symmetric": 0.0,
                "recentred": credit,
                "cispo": credit,
            }.get(name, -size)
            push = push_off_policy(module, name, world, new, scale)
            evidence.equal([predicted, -predicted], push)
            if name in MIN:
                evidence.record_left(size / credit)


# ---------------- C20: graded rewards


@claim("C20", "reinforce", "grpo", "pos_only", only_if="rewards are graded", extremes=False)
def c20(module, name, draws, evidence):
    """On-policy, with answers of one length, the std or pos-only can let a worse way win; the mean
    scale with one weight never does.

    Source: what the std and pos-only cost (D)

    Way A gives .5 or 1 evenly, so Q = .75. Way B gives 1 with chance .72 and else 0, so Q = .72.
    All answers are equally long and the weight is one constant: every node's tax is 0. With the
    mean scale the push on A's logit is (1 - 1/G) pi_A pi_B (.75 - .72) > 0 (C18). The std
    multiplies a group by 1 / std, a number of its own. Groups with a 0 in them, which came from B,
    have a large std. So B's failures count for less than they cost. That is enough for the push to
    be negative: at G = 4 and 8, from the shares .05, .5 and .95 alike. So B takes all, .720 in
    place of .750.

    pos-only needs no std for it. Let A give .5 surely, and B 1 with chance .4. Above the mean of a
    group are mostly lucky B's, and pos-only sees nothing else. With the mean scale it pushes
    towards B from the same shares, so it ends at .400 in place of .500.

    With rewards 0 and 1 neither can be. By C18 the std multiplies the whole push by one K > 0, the
    same for both ways. And pos-only has the first of C18's two terms, f = K q (1 - b). So f_A -
    f_B is (1 - b) times reinforce's: the same ways grow, more slowly the better the policy is. Its
    tax, K q (1 - q) a visitor, differs between the ways. With the credit K q (q - b) it adds up to
    K q (1 - b), so it costs nothing.

    Measured: the sign of the push on A, and the value of that for binary rewards with the same Q.
    "left": the size of the push over reinforce's with the mean scale.
    """
    winners_only = name == "pos_only"
    scale = "mean" if winners_only else "std"
    for G, share in itertools.product((4, 8), (0.05, 0.5, 0.95)):
        outcomes = [Outcome(0, 0.5, 0.5, 1), Outcome(0, 0.5, 1.0, 1)]
        Q = (0.75, 0.72)
        if winners_only:
            outcomes, Q = [Outcome(0, 1.0, 0.5, 1)], (0.5, 0.4)
        outcomes += [Outcome(1, Q[1], 1.0, 1), Outcome(1, 1 - Q[1], 0.0, 1)]
        world = World(G, outcomes, [share, 1 - share])
        push = float(measure_push(module, name, world, scale)[0])
        evidence.equal(True, push < 0)
        plain = (1 - 1 / G) * share * (1 - share) * (Q[0] - Q[1])
        evidence.equal([plain, -plain], measure_push(module, "reinforce", world, "mean"))
        evidence.record_left(push / plain)
        b = share * Q[0] + (1 - share) * Q[1]
        binary = factor(G, b, scale) * share * (1 - share) * (Q[0] - Q[1])
        binary *= 1 - b if winners_only else 1
        measured = measure_push(module, name, binary_world(G, Q, share), scale)
        evidence.equal([binary, -binary], measured)


# ---------------- C21: a baseline that cancels without bias


def product_loss(batch: losses.Batch, whole_group: bool) -> Tensor:
    """sg[w] A log pi with two other weights that have no bias: the product of an answer's own
    ratios, or that of the whole group."""
    s = losses.sequence_ratio(batch, "product").detach().view(-1, batch.group_size)
    w = s.prod(1, keepdim=True).expand_as(s) if whole_group else s
    return -losses.budget_mean(w.reshape(-1, 1) * batch.adv * batch.logp, batch)


def bias_and_variance(loss_fn, toy: Toy) -> list[float]:
    """|E g - unbiased| / |unbiased|, and E |g - E g|^2 / |grad J|^2 of one group's L g.

    The loss weighs all tokens of an answer alike.
    """
    odds = toy.groups.probabilities(toy.logp_old)[:, None]  # (groups, 1)
    batch = toy.batch(off_policy=True)
    c = coefficients(loss_fn(batch), batch)[:, :1] * 2 / len(odds)  # (N, 1), times the odds
    scores = [toy.policy.grad_log_prob_answer((), y).flatten() for y in toy.rows]
    g = (c * torch.stack(scores)).view(len(odds), toy.groups.G, -1).mean(1)  # times the odds
    mean, unbiased = g.sum(0), 2 * toy.unbiased.flatten()
    variance = ((g * g / odds).sum() - mean.square().sum()) / toy.exact.square().sum()
    return [float((mean - unbiased).norm() / unbiased.norm()), float(variance)]


@claim("C21", "recentred", only_if="s is the plain product, and A is R minus the group's mean")
def c21(module, name, draws, evidence):
    """The recentred baseline cancels at every ratio and is unbiased off-policy; it pays with
    variance.

    Source: exact enumeration (D, ours); setting: C16

    c_i = (1/G) sum_j s_i s_j (A_i - A_j). The term of i and j is minus that of j and i. So the c_i
    of a whole group sum to 0, whatever the s_i are, and a token that all share cancels. On-policy
    it is reinforce (C11).

    Let A_i - A_j = R_i - R_j and let s be the plain product. Answers are independent draws from the
    old policy, and E_old[s f(y)] = E_theta[f(y)], so for i != j

      E[s_i s_j (R_i - R_j) grad log pi(y_i)] = E_theta[R grad log pi] E_theta[1]
                                               - E_theta[grad log pi] E_theta[R] = grad J,

    as E_theta[grad log pi] = 0. Of the G terms of c_i one has j = i and is 0. So the expected
    update is (1 - 1/G) grad J, over L, as that of reinforce on-policy. This needs advantages that
    are differences of rewards: the scale "mean". With "std" each pair is divided by a number that
    belongs to the old policy's group.

    So cancellation does not have to be paid for with bias. It is paid for with variance. Three
    weights are unbiased: the answer's own product s_i, which does not cancel; recentred, s_i s_j
    for every pair, which does; the product over the whole group, which does as well. For G = 2 the
    last two are the same loss, s_1 s_2 A_i. In the table the group product's variance grows with G,
    recentred's does not: each of its terms has two products whatever G is. It is above the own
    product's there, but other toys (`--seed 3`) have it a little below. dfpo-min has the least
    variance, and a bias. The columns are |E g - unbiased| / |unbiased| and
    E |g - E g|^2 / |grad J|^2 of one group's L g, mean of 6 toys. With the geometric ratio
    recentred cancels and is biased ("left").

    A part S of the group that shares a token: the pairs within S are antisymmetric, too, so

      sum_{i in S} c_i = (1/G) sum_{i in S} sum_{j not in S} s_i s_j (A_i - A_j).

    Only comparisons with answers elsewhere are left. That is S's credit, but as the new policy
    would see it. If the advantages of S sum to 0, it is not 0 in general, as it is with
    Min-Replace.

    Measured: the expected update over all groups of 2, 3 and 4 answers of 6 toys; every node's sum
    on random trees.
    """
    prices = {
        "own product": partial(product_loss, whole_group=False),
        "recentred": module.recentred,
        "group product": partial(product_loss, whole_group=True),
        "dfpo_min": module.dfpo_min,
    }
    rows = {title: [title] for title in prices}
    for G in (2, 3, 4):
        toys = [Toy(draw.seed, G) for draw in draws[::4]]
        for toy in toys:
            off = toy.batch(off_policy=True)
            evidence.equal(toy.unbiased, ascent(module.recentred(off), toy.policy.W))
            geometric = ascent(module.recentred(off, "geometric"), toy.policy.W)
            evidence.record_left((geometric - toy.unbiased).norm() / toy.unbiased.norm())
        for title, loss_fn in prices.items():
            numbers = torch.tensor([bias_and_variance(loss_fn, toy) for toy in toys])
            rows[title] += numbers.mean(0).tolist()
    evidence.rows += rows.values()
    for draw, kind in itertools.product(draws, ("product", "geometric")):
        batch, s = draw.batch(module, 0.6), draw.sequence_ratios(0.6, kind)
        c = coefficients(module.recentred(batch, kind), batch) * draw.max_tokens
        pairs = s[:, None] * s * (draw.adv[:, None] - draw.adv)  # (N, N), antisymmetric
        for visits in draw.tree.values():
            inside = [i for i, _ in visits]
            outside = [j for j in draw.group(inside[0]) if j not in inside]
            predicted = pairs[inside][:, outside].sum() / draw.G
            at = c[tuple(zip(*visits, strict=True))]
            size = 1 + at.abs().sum()  # steep trees have large s_i s_j
            evidence.equal(predicted / size, at.sum() / size)
