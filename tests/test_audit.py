"""The audit's table is what TRL's losses do: for whoever chooses their settings by it.

TRL's own trainers, called by engines/shipped.py, give the value and gradient of losses.py. What is
left under another sampler is what the importance weights leave.
"""

import pytest
import torch

import losses
from claims.evidence import Draw
from engines import audit
from engines.shipped import trl_rows

CLIP = dict(eps_low=0.2, eps_high=0.2)  # the engines' default
PUBLISHED = {  # the first four columns of README
    "grpo, token": "0.075 0 1.000 0.085",
    "bnpo, token": "0 0 1.000 0.016",
    "dapo, token (default)": "0 0 1.000 0",
    "grpo, sequence": "0.075 0.007 0.356 0.085",
    "vespo, token": "0 0.153 0.310 0",
    "dapo, top_entropy_quantile 0.2": "0 0 1.000 0.146",
    "dapo, off_policy_mask_threshold 0.1": "0 0.010 1.000 0",
    "RLOO (default)": "0 0.187 0.759 0",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_is_as_published(name):
    pytest.importorskip("trl")
    loss = trl_rows()[name]
    cells = [audit.show(audit.left_over(loss, column)) for column in [*audit.COLUMNS][:4]]
    assert " ".join(cells) == PUBLISHED[name]


def rloo(batch):
    """TRL's: plain product, one clip an answer, and A against the mean of the others."""
    s, adv = losses.sequence_ratio(batch, "product"), losses.trajectory_advantage(batch)
    adv = adv * batch.group_size / (batch.group_size - 1)
    return -torch.minimum(s * adv, s.clamp(0.8, 1.2) * adv).mean()


TWINS = [
    (losses.grpo, {}, "grpo, token"),
    (losses.gspo, CLIP, "grpo, sequence"),
    (losses.dr_grpo, {}, "dr_grpo, token"),
    (losses.token_grpo, CLIP, "dapo, token (default)"),
    (losses.cispo, {}, "cispo, token, epsilon_high 5"),
    (rloo, {}, "RLOO (default)"),
]


@pytest.mark.parametrize("spread", (0.0, 0.5, 2.5))
def test_value_and_gradient_are_those_of_losses(spread):
    pytest.importorskip("trl")
    rows = trl_rows()
    for ours, hyper, name in TWINS:
        for draw in (Draw(0, k) for k in range(12)):
            case = audit.tree_case(draw, spread, 0.0, micro_batches=1 + (draw.N % 2 == 0))
            pair = ours(case.batch, **hyper), rows[name](case)
            grads = [torch.autograd.grad(loss, case.batch.logp)[0] for loss in pair]
            torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)
            assert grads[0].abs().max() > 1e-4


WEIGHTS = {  # of an answer or a token, by its u = pi / pi_sampler; and what README has
    "sequence_mask": (lambda u: u * (u <= 3), "0.254"),
    "sequence_truncate": (lambda u: u.clamp(max=3), "0.233"),
    "token_truncate": (lambda u: u.clamp(max=3), "0"),
}


@pytest.mark.parametrize("mode", WEIGHTS)
def test_another_sampler_leaves_what_its_weights_leave(mode):
    pytest.importorskip("trl")
    case, (weight, published) = audit.sampled_case(2500), WEIGHTS[mode]
    default = " (default)" * (mode == "sequence_mask")
    u = (case.batch.logp - case.sampler).detach()
    u = (u.sum(1) if "sequence" in mode else u[:, 0]).exp()
    c = (weight(u) * case.batch.adv[:, 0]).view(-1, audit.GROUP_SIZE)
    expected = (c.sum(1).abs() / c.abs().sum(1)).mean().item()
    loss = trl_rows()[f"dapo, vLLM {mode}{default}"]
    found = audit.left_over(loss, "another sampler, 2,500 tokens")
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert audit.show(found) == published
