"""C19 to C22: what the min costs off-policy, what the std costs, and what cancels without bias.

And two more of C18, on what a tax costs: pos-only's, and what a weight favours at no tax.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

import losses
from claims.cost import factor, measure_push, softmax_push
from claims.evidence import claim
from claims.trees import AllGroups, Draw, ascent, coefficients
from claims.worlds import Outcome, World
from toy.policy import count_orders

# ---------------- C19: what the min costs

MIN = ("grpo", "dr_grpo", "gspo")


def pushes_off_policy(module, name: str, world: World, share: float, scale: str) -> Tensor:
    """On both logits, from groups of the old policy, where way 0 has that share by now. (2,)."""
    groups = world.groups()
    old = groups.expected_batch(torch.tensor(world.shares, dtype=torch.float64).log(), scale)
    logits = torch.tensor([share, 1 - share], dtype=torch.float64).log().requires_grad_()
    logp = logits.log_softmax(0)[groups.way][:, None]
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
    p'/p and (1-p')/(1-p), have left the clip range. By C18b the mean advantage of a right answer is
    K (1-b), of a wrong one -K b. Each answer pushes the first logit with r A (1-p') or -r A p', and
    r (1-p') = p'(1-p')/p on the first way, r p' = p'(1-p')/(1-p) on the second. So without a clip
    the expected push is

      p'(1-p') K (q_u (1-b) - (1-q_u) b - q_d (1-b) + (1-q_d) b) = p'(1-p') K (q_u - q_d),

    the credit. Above the range the min stops the winners of the first way, below it the losers of
    the second. Of the four terms it leaves the second and the third,

      -p'(1-p') K ((1-q_u) b + q_d (1-b)).

    This is negative for all q. It pulls the choice back to the old policy whichever way is better.
    And it is a sum, where the credit is a difference: at q_u = .6, q_d = .5, p = .5 it is 4.45
    times the credit. So where a first update leaves the clip range, a second one undoes more than
    the first has done, unless the rate is small. A clip that is blind to the sign stops all four
    terms: 0. cispo keeps all four up to a ratio of 5. reinforce has p (1-p) K (q_u - q_d): its
    weight is 1. recentred has exactly the gradient at p', p'(1-p') (1 - 1/G) (q_u - q_d).

    `python -m toy.gate` has what follows for a whole training, and its limits. Measured on random
    ways, p, p' and G, for both scales of the advantage, and for p' on the other side, where the
    push is up. "left": the size of the push over that of the credit.
    """
    for k, draw in enumerate(draws[::2]):
        q = draw.randn(2).sigmoid().tolist()
        p = 0.2 + 0.25 * float(draw.randn(1).sigmoid())
        moved, G = 0.75 + 0.2 * float(draw.randn(1).sigmoid()), 2 + k % 4
        for first, (old, new) in itertools.product((0, 1), ((p, moved),)):
            # first = 1: the same with the ways exchanged, so that p' has moved down
            outcomes = []
            for way in (0, 1):
                outcomes += [Outcome(way, q[way], 1.0, 1), Outcome(way, 1 - q[way], 0.0, 1)]
            shares = [old, 1 - old] if first == 0 else [1 - old, old]
            up, down = q[first], q[1 - first]
            b = old * up + (1 - old) * down
            for scale in ("mean", "std"):
                K = factor(G, b, scale)
                terms = {
                    "reinforce": old * (1 - old) * K * (up - down),
                    "grpo_symmetric": 0.0,
                    "recentred": new * (1 - new) * K * (up - down),
                    "cispo": new * (1 - new) * K * (up - down),
                }
                size = new * (1 - new) * K * ((1 - up) * b + down * (1 - b))
                predicted = terms.get(name, -size)
                if name == "recentred" and scale == "std":
                    continue  # the std of the group is tied to the siblings' ratios
                share = new if first == 0 else 1 - new
                push = pushes_off_policy(module, name, World(G, outcomes, shares), share, scale)
                evidence.equal([predicted, -predicted], [push[first], push[1 - first]])
                if name in MIN:
                    evidence.record_left(size / (new * (1 - new) * K * abs(up - down)))


# ---------------- recentred


class GroupsOf2(AllGroups):
    G = 2


class GroupsOf4(AllGroups):
    G = 4


def group_product(batch: losses.Batch) -> Tensor:
    """sg[prod_j s_j] A log pi: the other weight that cancels and has no bias, to compare with."""
    s = losses.sequence_ratio(batch, "product").detach().view(-1, batch.group_size)
    w = s.prod(1, keepdim=True).expand_as(s).reshape(-1, 1)
    return -losses.budget_mean(w * batch.adv * batch.logp, batch)


def own_product(batch: losses.Batch) -> Tensor:
    """sg[s_i] A log pi: no bias, and it does not cancel."""
    w = losses.sequence_ratio(batch, "product").detach()[:, None]
    return -losses.budget_mean(w * batch.adv * batch.logp, batch)


def bias_and_variance(loss_fn, world: AllGroups) -> tuple[float, float]:
    """|E g - unbiased| / |unbiased|, and E |g - E g|^2 / |grad J|^2 of one group's L g."""
    p = dict(world.old.answers(world.x))
    odds = [math.prod(p[y] for y in group) * count_orders(group) for group in world.groups]
    odds = torch.tensor(odds, dtype=torch.float64)
    W = world.policy.W
    adv = world.adv.view(-1, 1).expand(world.mask.shape)
    logp = world.logp.detach().requires_grad_()
    batch = losses.Batch(logp, world.logp_old, adv, world.mask, world.G, world.max_tokens)
    c = losses.token_coefficients(loss_fn(batch), logp)  # a group's own, as no loss looks beyond it
    group = torch.arange(len(c))[:, None] // world.G  # (N, 1)
    alone = (group == torch.arange(len(odds))[:, None, None]) * c * world.max_tokens / world.G
    g = torch.autograd.grad(world.logp, W, alone, retain_graph=True, is_grads_batched=True)[0]
    g = g.flatten(1)  # (groups, parameters)
    mean = (odds[:, None] * g).sum(0)
    unbiased = (1 - 1 / world.G) * world.exact.flatten()
    variance = (odds * (g - mean).square().sum(1)).sum() / world.exact.square().sum()
    return float((mean - unbiased).norm() / unbiased.norm()), float(variance)


@claim("C21", "recentred", only_if="s is the plain product, and A is R minus the group's mean")
def c21(module, name, draws, evidence):
    """The recentred baseline cancels at every ratio and is unbiased off-policy; it pays with
    variance.

    Source: exact enumeration (D, ours); setting: C16

    c_i = (1/G) sum_j s_i s_j (A_i - A_j). The term of i and j is minus that of j and i. So the c_i
    of a whole group sum to 0, whatever the s_i are, and a token that all share cancels. With
    s = 1 it is A_i minus the mean advantage, which is 0: reinforce.

    Let A_i - A_j = R_i - R_j and let s be the plain product. Answers are independent draws from the
    old policy, and E_old[s f(y)] = E_theta[f(y)], so for i != j

      E[s_i s_j (R_i - R_j) grad log pi(y_i)] = E_theta[R grad log pi] E_theta[1]
                                               - E_theta[grad log pi] E_theta[R] = grad J,

    as E_theta[grad log pi] = 0. Of the G terms of c_i one has j = i and is 0. So the expected
    update is (1 - 1/G) grad J, over L, as that of reinforce on-policy. This needs advantages that
    are differences of rewards: the scale "mean". With "std" each pair is divided by a number that
    belongs to the old policy's group.

    So cancellation does not have to be paid for with bias. It is paid for with variance: two
    products in the place of one. Weighing a group by the product of all its s_j is unbiased and
    cancels, too; that is G products. With the geometric ratio it cancels and is biased ("left").

    A part S of the group that shares a token: the pairs within S are antisymmetric, too, so

      sum_{i in S} c_i = (1/G) sum_{i in S} sum_{j not in S} s_i s_j (A_i - A_j).

    Only comparisons with answers elsewhere are left. That is S's credit, but as the new policy
    would see it. If the advantages of S sum to 0, it is not 0 in general, as it is with
    Min-Replace.

    Measured: the expected update over all groups of 2, 3 and 4 answers of 6 toys; every node's sum
    on random trees; reinforce on-policy, coefficient by coefficient.
    """
    for draw in draws[::4]:
        for kind in (GroupsOf2, AllGroups, GroupsOf4):
            world = kind(draw.seed)
            unbiased = (1 - 1 / world.G) * world.exact / world.max_tokens
            off = world.batch(module, off_policy=True)
            evidence.equal(unbiased, ascent(module.recentred(off), world.policy.W))
            geometric = ascent(module.recentred(off, "geometric"), world.policy.W)
            evidence.record_left((geometric - unbiased).norm() / unbiased.norm())
    for draw, kind in itertools.product(draws, ("product", "geometric")):
        batch, s = draw.batch(module, 0.6), draw.sequence_ratios(0.6, kind)
        c = coefficients(module.recentred(batch, kind), batch) * draw.max_tokens
        for visits in draw.tree.values():
            inside = [i for i, _ in visits]
            outside = [j for j in draw.group(inside[0]) if j not in inside]
            terms = [s[i] * s[j] * (draw.adv[i] - draw.adv[j]) for i in inside for j in outside]
            measured = c[tuple(zip(*visits, strict=True))].sum()
            size = 1 + sum(abs(float(c[i, t])) for i, t in visits)  # steep trees have large s_i s_j
            evidence.equal(sum(terms) / draw.G / size, measured / size)
        on = draw.batch(module)
        same = coefficients(module.reinforce(on), on)
        evidence.equal(same, coefficients(module.recentred(on, kind), on))


@claim("C22", "recentred", extremes=False)
def c22(module, name, draws, evidence):
    """What cancelling without bias costs: the recentred baseline's variance lies between the own
    product's and the group product's.

    Source: exact enumeration (D, ours); setting: C16

    Three weights are unbiased: the answer's own product s_i, which does not cancel; recentred,
    s_i s_j for every pair, which does; the product over the whole group, which does as well. For
    G = 2 the last two are the same loss, s_1 s_2 A_i. With G the group product's variance grows,
    recentred's does not: each of its terms has two products whatever G is. dfpo-min has the least
    variance of all that cancel, and a bias. The table has |E g - unbiased| / |unbiased| and
    E |g - E g|^2 / |grad J|^2 of one group's L g, mean of 6 toys.

    Measured: the three biases are 0 at G = 2, 3 and 4; at G = 2 the two losses agree.
    """
    weights = {"own product": own_product, "group product": group_product}
    weights |= {"recentred": module.recentred, "dfpo_min": module.dfpo_min}
    for kind in (GroupsOf2, AllGroups, GroupsOf4):
        worlds = [kind(draw.seed) for draw in draws[::4]]
        for title, loss_fn in weights.items():
            numbers = [bias_and_variance(loss_fn, world) for world in worlds]
            if title != "dfpo_min":
                evidence.equal([0] * len(numbers), [bias for bias, _ in numbers])
            mean = torch.tensor(numbers).mean(0).tolist()
            evidence.rows.append([f"{title}, G = {kind.G}", *mean])
    for draw in draws:
        pair = GroupsOf2(draw.seed).batch(module, off_policy=True)
        group, recentred = (coefficients(f(pair), pair) for f in (group_product, module.recentred))
        evidence.equal(group, recentred)


# ---------------- C20: the std with graded rewards


@claim("C20", "reinforce", "grpo", only_if="the advantage is divided by the std", extremes=False)
def c20(module, name, draws, evidence):
    """On-policy and at no tax, the std lets a worse way win if rewards are graded; the mean scale
    never, nor binary rewards.

    Source: what the std costs (D)

    Way A gives .5 or 1 evenly, so Q = .75. Way B gives 1 with chance .72 and else 0, so Q = .72.
    All answers are equally long and the weight is one constant: every node's tax is 0. With the
    mean scale the push on A's logit is (1 - 1/G) pi_A pi_B (.75 - .72) > 0 (C18a). The std
    multiplies a group by 1 / std, a number of its own. Groups with a 0 in them, which came from B,
    have a large std. So B's failures count for less than they cost. That is enough for the push to
    be negative: at G = 4 and 8, from the shares .05, .5 and .95 alike. So B takes all, .720 in
    place of .750.

    With rewards 0 and 1 this cannot be. By C18b the std multiplies the whole push by one K > 0, the
    same for both ways.

    Measured through reinforce and through grpo, whose weights are equal here. "left": the size of
    the push by the std over that by the mean scale.
    """
    for G, share in itertools.product((4, 8), (0.05, 0.5, 0.95)):
        outcomes = [Outcome(0, 0.5, 0.5, 1), Outcome(0, 0.5, 1.0, 1)]
        outcomes += [Outcome(1, 0.72, 1.0, 1), Outcome(1, 0.28, 0.0, 1)]
        world = World(G, outcomes, [share, 1 - share])
        mean = measure_push(module, name, world, "mean")
        push = (1 - 1 / G) * share * (1 - share) * 0.03
        evidence.equal([push, -push], mean)
        std = measure_push(module, name, world, "std")
        by_loop = push_by_loop(world)
        evidence.equal([by_loop, -by_loop], std)
        evidence.equal(True, by_loop < 0)
        evidence.record_left(by_loop / push)


def push_by_loop(world: World) -> float:
    """On the first logit with the std scale: over how often each outcome occurs in a group."""
    kinds = [(o, o.chance * world.shares[o.way]) for o in world.outcomes]
    total = 0.0
    for counts in itertools.product(range(world.G + 1), repeat=len(kinds)):
        if sum(counts) != world.G:
            continue
        chance = math.factorial(world.G)
        for n, (_, p) in zip(counts, kinds, strict=True):
            chance *= p**n / math.factorial(n)
        R = [o.reward for n, (o, _) in zip(counts, kinds, strict=True) for _ in range(n)]
        mean = sum(R) / world.G
        if max(R) == min(R):
            continue
        std = math.sqrt(sum((r - mean) ** 2 for r in R) / (world.G - 1)) + 1e-4
        for n, (o, _) in zip(counts, kinds, strict=True):
            score = (o.way == 0) - world.shares[0]
            total += chance * n * (o.reward - mean) / std * score / world.G
    return total


# ---------------- pos-only


@claim("C18c", "pos_only", only_if="rewards are 0 or 1", extremes=False)
def c18c(module, name, draws, evidence):
    """With rewards 0 and 1 pos-only's expected push is (1 - b) times reinforce's: the largest tax
    of all costs nothing.

    Source: what a tax costs (D); setting: C18b

    Of equally long answers pos-only keeps the winners, with A = K_m (1 - m) in a group with the
    share m of right answers. The mean advantage of a right answer is K (1 - b), that of a wrong one
    -K b (C18b), of which pos-only has 0. So its f is K q (1 - b) for a way that is right with
    chance q, and reinforce's is K (q - b). Siblings compete: only differences act (C18a), and

      f_A - f_B = (1 - b) K (q_A - q_B),

    which is (1 - b) times reinforce's. The same ways grow, more slowly the better the policy is.
    pos-only's tax is the largest of all methods here, and each sibling pays alike.

    With graded rewards it is different. A gives .5 surely, B gives 1 with chance .4. Above the mean
    of a group are mostly lucky B's. With the mean scale and G = 4 pos-only pushes towards B from
    all of A's shares .05, .5 and .95, so it ends at .400 in place of .500 ("left": its push over
    reinforce's). With the std, G = 4 does so down to a share of about .2 only, G = 8 everywhere.
    """
    for world in make_binary_worlds(draws):
        q = [world.mean(lambda o: o.reward, way) for way in (0, 1)]
        b = sum(p * x for p, x in zip(world.shares, q, strict=True))
        for scale in ("mean", "std"):
            f = [factor(world.G, b, scale) * (1 - b) * x for x in q]
            push = measure_push(module, "pos_only", world, scale)
            evidence.equal(softmax_push(world, f), push)
            evidence.equal((1 - b) * measure_push(module, "reinforce", world, scale), push)
    graded = [Outcome(0, 1.0, 0.5, 1), Outcome(1, 0.4, 1.0, 1), Outcome(1, 0.6, 0.0, 1)]
    for share, (G, scale) in itertools.product((0.05, 0.5, 0.95), ((4, "mean"), (8, "std"))):
        world = World(G, graded, [share, 1 - share])
        push = measure_push(module, "pos_only", world, scale)
        right_way = measure_push(module, "reinforce", world, scale)
        evidence.equal([-1, 1], [push[0].sign(), right_way[0].sign()])
        evidence.record_left(push[0] / right_way[0])


def make_binary_worlds(draws: list[Draw]):
    """Two ways, right or wrong, all answers of one length."""
    for draw, G in zip(draws[::3], (2, 3, 4) * len(draws), strict=False):
        outcomes = []
        for way in (0, 1):
            q = float(draw.randn(1).sigmoid())
            outcomes += [Outcome(way, q, 1.0, 1), Outcome(way, 1 - q, 0.0, 1)]
        yield World(G, outcomes, draw.randn(2).softmax(0).tolist())


# ---------------- C18: the mean weight


@claim("C18d", "grpo", "reinforce", extremes=False)
def c18d(module, name, draws, evidence):
    """At zero tax 1/T_i favours the worse of two ways while the policy earns less than
    J* = (w_A Q_A - w_B Q_B) / (w_A - w_B); a constant weight never does.

    Source: what a tax costs (D); setting: C18a

    Let all answers of a way have one length, so that its weight w = 1/T is a constant there and its
    tax is 0. By C18a the odds of A against B move by f_A - f_B = (1 - 1/G) of

      w_A (Q_A - J) - w_B (Q_B - J) = (w_A Q_A - w_B Q_B) - (w_A - w_B) J.

    Let A be worse and shorter. Early, when J is small, both ways are better than the policy, and A
    is pushed w_A / w_B times as hard: the sign is that of w_A Q_A - w_B Q_B. It turns at J*. As
    J* < Q_A, B overtakes A in the end. That may take long: Q = .6, .7 and 0, T = 4, 40 and 16,
    shares .01, .01 and .98 have J* = .589. So no tax does not mean no preference between ways: wbar
    is one. A constant weight has f_A - f_B = (1 - 1/G) w (Q_A - Q_B), for any J.

    Measured: the push on both logits over their shares, in this world and with B's and A's common
    share so large that J is on J*, and beyond it. "left": f_A - f_B at the start.
    """
    Q, T = (0.6, 0.7, 0.0), (4, 40, 16)
    turn = (0.6 / 4 - 0.7 / 40) / (1 / 4 - 1 / 40)
    outcomes = [Outcome(way, Q[way], 1.0, T[way]) for way in range(2)]
    outcomes += [Outcome(way, 1 - Q[way], 0.0, T[way]) for way in range(3)]
    for G, J in itertools.product((2, 3, 4), (0.013, turn, 0.62)):
        s = J / 1.3 if J < 0.6 else 0.2  # of A
        other = (J - 0.6 * s) / 0.7
        world = World(G, outcomes, [s, other, 1 - s - other])
        push = measure_push(module, name, world, "mean")
        weights = [1 / x for x in T[:2]] if name == "grpo" else [1 / max(T)] * 2
        gap = weights[0] * (Q[0] - J) - weights[1] * (Q[1] - J)
        measured = push[0] / s - push[1] / other
        evidence.equal((1 - 1 / G) * gap, measured)
        if name == "grpo" and J == 0.013:
            evidence.record_left(measured)
