"""C21 to C26: cancelling is a control variate. What it moves, and what it does to the noise.

A history is the prompt and what an answer has said so far. The visitors of a history are the
answers of the group that take a token there. `prefix_baseline` compares the push of each visitor
with that of the others. C22 says when this moves no expected update, and C23 what it does to the
noise. C21 and C24 are about weights that cancel and have no bias off-policy, C25 about a sampler
that is not the trainer, and C26 about a mask by the sign of A.

Every group of answers is enumerated, with the probability that the old policy gives it. The policy
there is a table: each history has logits of its own. What holds for their gradients holds for every
parametrisation, by the chain rule.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import losses
from claims.cancellation import push_shared
from claims.choice import off_policy_batch
from claims.evidence import Draw, ascent, claim, coefficients
from claims.formulas import UNCLIPPED, fitting
from toy.worlds import Groups, Outcome, Toy, World

toy_of = cache(Toy)  # one toy for all methods


def toys_of(draws: list[Draw]) -> list[Toy]:
    """Some toys, in groups of 2, 3 and 4."""
    return [toy_of(draw.seed, G) for draw, G in zip(draws[::2], (2, 3, 4) * 4, strict=False)]


# ---------------- C21: a baseline that cancels without bias


@claim(
    "C21",
    "recentred",
    only_if="s is the plain product, and A is R minus the group's mean",
    extremes=False,
)
def c21(name, draws, evidence):
    """The recentred baseline cancels at every ratio and is unbiased off-policy.

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

    So cancellation does not have to be paid for with bias. It is paid for with variance. Let u, an
    answer's ratio, be independent of R, and V = E[u^2]. Then E[c^2] is (G - 1)/G^2 V Var(R)
    (2V + G - 2). An own product u_i (R_i - mean R), which is unbiased and does not cancel, has
    (G - 1)/G V Var(R). So recentred has 1 + 2 (V - 1)/G times that. (This is derived, not measured
    here, and is about one coefficient, not about the variance of a gradient.) With the geometric
    ratio recentred cancels and is biased ("left").

    A part S of the group that shares a token: the pairs within S are antisymmetric, too, so

      sum_{i in S} c_i = (1/G) sum_{i in S} sum_{j not in S} s_i s_j (A_i - A_j).

    Only comparisons with answers elsewhere are left. That is S's credit, but as the new policy
    would see it. If the advantages of S sum to 0, it is not 0 in general, as it is with
    Min-Replace.

    Measured: the expected update over all groups of 2, 3 and 4 answers of 12 toys. M1 compares each
    c_i with the formula, and AUDIT shows that the whole group cancels.
    """
    for toy in toys_of(draws):
        off = toy.batch(off_policy=True)
        evidence.equal(toy.unbiased, ascent(losses.recentred(off), toy.policy.W))
        geometric = ascent(losses.recentred(off, "geometric"), toy.policy.W)
        evidence.record_left((geometric - toy.unbiased).norm() / toy.unbiased.norm())


# ---------------- C22: cancelling moves no expected update

# With a fixed baseline the coefficient of an answer is made of that answer alone, or it is not.
OWN = ("reinforce", "grpo", "grpo_symmetric", "dr_grpo", "gspo", "off_policy_mask")
OWN += ("cispo", "pos_only")  # their divisor, the number of tokens, is a constant here
OTHERS = ("dfpo_min", "dfpo_orthogonal", "recentred", "balanced")


@claim("C22", "prefix_baseline")
def c22(name, draws, evidence):
    """After `prefix_baseline` the coefficients of any loss sum to 0, in every batch, at every token
    that all visitors of its history take, if there are two or more.

    Source: cancelling as a control variate (D, ours)

    For token t of answer i let H be the answers of the group that take a token at the same history,
    i included, and r = pi/pi_old of the token that each takes there. If H has n >= 2 answers, put

      c'_it = c_it - r_it mean over j in H, j != i, of (c_jt / r_jt).

    If nobody else takes a token there, c' = c. If all of H take the same token, r is common to
    them, so c'_it = c_it - mean over j != i of c_jt. Summed over H, each c_jt is subtracted n - 1
    times with the weight 1/(n - 1). So the sum is 0, whatever the c are: for the whole group or a
    part of it, at every ratio, with a clip, a min, a 1/T_i or a KL term.

    Measured: the sums, for a loss with random coefficients on random trees off-policy; and that the
    loss keeps its value.
    """
    for draw in draws:
        batch, k = draw.batch(0.6), draw.randn(*draw.mask.shape)
        loss = -(k * batch.logp)[draw.mask].sum() / draw.N
        cancelled = losses.prefix_baseline(loss, batch, draw.nodes)
        evidence.equal(loss, cancelled, what="the loss's value")
        c = coefficients(cancelled, batch)
        visitors = Counter()  # of each history
        for (p, y), at in draw.tree.items():
            visitors[p, y[:-1]] += len(at)
        for (p, y), at in draw.tree.items():
            if 1 < len(at) == visitors[p, y[:-1]]:  # they all take this token
                left = c[tuple(zip(*at, strict=True))]
                evidence.equal(0, left.sum() / (1 + left.abs().sum()), what="what is left")


def expected_updates(loss_fn: Callable, toy: Toy, off_policy: bool, scale: str) -> list[Tensor]:
    """Without `prefix_baseline` and with it. (V, D) both."""
    batch = toy.batch(off_policy, scale=scale)
    loss = loss_fn(batch)
    cancelled = losses.prefix_baseline(loss, batch, toy.groups.nodes)
    return [ascent(x, toy.policy.W) for x in (loss, cancelled)]


@claim(
    "C22b",
    *OWN,
    *OTHERS,
    only_if="c_i is made of answer i alone, and the baseline of A is a fixed number",
    extremes=False,
)
def c22b(name, draws, evidence):
    """`prefix_baseline` does not move the expected update of a loss whose coefficients are made of
    each answer alone, with A_i = R_i - b and a fixed b.

    Source: cancelling as a control variate (D, ours); setting: C22

    Draw the group's answers independently from pi_old. Take everything else as given: the other
    answers, and that answer i visits the history h. Then the mean of c_jt / r_jt over the others is
    a number m, and what `prefix_baseline` takes from the update is expected to be

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

    The table has |change| / |update| off-policy.

    Measured: the change of the update over all groups of 2, 3 and 4 answers of 12 toys, on-policy
    and off-policy. b is the sampler's mean reward.
    """
    loss_fn, moves = getattr(losses, name), []
    loss_fn = partial(loss_fn, **fitting(loss_fn))
    for off_policy, toy in itertools.product((False, True), toys_of(draws)):
        before, after = expected_updates(loss_fn, toy, off_policy, "exact")
        moves.append(float((after - before).norm() / before.norm()))
        if name in OTHERS:
            evidence.record_left(moves[-1])
        else:
            evidence.equal(0 * before, after - before, what="the change")
    off_policy_moves = moves[len(moves) // 2 :]
    evidence.rows.append([name, sum(off_policy_moves) / len(off_policy_moves)])


def leak(toy: Toy, off_policy: bool) -> Tensor:
    """C22c's sum over histories for w/r = 1/T, in loops over the answers. (V, D)."""
    G, total = toy.groups.G, torch.zeros_like(toy.exact)
    sampler = toy.old if off_policy else toy.policy
    rewards = dict(zip(toy.rows, toy.groups.rewards.tolist(), strict=True))
    answers = dict(sampler.answers(()))
    for h in {y[:t] for y in answers for t in range(len(y))}:
        visits = {y: q for y, q in answers.items() if len(y) > len(h) and y[: len(h)] == h}
        P, w_over_r, earned = sum(visits.values()), 0.0, 0.0
        r = toy.policy.probs(h) / sampler.probs(h)
        for y, q in visits.items():
            a = y[len(h)]
            w_over_r += q / P / len(y)
            earned += q / P * rewards[y] * r[a] * toy.policy.grad_log_prob(h, a)
        total += P / G * (1 - (1 - P) ** (G - 1)) * w_over_r * earned
    return total


@claim(
    "C22c",
    "prefix_baseline",
    only_if="A is R minus the group's mean, and the weight of A knows no reward",
    extremes=False,
)
def c22c(name, draws, evidence):
    """With the group's mean as baseline, `prefix_baseline` does move the expected update: by
    (P/G) (1 - (1-P)^(G-1)) E_old[w/r|h] sum_a grad pi(a|h) Q_old(h,a) at each history.

    Source: the leak of the group's mean (D, ours); setting: C22b

    A_j = R_j - (1/G) sum_k R_k holds -R_i/G. So the baseline that `prefix_baseline` gives to answer
    i holds -(R_i/G) mean over j != i of (w_j/r_j), where c_j = w_j A_j, and this part is not
    independent of the token that i takes. The rest of the baseline is, and drops out as in C22b.
    Let P be the chance of a visit to h. Answer i visits it with chance P, and then somebody else
    does with 1 - (1-P)^(G-1). Given both, the gain is

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
    off-policy, for grpo without a clip (w/r = 1/T_i).
    """
    unclipped = partial(losses.grpo, **UNCLIPPED)
    for toy, off_policy in itertools.product(toys_of(draws), (False, True)):
        predicted = leak(toy, off_policy)
        before, after = expected_updates(unclipped, toy, off_policy, "mean")
        evidence.equal(predicted, after - before)
        if off_policy:
            before, after = expected_updates(losses.grpo, toy, off_policy, "mean")
            evidence.record_left((after - before - predicted).norm() / predicted.norm())


# ---------------- C23: what cancelling does to the noise


def variance_ratio(outcomes, n: int, logits, logits_old, b: float | None) -> Tensor:
    """Var(cancelled) / Var(not) of a group's update, if n answers take a way each, which is
    learnt, and then end somehow. b None: the group's mean."""
    groups = Groups(outcomes, n)
    logp, logp_old = torch.zeros(2, *groups.mask.shape, dtype=torch.float64)
    logp[:, 0] = logits.log_softmax(0)[groups.way]
    logp_old[:, 0] = logits_old.log_softmax(0)[groups.way]
    A = groups.rewards - b if b is not None else losses.group_advantages(groups.rewards, n, "mean")
    adv = A[:, None].expand(logp.shape)
    batch = losses.Batch(logp.requires_grad_(), logp_old, adv, groups.mask, n, logp.shape[1])
    odds = groups.probabilities(logp_old)  # (groups,)
    scores = one_hot(groups.way) - logits.softmax(0)  # (N, ways), grad log pi
    loss, variances = losses.grpo(batch, **UNCLIPPED), []
    for x in (loss, losses.prefix_baseline(loss, batch, groups.nodes)):
        updates = (coefficients(x, batch)[:, :1] * scores).view(-1, n, len(logits)).mean(1)
        variances.append(odds @ updates.square().sum(1) - (odds @ updates).square().sum())
    return variances[1] / variances[0]


def share_of_the_mean(ends: list[tuple], b: float) -> float:
    """t of pushes x = (R - b)/T, by how an answer ends: chance, reward, length."""
    m = sum(chance * (R - b) / T for chance, R, T in ends)
    return m**2 / sum(chance * ((R - b) / T) ** 2 for chance, R, T in ends)


LONG_IF_RIGHT = [(0.6, 1.0, 24), (0.4, 0.0, 4)]


@claim("C23", "prefix_baseline", only_if="the token earns nothing and c/r is iid", extremes=False)
def c23(name, draws, evidence):
    """At a token that earns nothing, `prefix_baseline` multiplies the variance by (1 - t) n/(n -
    1), with t = m^2/(m^2 + v): it pays only if t > 1/n.

    Source: the law of the variance (D, ours); shrinkage baselines are known (2511.03710)

    Let n answers visit a history, n given. Let x = c/r be independent from answer to answer, with
    the mean m and the variance v, and also independent of the token taken there: which way an
    answer goes says nothing about what becomes of it. Let s = grad log pi. Then E_old[r s] = 0, so
    the terms r x s of different answers are uncorrelated, and one of them has the variance (m^2 +
    v) E[r^2 |s|^2]. After `prefix_baseline` x_i is x_i - mean of the other x_j, with mean 0 and
    variance v + v/(n-1). Hence

      Var(cancelled) / Var(not) = v n/(n-1) / (m^2 + v) = (1 - t) n/(n-1).

    Cancelling takes the mean of the pushes away, and pays for not knowing it. With raw rewards 0
    and 1, t is the chance to be right: below 1/n the raw reward is the less noisy one. Of the
    length tax of 1/T_i a small part is mean, if the baseline is exact: see the table, of two ways
    that are exactly alike. So a number that says that a batch does not cancel does not say that
    cancelling would make it less noisy.

    x_i - lam (mean of the others) is as unbiased for every lam. Its second moment is
    v + m^2 (1 - lam)^2 + lam^2 v/(n-1), least at lam = m^2/(m^2 + v/(n-1)). That is below 1 unless
    v is 0: to cancel completely is never the best. (This is derived, not measured here.)

    Where the token earns something, the terms of different answers are correlated, and the law is
    another ("left": the error of this one). All this needs a fixed baseline. With the group's mean
    the c of a group depend on each other. Then cancelling adds noise in small groups where it took
    some away: see the second row of the table.

    Measured: the variance over all groups of 2 to 5 answers that go two or three ways and end in
    random rewards and lengths, off-policy, through grpo without a clip. The table is on-policy.
    """
    for k, draw in enumerate(draws[::2]):
        ways, n, b = 2 + k % 2, 2 + k // 2 % 4, float(draw.randn(1))
        logits, rewards = draw.randn(2, ways), draw.randn(2).tolist()  # now, before
        T = torch.randint(1, 9, (2,), generator=draw.generator).tolist()
        ends = [*zip(draw.randn(2).softmax(0).tolist(), rewards, T, strict=True)]
        alike = [Outcome(way, *end) for way in range(ways) for end in ends]
        predicted = (1 - share_of_the_mean(ends, b)) * n / (n - 1)
        evidence.equal(predicted, variance_ratio(alike, n, *logits, b))
        earning = [o._replace(reward=o.reward + o.way) for o in alike]
        evidence.record_left(variance_ratio(earning, n, *logits, b) - predicted)
    outcomes = [Outcome(way, *end) for way in (0, 1) for end in LONG_IF_RIGHT]
    even = torch.zeros(2, 2, dtype=torch.float64)
    for title, b, t in (
        ("24 tokens if right (.6), else 4", 0.6, share_of_the_mean(LONG_IF_RIGHT, 0.6)),
        ("the same with the group's mean", None, ""),
    ):
        ratios = [float(variance_ratio(outcomes, n, *even, b)) for n in (2, 4, 8, 16)]
        evidence.rows.append([title, t, *ratios])


# ---------------- C24: cancelling without bias, off-policy


def unbiased_pair_rules(p: Tensor, q: Tensor) -> Tensor:
    """All beta(y, z) and b of C24, with alpha(y, z) = beta(z, y). (solutions, K^2 + 1)."""
    K = len(p)
    scores = torch.eye(K, dtype=torch.float64) - p  # (answers, K), grad log pi
    unknowns = torch.eye(K * K + 1, dtype=torch.float64)
    beta, b = unknowns[:, :-1].view(-1, K, K), unknowns[:, -1, None, None]
    # The expected update where the reward is 1 for an answer z and 0 for the others.
    differences = scores[None] - scores[:, None]  # (y, z, K)
    updates = torch.einsum("uyz,y,z,yzk->uzk", beta, q, q, differences) - b * p[:, None] * scores
    diagonal = beta.diagonal(dim1=1, dim2=2)  # pairs of equal answers, which have no say
    equations = torch.cat([updates.flatten(1), diagonal], 1).T  # all must be 0
    return torch.linalg.svd(equations).Vh[torch.linalg.matrix_rank(equations) :]


@claim(
    "C24",
    "recentred",
    only_if="a choice has three answers or more, and theta does not depend on the batch",
    extremes=False,
)
def c24(name, draws, evidence):
    """Off-policy a weight of the own answer times (R - group mean) cannot both cancel and be
    unbiased. Of the rules that compare two answers at a time, only recentred's product can.

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

    "Unbiased" needs a theta that does not depend on the batch. After a first update on a group, the
    new policy prefers what this group happened to reward, and neither recentred nor the own product
    mends that.

    Measured: each pair's coefficient against the one solution of the linear system, for choices of
    2, 3, 4 and 6 answers. "left": how far two of one answer's factors u_y u_z, which an own weight
    would have to be equal to, lie apart.
    """
    for draw, K in itertools.product(draws[::4], (2, 3, 4, 6)):
        logits, R = draw.randn(2, K), draw.randn(K)
        rules = unbiased_pair_rules(*logits.softmax(1))
        evidence.equal(1, len(rules), what="solutions")
        beta = (rules[0, :-1] / rules[0, -1]).view(K, K)
        pairs = torch.cartesian_prod(torch.arange(K), torch.arange(K))  # (groups, 2): y, z
        answers = pairs.flatten()
        logp, logp_old = logits.log_softmax(1)[:, answers, None]
        adv = losses.group_advantages(R[answers], 2, "mean")[:, None]
        batch = losses.Batch(logp.requires_grad_(), logp_old, adv, adv == adv, 2, 1)
        measured = coefficients(losses.recentred(batch), batch)[::2, 0]
        y, z = pairs.T
        evidence.equal((beta[z, y] * R[y] - beta[y, z] * R[z]) / 2, measured, what="a pair")
        if K > 2:
            evidence.record_left(beta[0, 1] - beta[0, 2])


# ---------------- C25: a sampler that is not the trainer


@claim("C25", "reinforce", only_if="no weight is capped or masked", extremes=False)
def c25(name, draws, evidence):
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
    is unbiased; its price grows with E[u^2] (C21).

    Measured: both expectations over all groups of 2 to 4 answers to a choice, with no cap; and the
    bias of the update with 0 above 3. reinforce weighs all tokens of an answer alike, so the sum of
    a group's coefficients is what a token gets that all share.
    """
    cases = zip(draws[::2], (2, 3, 4) * 4, strict=False)
    for (draw, G), largest in itertools.product(cases, (math.inf, 3)):
        logits, R = draw.randn(2, 4), draw.randn(4)
        p, q = logits.softmax(1)
        answers = [Outcome(way, 1.0, reward, 1) for way, reward in enumerate(R.tolist())]
        now = logits[0].clone().requires_grad_()
        batch = off_policy_batch(World(G, answers, q.tolist()), now, "mean")
        u = losses.sequence_ratio(batch, "product").detach()
        loss = losses.reinforce(replace(batch, adv=(u * (u <= largest))[:, None] * batch.adv))
        update, unbiased = ascent(loss, now), (1 - 1 / G) * p * (R - p @ R)
        if largest < math.inf:
            evidence.record_left((update - unbiased).norm() / unbiased.norm())
            continue
        evidence.equal(unbiased, update, what="the expected update")
        left = G * coefficients(loss, batch).mean()  # each group counts as it is probable
        evidence.equal((G - 1) * (p - q) @ R, left, what="the expected sum")


# ---------------- C26: a choice of answers by the sign of A


@claim("C26", "off_policy_mask")
def c26(name, draws, evidence):
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
    whatever it earns. `prefix_baseline` takes that away without a change of the expected update, if
    the baseline is fixed (C22b). What may cost reward is that the mask makes the answers behind it
    heavier or lighter by their sign: a bias in a choice, as the min's is (C19).

    With unequal lengths each A_i is divided by its T_i, so the winners' sum differs from the
    losers'. So it is measured: each sum on random trees, inside and outside the range, for two
    deltas. "left": the mean size of the sum.
    """
    for draw, delta in itertools.product(draws, (0.02, 0.1)):
        rho, A, measured = push_shared(name, draw, 0.6, delta=delta)
        far = draw.at_shared(draw.sequence_ratios(0.6).log() < -delta)
        rho, winners = rho[:, 0], A.clamp(min=0).sum(1)
        losers = (A.clamp(max=0) * ~far).sum(1)
        evidence.equal(rho * (winners * (rho <= 1.2) + losers * (rho >= 0.8)), measured)
        evidence.record_left(measured)
