"""The policy losses that TRL and verl ship, called on our tensors as a trainer would call them."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from losses import Batch


@dataclass
class Row:
    """A loss with its settings."""

    name: str  # the settings that are not defaults, which are all that is said of them
    source: str  # "file:line" of what makes it differ from others, in the installed version
    loss: Callable[[Batch], Tensor]


def line_of(function: Callable, text: str = "") -> str:
    """Where a function, or the first line of it that has this text, stands. ValueError without."""
    lines, start = inspect.getsourcelines(inspect.unwrap(function))
    offset = next((k for k, line in enumerate(lines) if text in line), None)
    if offset is None:
        raise ValueError(f"{function.__qualname__} has no line with {text!r}: another version?")
    return f"{Path(inspect.getsourcefile(function)).name}:{start + offset}"


# ---------------- TRL


def trl_rows() -> list[Row]:
    from trl import GRPOTrainer, RLOOTrainer

    rows = []

    def add(text: str, kind: str = "GRPO", **settings):
        name = ", ".join([kind, *(f"{key} {value}" for key, value in settings.items())])
        loss = {"GRPO": GRPOTrainer, "RLOO": RLOOTrainer}[kind]._compute_loss
        rows.append(Row(name, line_of(loss, text), partial(trl_loss, kind, settings)))

    add('["cispo", "dapo", "vespo"]')  # the default: loss_type dapo
    add('["grpo", "sapo"]', loss_type="grpo")
    add('self.loss_type == "dr_grpo"', loss_type="dr_grpo")
    # TRL's default is .2. Its documentation recommends 5.
    add('self.loss_type == "cispo"', loss_type="cispo", epsilon_high=5.0)
    add('self.loss_type == "sapo"', loss_type="sapo")
    add('self.loss_type == "vespo"', loss_type="vespo")
    add('level == "sequence"', loss_type="grpo", importance_sampling_level="sequence")
    add("self.args.delta is not None", delta=3.0)  # dual clip
    add("self.off_policy_mask_threshold", off_policy_mask_threshold=0.5)
    add("self.args.use_bias_correction_kl", beta=0.04)
    add("", "RLOO")
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
        # RLOO's KL is a part of the reward, so it moves no coefficient at a shared token. With
        # beta, a trainer would load its model once more, from a path that ours does not have.
        **dict(settings) | {"beta": 0.0},
    )
    prompts = Dataset.from_list([{"prompt": "1+1="}])
    trainer = getattr(trl, f"{kind}Trainer")(
        model, lambda **_: [], config, prompts, processing_class=tokenizer
    )
    trainer.beta, trainer.ref_model = dict(settings).get("beta", 0.0), "the reference"
    return trainer


def trl_loss(kind: str, settings: dict, b: Batch, sampler: Tensor | None = None) -> Tensor:
    """A trainer's own scoring of answers, its advantages, weights and loss, with our log-probs.

    sampler: (N, T) the log-probs of an engine that drew the answers; then settings have a mode.
    """
    # No text is drawn and no model is run: what would do so is replaced, in this one trainer.
    trainer = trl_trainer(kind, tuple(settings.items()))
    # A sums to 0 in every group, so it is its own advantage.
    trainer.scale_rewards, trainer._calculate_rewards = "none", lambda *_: b.adv[:, :1]
    trainer.num_generations, trainer.max_completion_length = b.group_size, b.max_tokens
    trainer.current_gradient_accumulation_steps = 1
    trainer.use_vllm = sampler is not None  # which would hand on the answers and its log-probs
    trainer.model.train()

    def generate(prompts):
        ids = [[2] * n for n in b.mask.sum(1).tolist()]  # no loss reads them
        if kind == "RLOO":
            return [[2]] * len(ids), ids, [""] * len(ids)
        drawn = None
        if sampler is not None:
            drawn = [x[seen].tolist() for x, seen in zip(sampler, b.mask, strict=True)]
        return [[2]] * len(ids), ids, None, [""] * len(ids), drawn, {}, None, []

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


def verl_rows() -> list[Row]:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    rows = []

    def add(mode: str, mean: str = "token-mean", text: str = "", **settings):
        name = ", ".join([mode, mean, *(f"{key} {value}" for key, value in settings.items())])
        source = line_of(get_policy_loss_fn(mode), text)
        rows.append(Row(name, source, partial(verl_loss, mode, mean, settings)))

    add("vanilla")  # the default, with dual clip at 3
    add("vanilla", "seq-mean-token-mean")
    add("cispo", text="clipped_ratio = ")
    add("gpg")
    by_sign = "valid_mask = torch.where(advantages > 0"
    add("dppo_tv", text=by_sign)
    add("dppo_kl", text=by_sign)
    add("dppo_kl", text=by_sign, clip_ratio_low=0.05, clip_ratio_high=0.05)
    add("gspo", "seq-mean-token-mean", text='"seq-mean-token-mean"')
    add("sapo", "seq-mean-token-mean", text="gates = ")
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
