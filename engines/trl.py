"""Any method of METHODS inside TRL's GRPOTrainer, on as many processes as `accelerate launch`
starts.

A loss of losses.py is a function of the (N, T) log-probs of a whole optimiser batch. TRL shows its loss one micro-batch
of one process, with the rows shuffled, so that groups are torn. Here the rows stay in order; at the first micro-step of
an optimiser step the log-probs of all its micro-batches and processes are gathered, the loss is taken once, and its
token coefficients c are carried through the model piece by piece, as train.py's update does. So value and gradient
are those of losses.py, whatever the number of processes and accumulation steps.
Cost: with A accumulation steps, A - 1 scoring passes without gradient per optimiser step; none for A = 1.

Written against TRL 1.16 (its Liger loss, which went past `_compute_loss`, is gone there). Text only, no tools.
"""

from __future__ import annotations

import inspect
from dataclasses import fields

import torch
from torch import Tensor

from engines import bind
from losses import (
    Batch,
    Method,
    OldPolicy,
    group_advantages,
    learning_tax,
    prefix_nodes,
    project,
    token_coefficients,
)

try:
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import split_tensor_dict
except ImportError as error:
    raise ImportError(
        f"engines.trl needs TRL ({error}); install it with: pip install -e '.[trl]'"
    ) from None

# What shapes TRL's own losses and would be read by nobody here.
UNREAD = (
    "loss_type",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "multi_objective_aggregation",
)
UNREAD += (
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "off_policy_mask_threshold",
)
UNREAD += ("mask_truncated_completions",)


def refuse(args: GRPOConfig, method: Method, project: bool):
    """ValueError with the reason for every setting under which value or gradient would not be those
    of losses.py."""
    default = {f.name: f.default for f in fields(GRPOConfig)}
    for name in UNREAD:
        if getattr(args, name) != default[name]:
            raise ValueError(
                f"{name} {getattr(args, name)} has no effect here: hyperparameters are given as hyper"
            )
    rows, passes = (
        args.gradient_accumulation_steps * args.per_device_train_batch_size,
        len(method.passes),
    )
    one = (
        args.steps_per_generation == args.gradient_accumulation_steps
    )  # an optimiser step takes a whole generation
    scale = {"std": "group", "mean": "none"}[method.scale]
    kl = "kl" in inspect.signature(method.passes[0]).parameters and not project
    reasons = {
        f"scale_rewards must be {scale!r} for this method's advantages": args.scale_rewards
        != scale,
        "steps_per_generation must be a multiple of gradient_accumulation_steps, so that an optimiser step is of one "
        "generation": args.steps_per_generation % args.gradient_accumulation_steps,
        f"{rows} rows an optimiser step and process are not whole groups of num_generations {args.num_generations}": (
            rows % args.num_generations and not one
        ),
        f"{passes} passes are {passes} iterations: num_iterations must be a multiple, and steps_per_generation equal "
        "to gradient_accumulation_steps": passes > 1 and (args.num_iterations % passes or not one),
        "beta needs a method whose pass is grpo, not projected": args.beta and not kl,
        "beta weighs the plain k3 here: set use_bias_correction_kl=False": args.beta
        and args.use_bias_correction_kl,
        "vllm_importance_sampling_correction weighs tokens behind the loss: set it to False": (
            args.use_vllm and args.vllm_importance_sampling_correction
        ),
    }
    for reason, bad in reasons.items():
        if bad:
            raise ValueError(reason)


class Trainer(GRPOTrainer):
    """GRPOTrainer(model, reward_funcs, args, ...) with the loss of METHODS[method]; beta weighs the
    k3 KL term.

    hyper: hyperparameters of the method. project: the node-mean projection of claim C17.
    ValueError, before anything is loaded where possible, for what this method or TRL cannot honour.
    """

    def __init__(
        self, *args, method: str, hyper: dict | None = None, project: bool = False, **kwargs
    ):
        given = inspect.signature(GRPOTrainer.__init__).bind(None, *args, **kwargs).arguments
        config = given.get("args")
        if config is None:
            raise ValueError("args: a GRPOConfig is needed")
        self.method, self.project = bind(method, hyper or {}), project
        refuse(config, self.method, project)
        if config.beta:
            self.method = bind(method, {**(hyper or {}), "kl": config.beta}, reference=True)
        if any(given.get(name) for name in ("tools", "environment_factory", "rollout_func")):
            raise ValueError(
                "tools, environment_factory and rollout_func are not supported: the mask would have holes"
            )
        super().__init__(*args, **kwargs)
        if self._is_vlm or self.aux_loss_enabled:
            raise ValueError("vision models and router auxiliary losses are not supported")
        for name, module in self.model.named_modules():
            rates = [
                getattr(module, "attention_dropout", 0),
                module.p if isinstance(module, torch.nn.Dropout) else 0,
            ]
            if live := [rate for rate in rates if isinstance(rate, float) and rate > 0]:
                raise ValueError(
                    f"{name} drops out {live[0]}: the two passes would differ; set it to 0"
                )

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)  # (rows of all processes, reward functions)
        if rewards.isnan().all(1).any():
            raise ValueError(
                "every reward function returned None for an answer; each answer needs a number"
            )
        self.rewards = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        return rewards

    def _generate_and_score_completions(self, inputs):
        rows = super()._generate_and_score_completions(inputs)
        rows["rewards"] = self.rewards[self.accelerator.process_index * len(inputs) :][
            : len(inputs)
        ]
        return rows

    def _prepare_inputs(self, generation_batch):
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        pieces = (
            self.args.steps_per_generation
        )  # as TRL does, but for the shuffle: groups stay whole and in order
        if self._step % (pieces * self.num_iterations) == 0 or self._buffered_inputs is None:
            self._buffered_inputs = split_tensor_dict(
                self._generate_and_score_completions(generation_batch), pieces
            )
        return self._buffered_inputs[self._step % pieces]

    def _logp(self, model, x: dict) -> tuple[Tensor, Tensor]:
        ids = torch.cat([x["prompt_ids"], x["completion_ids"]], 1)
        attention = torch.cat([x["prompt_mask"], x["completion_mask"]], 1)
        width = x["completion_ids"].shape[1]
        logp, entropy, _ = self._get_per_token_logps_and_entropies(
            model, ids, attention, width, compute_entropy=True
        )
        return logp.masked_fill(x["completion_mask"] == 0, 0.0), entropy

    def _compute_loss(self, model, inputs):
        if not self.model.training:
            return self._loss(self._logp(model, inputs)[0], [inputs], self.num_generations_eval)[0]
        size = self.args.gradient_accumulation_steps
        micro, start = self._step % size, self._step % self.args.steps_per_generation
        if (
            micro == 0
        ):  # the others first: FSDP wants no forward pass between one with gradient and its backward
            window = self._buffered_inputs[start : start + size]
            with torch.no_grad():
                others = [self._logp(model, x)[0] for x in window[1:]]
        logp, entropy = self._logp(model, inputs)
        if micro == 0:
            self.value, c = self._loss(
                torch.cat([logp.detach(), *others]), window, self.num_generations
            )
            self.c = c.split(len(logp))
        mask = inputs["completion_mask"]
        entropy, tokens = self.accelerator.reduce(
            torch.stack([(entropy.detach() * mask).sum(), mask.sum()]), "sum"
        )
        self._metrics["train"]["entropy"].append((entropy / tokens.clamp(min=1)).item())
        surrogate = -(self.c[micro] * logp).sum()
        return (
            self.value / size + surrogate - surrogate.detach()
        )  # TRL adds micro-steps up, processes are averaged

    def _loss(
        self, logp: Tensor, window: list[dict], group_size: int
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of the optimiser batch, and the coefficients of this process's rows, scaled for
        DDP's average."""

        def whole(x: Tensor) -> Tensor:  # of all processes; their widths differ
            return self.accelerator.gather(
                self.accelerator.pad_across_processes(x, dim=1).contiguous()
            )

        def field(name: str) -> Tensor:
            return whole(torch.cat([x[name] for x in window]))

        tokens, mask, rewards = (
            field("completion_ids"),
            field("completion_mask").bool(),
            field("rewards"),
        )
        leaf = whole(logp).requires_grad_()  # (N, T)
        old = field("old_per_token_logps") if "old_per_token_logps" in window[0] else leaf.detach()
        ref = field("ref_per_token_logps") if self.beta else None
        advantages = group_advantages(rewards, group_size, self.method.scale)  # (N,)
        adv = advantages[:, None] * mask
        if self.method.credit:
            adv = self.method.credit(
                adv, OldPolicy(tokens, mask, old, rewards, group_size, self.temperature)
            )
        batch = Batch(leaf, old, adv, mask, group_size, self.max_completion_length, ref)
        iteration = self._step // self.args.steps_per_generation % self.num_iterations
        method_pass = self.method.passes[iteration % len(self.method.passes)]
        if not self.model.training:
            return method_pass(batch), None
        with torch.enable_grad():
            loss = method_pass(batch)
            nodes = prefix_nodes(tokens, mask, group_size)
            surrogate = project(loss, leaf, advantages, nodes, mask) if self.project else loss
            c = token_coefficients(surrogate, leaf)
        self._metrics["train"]["learning_tax"].append(learning_tax(c, advantages, nodes, mask))
        mine = c[self.accelerator.process_index * len(logp) :][: len(logp), : logp.shape[1]]
        return loss.detach(), mine * self.accelerator.num_processes / len(c)
