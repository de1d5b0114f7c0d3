"""Q1 and Q4: what people ask about the numbers of a run.

The answers in words stand in TROUBLESHOOTING.md.
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
    """In the first update of a batch the value of grpo and gspo is 0, whatever was sampled, and no
    clip acts. The gradient is not 0.

    Source: questions of users (D)

    Measured: on-policy, the value, and each push with a narrow and with a wide clip range
    against M1's twin without one. "left": how much the pushes change with the range once the
    ratios differ.
    """
    narrow, wide = ({"eps_low": eps, "eps_high": eps} for eps in (1e-3, 0.5))
    loss_fn = getattr(losses, name)
    for draw, spread in itertools.product(draws, (0.0, 0.6)):
        batch = draw.batch(spread)
        one, other = (pushes_of(loss_fn(batch, **eps), batch) for eps in (narrow, wide))
        if spread:
            evidence.record_left((one - other)[draw.mask] / draw.size)
            continue
        _, unclipped = formula(name, batch, **UNCLIPPED)
        for c in (one, other):
            evidence.equal(unclipped, c)
        terms = shares(name, batch) * torch.tensor(draw.T) * draw.adv
        evidence.equal(-terms.mean(), loss_fn(batch))


@claim("Q4", "k3")
def q4(name, draws, evidence):
    """The value of the KL term estimates KL(pi || pi_ref). Its gradient is that of KL(pi_ref || pi)
    for k3 alone, and that of KL(pi || pi_ref) for k3 times the ratio.

    Source: k3 in GRPO Eq. 4 (P); with the ratio in DeepSeek-V3.2 (S), as TRL has it (P); gradients
    (D)

    Measured: the expectations over one softmax, with the ratio off-policy. "left": how far the
    gradient is from that of the other KL.
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
        evidence.record_left(ascent(other, z) - ascent(term, z))
