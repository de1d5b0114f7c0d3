"""C22 to C26: cancelling is a control variate. What it moves, and what it does to the noise.

A history is the prompt and what an answer has said so far. The visitors of a history are the
answers of the group that take a token there. `cancel` compares the push of each visitor with that
of the others. C22 says when this moves no expected update, and C23 what it does to the noise. C24
is about weights that cancel and have no bias off-policy, C25 about a sampler that is not the
trainer, and C26 about a mask by the sign of A.

Every group of answers is enumerated, with the probability that the old policy gives it. The policy
there is a table: each history has logits of its own. What holds for their gradients holds for every
parametrisation, by the chain rule.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import losses
from claims.choice import own_product
from claims.evidence import Draw, ascent, claim, coefficients
from claims.formulas import UNCLIPPED, fitting
from toy.worlds import Groups, Outcome, Toy

# With a fixed baseline the coefficient of an answer is made of that answer alone, or it is not.
OWN = ("reinforce", "grpo", "grpo_symmetric", "dr_grpo", "gspo", "off_policy_mask")
OWN += ("cispo", "pos_only")  # their divisor, the number of tokens, is a constant here
OTHERS = ("dfpo_min", "dfpo_orthogonal", "recentred", "balanced")


def batch_of(module, groups: Groups, logp: Tensor, logp_old: Tensor, adv: Tensor):
    """Every group once. (N, T), (N, T), (N,) -> Batch."""
    mask = groups.mask
    adv = adv[:, None].expand(mask.shape)
    return module.Batch(logp, logp_old, adv, mask, groups.G, mask.shape[1])


def before_and_after(module, loss: Tensor, batch, nodes: Tensor) -> list[Tensor]:
    """The coefficients of a loss, and those that `cancel` makes of them. (N, T) both."""
    return [coefficients(x, batch) for x in (loss, module.cancel(loss, batch, nodes))]


# ---------------- C22: cancelling moves no expected update


@claim("C22", "cancel")
def c22(module, name, draws, evidence):
    """After `cancel` the coefficients of any loss sum to 0, in every batch, at every token that all
    visitors of its history take, if there are two or more.

    Source: cancelling as a control variate (D, ours)

    For token t of answer i let H be the answers of the group that take a token at the same history,
    i included, and r = pi/pi_old of the token that each takes there. If H has n >= 2 answers, put

      c'_it = c_it - r_it mean over j in H, j != i, of (c_jt / r_jt).

    If nobody else takes a token there, c' = c. If all of H take the same token, r is common to
    them, so c'_it = c_it - mean over j != i of c_jt. Summed over H, each c_jt is subtracted n - 1
    times with the weight 1/(n - 1). So the sum is 0, whatever the c are: for the whole group or a
    part of it, at every ratio, with a clip, a min, a 1/T_i or a KL term.

    Measured: every coefficient after `cancel` of a loss with random coefficients, on random trees
    off-policy, against a loop over histories; the sums; and that the loss keeps its value.
    """
    for draw in draws:
        batch = draw.batch(losses, 0.6)
        c, ratio = draw.randn(*draw.mask.shape), draw.log_ratio(0.6).exp()
        loss = -(c * batch.logp)[draw.mask].sum() / draw.N
        cancelled = module.cancel(loss, batch, draw.nodes)
        evidence.equal(loss, cancelled, what="the loss's value")
        predicted, measured = c * draw.mask, coefficients(cancelled, batch)
        visits = defaultdict(list)  # by group and history
        for i, y in enumerate(draw.answers):
            for t in range(len(y)):
                visits[i // draw.G, y[:t]].append((i, t))
        for at in (at for at in visits.values() if len(at) > 1):
            units = [float(c[visit] / ratio[visit]) for visit in at]
            for visit, unit in zip(at, units, strict=True):
                predicted[visit] -= ratio[visit] * (sum(units) - unit) / (len(at) - 1)
            if len({draw.answers[i][t] for i, t in at}) == 1:
                left = measured[tuple(zip(*at, strict=True))]
                evidence.equal(0, left.sum() / (1 + left.abs().sum()), what="what is left")
        evidence.equal(predicted, measured, what="a token's coefficient")


toy_of = cache(Toy)  # one toy for all methods


def toys_of(draws: list[Draw]) -> list[Toy]:
    """Some toys, in groups of 2, 3 and 4."""
    return [toy_of(draw.seed, G) for draw, G in zip(draws[::2], (2, 3, 4) * 4, strict=False)]


def effect(module, loss_fn: Callable, toy: Toy, off_policy: bool, adv: Tensor) -> list[Tensor]:
    """The expected updates without and with `cancel`, (V, D); then the coefficients, (N, T)."""
    groups, logp_old = toy.groups, toy.logp_old if off_policy else toy.logp.detach()
    batch = batch_of(module, groups, toy.logp.clone(), logp_old, adv)
    both = before_and_after(module, loss_fn(batch), batch, groups.nodes)
    odds = groups.probabilities(logp_old).repeat_interleave(groups.G)[:, None]
    sums = ((odds * c * batch.logp).sum() / groups.G for c in both)
    return [*(ascent(-x, toy.policy.W) for x in sums), *both]


@claim(
    "C22b",
    *OWN,
    *OTHERS,
    only_if="c_i is made of answer i alone, and the baseline of A is a fixed number",
    extremes=False,
)
def c22b(module, name, draws, evidence):
    """`cancel` does not move the expected update of a loss whose coefficients are made of each
    answer alone, with A_i = R_i - b and a fixed b.

    Source: cancelling as a control variate (D, ours); setting: C22

    Draw the group's answers independently from pi_old. Take everything else as given: the other
    answers, and that answer i visits the history h. Then the mean of c_jt / r_jt over the others is
    a number m, and what `cancel` takes from the update is expected to be

      E_old[r m grad log pi(a|h)] = m sum_a pi(a|h) grad log pi(a|h) = m grad 1 = 0.

    So it is a control variate: a leave-one-out baseline at every history, of whatever the loss
    does. Every batch changes, its mean does not. Five things are needed.

      (1) c_j does not depend on answer i. So it is made of answer j alone, and b is a fixed number.
          reinforce, grpo, grpo-symmetric, dr-grpo, gspo and off-policy-mask are of this kind. So
          are cispo, pos-only and advantage-reweighting if their divisor is a constant, as it is
          here, and dfpo-min on-policy, where it is reinforce. Nothing is promised for DFPO else,
          recentred, balanced, nthr, lopti, ibpo and dapo ("left": how far the update of some of
          them moves, as a share of it).
      (2) With the mean of the group for b, which METHODS ships, A_j holds R_i, and the update does
          move: C22c.
      (3) The old policy can draw every token that the new one can. top-p breaks that.
      (4) theta does not depend on the batch. After a first update on the same batch it does.
      (5) logp_old is that of the sampler.

    Under these conditions what 1/T_i and the min leave at a shared token costs no reward by itself:
    taking it away changes nothing but noise. They cost reward by a bias in a choice (C18, C19).

    The table has what `cancel` does off-policy: |change| / |update|, and E |sum c| / E sum |c|
    before and after at a first token that the whole group takes; E sum |c| is that before. b is the
    sampler's mean reward.

    Measured: the change of the update over all groups of 2, 3 and 4 answers of 12 toys, on-policy
    and off-policy; and that nothing is left.
    """
    loss_fn, rows = getattr(module, name), []
    loss_fn = partial(loss_fn, **fitting(loss_fn))
    for toy, off_policy in itertools.product(toys_of(draws), (False, True)):
        groups, G = toy.groups, toy.groups.G
        odds = groups.probabilities(toy.logp_old)
        b = odds @ groups.rewards.view(-1, G).mean(1)
        before, after, *both = effect(module, loss_fn, toy, off_policy, groups.rewards - b)
        moves = (after - before).norm() / before.norm()
        if name in OTHERS:
            evidence.record_left(moves)
        else:
            evidence.equal(0 * before, after - before, what="the change")
        ways = groups.way.view(-1, G)
        odds = odds * (ways == ways[:, :1]).all(1)  # all take one first token
        first = [c[:, 0].view(-1, G) for c in both]
        left, left_after = (odds @ c.sum(1).abs() for c in first)
        size = odds @ first[0].abs().sum(1)
        evidence.equal(0, left_after, what="what is left")
        if off_policy:
            rows.append([moves, left, left_after, size])
    moves, left, left_after, size = torch.tensor(rows).mean(0)
    evidence.rows.append([name, *map(float, (moves, left / size, left_after / size))])


def leak(toy: Toy, off_policy: bool, one_divisor: bool) -> Tensor:
    """C22c's sum over histories, in loops over the answers. (V, D)."""
    G, total = toy.groups.G, torch.zeros_like(toy.exact)
    sampler = toy.old if off_policy else toy.policy
    rewards = dict(zip(toy.rows, toy.groups.rewards.tolist(), strict=True))
    answers = dict(sampler.answers(()))
    for h in {y[:t] for y in answers for t in range(len(y))}:
        r, w_over_r, earned = toy.policy.probs(h) / sampler.probs(h), 0.0, 0.0
        visits = {y: q for y, q in answers.items() if y != h and y[: len(h)] == h}
        P = sum(visits.values())
        for y, q in visits.items():
            a = y[len(h)]
            w_over_r += q / P * (1 / (2 * r[a]) if one_divisor else 1 / len(y))
            earned += q / P * rewards[y] * r[a] * toy.policy.grad_log_prob(h, a)
        total += P / G * (1 - (1 - P) ** (G - 1)) * w_over_r * earned
    return total


@claim(
    "C22c",
    "cancel",
    only_if="A is R minus the group's mean, and the weight of A knows no reward",
    extremes=False,
)
def c22c(module, name, draws, evidence):
    """With the group's mean as baseline, `cancel` does move the expected update: by
    (P/G) (1 - (1-P)^(G-1)) E_old[w/r|h] sum_a grad pi(a|h) Q_old(h,a) at each history.

    Source: the leak of the group's mean (D, ours); setting: C22b

    A_j = R_j - (1/G) sum_k R_k holds -R_i/G. So the baseline that `cancel` gives to answer i holds
    -(R_i/G) mean over j != i of (w_j/r_j), where c_j = w_j A_j, and this part is not independent of
    the token that i takes. The rest of the baseline is, and drops out as in C22b. Let P be the
    chance of a visit to h. Answer i visits it with chance P, and then somebody else does with
    1 - (1-P)^(G-1). Given both, the gain is

      (1/G) E_old[w/r|h] E_old[r R grad log pi|h]
        = (1/G) E_old[w/r|h] sum_a grad pi(a|h) Q_old(h,a),

    where Q_old(h,a) is the mean reward of the old policy's answers that go on with a. On-policy, at
    the root and for a constant w, that is the true gradient times w/G: reinforce goes from 1 - 1/G
    to 1, a factor of G/(G-1), because the own reward has left its baseline. That is the gain of a
    better baseline, no merit of cancelling. Off-policy it holds Q_old, so it is not the gradient at
    the new policy.

    A weight that looks at the reward, as with the min off-policy or with the std, has another gain
    ("left": by how much it differs for the min).

    Measured: the change of the update over all groups of 2 to 4 answers of 12 toys, on-policy and
    off-policy, for reinforce (w/r = 1/(L r)) and for grpo without a clip (w/r = 1/T_i).
    """
    cases = [(losses.reinforce, {}), (losses.grpo, UNCLIPPED), (losses.grpo, {})]
    for toy, (loss_fn, hyper) in itertools.product(toys_of(draws), cases):
        adv = losses.group_advantages(toy.groups.rewards, toy.groups.G, "mean")
        for off_policy in (False, True):
            before, after, *_ = effect(module, partial(loss_fn, **hyper), toy, off_policy, adv)
            predicted = leak(toy, off_policy, loss_fn is losses.reinforce)
            if loss_fn is losses.grpo and off_policy and not hyper:
                evidence.record_left((after - before - predicted).norm() / predicted.norm())
            else:
                evidence.equal(predicted, after - before)


# ---------------- C23: what cancelling does to the noise


class OneChoice:
    """All groups of G answers that take one way each, and then end somehow. The ways are learnt.

    logits: (ways,), or (N, ways) if every group has a policy of its own by now.
    """

    def __init__(self, outcomes: list[Outcome], G: int, logits: Tensor, logits_old: Tensor):
        self.groups = groups = Groups(outcomes, G)
        way = groups.way[:, None]
        logits = logits.expand(len(way), -1)
        self.scores = one_hot(groups.way) - logits.softmax(1)  # (N, ways), grad log pi
        self.logp, self.logp_old = torch.zeros(2, *groups.mask.shape, dtype=torch.float64)
        self.logp[:, :1] = logits.log_softmax(1).gather(1, way)
        self.logp_old[:, :1] = logits_old.log_softmax(0)[way]
        self.odds = groups.probabilities(self.logp_old)  # (groups,)
        self.centred = losses.group_advantages(groups.rewards, G, "mean")  # (N,)

    def batch(self, module, adv: Tensor):
        logp = self.logp.clone().requires_grad_()
        return batch_of(module, self.groups, logp, self.logp_old, adv)

    def updates(self, c: Tensor) -> Tensor:
        """Each group's update of the logits. (N, 1) -> (groups, ways)."""
        return (c * self.scores).view(len(self.odds), self.groups.G, -1).mean(1)

    def variance(self, c: Tensor) -> float:
        """Of one group's update. (N, 1) -> float."""
        g = self.updates(c)
        return float(self.odds @ g.square().sum(1) - (self.odds @ g).square().sum())


def variance_law(outcomes: list[Outcome], n: int, logits: Tensor, logits_old: Tensor, b: float):
    """t, the best factor, and Var(cancelled) / Var(not); x = (R - b)/T is an answer's c/r."""
    p, q = logits.softmax(0), logits_old.softmax(0)
    way = torch.tensor([o.way for o in outcomes])
    chance = q[way] * torch.tensor([o.chance for o in outcomes], dtype=torch.float64)
    x = torch.tensor([(o.reward - b) / o.length for o in outcomes], dtype=torch.float64)
    g = (p / q)[way, None] * (torch.eye(len(p))[way] - p)  # (outcomes, ways)
    m, g2, k2 = chance @ x, g.square().sum(1), ((chance * x) @ g).square().sum()
    v = chance @ (x - m) ** 2
    after = chance @ ((x - m) ** 2 * g2) + (v * (chance @ g2) + k2) / (n - 1) - k2
    ratio = after / (chance @ (x**2 * g2) - k2)
    return [m * m / (m * m + v), m * m / (m * m + v / (n - 1)), ratio]


def measure_variances(module, outcomes, n, logits, logits_old, b: float | None) -> list[float]:
    """The best factor and Var(cancelled) / Var(not), over all groups; b None: the group's mean."""
    world = OneChoice(outcomes, n, logits, logits_old)
    batch = world.batch(losses, world.centred if b is None else world.groups.rewards - b)
    loss = losses.grpo(batch, **UNCLIPPED)
    c, after = (x[:, :1] for x in before_and_after(module, loss, batch, world.groups.nodes))
    none, half, full = map(world.variance, (c, (c + after) / 2, after))
    curve = 2 * (none + full - 2 * half)  # a parabola in the factor, through 0, 1/2 and 1
    return [(none + curve - full) / (2 * curve), full / none]


LONG_IF_RIGHT = [(0.6, 1.0, 24), (0.4, 0.0, 4)]
EXAMPLES = {  # how an answer ends, on either way: chance, reward, length; and the baseline
    "24 tokens if right (.6), else 4": (LONG_IF_RIGHT, 0.6),
    "the same with the group's mean": (LONG_IF_RIGHT, None),
    "10 tokens if right (.5), else 14": ([(0.5, 1.0, 10), (0.5, 0.0, 14)], 0.5),
    "raw rewards, right .25": ([(0.25, 1.0, 1), (0.75, 0.0, 1)], 0.0),
}


@claim("C23", "cancel", only_if="the token earns nothing and c/r is iid", extremes=False)
def c23(module, name, draws, evidence):
    """At a token that earns nothing, `cancel` multiplies the variance by (1 - t) n/(n - 1), with
    t = m^2/(m^2 + v): it pays only if t > 1/n.

    Source: the law of the variance (D, ours); shrinkage baselines are known (2511.03710)

    Let n answers visit a history, n given. Let x = c/r be independent from answer to answer, with
    the mean m and the variance v, and also independent of the token taken there: which way an
    answer goes says nothing about what becomes of it. Let s = grad log pi. Then E_old[r s] = 0, so
    the terms r x s of different answers are uncorrelated, and one of them has the variance (m^2 +
    v) E[r^2 |s|^2]. After `cancel` x_i is x_i - mean of the other x_j, with mean 0 and variance v +
    v/(n-1). Hence

      Var(cancelled) / Var(not) = v n/(n-1) / (m^2 + v) = (1 - t) n/(n-1).

    Cancelling takes the mean of the pushes away, and pays for not knowing it. With raw rewards 0
    and 1, t is the chance to be right: below 1/n the raw reward is the less noisy one. Of the
    length tax of 1/T_i a small part is mean, if the baseline is exact: see the table. So a number
    that says that a batch does not cancel does not say that cancelling would make it less noisy.

    x_i - lam (mean of the others) is as unbiased for every lam. Its second moment is
    v + m^2 (1 - lam)^2 + lam^2 v/(n-1), least at lam = m^2/(m^2 + v/(n-1)). That is below 1 unless
    v is 0: to cancel completely is never the best.

    Where the token earns something, k = E[x r s] is not 0. With g = r s the ratio is then

      (E[(x-m)^2 g^2] + (v E[g^2] + k^2)/(n-1) - k^2) / (E[x^2 g^2] - k^2).

    "left": the error of the first law there. All this needs a fixed baseline. With the group's mean
    the c of a group depend on each other. Then cancelling adds noise in small groups where it took
    some away: see the second row of the table.

    Measured: the variance over all groups of 2 to 5 answers that go two or three ways and end in
    random rewards and lengths, off-policy, through grpo without a clip. The table has t, the ratio
    for four n, and the best lam at n = 4, on-policy and measured, too.
    """
    for k, draw in enumerate(draws[::2]):
        ways, n, b = 2 + k % 2, 2 + k // 2 % 4, float(draw.randn(1))
        logits, rewards = draw.randn(2, ways), draw.randn(2).tolist()  # now, before
        T = torch.randint(1, 9, (2,), generator=draw.generator).tolist()
        ends = [*zip(draw.randn(2).softmax(0).tolist(), rewards, T, strict=True)]
        alike = [Outcome(way, *end) for way in range(ways) for end in ends]
        t, *predicted = variance_law(alike, n, *logits, b)
        evidence.equal((1 - t) * n / (n - 1), predicted[1], what="the two formulas")
        evidence.equal(predicted, measure_variances(module, alike, n, *logits, b))
        earning = [o._replace(reward=o.reward + o.way) for o in alike]
        t, _, predicted = variance_law(earning, n, *logits, b)
        measured = measure_variances(module, earning, n, *logits, b)[1]
        evidence.equal(predicted, measured, what="it earns something")
        evidence.record_left(measured - (1 - t) * n / (n - 1))
    even = torch.zeros(2, 2, dtype=torch.float64)
    for title, (ends, b) in EXAMPLES.items():
        outcomes = [Outcome(way, *end) for way in (0, 1) for end in ends]
        found = [measure_variances(module, outcomes, n, *even, b) for n in (2, 4, 8, 16)]
        t = "" if b is None else variance_law(outcomes, 2, *even, b)[0]
        evidence.rows.append([title, t, *(ratio for _, ratio in found), found[1][0]])


# ---------------- C24: cancelling without bias, off-policy

STEPS = (0.1, 0.5, 2)


def unbiased_pair_rules(p: Tensor, q: Tensor) -> Tensor:
    """All alpha(y, z), beta(y, z) and b of C24, 0 on the diagonal. (solutions, 2 K^2 + 1)."""
    K = len(p)
    scores = torch.eye(K, dtype=torch.float64) - p  # (answers, K), grad log pi
    unknowns = torch.eye(2 * K * K + 1, dtype=torch.float64)
    alpha, beta = unknowns[:, :-1].view(-1, 2, K, K).unbind(1)  # (unknowns, K, K) both
    # The expected update where the reward is 1 for an answer z and 0 for the others.
    updates = torch.einsum("uzy,y,z,zk->uzk", alpha, q, q, scores)
    updates = updates - torch.einsum("uyz,y,z,yk->uzk", beta, q, q, scores)
    updates = updates - unknowns[:, -1, None, None] * p[:, None] * scores
    equations = (alpha - beta.mT, alpha.diagonal(dim1=1, dim2=2), updates)  # all must be 0
    _, sizes, rows = torch.linalg.svd(torch.cat([x.flatten(1) for x in equations], 1).T)
    return rows[int((sizes > 1e-9 * sizes[0]).sum()) :]


def answers_to_one_choice(rewards: Tensor) -> list[Outcome]:
    return [Outcome(way, 1.0, reward, 1) for way, reward in enumerate(rewards.tolist())]


def second_bias(
    loss_fn: Callable, rewards: Tensor, logits: Tensor, step: float, common: bool = False
) -> Tensor:
    """The bias of an update on two answers after a first step: on the same two, or, if common, the
    mean step for all."""
    first = OneChoice(answers_to_one_choice(rewards), 2, logits, logits)
    batch = first.batch(losses, first.centred)
    g = first.updates(coefficients(loss_fn(batch), batch))  # (groups, ways)
    new = logits + step * ((first.odds @ g).expand_as(g) if common else g)
    second = OneChoice(answers_to_one_choice(rewards), 2, new.repeat_interleave(2, 0), logits)
    batch = second.batch(losses, second.centred)
    update = second.odds @ second.updates(coefficients(loss_fn(batch), batch))
    p = new.softmax(1)
    unbiased = second.odds @ (p * (rewards - p @ rewards[:, None])) / 2
    return (update - unbiased).norm() / unbiased.norm()


@claim("C24", "recentred", only_if="theta does not depend on the batch", extremes=False)
def c24(module, name, draws, evidence):
    """Off-policy, in a choice of three or more answers, a weight of the own answer times (R - group
    mean) cannot both cancel and be unbiased. Of the rules that compare two answers at a time, only
    recentred's product can.

    Source: a trilemma (D, ours)

    Take one choice of K answers with free logits, p now and q > 0 before, u = p/q, and any rewards.
    A policy with longer answers contains this case.

    A pair rule c_i = mean over j != i of alpha(y_i, y_j) R_i - beta(y_i, y_j) R_j, with alpha and
    beta free of rewards. A batch of two answers y, z cancels for all rewards only if alpha(y, z) =
    beta(z, y). Let the reward be 1 for an answer z and 0 for all others, and s_y = grad log pi(y) =
    e_y - p. The expected update is then

      q_z sum_y q_y alpha(z, y) s_z - q_z sum_y q_y beta(y, z) s_y

    over y != z, and must be b p_z s_z. The only relation between the s_y is sum_y p_y s_y = 0. So
    for y != z there is a number b_z with q_z q_y beta(y, z) = b_z p_y, which is
    beta(y, z) = u_y b_z/q_z. With alpha(z, y) = beta(y, z) the factors of s_z then say that
    b_z (1 - p_z) - b p_z = -b_z p_z, so b_z = b p_z. Hence alpha(y, z) = beta(y, z) = b u_y u_z,
    which is recentred. A pair of equal answers contributes nothing, whatever its weight.

    An own weight, w(y_i) (R_i - mean R), is such a rule in groups of two, and other groups ask the
    same of w: the expected update is (1 - 1/G) (E[w R s] - E[w s] E[R]), and to cancel is to be
    constant, because R_j has the factor w_j - mean w. So if it does both, w(y) is b u_y u_z for
    every other z. With three answers or more, u is then a constant, so it is 1: on-policy only.
    Alone, each is easy: a constant w cancels, and w = u is unbiased (C16). (With two answers u_1
    u_2 is a constant anyway.)

    The price: if u is independent of R, and V = E[u^2], then

      E[c^2] = (G - 1)/G^2 V Var(R) (2 V + G - 2).

    E[(R_i - R_j)^2] is 2 Var(R), and E[(R_i - R_j)(R_i - R_k)] is Var(R). Of the (G-1)^2 terms in
    c_i^2 the G - 1 squares have V^2, and the others V. The own product has (G - 1)/G V Var(R). So
    recentred has 1 + 2 (V - 1)/G times that. This is about one coefficient, not about the variance
    of a gradient.

    "Unbiased" needs a theta that does not depend on the batch. After a first update on a group, the
    new policy prefers what this group happened to reward, and neither recentred nor the own product
    mends that ("left", and the table: the bias of a second update on the same two of four answers,
    by the length of the first step). After a first step that is the same for all groups there is no
    bias.

    Measured: each pair's coefficient against the one solution of the linear system, for 2, 3, 4 and
    6 answers; E[c^2] over all groups; a second update over all groups, each from its own theta.
    """
    for draw, K in itertools.product(draws[::4], (2, 3, 4, 6)):
        logits, R = draw.randn(2, K), draw.randn(K)
        rules = unbiased_pair_rules(*logits.softmax(1))
        evidence.equal(1, len(rules), what="solutions")
        alpha, beta = (rules[0, :-1] / rules[0, -1]).view(2, K, K)
        world = OneChoice(answers_to_one_choice(R), 2, *logits)
        batch = world.batch(module, world.groups.rewards)
        y, z = world.groups.way.view(-1, 2).T
        measured = coefficients(module.recentred(batch), batch)[::2, 0]
        evidence.equal((alpha[y, z] * R[y] - beta[y, z] * R[z]) / 2, measured, what="a pair")
    for draw, G in zip(draws[::4], (2, 3, 4) * 2, strict=False):
        logits, low, gap = draw.randn(2, 3), *draw.randn(2).tolist()
        outcomes = [Outcome(way, 0.5, R, 1) for way in range(3) for R in (low, low + gap)]
        p, q = logits.softmax(1)
        world, V = OneChoice(outcomes, G, *logits), p**2 @ (1 / q)
        batch = world.batch(module, world.centred)
        squares = coefficients(module.recentred(batch), batch).view(-1, G).square().mean(1)
        predicted = (G - 1) / G**2 * V * gap**2 / 4 * (2 * V + G - 2)
        evidence.equal(predicted, world.odds @ squares, what="the price")
    columns, cases = [], [(draw.randn(4), draw.randn(4)) for draw in draws[::4]]
    for loss_fn in (module.recentred, own_product):
        biases = [[second_bias(loss_fn, *case, step) for step in STEPS] for case in cases]
        common = [second_bias(loss_fn, *case, STEPS[-1], common=True) for case in cases]
        evidence.equal([0] * len(cases), torch.stack(common), what="after a common step")
        evidence.record_left(biases)
        columns.append([*torch.tensor(biases).mean(0).tolist(), max(common)])
    titles = (*map(str, STEPS), f"{STEPS[-1]}, the same for all groups")
    evidence.rows += map(list, zip(titles, *columns, strict=True))


# ---------------- C25: a sampler that is not the trainer


CAPS = (  # what an engine makes of the weight of an answer
    lambda u: u,
    lambda u: u.clamp(max=3),  # TIS
    lambda u: u * ((u >= 0.5) & (u <= 2)),  # MIS
    lambda u: u * (u <= 3),  # TRL's default
)


@claim("C25", "reinforce", only_if="no weight is capped or masked", extremes=False)
def c25(module, name, draws, evidence):
    """Weights u = prod_t pi_trainer/pi_sampler leave (G - 1) (J_trainer - J_sampler), in
    expectation, at a first token that all answers have for sure, if A is R minus the group's mean:
    noise, as long as nothing caps them.

    Source: TIS and MIS (D, ours); TRL's default with vLLM, 0 above 3: its GRPOConfig (P)

    An engine that samples has other numerics than the trainer. So an answer comes from pi_sampler,
    while the loss takes it for one of pi_trainer's. Libraries mend that with the weight u_i of the
    whole answer, at most C (truncated, TIS), or 0 outside a range (masked, MIS). Then a token that
    all share has sum_i w_i A_i, also in the first update of a batch, where all other ratios are 1.

    The statement is about the root. Answers are independent draws from the sampler, and A_i = R_i -
    mean R. So for any weight w of the own answer

      E[sum_i w_i A_i] = G (1 - 1/G) (E[w R] - E[w] E[R]) = (G - 1) Cov(w, R),

    and without a cap E[u R] = J_trainer, E[u] = 1. The same holds further on, given that all take a
    token: (G - 1) rho (Q_trainer - Q_sampler), where rho is the product of the ratios up to it, and
    Q the mean reward after it.

    Without a cap that is an error of the baseline, the same for all siblings: the expected update
    is (1 - 1/G) grad J at the trainer (C16). With a cap E[w grad log pi] is not 0, and the expected
    update is biased ("left"). recentred with the sampler's log-probs as logp_old leaves nothing and
    is unbiased (C21); its price grows with E[u^2] (C24).

    Measured: both expectations over all groups of 2 to 4 answers to a choice, with no cap, TIS at
    most 3, MIS within .5 to 2, and 0 above 3. reinforce weighs all tokens of an answer alike, so
    the sum of a group's coefficients is what a token gets that all share.
    """
    cases = zip(draws[::2], (2, 3, 4) * 4, strict=False)
    for (draw, G), cap in itertools.product(cases, CAPS):
        logits, R = draw.randn(2, 4), draw.randn(4)
        p, q = logits.softmax(1)
        world = OneChoice(answers_to_one_choice(R), G, *logits)
        batch = world.batch(module, world.centred)
        w, u = cap(p / q), losses.sequence_ratio(batch, "product").detach()
        batch = replace(batch, adv=cap(u)[:, None] * batch.adv)
        c = coefficients(module.reinforce(batch), batch)
        predicted = (G - 1) * (q @ (w * R) - (q @ w) * (q @ R))
        evidence.equal(predicted, world.odds @ c.view(-1, G).sum(1), what="the expected sum")
        update, unbiased = world.odds @ world.updates(c), (1 - 1 / G) * p * (R - p @ R)
        if cap is CAPS[0]:
            evidence.equal(unbiased, update, what="the expected update")
        else:
            evidence.record_left((update - unbiased).norm() / unbiased.norm())


# ---------------- C26: a choice of answers by the sign of A


@claim("C26", "off_policy_mask")
def c26(module, name, draws, evidence):
    """A mask of losers alone leaves r P_m at a shared token inside the clip range, -r (P - P_m)
    above it and r P below it, P the winners' advantages and P_m those of the masked losers.

    Source: selection by sign (D, ours); the mask: DeepSeek-V3.2 2512.02556 Eq. 9 (S)

    DFPO names asymmetric selection among the causes of unequal weights (S). This is its purest
    case: an answer is dropped if A_i < 0 and its mean log(pi_old/pi) is above delta, and never if
    A_i > 0. Let P be the sum of A over the winners of a group. It is also the sum of |A| over its
    losers, because A sums to 0. P_m is the part of the losers that are dropped. Let all answers be
    equally long. At a token that all share, with the ratio r, the coefficients then sum to

      r P - r (P - P_m) = r P_m     inside the clip range,
      0   - r (P - P_m)             above it, where the min stops the winners (C6),
      r P - 0                       below it, where it stops the losers, masked or not,

    all divided by the common T. So inside the range the mask pushes what all answers share,
    whatever it earns. `cancel` takes that away without a change of the expected update, if the
    baseline is fixed (C22b). What may cost reward is that the mask makes the answers behind it
    heavier or lighter by their sign: a bias in a choice, as the min's is (C19).

    With unequal lengths each A_i is divided by its T_i, so the winners' sum differs from the
    losers'. So it is measured: each sum on random trees, inside and outside the range, for three
    deltas. "left": the mean size of the sum.
    """
    settings = itertools.product(draws, ((0.15, 0.0), (0.3, 0.35)), (0.0, 0.02, 0.1))
    for draw, (spread, offset), delta in settings:
        log_r = draw.log_ratio(spread, offset)
        far = (-log_r.sum(1) / torch.tensor(draw.T) > delta).tolist()
        batch = draw.batch(module, spread, offset)
        loss = module.off_policy_mask(batch, delta)
        measured = draw.at_shared(coefficients(loss, batch)).sum(1)
        predicted = []
        for i, t in (draw.tree[node][0] for node in draw.shared):
            answers = [(draw.adv[j].item() / draw.T[j], far[j]) for j in draw.group(i)]
            winners = sum(a for a, _ in answers if a > 0)
            losers = sum(a for a, dropped in answers if a < 0 and not dropped)
            r = float(log_r[i, t].exp())
            predicted.append(r * ((winners if r <= 1.2 else 0) + (losers if r >= 0.8 else 0)))
        evidence.equal(predicted, measured)
        evidence.record_left(measured)
