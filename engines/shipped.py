"""Every policy loss that TRL and verl ship, called on our tensors as its trainer would call it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from losses import Batch


@dataclass
class Row:
    """One loss of an engine with its settings, and the file and line where it is written.

    loss(micro_batch, whole) is the share of a micro-batch in the loss of the whole batch. All
    micro-batches are of one size.
    """

    name: str
    where: str
    loss: Callable[[SimpleNamespace, Batch], Tensor]


# ---------------- TRL


def trl_rows() -> Iterator[Row]:
    from trl import GRPOConfig, GRPOTrainer

    epsilon = next(f.default for f in fields(GRPOConfig) if f.name == "epsilon")
    source, first_line = inspect.getsourcelines(GRPOTrainer._compute_loss)
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"):
        line = first_line + next(i for i, text in enumerate(source) if f'"{loss_type}"' in text)
        for level in ("token", "sequence"):
            settings = {"loss_type": loss_type, "importance_sampling_level": level}
            settings |= {"epsilon_low": epsilon, "epsilon_high": epsilon}
            name = f"{loss_type}, {level}"
            if loss_type == "cispo":
                settings["epsilon_high"] = 5.0  # recommended by TRL's documentation
                name += ", epsilon_high 5"
            yield Row(name, f"grpo_trainer.py:{line}", partial(trl_loss, settings))


def trl_loss(settings: dict, part: SimpleNamespace, whole: Batch) -> Tensor:
    """_compute_loss of a stand-in for the trainer, whose "model" hands back our log-probs.

    settings: attributes of the trainer or its args that are not TRL's defaults. A KL term (beta) is
    for whole batches only.
    """
    from trl import GRPOConfig, GRPOTrainer

    micro_batches = len(whole.mask) // len(part.mask)
    args = {f.name: f.default for f in fields(GRPOConfig)}
    args |= settings | {"steps_per_generation": micro_batches}
    trainer = SimpleNamespace(
        args=SimpleNamespace(**args),
        current_gradient_accumulation_steps=micro_batches,
        max_completion_length=whole.max_tokens,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        use_vllm=False,
        _metrics={"train": defaultdict(list)},
    )
    vars(trainer).update(settings)
    scored = (part.logp, torch.zeros_like(part.logp), None)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: scored
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    inputs = dict.fromkeys(names, part.mask.long())
    inputs |= {"advantages": part.adv[:, 0], "old_per_token_logps": part.logp_old}
    inputs |= {"ref_per_token_logps": whole.logp_ref, "num_items_in_batch": whole.mask.sum()}
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


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


def verl_rows() -> Iterator[Row]:
    from verl.trainer.ppo import core_algos

    for mode, function in core_algos.POLICY_LOSS_REGISTRY.items():
        if function.__module__ != core_algos.__name__:
            continue  # registered by somebody else
        file = inspect.getsourcefile(function).rpartition("/")[2]
        where = f"{file}:{inspect.getsourcelines(function)[1]}"
        own = inspect.signature(function).parameters["loss_agg_mode"].default
        aggregations = AGGREGATIONS if mode == "vanilla" else dict.fromkeys((AGGREGATIONS[0], own))
        if mode in ("sapo", "geo_mean"):
            aggregations = ["its own mean over answers"]  # whatever loss_agg_mode says
        for options in OPTIONS.get(mode, [{}]):
            values = options.get("rollout_correction", options)
            words = " ".join(f"{k} {v}" for k, v in values.items() if v is not None)
            for aggregation in aggregations:
                name = ", ".join(filter(None, (mode, words, aggregation)))
                yield Row(name, where, partial(verl_loss, function, aggregation, options))


def verl_loss(
    function: Callable, aggregation: str, options: dict, part: SimpleNamespace, whole: Batch
) -> Tensor:
    """A function of verl's registry, called as verl/workers/utils/losses.py:ppo_loss does."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    actor = {"strategy": "fsdp", "rollout_n": whole.group_size}
    actor["ppo_micro_batch_size_per_gpu"] = len(part.mask)
    actor |= {k: v for k, v in options.items() if k.startswith("clip_ratio")}
    policy = PolicyLossConfig(**{k: v for k, v in options.items() if k not in actor})
    config = ActorConfig(**actor, policy_loss=policy)
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=whole.mask.sum().item(),
        global_batch_size=len(whole.mask),
        loss_scale_factor=None,
    )
    torch.manual_seed(0)  # clip_cov draws at random
    tensors = (part.logp_old, part.logp, part.adv, part.mask)
    return function(*tensors, loss_agg_mode=aggregation, config=config)[0]
