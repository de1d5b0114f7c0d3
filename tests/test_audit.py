"""The audit's table is what TRL's losses do: for whoever chooses their settings by it.

TRL's own trainers, called by engines/shipped.py, give the value and gradient of losses.py, and the
audit prints what the README has.
"""

import pytest
import torch

import losses
from claims.evidence import Draw
from engines import audit
from engines.shipped import trl_rows

PUBLISHED = {  # the first columns; the last two, of another sampler, take long
    "GRPO, loss_type grpo, importance_sampling_level token": "0.075 0 1.000",
    "GRPO, loss_type grpo, importance_sampling_level sequence": "0.075 0.007 0.356",
    "GRPO, loss_type vespo, importance_sampling_level token": "0 0.153 0.310",
    "GRPO, off_policy_mask_threshold 0.1": "0 0.010 1.000",
    "RLOO": "0 0.187 0.759",
    "GRPO, vllm_importance_sampling_mode sequence_mask": "0 0 1.000 0.140 0.254",
    "GRPO, vllm_importance_sampling_mode token_truncate": "0 0 1.000 0 0",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_is_as_published(name):
    pytest.importorskip("trl")
    loss, cells = trl_rows()[name], PUBLISHED[name].split()
    columns = [*audit.COLUMNS][: len(cells)]
    assert [audit.show(audit.left_over(loss, column)) for column in columns] == cells


def rloo(batch):
    """TRL's: plain product, one clip an answer, and A against the mean of the others."""
    s, adv = losses.sequence_ratio(batch, "product"), losses.trajectory_advantage(batch)
    adv = adv * batch.group_size / (batch.group_size - 1)
    return -torch.minimum(s * adv, s.clamp(0.8, 1.2) * adv).mean()


CLIP = dict(eps_low=0.2, eps_high=0.2)  # TRL's default
TWINS = {
    "GRPO, loss_type grpo, importance_sampling_level token": (losses.grpo, {}),
    "GRPO, loss_type grpo, importance_sampling_level sequence": (losses.gspo, CLIP),
    "GRPO, loss_type dr_grpo, importance_sampling_level token": (losses.dr_grpo, {}),
    "GRPO, loss_type dapo, importance_sampling_level token": (losses.token_grpo, CLIP),
    "GRPO, loss_type cispo, importance_sampling_level token, epsilon_high 5.0": (losses.cispo, {}),
    "RLOO": (rloo, {}),
}


@pytest.mark.parametrize("name", TWINS)
def test_value_and_gradient_are_those_of_losses(name):
    pytest.importorskip("trl")
    ours, hyper = TWINS[name]
    for draw in (Draw(0, k) for k in range(12)):
        case = audit.tree_case(draw, spread=2.5)
        pair = ours(case.batch, **hyper), trl_rows()[name](case)
        grads = [torch.autograd.grad(loss, case.batch.logp)[0] for loss in pair]
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)
        assert grads[0].abs().max() > 1e-4
