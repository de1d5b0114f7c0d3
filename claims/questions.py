"""Q1 and Q4: what people ask about the numbers of a run.

TROUBLESHOOTING.md has the answers in words.
"""

from __future__ import annotations

import itertools

import torch

import losses
from claims.evidence import ascent, claim, pushes_of
from claims.formulas import UNCLIPPED, formula, shares


@claim(
    "Q1", "grpo", "gspo", "dr_grpo", "grpo_symmetric", "dapo", only_if="the ratios are exactly 1"
)
def q1(name, draws, evidence):
    """In the first update on a rollout batch, the value of grpo and gspo is 0, whatever was
    sampled, and no clip acts. The gradient is not 0.

    Source: questions of users (D)

    Measured: on-policy, the value, and each push with a narrow and with a wide clip range against
    M1's twin without one. "otherwise": how far the pushes change with the range once the ratios
    differ.

    Proof: all ratios are 1, so each token adds A_i and lies inside any clip range. If each answer
    is divided by its own length, the value is -(1/N) sum_i A_i = 0. The other divisors weigh an
    answer by its length: dr-grpo and grpo-symmetric have the value -sum_i A_i T_i / (N L), and dapo
    has -sum_i A_i T_i / sum_i T_i over mixed groups. The slope is A_i times a weight, so it is 0
    everywhere only if every group has equal rewards.
    """
    narrow, wide = ({"eps_low": eps, "eps_high": eps} for eps in (1e-3, 0.5))
    loss_fn = getattr(losses, name)
    for draw, spread in itertools.product(draws, (0.0, 0.6)):
        batch = draw.batch(spread)
        one, other = (pushes_of(loss_fn(batch, **eps), batch) for eps in (narrow, wide))
        if spread:
            evidence.record_otherwise((one - other)[draw.mask] / draw.size)
            continue
        _, unclipped = formula(name, batch, **UNCLIPPED)
        for c in (one, other):
            evidence.equal(unclipped, c)
        terms = shares(name, batch) * torch.tensor(draw.T) * draw.adv
        evidence.equal(-terms.mean(), loss_fn(batch))


@claim("Q4", "k3")
def q4(name, draws, evidence):
    """The value of the KL term estimates KL(pi || pi_ref). The gradient of k3 alone is that of
    KL(pi_ref || pi), and the gradient of k3 times the ratio is that of KL(pi || pi_ref).

    Source: k3 in GRPO Eq. 4 (P); with the ratio in DeepSeek-V3.2 (S), as TRL has it (P); gradients
    (D)

    Measured: the expectations over one softmax, with the ratio off-policy. "otherwise": how far the
    gradient is from that of the other KL.

    Proof: over tokens drawn from pi, q = pi_ref / pi has E[q] = 1, so E[k3] = E[-log q] = KL(pi ||
    pi_ref). But the loss is differentiated at fixed samples. The slope of k3 in log pi is 1 - q,
    and as E[grad log pi] = 0

        E[(1 - q) grad log pi] = -sum_a pi_ref(a) grad log pi(a) = grad KL(pi_ref || pi).

    With kl_ratio the term is r k3, whose slope is r k3 + r (1 - q) = -r log q. So on-policy and
    off-policy

        E_old[-r log q grad log pi]
            = sum_a pi(a) log(pi(a) / pi_ref(a)) grad log pi(a) = grad KL(pi || pi_ref).
    """
    for draw, times_ratio in itertools.product(draws, (False, True)):
        z = draw.randn(5).requires_grad_()
        logp, ref = z.log_softmax(0), draw.randn(5).log_softmax(0)
        old = draw.randn(5).log_softmax(0) if times_ratio else logp.detach()
        rows = logp.expand(2, 5)  # two answers to one prompt, a column for each token
        batch = losses.Batch(rows, old.expand(2, 5), 0 * rows, rows < 1, 2, 5, ref.expand(2, 5))
        term = old.exp() @ losses.k3(batch, times_ratio)[0]
        to_ref, from_ref = logp.exp() @ (logp - ref), ref.exp() @ (ref - logp)
        this, other = (to_ref, from_ref) if times_ratio else (from_ref, to_ref)
        evidence.equal(to_ref, term)
        evidence.equal(ascent(this, z), ascent(term, z))
        evidence.record_otherwise(ascent(other, z) - ascent(term, z))
