"""TRL's own losses as losses of ours, for the page of verify.py:

    python verify.py engines/trl_loss.py                     TRL's default
    python verify.py engines/trl_loss.py loss_type=cispo epsilon_high=5

The loss is GRPOTrainer._compute_loss of the TRL that you have installed; log-probs are given to it
instead of a model's. Written against TRL 1.16.0.
"""

from __future__ import annotations

import functools
import tempfile

from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from engines.example import tiny
from losses import Batch


@functools.cache
def make_trainer(**settings) -> GRPOTrainer:
    model, tokenizer = tiny()
    config = GRPOConfig(tempfile.gettempdir(), use_cpu=True, bf16=False, report_to=[], **settings)
    prompts = Dataset.from_list([{"prompt": "1+1="}])
    return GRPOTrainer(model, lambda **_: [], config, prompts, processing_class=tokenizer)


def loss(
    batch: Batch,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    kl: float = 0.0,
    kl_ratio: bool = True,
) -> Tensor:
    """TRL's loss if the batch is a whole optimiser step. kl is TRL's beta, and kl_ratio its
    use_bias_correction_kl."""
    settings = dict(loss_type=loss_type, importance_sampling_level=importance_sampling_level)
    trainer = make_trainer(**settings, epsilon=epsilon, epsilon_high=epsilon_high)
    trainer.args.use_bias_correction_kl = kl_ratio
    trainer.beta, trainer.max_completion_length = kl, batch.max_tokens
    trainer.current_gradient_accumulation_steps = 1
    trainer._metrics["train"].clear()
    logp, mask = batch.logp, batch.mask.long()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, logp.detach(), None)
    unread = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), mask)
    rows = unread | dict(
        completion_mask=mask,
        advantages=batch.adv.sum(1) / mask.sum(1).clamp(min=1),
        old_per_token_logps=batch.logp_old,
        ref_per_token_logps=batch.logp_ref,
        num_items_in_batch=mask.sum(),
    )
    return trainer._compute_loss(trainer.model.train(), rows)
