"""What engines/trl.py refuses: whatever would change the value or gradient of losses.py."""

from __future__ import annotations

import inspect
from dataclasses import fields

import torch

from engines import refuse_method
from llm import bind
from losses import Method

# These shape TRL's own losses. Nothing here would read them.
UNREAD = (
    "loss_type",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "multi_objective_aggregation",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "off_policy_mask_threshold",
    "mask_truncated_completions",
)


def bind_method(name: str, hyper: dict[str, object], args, projected: bool) -> Method:
    """METHODS[name] with its hyperparameters, and with args.beta as weight of the k3 KL term.

    args: a GRPOConfig. Raises ValueError, in one line, for a method, hyperparameter or setting that
    cannot be honoured.
    """
    method = bind(name, hyper, reference=False)
    refuse_method(name, method)
    refuse_settings(args, method, projected)
    refuse_batching(args, len(method.passes))
    return bind(name, hyper | {"kl": args.beta}) if args.beta else method


def refuse_settings(args, method: Method, projected: bool):
    """ValueError, in one line, for settings of a GRPOConfig that this method cannot honour."""
    for field in fields(args):
        value = getattr(args, field.name)
        if field.name in UNREAD and value != field.default:
            raise ValueError(
                f"{field.name} {value} has no effect here: hyperparameters are given as hyper"
            )
    scale = {"std": "group", "mean": "none"}[method.scale]
    if args.scale_rewards != scale:
        raise ValueError(f"scale_rewards must be {scale!r} for this method's advantages")
    takes_kl = "kl" in inspect.signature(method.passes[0]).parameters
    if args.beta and (projected or not takes_kl):
        raise ValueError("beta needs a method whose pass is grpo, not projected")
    if args.beta and args.use_bias_correction_kl:
        raise ValueError("beta weighs the plain k3 here: set use_bias_correction_kl=False")
    if args.use_vllm and args.vllm_importance_sampling_correction:
        raise ValueError(
            "vllm_importance_sampling_correction weighs tokens behind the loss: set it to False"
        )


def refuse_batching(args, passes: int):
    """ValueError unless every optimiser step is on whole groups, and every pass has its steps."""
    accumulation = args.gradient_accumulation_steps
    rows = accumulation * args.per_device_train_batch_size
    if rows < 1 or args.steps_per_generation < 1:
        raise ValueError("batch size, accumulation steps and steps_per_generation: at least 1 each")
    if args.steps_per_generation % accumulation:
        raise ValueError(
            "steps_per_generation must be a multiple of gradient_accumulation_steps, "
            "so that an optimiser step is of one generation"
        )
    takes_whole_generation = args.steps_per_generation == accumulation
    if rows % args.num_generations and not takes_whole_generation:
        raise ValueError(
            f"{rows} rows an optimiser step and process are not whole groups of "
            f"num_generations {args.num_generations}"
        )
    if passes > 1 and (args.num_iterations % passes or not takes_whole_generation):
        raise ValueError(
            f"{passes} passes are {passes} iterations: num_iterations must be a multiple, "
            "and steps_per_generation equal to gradient_accumulation_steps"
        )


def refuse_dropout(model: torch.nn.Module):
    """ValueError for a model that drops out: a micro-batch goes through it twice."""
    for name, module in model.named_modules():
        rates = [getattr(module, "attention_dropout", 0)]
        if isinstance(module, torch.nn.Dropout):
            rates.append(module.p)
        for rate in rates:
            if isinstance(rate, float) and rate > 0:
                raise ValueError(
                    f"{name} drops out {rate}: the two passes would differ; set it to 0"
                )
