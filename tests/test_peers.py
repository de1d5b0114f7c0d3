"""The same numbers as the losses of the field: TRL's GRPOTrainer._compute_loss on our tensors."""

from dataclasses import replace

import pytest
import torch

import losses
from losses import Batch, group_advantages

pytest.importorskip("trl", minversion="1.16")
from trl.trainer.utils import nanstd  # noqa: E402

from engines.shipped import trl_loss  # noqa: E402

G, T, L = 4, 6, 11
MIXED = [1.0, 0, 0, 1, 1, 1, 1, 0, 0.3, 0.1, 0.1, 2, 0, 0.5, 0.5, 1]
EQUAL = MIXED[:4] + [0.1] * 4 + MIXED[8:]  # the second group has nothing to compare


def make_batch(rewards, dtype, scale="std"):
    """Four groups of four, lengths 1 to 6, ratios from 0.6 to 1.65."""
    g = torch.Generator().manual_seed(0)
    logp, noise, ref = torch.rand(3, 16, T, generator=g, dtype=torch.float64).to(dtype)
    adv = group_advantages(torch.tensor(rewards, dtype=dtype), G, scale)
    mask = torch.arange(T) < torch.randint(1, T + 1, (16, 1), generator=g)
    logp = -3 * logp
    return Batch(logp, logp + noise - 0.5, adv[:, None].expand(16, T), mask, G, L, logp + ref - 0.5)


def settings(loss_type, low=0.2, high=0.2, level="token", **more):
    clip = {"epsilon_low": low, "epsilon_high": high}
    return clip | {"loss_type": loss_type, "importance_sampling_level": level} | more


# Ours, with its paper's hyperparameters or others, and TRL's settings for the same.
PEERS = {
    "grpo": (losses.grpo, {}, settings("grpo")),
    "grpo, clip": (losses.grpo, {"eps_low": 0.1, "eps_high": 0.4}, settings("grpo", 0.1, 0.4)),
    "grpo, kl": (
        losses.grpo,
        {"kl": 0.04},
        settings("grpo", beta=0.04, use_bias_correction_kl=False),
    ),
    "dr_grpo": (losses.dr_grpo, {}, settings("dr_grpo")),
    "dapo": (losses.dapo, {}, settings("dapo", high=0.28)),
    "gspo": (losses.gspo, {}, settings("grpo", 3e-4, 4e-4, "sequence")),
    "gspo, clip": (
        losses.gspo,
        {"eps_low": 0.05, "eps_high": 0.08},
        settings("grpo", 0.05, 0.08, "sequence"),
    ),
    "cispo": (losses.cispo, {}, settings("cispo", high=5.0)),
    # TRL's epsilon_high is the bound itself, and 0.2 is its default: no weight is above 0.2.
    "cispo, default": (losses.cispo, {"eps_high": 0.2 - 1}, settings("cispo")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rewards", [MIXED, EQUAL], ids=["mixed groups", "one equal group"])
@pytest.mark.parametrize("on_policy", [True, False], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("ours, options, theirs", PEERS.values(), ids=PEERS)
def test_value_and_gradient_are_those_of_trl(ours, options, theirs, on_policy, rewards, dtype):
    b = make_batch(rewards, dtype, "mean" if ours is losses.dr_grpo else "std")
    if on_policy:
        b = replace(b, logp_old=b.logp)
    pair = []
    for loss_of in (lambda b: ours(b, **options), lambda b: trl_loss(theirs, b, b)):
        logp = b.logp.clone().requires_grad_()
        loss = loss_of(replace(b, logp=logp))
        pair.append((loss.detach(), torch.autograd.grad(loss, logp)[0]))
    (loss, grad), (trl, trl_grad) = pair
    if ours is losses.dapo and rewards is EQUAL:  # TRL's mean counts the equal group's tokens
        kept = 1 - b.mask[4:8].sum() / b.mask.sum()
        loss, grad = loss * kept, grad * kept
    torch.testing.assert_close(loss, trl, rtol=1e-6, atol=1e-6)  # it may be exactly 0
    torch.testing.assert_close(grad, trl_grad, rtol=1e-5, atol=1e-9)
    assert trl_grad.abs().max() > 1e-3


def test_advantages_are_those_of_trl():
    """As GRPOTrainer._generate_and_score_completions has them with scale_rewards="group"."""
    groups = torch.tensor(MIXED).view(-1, G)
    deviation = nanstd(groups, dim=1, keepdim=True) + 1e-4
    expected = (groups - groups.nanmean(1, keepdim=True)) / deviation
    ours = group_advantages(torch.tensor(MIXED), G, "std")
    torch.testing.assert_close(ours, expected.view(-1), rtol=1e-6, atol=1e-6)
