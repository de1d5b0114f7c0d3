"""I1 to I3: comparing and correcting (IBPO). Second-hand throughout (S).

For each wrong answer y_i the same policy is asked to correct it. A correction that succeeds says
two things: that y_i was a near miss, and which of its tokens were to blame. The near miss earns a
bonus phi_i = rho 1[R_i = 0 and the correction is right]. The shaped reward is R'_i = R_i + l phi_i,
with rho = 0.5 (`bonus`) and l = 0.6 (`weight`). How rho and l combine is not known for certain;
here they multiply. A'_i is the group advantage of the shaped rewards. The correction is aligned
with y_i (Levenshtein): tokens that it left as they were are called kept, the others changed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from claims.evidence import claim
from claims.trees import ascent, coefficients
from toy.policy import Policy
from toy.worlds import Groups, Outcome


def variance(x, odds) -> float:
    return float((odds * x * x).sum() - (odds * x).sum() ** 2)


@claim("I1", "shaped_rewards", only_if="p > (weight bonus / 2)(1 - (1-p) q)", extremes=False)
def i1(module, name, draws, evidence):
    """A reward for near misses lowers the variance iff Cov(R, phi) < -(weight/2) Var(phi): not on
    hard prompts.

    Source: IBPO (S); condition for binary rewards (D)

    For every weight l, Var(R + l phi) - Var(R) = 2 l Cov(R, phi) + l^2 Var(phi). That is negative
    if and only if Cov(R, phi) < -(l/2) Var(phi).

    Let P(R = 1) = p, and let a correction succeed with probability q. Then phi = rho with
    probability (1-p) q, and only where R = 0. So Cov(R, phi) = -p (1-p) q rho, and Var(phi) = rho^2
    (1-p) q (1 - (1-p) q). For p < 1 and q > 0 the variance falls if and only if
    p > (l rho / 2)(1 - (1-p) q).

    With l = 0.6, rho = 0.5 and q = 0.2 it rises at p = 0.05 and 0.10 and falls from 0.15 on
    ("left": how much it rises there, relative to Var(R)).
    """
    bonus, weight = 0.5, 0.6
    R = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    shaped = module.shaped_rewards(R, torch.tensor([False, True, False]))
    for p, q in itertools.product((0.05, 0.1, 0.15, 0.3, 0.5, 0.9), (0.05, 0.2, 0.8)):
        near_miss = (1 - p) * q
        odds = torch.tensor([p, near_miss, (1 - p) * (1 - q)], dtype=torch.float64)
        cov = -p * near_miss * bonus
        var = bonus**2 * near_miss * (1 - near_miss)
        change = variance(shaped, odds) - variance(R, odds)
        evidence.equal(2 * weight * cov + weight**2 * var, change)
        evidence.equal(p > weight * bonus / 2 * (1 - near_miss), change < 0)
        if change > 0:
            evidence.record_left(change / variance(R, odds))
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    repaired = torch.tensor([True, True, True, False])
    evidence.equal([0.2 * 0.7, 1, 0.5, 0], module.shaped_rewards(rewards, repaired, 0.2, 0.7))


@claim(
    "I2",
    "ibpo",
    only_if="the correction succeeds with the same chance whatever the slips are",
    extremes=False,
)
def i2(module, name, draws, evidence):
    """Repairs that do not depend on the slips make, on average, right answers likelier and slips as
    a whole rarer.

    Source: IBPO (S); by sign, and in expectation (D)

    This is about groups in which all answers are wrong. Groups of right answers teach nothing.

    An answer has T places. At place t it takes token a with probability pi_t(a), whatever stands
    before. The right answer is k_1 .. k_T; let Q be its probability. A slip is a token other than
    k_t at place t. A correction that succeeds mends all slips and changes nothing else; it succeeds
    with probability q, whatever the slips are. Let m of the G answers of an all-wrong group be
    repaired. Their R' is l rho, and that of the others is 0. So A'_i = l rho (1 - m/G) for the
    repaired ones, which is not negative, and -l rho m/G for the others. Let S be the expected sum
    of A'_i over the repaired ones: S = l rho (G - 1) q (1 - q). Over the others the sum is -S.

    The mean of e_y - pi_t over all answers is 0. It is (1 - Q) times its mean over wrong answers,
    plus Q (e_k - pi_t). So over wrong answers it is -u (e_k - pi_t), with u = Q / (1 - Q). Of wrong
    answers the share p = (pi_t(k_t) - Q) / (1 - Q) has k_t. So their kept tokens alone give
    p (e_k - pi_t), and their changed ones the rest, -(u + p) (e_k - pi_t). The expected push at
    place t is therefore f_t grad log pi_t(k_t) / (G T), with a number for each reading:

      none         f_t = -S u + S u = 0
      sign         f_t =  S p + S u = S pi_t(k_t) / (1 - Q)
      changed      f_t = -S (u + p) + S u = -S (pi_t(k_t) - Q) / (1 - Q)

    By sign f_t > 0 at all places. Then a step of any size along this push makes k_t likelier. For
    any two distributions (e_k - pi').(e_k - pi) is positive, as it is (1 - pi'_k)(1 - pi_k) plus
    the sum of pi'_a pi_a over a != k. A step eta changes the log-odds of a slip a against k_t by
    -eta f_t (1 - pi_k + pi_a) / (G T). "changed" does the opposite of both: it rewards mistakes.

    Advantages have the scale "mean" here; with "std" the pushes are not linear in the rewards. All
    groups are enumerated. One group may differ from their mean, because an answer that is not
    repaired is blamed for its right tokens, too. Where all answers are right, all R' are equal, A'
    is 0, and so are all coefficients.

    The condition matters. Where only answers with one slip can be repaired, "changed" may make a
    right token likelier. Where only answers with two slips can be, "sign" may make one less likely.
    "left" is the share of random worlds with T = 2 in which that happens.
    """
    for k, draw in enumerate(draws[:8]):
        G, q = 2 + k % 2, 0.2 + 0.1 * (k % 5)
        place = torch.eye(2, dtype=torch.float64)  # what stands before does not matter
        W = draw.randn(3, 2).requires_grad_()
        policy = Policy(W, lambda history, place=place: place[len(history)], 2)
        p = [float(policy.probs((0,) * t)[right]) for t, right in enumerate(RIGHT)]
        scores = [policy.grad_log_prob((0,) * t, right) for t, right in enumerate(RIGHT)]
        Q = p[0] * p[1]
        S = 0.3 * (G - 1) * q * (1 - q)
        for reading, f in {"none": [0, 0], "sign": p, "changed": [Q - x for x in p]}.items():
            f_t = [S * x / (1 - Q) for x in f]
            predicted = sum(x * score for x, score in zip(f_t, scores, strict=True)) / (2 * G)
            evidence.equal(predicted, push_repairs(module, policy, reading, G, (q, q)))
        for reading, sign, chances in (("sign", 1, (0, q)), ("changed", -1, (q, 0))):
            g = sign * push_repairs(module, policy, reading, G, chances)
            evidence.record_left(any((g * score).sum() < 0 for score in scores))


RIGHT = (1, 2)  # the only right answer


def push_repairs(module, policy: Policy, reading: str, G: int, q: tuple[float, float]) -> Tensor:
    """On W, in expectation over all-wrong groups of answers of 2 tokens, with all their repairs.

    q: the chances that one slip is mended, and that two are.
    """
    logits = policy.W.log_softmax(0)  # a column for each place
    p = logits.detach().exp()
    Q = float(p[RIGHT[0], 0] * p[RIGHT[1], 1])
    outcomes = []  # each wrong answer, repaired and not
    for y in itertools.product(range(3), repeat=2):
        slips = sum(token != right for token, right in zip(y, RIGHT, strict=True))
        if slips:
            mended = q[slips - 1]
            outcomes.append(Outcome(y[0], mended / (1 - Q), 0.0, 2, y[1]))
            outcomes.append(Outcome(y[0], (1 - mended) / (1 - Q), 0.0, 2, y[1]))
    groups = Groups(outcomes, G)
    tokens = torch.stack([groups.way, groups.plan], 1)
    logp = logits[tokens, torch.arange(2)]
    repaired = groups.picks % 2 == 0
    facts = (tokens, groups.mask, logp.detach(), groups.rewards, G)
    kept_mask = tokens == torch.tensor(RIGHT)
    old = module.OldPolicy(*facts, kept_mask=kept_mask, repaired=repaired)
    groups.rewards = module.shaped_rewards(groups.rewards, repaired)
    batch = groups.batch(logp, groups.probabilities(logp), "mean")
    adv = module.ibpo(batch.adv, old, reading)
    return ascent(module.grpo(replace(batch, adv=adv)), policy.W)


@claim("I3", "ibpo")
def i3(module, name, draws, evidence):
    """A repaired answer is blamed on its changed tokens only and praised on its kept ones only; all
    else is grpo.

    Source: IBPO (S); by sign (D)

    The sources do not settle which tokens get credit, so a principle has to. A repaired answer may
    not reward its changed tokens or blame its kept ones: the changed tokens are the mistake, and
    the kept ones stand in a right answer. Other answers that share these tokens still may. Hence
    the mask m that multiplies A'_i. On a repaired answer it is 0 on changed tokens where A'_i > 0,
    and 0 on kept ones where A'_i < 0. Everywhere else it is 1, also on all answers whose
    corrections failed. What it leaves out has no gradient, whatever the ratio and the clip.

    Two other readings can be chosen. "changed" has m = 0 on kept tokens for both signs. "none" has
    m = 1, which is grpo with shaped rewards. Without a repair all three are grpo.
    """
    for k, draw in enumerate(draws):
        kept_mask = draw.mask & (draw.noise > 0)
        repaired = torch.rand(draw.N, generator=draw.generator) < (k % 4) / 3  # none .. all
        R = torch.zeros(draw.N, dtype=torch.float64)
        facts = (draw.tokens, draw.mask, draw.logp.detach(), R, draw.G)
        old = module.OldPolicy(*facts, kept_mask=kept_mask, repaired=repaired)
        plain = draw.batch(module, 0.6)
        grpo = coefficients(module.grpo(plain), plain)
        adv = draw.rows(draw.adv)
        masks = {
            "sign": torch.where(adv > 0, kept_mask, ~kept_mask),
            "changed": ~kept_mask,
            "none": draw.mask,
        }
        for reading, m in masks.items():
            batch = draw.batch(module, 0.6, adv=module.ibpo(adv, old, reading))
            predicted = torch.where(m | ~draw.rows(repaired), grpo, 0)
            evidence.equal(predicted, coefficients(module.grpo(batch), batch))
