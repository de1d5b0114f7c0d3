"""M6, N4, A2, A4, I1 and I3: what three neighbouring papers do to the advantage of a token.

NTHR: what does a step do to the likelihood of a correct answer? A step on one question should make
its correct answers likelier. Delta(x) is the mean over the correct answers of
ln pi_theta'(y) - ln pi_theta(y), summed over tokens, where theta' comes after one update on that
question alone. The likelihood is called lazy (lazy likelihood displacement) if Delta(x) is below a
small epsilon, or negative. Wrong answers that resemble correct ones cause this: pushing them down
pushes the correct ones down as well.

AR/Lopti: low-probability tokens have the largest gradients, and so they dominate a step. There are
two remedies. Advantage Reweighting shrinks their advantages. Lopti gives them a step of their own,
before the others.

IBPO, second-hand throughout (S): for each wrong answer y_i the same policy is asked to correct it.
A correction that succeeds says two things: that y_i was a near miss, and which of its tokens were
to blame. The near miss earns a bonus phi_i = rho 1[R_i != 1, the correction is right]. The shaped
reward is R'_i = R_i + l phi_i, with rho = 0.5 (`bonus`) and l = 0.6 (`weight`). How rho and l
combine is not known for certain; here they multiply. A'_i is the group advantage of the shaped
rewards. The correction is aligned with y_i (Levenshtein): tokens that it left as they were are
called kept, the others changed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import llm.neighbours
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


@claim("M6", "nthr", "nthr_random")
def m6(name, draws, evidence):
    """NTHR multiplies by eta the negative advantages of wrong tokens scoring above tau; its control
    as many, by chance.

    Source: NTHR sec. 5.2, Algorithm 1, App. 7.3 (P); the self term is open

    Measured: both rules against a loop over answers, with random scores, for both readings of the
    self term and three eta. Of the control: how many tokens of each answer, and their factor.
    """
    settings = {}, {"eta": 0.0}, {"beta": 0.5, "self_term": True, "eta": 0.3}
    for draw, hyper in itertools.product(draws, settings):
        readout = Readout(draw)
        correct = readout.correct
        scores, own_scores = (draw.fill(x) for x in draw.randn(2, *draw.mask.shape))
        gen = torch.Generator().manual_seed(draw.seed)
        old = losses.OldPolicy(**readout.facts, gen=gen, scores=scores, own_scores=own_scores)
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
                if name == "nthr_random":
                    by_chance = draw.mask[i] & (measured[i] != adv[i])
                    evidence.equal(softened.sum(), by_chance.sum(), what="how many are softened")
                    softened = by_chance
                eta = hyper.get("eta", 2 * abs(0.5 - len(right) / draw.G))
                predicted[i, softened] *= eta
        evidence.equal(predicted, measured, what=f"an advantage with {hyper or 'the defaults'}")


@claim("N4", "nthr_scores")
def n4(name, draws, evidence):
    """A wrong token pushes the correct answers down by its score, sum <g, g'> <h, h'> over their
    tokens; one matrix a group replaces the double sum.

    Source: NTHR Theorem 4.4, sec. 5.2 and App. 7.4 (P); boundary and restriction (D)

    Measured: all scores, and a correct answer's own part in those of its tokens, on V* and on all
    ids, against pairs; and the sum over the wrong tokens, as the inner product of two gradients in
    W.
    """
    for draw in draws:
        readout = Readout(draw)
        for full_vocab in (False, True):
            measured = llm.neighbours.nthr_scores(
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
    """Advantage Reweighting: A_{i,t} = [alpha pi_old + 1 - alpha] A_i, whatever the sign of A_i.

    Source: AR/Lopti Prop. 4.2, Eq. 4 (P)

    Measured: each advantage, at alpha = 0, 0.3 and 1, and that it is detached.
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
    """Lopti's two passes part the tokens at pi_old = eta; at equal parameters their gradients add
    up to the joint one.

    Source: AR/Lopti (P)

    Measured: the pushes of each pass against M1's twin of the joint loss on its part of the
    tokens, on-policy and off-policy, at two eta; one token lies exactly at eta.
    """
    for draw, spread, eta in itertools.product(draws, (0.0, 0.9), (0.5, 0.3)):
        batch = draw.batch(spread)
        at_eta = batch.logp_old.clone()
        at_eta[0, 0] = math.log(eta)
        batch = replace(batch, logp_old=at_eta)
        _, joint = formula("token_grpo", batch)
        improbable = at_eta.exp() < eta
        kept = improbable if name == "lopti_low" else ~improbable
        part = pushes_of(getattr(losses, name)(batch, eta=eta), batch)
        evidence.equal(torch.where(draw.mask & kept, joint, 0), part)


# ---------------- IBPO: comparing and correcting


@claim(
    "I1",
    "shaped_rewards",
    only_if="E[R] > (weight bonus / 2)(1 - P(near miss))",
)
def i1(name, draws, evidence):
    """A reward for near misses lowers the variance iff Cov(R, phi) < -(weight/2) Var(phi): not on
    hard prompts with rare repairs.

    Source: IBPO (S); condition for binary rewards (D)

    Measured: the change of the variance for 18 pairs of p and q and two of weight and bonus; some
    answers are half right. "left": how far it rises where it does, relative to Var(R).
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
            evidence.record_left((new - old) / old)


@claim("I3", "ibpo")
def i3(name, draws, evidence):
    """A repaired answer is blamed on its changed tokens only and praised on its kept ones only; all
    else is grpo.

    Source: IBPO (S); by sign (D)

    Measured: each push of grpo under the rule, for all three readings, off-policy, where
    none, some and all answers are repaired, against M1's twin with the mask written out.
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
