"""M6, N4, A2, A4, I1 and I3: what three neighbouring papers do to the advantage of a token.

NTHR asks what an update does to the probability of a correct answer. An update on one question
should make its correct answers more likely. Delta(x) is the mean over the correct answers of ln
pi_theta'(y) - ln pi_theta(y), summed over tokens, where theta' comes after one update on that
question alone. The likelihood is called lazy (lazy likelihood displacement) if Delta(x) is below a
small epsilon, or negative. Wrong answers that resemble correct ones cause this: pushing them down
also pushes the correct ones down.

AR/Lopti says that low-probability tokens have the largest gradients and so dominate an update. It
has two remedies. Advantage Reweighting shrinks their advantages. Lopti gives them an update of
their own, before the others.

IBPO, second-hand throughout (S), asks the same policy to correct each wrong answer y_i. A
correction that succeeds says two things: that y_i was a near miss, and which of its tokens were to
blame. The near miss earns a bonus phi_i = rho 1[R_i != 1, the correction is right]. The shaped
reward is R'_i = R_i + l phi_i, with rho = 0.5 (`bonus`) and l = 0.6 (`weight`). How rho and l
combine is not known for certain; here they multiply. A'_i is the group advantage of the shaped
rewards. The correction is aligned with y_i (Levenshtein): tokens that it keeps are called kept, the
others changed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import llm.credit
import losses
from claims.evidence import LARGE, Draw, ascent, claim, pushes_of
from claims.formulas import formula

# ---------------- NTHR: negative gradients


class Readout:
    """The answers of a draw with random hidden states, read at temperature 0.7.

    Padding holds garbage. Rewards are 0, a half (no right answer) and 1. The first group is mixed.
    In some draws a second one is all right or all wrong.
    """

    def __init__(self, draw: Draw):
        V = LARGE if draw.kind == "steep" else draw.vocabulary + 5  # five ids occur in no answer
        self.draw = draw
        self.h = draw.randn(*draw.mask.shape, 4)  # (N, T, 4)
        self.head = draw.randn(V, 4)
        log_pi = (self.h @ self.head.T).log_softmax(-1)
        self.g = one_hot(draw.tokens, V) - log_pi.exp()  # (N, T, V)
        G = draw.G
        R = torch.randint(0, 3, (draw.N,), generator=draw.generator).double() / 2
        R[:2] = torch.tensor([0.0, 1.0])
        if draw.equal_lengths:
            R[G : 2 * G] = R[-1].item()
        self.correct = R == 1  # (N,)
        self.facts = dict(tokens=draw.tokens, mask=draw.mask, group_size=G, rewards=R)
        self.facts["logp"] = draw.fill(log_pi.gather(2, draw.tokens[..., None])[..., 0])
        hidden = torch.where(draw.mask[..., None], self.h, math.nan)
        self.reading = dict(hidden=hidden, head=0.7 * self.head, temperature=0.7)

    def scores(self, full_vocab: bool) -> tuple[Tensor, Tensor]:
        """The sum of <g, g'> <h, h'> over the correct tokens of the group, and a correct answer's
        own part in the sums of its tokens. (N, T) both, 0 outside mixed groups.

        g is kept on the ids of the group's answers, or on all.
        """
        draw = self.draw
        scores, own = torch.zeros(2, *draw.mask.shape, dtype=torch.float64)
        for start in range(0, draw.N, draw.G):
            group = draw.group(start)
            if not 0 < self.correct[group].sum() < draw.G:
                continue
            answer, t = draw.mask[group].nonzero(as_tuple=True)
            answer = answer + start
            ids = slice(None) if full_vocab else draw.tokens[answer, t].unique()
            g, h = self.g[answer, t][:, ids], self.h[answer, t]
            pairs = (g @ g.T) * (h @ h.T) * self.correct[answer]  # (K, K), no matrix M
            scores[answer, t] = pairs.sum(1)
            own[answer, t] = (pairs * (answer[:, None] == answer)).sum(1)
        return scores, own


@claim("M6", "nthr")
def m6(name, draws, evidence):
    """NTHR multiplies by eta the negative advantages of wrong tokens that score above tau.

    Source: NTHR sec. 5.2, Algorithm 1, App. 7.3 (P); the self term is open

    Measured: the rule against a loop over answers, with random scores, for both readings of the
    self term and three eta.

    Proof: by definition. N4 says what the score is, and why a high one harms. The threshold tau is
    beta times the smallest mean score of a correct answer in the group. By default beta = 1 and eta
    = 2 |0.5 - p|, where p is the group's share of correct answers. Everything comes from the old
    policy.

    Open: whether a correct token's score counts its own answer. The paper says "other correct
    responses" twice, so the default leaves it out. Two reimplementations count it.
    """
    settings = {}, {"eta": 0.0}, {"beta": 0.5, "self_term": True, "eta": 0.3}
    for draw, hyper in itertools.product(draws, settings):
        readout = Readout(draw)
        correct = readout.correct
        scores, own_scores = (draw.fill(x) for x in draw.randn(2, *draw.mask.shape))
        old = losses.OldPolicy(**readout.facts, scores=scores, own_scores=own_scores)
        adv = torch.where(draw.mask, draw.randn(*draw.mask.shape), -1)
        measured = getattr(losses, name)(adv, old, **hyper)
        counted = scores if "self_term" in hyper else scores - own_scores
        predicted = adv.clone()
        for i in range(draw.N):
            right = [j for j in draw.group(i) if correct[j]]
            if right and i not in right:
                means = [counted[j, : draw.T[j]].mean() for j in right]
                tau = hyper.get("beta", 1) * min(means)
                softened = draw.mask[i] & (scores[i] > tau) & (adv[i] < 0)
                eta = hyper.get("eta", 2 * abs(0.5 - len(right) / draw.G))
                predicted[i, softened] *= eta
        evidence.equal(predicted, measured, what=f"an advantage with {hyper or 'the defaults'}")


@claim("N4", "nthr_scores")
def n4(name, draws, evidence):
    """A wrong token pushes the correct answers down by its score, sum <g, g'> <h, h'> over their
    tokens. One matrix for the group replaces the double sum.

    Source: NTHR Theorem 4.4, sec. 5.2 and App. 7.4 (P); boundary and restriction (D)

    Measured: all scores, and a correct answer's own part in the scores of its tokens, on V* and on
    all ids, against pairs; and the sum over the wrong tokens, as the inner product of two gradients
    in W.

    Proof: let h be the last hidden state that predicts a token, and g = e_y - pi(.|h). The gradient
    of its log-prob in the output matrix is g h^T, so the gradients of two tokens have the inner
    product <g, g'> <h, h'>. On-policy the update ascends sum_j A_j log pi(y_j), with A_j = u for a
    correct answer and -v for a wrong one. So the log-probs of the correct answers grow by a part
    for pairs of correct tokens, minus v times the summed scores of the wrong tokens. A wrong token
    with a positive score pushes them down, and one with a negative score pushes them up. So tau = 0
    is the natural boundary (M6).

    As <g, g'> <h, h'> = g^T (g' h'^T) h, the score is g^T M h, where M is the sum of g' h'^T over
    the correct tokens.

    Limits: the theorem also lets hidden states move. Restricting g to the ids of the group's
    answers may raise or lower the score.
    """
    for draw in draws:
        readout = Readout(draw)
        for full_vocab in (False, True):
            measured = llm.credit.nthr_scores(
                **readout.facts, **readout.reading, full_vocab=full_vocab
            )
            for x, y in zip(readout.scores(full_vocab), measured, strict=True):
                evidence.equal(x, y)
        W = readout.head.requires_grad_()
        logp = (readout.h @ W.T).log_softmax(-1).gather(2, draw.tokens[..., None])[..., 0]
        first = draw.mask & (torch.arange(draw.N) < draw.G)[:, None]  # the first group is mixed
        right, wrong = (first & draw.rows(x) for x in (readout.correct, ~readout.correct))
        product = (ascent(-logp[right].sum(), W) * ascent(-logp[wrong].sum(), W)).sum()
        evidence.equal(product, measured[0][wrong].sum())


# ---------------- AR/Lopti: low-probability tokens


@claim("A2", "advantage_reweighting")
def a2(name, draws, evidence):
    """Advantage Reweighting sets A_{i,t} = [alpha pi_old + 1 - alpha] A_i, whatever the sign of
    A_i.

    Source: AR/Lopti Prop. 4.2, Eq. 4 (P)

    Measured: each advantage, at alpha = 0, 0.3 and 1, and that it is detached.

    Proof: the rule is a definition, and Prop. 4.2 is its reason. The gradient of log pi_o in the
    logits is e_o - pi. Its squared length is (1 - pi_o)^2 plus the squares of the other
    probabilities, whose sum lies between (1 - pi_o)^2 / (V - 1) and (1 - pi_o)^2. So its length is
    1 - pi_o times a factor between sqrt(V / (V - 1)) and sqrt 2 (Prop. 4.2), and low-probability
    tokens have the largest gradients. At a probability of 0.1 the length 1 - pi_o is 9 times as
    large as at 0.9. The rule makes that 8.3, 7.5 and 6.8 times at alpha = 0.1, 0.2 and 0.3. The
    rule's factor comes from the old policy and is detached. All visitors of a node have one factor,
    so pushes that cancelled still do.
    """
    for draw, hyper in itertools.product(draws, ({}, {"alpha": 0.0}, {"alpha": 1.0})):
        alpha = hyper.get("alpha", 0.3)
        adv = draw.rows(draw.adv) * (1 + 0.5 * draw.noise)
        rewards = torch.zeros(draw.N)
        old = losses.OldPolicy(draw.tokens, draw.mask, draw.logp, rewards, draw.G)
        measured = losses.advantage_reweighting(adv, old, **hyper)
        evidence.equal(False, measured.requires_grad)
        factor = 1 - alpha + alpha * draw.logp.exp()
        evidence.equal((factor * adv)[draw.mask], measured[draw.mask])


@claim("A4", "lopti_low", "lopti_high")
def a4(name, draws, evidence):
    """Lopti's two passes split the tokens at pi_old = eta. At equal parameters their gradients add
    up to the joint gradient.

    Source: AR/Lopti (P)

    Measured: the pushes of each pass against M1's twin of the joint loss on its part of the tokens,
    on-policy and off-policy, at two eta; one token lies exactly at eta.

    Proof: pass 1 keeps the tokens with pi_old < eta, pass 2 the others, and each divides by the
    number of all tokens. In training, pass 2 starts from the parameters after pass 1 while the old
    log-probs stay, so its clip can act even on-policy. The authors' code (zhyang2226/AR-Lopti, P)
    has eta = 0.4, or 0.5 with Advantage Reweighting; a negative eta reverses the order there.
    """
    for draw, spread, eta in itertools.product(draws, (0.0, 0.9), (0.5, 0.3)):
        batch = draw.batch(spread)
        at_eta = batch.logp_old.clone()
        at_eta[0, 0] = math.log(eta)
        batch = replace(batch, logp_old=at_eta)
        _, joint = formula("token_grpo", batch)
        low = at_eta.exp() < eta
        kept = low if name == "lopti_low" else ~low
        part = pushes_of(getattr(losses, name)(batch, eta=eta), batch)
        evidence.equal(torch.where(draw.mask & kept, joint, 0), part)


# ---------------- IBPO: comparing and correcting


@claim(
    "I1",
    "shaped_rewards",
    only_if="E[R] > (weight bonus / 2)(1 - P(near miss))",
)
def i1(name, draws, evidence):
    """A reward for near misses lowers the variance if and only if Cov(R, phi) < -(weight/2)
    Var(phi). On hard prompts with rare repairs it does not.

    Source: IBPO (S); condition for binary rewards (D)

    Measured: the change of the variance for 18 pairs of p and q and two of weight and bonus; some
    answers are half right. "otherwise": how far the variance rises where it does, relative to
    Var(R).

    Proof: a near miss, a wrong answer whose correction is right, earns phi = bonus, and R' = R +
    weight phi. For every weight the variance grows by 2 weight Cov(R, phi) + weight^2 Var(phi). Let
    a near miss have probability m. There R = 0, so Cov(R, phi) = -bonus m E[R] and Var(phi) =
    bonus^2 m (1 - m), and the variance grows by

        2 weight bonus m ((weight bonus / 2) (1 - m) - E[R]).

    With rewards 0 and 1, a probability p of being right and a probability q of being repaired if
    wrong, m = (1 - p) q. So for p < 1 and q > 0 the variance falls if and only if p > (weight bonus
    / 2) (1 - (1 - p) q). For example, with weight = 0.6, bonus = 0.5 and q = 0.2 it rises at p =
    0.10 and falls at 0.15.
    """
    R = torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    repaired = torch.tensor([True, True, False, False])  # a right answer gets no bonus
    chances, rates = (0.05, 0.1, 0.15, 0.3, 0.5, 0.9), (0.05, 0.2, 0.8)
    for p, q, (bonus, weight) in itertools.product(chances, rates, ((0.5, 0.6), (0.2, 0.7))):
        shaped = losses.shaped_rewards(R, repaired, bonus, weight)
        wrong = 0.95 * (1 - p)
        near_miss = wrong * q
        odds = torch.tensor([p, near_miss, wrong - near_miss, 0.05 * (1 - p)], dtype=torch.float64)
        old, new = (odds @ x**2 - (odds @ x) ** 2 for x in (R, shaped))
        gap = weight * bonus / 2 * (1 - near_miss) - odds @ R  # above 0 it rises
        evidence.equal(2 * weight * bonus * near_miss * gap, new - old)
        if gap > 0:
            evidence.record_otherwise((new - old) / old)


@claim("I3", "ibpo")
def i3(name, draws, evidence):
    """A repaired answer is blamed only on its changed tokens and praised only on its kept ones. All
    else is grpo.

    Source: IBPO (S); by sign (D)

    Measured: each push of grpo under the rule, for all three readings, off-policy, where none, some
    and all answers are repaired, against M1's twin with the mask written out.

    Proof: by definition. The correction is aligned with the answer, and what it keeps is kept, the
    rest changed. The changed tokens are the mistake, and the kept ones are part of a right answer.
    Hence a mask on A'_i: 0 on changed tokens where A'_i > 0, and on kept ones where A'_i < 0.

    Other readings: "changed" gives kept tokens no credit at either sign. In a group that is all
    wrong, repaired answers have A'_i > 0, so there it only rewards their mistakes. "none" is grpo
    with shaped rewards. The sources do not settle which is meant.
    """
    for k, draw in enumerate(draws):
        kept_mask = draw.mask & (draw.noise > 0)
        repaired = torch.rand(draw.N, generator=draw.generator) < (k % 4) / 3  # none .. all
        R = torch.zeros(draw.N, dtype=torch.float64)
        facts = (draw.tokens, draw.mask, draw.logp.detach(), R, draw.G)
        old = losses.OldPolicy(*facts, kept_mask=kept_mask, repaired=repaired)
        _, grpo = formula("grpo", draw.batch(0.6))
        adv = draw.rows(draw.adv)
        masks = {
            "sign": torch.where(adv > 0, kept_mask, ~kept_mask),
            "changed": ~kept_mask,
            "none": draw.mask,
        }
        for reading, m in masks.items():
            batch = draw.batch(0.6, adv=losses.ibpo(adv, old, reading))
            predicted = torch.where(m | ~draw.rows(repaired), grpo, 0)
            evidence.equal(predicted, pushes_of(losses.grpo(batch), batch))
