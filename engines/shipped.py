"""The policy losses that TRL and verl ship, called on our tensors as a trainer would call them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from torch import Tensor

from losses import Batch


@dataclass
class Case:
    """What a loss is called on. Padding is 0."""

    batch: Batch
    sampler: Tensor  # (N, T) the log-probs of the engine that drew the answers
    entropy: Tensor  # (N, T) of the policy where it took a token; any, but one at each history


# A row is the name of a loss with its settings, and the loss of the whole batch.
Rows = dict[str, Callable[[Case], Tensor]]


# ---------------- TRL


def trl_rows() -> Rows:
    rows = {}

    def add(kind: str = "GRPO", **settings):
        name = ", ".join([kind, *(f"{key} {value}" for key, value in settings.items())])
        rows[name] = partial(trl_loss, kind, settings)

    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"):
        # TRL's default is .2. Its documentation recommends 5.
        more = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
        for level in ("token", "sequence"):
            add(loss_type=loss_type, importance_sampling_level=level, **more)
    add(top_entropy_quantile=0.2)
    add(off_policy_mask_threshold=0.1)
    for mode in ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate"):
        add(vllm_importance_sampling_mode=mode)
    add("RLOO")
    return rows


@cache
def trl_trainer(kind: str, settings: tuple[tuple[str, object], ...]):
    """A real trainer, of a tiny model, with settings that are not TRL's defaults."""
    import trl
    from datasets import Dataset

    from engines.example import load

    model, tokenizer = load("")
    config = getattr(trl, f"{kind}Config")(
        output_dir=tempfile.gettempdir(),
        report_to="none",
        use_cpu=True,
        bf16=False,
        num_iterations=2,  # so that there are old log-probs
        beta=0.0,  # RLOO's KL is a part of the reward, so it moves no coefficient at a shared token
        **dict(settings),
    )
    prompts = Dataset.from_list([{"prompt": "1+1="}])
    return getattr(trl, f"{kind}Trainer")(
        model, lambda **_: [], config, prompts, processing_class=tokenizer
    )


def trl_loss(kind: str, settings: dict, case: Case) -> Tensor:
    """A trainer's own scoring of answers, its advantages, weights and loss, with our log-probs."""
    trainer, b = trl_trainer(kind, tuple(settings.items())), case.batch
    # A sums to 0 in every group, so it is its own advantage.
    trainer.scale_rewards, trainer._calculate_rewards = "none", lambda *_: b.adv[:, :1]
    trainer.num_generations, trainer.max_completion_length = b.group_size, b.max_tokens
    trainer.current_gradient_accumulation_steps = 1
    # Then vLLM hands on the answers, and its own log-probs of them.
    trainer.use_vllm = vllm = "vllm_importance_sampling_mode" in settings
    trainer.model.train()

    def generate(prompts):
        ids = [[2] * n for n in b.mask.sum(1).tolist()]  # no loss reads them
        if kind == "RLOO":
            return [[2]] * len(ids), ids, [""] * len(ids)
        drawn = [x[seen].tolist() for x, seen in zip(case.sampler, b.mask, strict=True)]
        return [[2]] * len(ids), ids, None, [""] * len(ids), drawn if vllm else None, {}, None, []

    def score(logp: Tensor):
        width = int(b.mask.sum(1).max())  # TRL pads to the longest answer
        scored = logp[:, :width], case.entropy[:, :width], None
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: scored

    trainer._generate = generate
    score(b.logp_old)
    rows = trainer._generate_and_score_completions([{"prompt": ""}] * len(b.mask))
    score(b.logp)
    return trainer._compute_loss(trainer.model, rows)


# ---------------- verl


def verl_rows() -> Rows:
    rows = {}

    def add(mode: str, mean: str = "token-mean", preset: str = ""):
        name = f"{mode}, {mean}{', ' * bool(preset)}{preset}"
        rows[name] = partial(verl_loss, mode, mean, preset)

    for mode in ("vanilla", "cispo", "gpg", "dppo_kl", "gspo"):
        add(mode)
    for mode in ("vanilla", "sapo"):
        add(mode, "seq-mean-token-mean")
    # Named constructors of its RolloutCorrectionConfig. They stand before the loss. Without one of
    # them, verl corrects nothing.
    for way in ("token_is", "seq_is", "seq_is_rs"):
        add("vanilla", preset=f"decoupled_{way}")
    return rows


def verl_loss(mode: str, mean: str, preset: str, case: Case) -> Tensor:
    """A function of verl's registry, called as verl/workers/utils/losses.py:ppo_loss does."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config import ActorConfig

    b, mask, weights = case.batch, case.batch.mask, None
    if preset:
        chosen = getattr(RolloutCorrectionConfig, preset)()
        names = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
        found, mask, _ = compute_rollout_correction_and_rejection_mask(
            b.logp_old, case.sampler, mask.long(), **{name: getattr(chosen, name) for name in names}
        )
        mask, weights = mask.bool(), found.batch["rollout_is_weights"]
    config = ActorConfig(
        strategy="fsdp", rollout_n=b.group_size, ppo_micro_batch_size_per_gpu=len(mask)
    )
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=mask.sum().item(), global_batch_size=len(mask)
    )
    loss, _ = get_policy_loss_fn(mode)(
        b.logp_old, b.logp, b.adv, mask, mean, config=config, rollout_is_weights=weights
    )
    return loss
