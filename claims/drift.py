"""C13 and C14: what happens to a token that is not left alone.

C1 to C12 say when a shared token keeps a gradient. Here is what that gradient does: the token's
distribution drifts, and answers of equal reward can be driven apart.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from claims.evidence import claim
from claims.trees import ascent
from toy.policy import EOS, Policy, kl, tabular


@claim("C13", "dr_grpo", "grpo_symmetric", "dfpo_min", extremes=False)
def c13(module, name, draws, evidence):
    """A step eta g moves a token by KL = (eta^2/2) g^T F(h) g + O(eta^3): halving eta divides the
    remainder by 8.

    Source: DFPO Prop. 3.1 (S); kernel (D)

    Write p_eta for pi_{theta + eta g}(.|h), and f(eta) = KL(p_eta || p_0) = sum_a p_eta log(p_eta /
    p_0). Probabilities sum to 1, so sum_a p_eta' = 0, and f' = sum_a p_eta' log(p_eta / p_0). At
    eta = 0 both f and f' are 0. The second derivative there is

      f'' = sum_a p_0' (log p_0)' = E_a[<g, grad log pi(a|h)>^2] = g^T F(h) g

    with the Fisher matrix F(h) = E_a[grad log pi(a|h) grad log pi(a|h)^T]. The next term is of
    third order, so halving eta divides the remainder by 8.

    So whatever gradient a shared token is left with makes its distribution drift, though no reward
    asks for it. Where the condition C2 holds, the token stays where it is. The KL is positive only
    if g is outside the kernel of F(h). To add one number to all logits of h is a step, but no
    drift; that is checked, too.

    g is the loss's own ascent direction, off-policy. For dr_grpo, outside the clip range, 8 is
    compared with the sum of |remainder| at eta = 1e-3 over that at 5e-4. For grpo_symmetric and
    dfpo_min, 0 is compared with the drift itself.
    """
    remainder = {1e-3: 0.0, 5e-4: 0.0}
    for draw in draws[::3]:
        setting = (0.3, 0.35) if name == "dr_grpo" else (0.6, 0.0)
        g = draw.N * ascent(getattr(module, name)(draw.batch(module, *setting)), draw.policy.W)
        for p, y in draw.shared[:2]:
            h = (p, *y[:-1])
            if name != "dr_grpo":
                evidence.equal(0, kl(draw.policy.step(g, 0.5), draw.policy, h))
                continue
            F = draw.policy.fisher(h)
            for eta in remainder:
                second_order = eta**2 / 2 * float(g.flatten() @ F @ g.flatten())
                drift = kl(draw.policy.step(g, eta), draw.policy, h)
                remainder[eta] += abs(drift - second_order)
            shift = draw.policy.phi(h).expand_as(g)
            drift = kl(draw.policy.step(shift, 0.5), draw.policy, h)
            evidence.equal([0, 0], [shift.flatten() @ F @ shift.flatten(), drift])
    if name == "dr_grpo":
        evidence.equal(8, remainder[1e-3] / remainder[5e-4], tolerance=0.1)


def change_of_log_odds(module, policy: Policy, prompts, answers, k) -> Tensor:
    """d log(pi(y_a)/pi(y_b)) / d eta along the loss's own ascent direction."""
    logp, mask = policy.log_probs(prompts, answers)
    adv = torch.tensor(k, dtype=torch.float64)[:, None].expand(mask.shape)
    loss = module.reinforce(module.Batch(logp, logp.detach(), adv, mask, 2, 1))
    log_odds = logp[0].sum() - logp[1].sum()
    return 2 * (ascent(-log_odds, policy.W) * ascent(loss, policy.W)).sum()


@claim(
    "C14",
    "reinforce",
    fails="Eq. 5 needs score gradients of equal norm",
    extremes=False,
)
def c14(module, name, draws, evidence):
    """Equal rewards do not give d log(pi(y_a)/pi(y_b)) = eta c (k_a - k_b): equal k can still drive
    two answers apart.

    Source: DFPO Cor. 3.2, Eq. 5 (S); exact formula and counterexample (D)

    The corollary is about two answers y_a and y_b of equal reward, which a method weighs by k_a and
    k_b. The step is eta g with

      g = A (k_a grad log pi(y_a) + k_b grad log pi(y_b)),

    because equal rewards have equal advantages A. To first order a function f of theta changes by
    eta <grad f, g>. Take f = log pi(y_a) - log pi(y_b). Write n_a and n_b for the squared norms of
    the two score gradients, and x for their inner product. Then the change is, exactly to
    first order,

      eta A (k_a n_a - k_b n_b + (k_b - k_a) x).

    If n_a = n_b = n, this is eta A (n - x) (k_a - k_b): Eq. 5 with c = A (n - x). So equal norms
    are enough. If the two score gradients are orthogonal as well, for instance because they have
    disjoint parameters, then x = 0 and c = A n. With p = (.4, .4, .2) in one softmax the norms are
    equal although x = -.44, and c = .56 - (-.44) = 1. Both cases are checked.

    With unequal norms Eq. 5 is wrong. Take one softmax with p = (.6, .3, .1), A = 1, k_a = k_b =
    1/2, and the first two tokens as the two answers. In the logits g = ((e_a - p) + (e_b - p))/2 =
    (-.1, .2, -.1), and the log-odds change by g_a - g_b = -.3 per eta. So the likelier answer
    loses, though k_a = k_b and Eq. 5 says 0 ("left"). Public notes on the paper
    (Memory4ever/AI-System-Design) have the same example.

    The exact formula is checked with dense features and answers of unequal length.
    """
    x = (0,)
    for draw in draws:
        features = defaultdict(lambda draw=draw: draw.randn(4))
        dense = Policy(draw.randn(5, 4).requires_grad_(), features.__getitem__, 3)
        answers = [(1, 2, EOS), (2, EOS)]
        k = draw.randn(2).tolist()
        measured = change_of_log_odds(module, dense, [x, x], answers, k)
        a, b = (dense.grad_log_prob_answer(x, y) for y in answers)
        evidence.equal(((a - b) * (k[0] * a + k[1] * b)).sum(), measured)
        W = draw.randn(3, 1).repeat(1, 2).requires_grad_()
        disjoint = Policy(W, tabular([(0,), (1,)]), 1)
        n = float((disjoint.grad_log_prob(x, 1) ** 2).sum())
        measured = change_of_log_odds(module, disjoint, [(0,), (1,)], [(1,), (1,)], k)
        evidence.equal(n * (k[0] - k[1]), measured)

    def in_one_softmax(p, k) -> Tensor:
        W = torch.tensor([[p_a] for p_a in p], dtype=torch.float64).log().requires_grad_()
        softmax = Policy(W, tabular([x]), 1)
        return change_of_log_odds(module, softmax, [x, x], [(0,), (1,)], k)

    evidence.equal(0.7 - 0.1, in_one_softmax((0.4, 0.4, 0.2), (0.7, 0.1)))
    counterexample = in_one_softmax((0.6, 0.3, 0.1), (0.5, 0.5))
    evidence.equal(-0.3, counterexample)
    evidence.record_left(counterexample)
