"""Every policy loss that TRL and verl ship, called on our tensors as its trainer would call it."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from losses import Batch


@dataclass
class Case:
    """What a loss is called on. Padding is 0."""

    batch: Batch
    sampler: Tensor  # (N, T) the log-probs of the engine that drew the answers
    entropy: Tensor  # (N, T) of the policy where it took a token
    micro_batches: int = 1


@dataclass
class Row:
    """One loss of an engine with its settings, and the file and line where it is written."""

    name: str
    where: str
    loss: Callable[[Case], Tensor]  # of the whole batch, the sum over micro-batches
    by_default: bool = False


def share(case: Case, k: int) -> slice:
    """The rows of micro-batch k. They are dealt out in turns, so that groups are torn."""
    return slice(k, None, case.micro_batches)


# ---------------- TRL


def trl_rows() -> Iterator[Row]:
    from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

    source, first_line = inspect.getsourcelines(GRPOTrainer._compute_loss)
    default, vllm_default = GRPOConfig.loss_type, GRPOConfig.vllm_importance_sampling_mode

    def row(words: str, loss_type: str, vllm: bool = False, by_default=False, **settings) -> Row:
        line = first_line + next(i for i, text in enumerate(source) if f'"{loss_type}"' in text)
        if loss_type == "cispo":
            settings["epsilon_high"] = 5.0  # recommended by TRL's documentation
            words += ", epsilon_high 5"
        loss = partial(trl_loss, "GRPO", vllm, {"loss_type": loss_type} | settings)
        return Row(f"{loss_type}, {words}", f"grpo_trainer.py:{line}", loss, by_default)

    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"):
        yield row("token", loss_type, by_default=loss_type == default)
        yield row("sequence", loss_type, importance_sampling_level="sequence")
    yield row("top_entropy_quantile 0.2", default, top_entropy_quantile=0.2)
    yield row("off_policy_mask_threshold 0.1", default, off_policy_mask_threshold=0.1)
    for mode in ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate"):
        by_default = mode == vllm_default
        yield row(f"vLLM {mode}", default, True, by_default, vllm_importance_sampling_mode=mode)
    uncorrected = {"vllm_importance_sampling_correction": False}
    yield row("vLLM, no correction", default, True, **uncorrected)
    yield row(f"vLLM {vllm_default}", "cispo", True)
    line = inspect.getsourcelines(RLOOTrainer._compute_loss)[1]
    loss = partial(trl_loss, "RLOO", False, {})
    yield Row("RLOO", f"rloo_trainer.py:{line}", loss, by_default=True)


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


def trl_loss(kind: str, vllm: bool, settings: dict, case: Case) -> Tensor:
    """A trainer's own scoring of answers, its advantages, weights and loss, with our log-probs.

    vllm: the answers, and the sampler's log-probs, are those that vLLM would hand on.
    """
    trainer, b = trl_trainer(kind, tuple(settings.items())), case.batch
    # A sums to 0 in every group, so it is its own advantage.
    trainer.scale_rewards, trainer._calculate_rewards = "none", lambda *_: b.adv[:, :1]
    trainer.num_generations, trainer.max_completion_length = b.group_size, b.max_tokens
    trainer.args.steps_per_generation = case.micro_batches
    trainer.current_gradient_accumulation_steps = case.micro_batches
    trainer.use_vllm = vllm
    trainer.model.train()

    def generate(prompts):
        ids = [[2] * n for n in b.mask.sum(1).tolist()]  # no loss reads them
        if kind == "RLOO":
            return [[2]] * len(ids), ids, [""] * len(ids)
        drawn = [x[seen].tolist() for x, seen in zip(case.sampler, b.mask, strict=True)]
        return [[2]] * len(ids), ids, None, [""] * len(ids), drawn if vllm else None, {}, None, []

    def score(logp: Tensor, entropy: Tensor):
        width = int(b.mask.sum(1).max())  # TRL's padding is as wide as the longest answer
        scored = logp[:, :width], entropy[:, :width], None
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: scored

    trainer._generate = generate
    score(b.logp_old, case.entropy)
    rows = trainer._generate_and_score_completions([{"prompt": ""}] * len(b.mask))
    loss = 0.0
    for k in range(case.micro_batches):
        part = share(case, k)
        score(b.logp[part], case.entropy[part])
        own = {name: x[part] if x.dim() else x for name, x in rows.items()}
        loss = loss + trainer._compute_loss(trainer.model, own)
    # Of RLOO's, transformers takes the mean over micro-batches.
    return loss / case.micro_batches if kind == "RLOO" else loss


# ---------------- verl

AGGREGATIONS = (
    "token-mean",  # verl's default
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
)
# DPPO clips a probability or a KL, which seldom leave its default of 0.2 on the trees.
NARROW = {"clip_ratio": 0.02, "clip_ratio_low": None, "clip_ratio_high": None}
OPTIONS = {  # the defaults, unless a loss is named here
    "dppo_tv": [{}, NARROW],
    "dppo_kl": [{}, NARROW],
    "dro": [{"dro_beta": 1.0}],  # it has no default
    "bypass_mode": [
        {"rollout_correction": {"loss_type": "ppo_clip"}},
        {"rollout_correction": {"loss_type": "reinforce", "rollout_is": "token"}},
        {"rollout_correction": {"loss_type": "reinforce", "rollout_is": "sequence"}},
    ],
}
# Named constructors of its RolloutCorrectionConfig. They stand before the loss. Without one of
# them, verl corrects nothing.
PRESETS = (
    "decoupled_token_is",
    "decoupled_token_icepop",
    "decoupled_seq_is",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
)


def verl_rows() -> Iterator[Row]:
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    for mode, function in core_algos.POLICY_LOSS_REGISTRY.items():
        if function.__module__ != core_algos.__name__:
            continue  # registered by somebody else
        where = place(function)
        own = inspect.signature(function).parameters["loss_agg_mode"].default
        aggregations = AGGREGATIONS if mode == "vanilla" else dict.fromkeys((AGGREGATIONS[0], own))
        if mode in ("sapo", "geo_mean"):
            aggregations = ["its own mean over answers"]  # whatever loss_agg_mode says
        for options in OPTIONS.get(mode, [{}]):
            values = options.get("rollout_correction", options)
            words = " ".join(f"{k} {v}" for k, v in values.items() if v is not None)
            for aggregation in aggregations:
                name = ", ".join(filter(None, (mode, words, aggregation)))
                by_default = (mode, aggregation) == ("vanilla", AGGREGATIONS[0])
                loss = partial(verl_loss, function, aggregation, options, "")
                yield Row(name, where, loss, by_default)
    vanilla = core_algos.POLICY_LOSS_REGISTRY["vanilla"]
    where = place(rollout_corr_helper.compute_rollout_correction_and_rejection_mask)
    for preset in PRESETS:
        loss = partial(verl_loss, vanilla, AGGREGATIONS[0], {}, preset)
        yield Row(f"vanilla, {AGGREGATIONS[0]}, {preset}", where, loss)


def place(function: Callable) -> str:
    file = inspect.getsourcefile(function).rpartition("/")[2]
    return f"{file}:{inspect.getsourcelines(function)[1]}"


def verl_loss(
    function: Callable, aggregation: str, options: dict, preset: str, case: Case
) -> Tensor:
    """A function of verl's registry, called as verl/workers/utils/losses.py:ppo_loss does."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config import ActorConfig, PolicyLossConfig

    b = case.batch
    old, mask, weights = b.logp_old, b.mask, None
    if "rollout_correction" in options:  # bypass mode: the sampler's log-probs are the old ones
        old = case.sampler
    if preset:
        chosen = getattr(RolloutCorrectionConfig, preset)()
        names = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
        found, mask, _ = compute_rollout_correction_and_rejection_mask(
            old, case.sampler, b.mask.long(), **{name: getattr(chosen, name) for name in names}
        )
        mask, weights = mask.bool(), found and found.batch["rollout_is_weights"]
    actor = {"strategy": "fsdp", "rollout_n": b.group_size}
    actor["ppo_micro_batch_size_per_gpu"] = len(b.mask) // case.micro_batches
    actor |= {k: v for k, v in options.items() if k.startswith("clip_ratio")}
    policy = PolicyLossConfig(**{k: v for k, v in options.items() if k not in actor})
    config = ActorConfig(**actor, policy_loss=policy)
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=mask.sum().item(),
        global_batch_size=len(mask),
        loss_scale_factor=None,
    )
    torch.manual_seed(0)  # clip_cov draws at random
    loss = 0.0
    for k in range(case.micro_batches):
        own = share(case, k), slice(int(b.mask[share(case, k)].sum(1).max()))
        loss = (
            loss
            + function(
                *(x[own] for x in (old, b.logp, b.adv, mask)),
                loss_agg_mode=aggregation,
                config=config,
                rollout_is_weights=weights[own] if weights is not None else None,
            )[0]
        )
    return loss
