"""The policy losses that TRL and verl ship, called on our tensors as a trainer would call them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from losses import Batch

# ---------------- TRL


def trl_rows() -> dict[str, Callable[[Batch], Tensor]]:
    """Losses by name, which is that of the trainer and the settings that are not its defaults."""
    rows = {}

    def add(kind: str = "GRPO", **settings):
        name = ", ".join([kind, *(f"{key} {value}" for key, value in settings.items())])
        rows[name] = partial(trl_loss, kind, settings)

    add()  # the default: loss_type dapo
    add(loss_type="grpo")
    add(loss_type="dr_grpo")
    # TRL's default is .2. Its documentation recommends 5.
    add(loss_type="cispo", epsilon_high=5.0)
    add(loss_type="sapo")
    add(loss_type="vespo")
    add(loss_type="grpo", importance_sampling_level="sequence")
    add(delta=3.0)  # dual clip
    add(off_policy_mask_threshold=0.5)
    add(beta=0.04)
    add("RLOO")
    return rows


@cache
def trl_trainer(kind: str, settings: tuple[tuple[str, object], ...]):
    """A real trainer, of a tiny model, with settings that are not TRL's defaults."""
    import trl
    from datasets import Dataset

    from engines.example import tiny

    model, tokenizer = tiny()
    config = getattr(trl, f"{kind}Config")(
        output_dir=tempfile.gettempdir(),
        report_to="none",
        use_cpu=True,
        bf16=False,
        num_iterations=2,  # so that there are old log-probs
        # RLOO's KL is a part of the reward, so it changes no push on a shared token. With
        # beta, a trainer would load its model once more, from a path that ours does not have.
        **dict(settings) | {"beta": 0.0},
    )
    prompts = Dataset.from_list([{"prompt": "1+1="}])
    trainer = getattr(trl, f"{kind}Trainer")(
        model, lambda **_: [], config, prompts, processing_class=tokenizer
    )
    trainer.beta, trainer.ref_model = dict(settings).get("beta", 0.0), "the reference"
    return trainer


def trl_loss(kind: str, settings: dict, b: Batch) -> Tensor:
    """A trainer's own scoring of answers, its advantages and its loss, with our log-probs."""
    # No text is drawn and no model is run: what would do so is replaced, in this one trainer.
    trainer = trl_trainer(kind, tuple(settings.items()))
    # A sums to 0 in every group, so it is its own advantage.
    trainer.scale_rewards, trainer._calculate_rewards = "none", lambda *_: b.adv[:, :1]
    trainer.num_generations, trainer.max_completion_length = b.group_size, b.max_tokens
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()

    def generate(prompts):
        ids = [[2] * n for n in b.mask.sum(1).tolist()]  # no loss reads them
        if kind == "RLOO":
            return [[2]] * len(ids), ids, [""] * len(ids)
        return [[2]] * len(ids), ids, None, [""] * len(ids), None, {}, None, []

    def score(model, *_, **__):
        """TRL asks for the log-probs of the reference, of the old policy and, last, of the new."""
        logp = now if model is trainer.model else b.logp_ref
        logp = logp[:, : b.mask.sum(1).max()]  # TRL pads to the longest answer
        return logp, torch.zeros_like(logp), None  # the entropies are for a log

    trainer._generate, trainer._get_per_token_logps_and_entropies = generate, score
    now = b.logp_old
    rows = trainer._generate_and_score_completions([{"prompt": ""}] * len(b.mask))
    now = b.logp
    return trainer._compute_loss(trainer.model, rows)


# ---------------- verl


def verl_rows() -> dict[str, Callable[[Batch], Tensor]]:
    """The same of verl: the name is that of the policy loss, its average and other settings."""
    rows = {}

    def add(mode: str, mean: str = "token-mean", **settings):
        name = ", ".join([mode, mean, *(f"{key} {value}" for key, value in settings.items())])
        rows[name] = partial(verl_loss, mode, mean, settings)

    add("vanilla")  # the default, with dual clip at 3
    add("vanilla", "seq-mean-token-mean")
    add("cispo")
    add("gpg")
    add("dppo_tv")
    add("dppo_kl")
    add("dppo_kl", clip_ratio_low=0.05, clip_ratio_high=0.05)
    add("gspo", "seq-mean-token-mean")
    add("sapo", "seq-mean-token-mean")
    return rows


def verl_loss(mode: str, mean: str, settings: dict, b: Batch) -> Tensor:
    """A function of verl's registry, called as verl/workers/utils/losses.py:ppo_loss does."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=b.group_size,
        ppo_micro_batch_size_per_gpu=len(b.mask),
        **settings,
    )
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=b.mask.sum().item(), global_batch_size=len(b.mask)
    )
    loss, _ = get_policy_loss_fn(mode)(b.logp_old, b.logp, b.adv, b.mask, mean, config=config)
    return loss
