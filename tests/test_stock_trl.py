"""TRL's own losses are ours, and its defaults are as printed: for readers of engines/README.md.

TRL's trainer gets random log-probs instead of a model's. The value and the gradient of its loss
must be those of the function of losses.py that is named beside the settings.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from datasets import Dataset

import losses
from engines import defaults

trl = pytest.importorskip("trl", reason="TRL is an extra: pip install -e '.[trl]'")

CLIP = dict(eps_low=0.2, eps_high=0.2)  # TRL's default
KL = {"loss_type": "grpo", "beta": 0.04}
TWINS = [
    ({"loss_type": "grpo"}, losses.grpo, {}),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, losses.gspo, CLIP),
    ({"loss_type": "dr_grpo"}, losses.dr_grpo, {}),
    ({}, losses.token_grpo, CLIP),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, losses.cispo, {}),
    ({"loss_type": "sapo"}, losses.sapo, {}),
    (KL, losses.grpo, {"kl": 0.04, "kl_ratio": True}),
    (KL | {"use_bias_correction_kl": False}, losses.grpo, {"kl": 0.04}),
]


def random_batch():
    """64 answers of one to five tokens. One ratio in twenty is above 5, where cispo clips."""
    gen = torch.Generator().manual_seed(0)
    policy, change, ref, adv = torch.randn(4, 64, 5, generator=gen, dtype=torch.float64)
    mask = torch.arange(5) < torch.randint(1, 6, (64, 1), generator=gen)
    logp = (policy - 3).requires_grad_()
    old, adv = logp.detach() - change, adv[:, :1].expand(64, 5)
    return losses.Batch(logp, old, adv, mask, group_size=4, max_tokens=7, logp_ref=ref - 3)


def trl_config(**settings):
    return trl.GRPOConfig(tempfile.gettempdir(), use_cpu=True, bf16=False, **settings)


def trl_loss(model, settings, batch):
    """TRL's loss if the batch is a whole optimiser step."""
    config = trl_config(max_completion_length=batch.max_tokens, **settings)
    prompts = Dataset.from_list([{"prompt": "1+1="}])
    trainer = trl.GRPOTrainer(model, lambda **_: [], config, prompts)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    logp, mask = batch.logp, batch.mask.long()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, logp.detach(), None)
    unread = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), mask)
    rows = unread | dict(
        completion_mask=mask,
        advantages=batch.adv[:, 0],
        old_per_token_logps=batch.logp_old,
        ref_per_token_logps=batch.logp_ref,
        num_items_in_batch=mask.sum(),
    )
    return trainer._compute_loss(trainer.model, rows)


@pytest.mark.parametrize("settings, ours, hyper", TWINS, ids=[str(row[0]) for row in TWINS])
def test_value_and_gradient_are_those_of_losses(qwen_path, settings, ours, hyper):
    batch = random_batch()
    pair = ours(batch, **hyper), trl_loss(qwen_path, settings, batch)
    pushes = [losses.token_pushes(loss, batch.logp) for loss in pair]
    torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-7)  # sapo's 1.05 is float32 in TRL
    torch.testing.assert_close(*pushes, rtol=1e-5, atol=1e-7)


def test_the_defaults_are_printed_and_are_trls():
    assert defaults.table("is") in Path(defaults.__file__).with_name("README.md").read_text("utf-8")
    expected = dict(
        loss_type="dapo",  # sums over tokens, divided by the tokens of the batch
        scale_rewards="group",
        epsilon=0.2,
        beta=0.0,
        use_bias_correction_kl=True,
        num_iterations=1,
        vllm_importance_sampling_mode="sequence_mask",
        vllm_importance_sampling_clip_max=3.0,
    )
    given = vars(trl_config())
    assert {name: given[name] for name in expected} == expected
