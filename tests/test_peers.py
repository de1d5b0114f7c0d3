"""The same numbers as the losses of the field: TRL's GRPOTrainer._compute_loss on our tensors.

Written against TRL 1.16.0. Its trainer is never built: `_compute_loss` gets a stand-in with the
attributes that it reads, whose "model" hands back our log-probs. Loss type and clip are TRL's
configuration, the arithmetic is TRL's.
"""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import losses
from losses import Batch, group_advantages

pytest.importorskip("trl", minversion="1.16")
from trl import GRPOTrainer  # noqa: E402
from trl.trainer.utils import nanstd  # noqa: E402

G, T, L = 4, 6, 11


def trl_loss(b, loss_type, level, eps_low, eps_high, kl=0.0):
    """One training step of one process without gradient accumulation: nothing is rescaled."""
    same = lambda x, *_, **__: x  # noqa: E731
    accelerator = SimpleNamespace(num_processes=1, gather=same, reduce=same)
    trainer = SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=eps_low,
        epsilon_high=eps_high,
        beta=kl,
        max_completion_length=b.max_tokens,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (b.logp, 0 * b.logp, None),
    )
    mask = b.mask.long()
    inputs = {
        "prompt_ids": mask,
        "prompt_mask": mask,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": b.adv[:, 0],
        "old_per_token_logps": b.logp_old,
        "ref_per_token_logps": b.logp_ref,
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def make_batch(rewards, dtype, scale="std"):
    """Four groups of four, lengths 1 to 6, ratios from 0.6 to 1.65."""
    g = torch.Generator().manual_seed(0)
    logp, noise, ref = torch.rand(3, 16, T, generator=g, dtype=torch.float64).to(dtype)
    adv = group_advantages(torch.tensor(rewards, dtype=dtype), G, scale)
    mask = torch.arange(T) < torch.randint(1, T + 1, (16, 1), generator=g)
    logp = -3 * logp
    return Batch(logp, logp + noise - 0.5, adv[:, None].expand(16, T), mask, G, L, logp + ref - 0.5)


MIXED = [1.0, 0, 0, 1, 1, 1, 1, 0, 0.3, 0.1, 0.1, 2, 0, 0.5, 0.5, 1]
EQUAL = MIXED[:4] + [0.1] * 4 + MIXED[8:]  # the second group has nothing to compare
# Ours with its paper's clip or another one, TRL's loss_type and importance_sampling_level.
PEERS = [
    (losses.grpo, {}, "grpo", "token"),
    (losses.grpo, {"eps_low": 0.1, "eps_high": 0.4}, "grpo", "token"),
    (losses.grpo, {"kl": 0.04}, "grpo", "token"),
    (losses.dr_grpo, {}, "dr_grpo", "token"),
    (losses.dapo, {"eps_high": 0.28}, "dapo", "token"),
    (losses.gspo, {"eps_low": 3e-4, "eps_high": 4e-4}, "grpo", "sequence"),
    (losses.gspo, {"eps_low": 0.05, "eps_high": 0.08}, "grpo", "sequence"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rewards", [MIXED, EQUAL], ids=["mixed groups", "one equal group"])
@pytest.mark.parametrize("on_policy", [True, False], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize(
    "ours, options, loss_type, level", PEERS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_value_and_gradient_are_those_of_trl(
    ours, options, loss_type, level, on_policy, rewards, dtype
):
    b = make_batch(rewards, dtype, "mean" if ours is losses.dr_grpo else "std")
    if on_policy:
        b = replace(b, logp_old=b.logp)
    clip = {"eps_low": 0.2, "eps_high": 0.2} | options
    pair = []
    for loss_of in (lambda b: ours(b, **options), lambda b: trl_loss(b, loss_type, level, **clip)):
        logp = b.logp.clone().requires_grad_()
        loss = loss_of(replace(b, logp=logp))
        pair.append((loss.detach(), torch.autograd.grad(loss, logp)[0]))
    (loss, grad), (trl, trl_grad) = pair
    if ours is losses.dapo and rewards is EQUAL:  # TRL's mean counts the equal group's tokens
        kept = 1 - b.mask[4:8].sum() / b.mask.sum()
        loss, grad = loss * kept, grad * kept
    atol = 1e-6 if on_policy else 0.0  # on-policy it may be exactly 0
    torch.testing.assert_close(loss, trl, rtol=1e-6, atol=atol)
    torch.testing.assert_close(grad, trl_grad, rtol=1e-5, atol=1e-9)
    assert trl_grad.abs().max() > 1e-3


def test_advantages_are_those_of_trl():
    """As GRPOTrainer._generate_and_score_completions has them with scale_rewards="group"."""
    groups = torch.tensor(MIXED).view(-1, G)
    deviation = nanstd(groups, dim=1, keepdim=True) + 1e-4
    expected = (groups - groups.nanmean(1, keepdim=True)) / deviation
    ours = group_advantages(torch.tensor(MIXED), G, "std")
    torch.testing.assert_close(ours, expected.view(-1), rtol=1e-6, atol=1e-6)
