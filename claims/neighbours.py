"""M6, N4, A2 and I3: what three neighbouring papers do to the advantage of a token.

NTHR softens wrong answers' tokens that drag correct answers down. AR/Lopti says that
low-probability tokens dominate an update. IBPO asks the policy to correct its wrong answers.
"""

from __future__ import annotations

import torch

import llm.credit
import losses
from claims.evidence import Tree, claim, equal


def known(tree: Tree) -> dict:
    """What a credit rule knows. Rewards are 0, a half and 1; the first group is mixed."""
    R = torch.randint(0, 3, (tree.N,), generator=tree.generator).double() / 2
    R[:2] = torch.tensor([0.0, 1.0])
    return dict(
        tokens=tree.tokens, mask=tree.mask, logp=tree.fill(tree.logp), rewards=R, group_size=tree.G
    )


@claim("M6", "nthr")
def m6(name, tree):
    """NTHR multiplies by eta the negative advantages of wrong tokens that score above tau.

    Source: NTHR sec. 5.2, Algorithm 1, App. 7.3 (P); the self term is open

    Proof: by definition. tau is beta times the smallest mean score of a correct answer in the
    group. By default beta = 1 and eta = 2 |0.5 - p|, where p is the group's share of correct
    answers.
    """
    facts, adv = known(tree), tree.fill(tree.randn(*tree.mask.shape), -1)
    scores, own = (tree.fill(x) for x in tree.randn(2, *tree.mask.shape))
    old, correct = losses.OldPolicy(**facts, scores=scores, own_scores=own), facts["rewards"] == 1
    for hyper in ({}, {"eta": 0.0}, {"beta": 0.5, "self_term": True, "eta": 0.3}):
        counted = scores if "self_term" in hyper else scores - own
        predicted = adv.clone()
        for i in range(tree.N):
            start = i - i % tree.G
            right = [j for j in range(start, start + tree.G) if correct[j]]
            if right and i not in right:
                tau = hyper.get("beta", 1) * min(counted[j, : tree.T[j]].mean() for j in right)
                softened = tree.mask[i] & (scores[i] > tau) & (adv[i] < 0)
                predicted[i, softened] *= hyper.get("eta", 2 * abs(0.5 - len(right) / tree.G))
        equal(predicted, losses.nthr(adv, old, **hyper), str(hyper))


@claim("N4", "nthr_scores")
def n4(name, tree):
    """A token's score is the inner product of two gradients in the output matrix: of its own
    log-prob, and of those of all correct answers. So a wrong token pushes them down by its score.

    Source: NTHR Theorem 4.4, sec. 5.2 and App. 7.4 (P); restriction (D)

    Proof: let h be the last hidden state that predicts a token, and g = e_y - pi(.|h). The gradient
    of its log-prob in the output matrix is g h^T, so those of two tokens have the inner product
    <g, g'> <h, h'> = g^T (g' h'^T) h, and the sum over g' h'^T is one matrix for the group. g is
    kept on the ids of the group's answers.
    """
    facts, V = known(tree), 9  # five ids occur in no answer
    h, head = tree.randn(*tree.mask.shape, 4), tree.randn(V, 4).requires_grad_()
    logp = (h @ head.T / 0.7).log_softmax(-1).gather(2, tree.tokens[..., None])[..., 0]
    facts["logp"], right = tree.fill(logp.detach()), facts["rewards"] == 1
    hidden = torch.where(tree.mask[..., None], h, torch.nan)
    measured = llm.credit.nthr_scores(**facts, hidden=hidden, head=head.detach(), temperature=0.7)
    for i in range(0, tree.N, tree.G):
        group, seen = slice(i, i + tree.G), tree.mask[i : i + tree.G]
        if not 0 < right[group].sum() < tree.G:
            continue
        grads = [torch.autograd.grad(x, head, retain_graph=True)[0] for x in logp[group][seen]]
        ids = tree.tokens[group][seen].unique()
        J = 0.7 * torch.stack(grads)[:, ids].flatten(1)  # (K, V* d), of logits h head^T
        of = torch.arange(tree.G)[:, None].expand_as(seen)[seen]  # the answer of each token
        counts = right[group][of].double()
        equal(J @ (counts @ J), measured[0][group][seen])
        own = [(J[k] @ J.T) @ (counts * (of == of[k])) for k in range(len(of))]
        equal(torch.stack(own), measured[1][group][seen])


@claim("A2", "advantage_reweighting")
def a2(name, tree):
    """Advantage Reweighting sets A_{i,t} = [alpha pi_old + 1 - alpha] A_i, whatever the sign of
    A_i. So pushes that cancelled still do.

    Source: AR/Lopti Prop. 4.2, Eq. 4 (P)
    """
    old, adv = losses.OldPolicy(**known(tree)), tree.rows(tree.adv)
    for alpha in (0.0, 0.3, 1.0):
        factor = 1 - alpha + alpha * tree.logp.exp()
        measured = losses.advantage_reweighting(adv, old, alpha)
        equal((factor * adv)[tree.mask], measured[tree.mask])


@claim("I3", "ibpo", "shaped_rewards")
def i3(name, tree):
    """A wrong answer whose correction is right earns weight * bonus. It is blamed only on its
    changed tokens and praised only on its kept ones.

    Source: IBPO (S); by sign (D)

    Proof: by definition. "changed" gives kept tokens no credit at either sign, so in a group that
    is all wrong it only rewards mistakes. "none" is grpo with shaped rewards.
    """
    kept, adv = tree.mask & (tree.noise > 0), tree.rows(tree.adv)
    repaired = torch.rand(tree.N, generator=tree.generator) < 0.5
    old = losses.OldPolicy(**known(tree), kept_mask=kept, repaired=repaired)
    if name == "shaped_rewards":
        pairs = zip(old.rewards.tolist(), repaired.tolist(), strict=True)
        shaped = [R + 0.5 * 0.6 if near and R < 1 else R for R, near in pairs]
        return equal(shaped, losses.shaped_rewards(old.rewards, repaired), "a reward")
    masks = {"sign": torch.where(adv > 0, kept, ~kept), "changed": ~kept, "none": kept | True}
    for reading, credited in masks.items():
        equal(adv * (credited | ~tree.rows(repaired)), losses.ibpo(adv, old, reading), reading)
