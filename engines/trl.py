"""TRL's GRPOTrainer with any method of METHODS, on as many processes as accelerate starts.

A loss of losses.py is a function of the (N, T) log-probs of a whole optimiser batch. TRL calls its
loss once for each micro-batch of each process, on shuffled rows, so that groups are torn. Here the
rows stay in order. At the first micro-step of an optimiser step, the log-probs of all its
micro-batches and processes are gathered, and the loss is taken once. The pushes on its tokens are
then carried through the model piece by piece, as train.py's update does. So value and gradient are
those of losses.py for any number of processes and accumulation steps.

Cost: with K accumulation steps, an optimiser step scores K - 1 micro-batches once more, without
gradient. Dropout is switched off, because the two passes would differ. Written against TRL 1.16,
for text without tools.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from losses import (
    Batch,
    Method,
    OldPolicy,
    bind,
    group_advantages,
    prefix_baseline,
    prefix_nodes,
    token_pushes,
)


class Trainer(GRPOTrainer):
    """GRPOTrainer(model, reward_funcs, args, ...) with the loss of METHODS[method].

    hyper: hyperparameters of the method; its KL term is args.beta's. The scale of the advantages is
    args.scale_rewards. prefix_baseline: give the loss the gradient of losses.prefix_baseline. Sets
    args.disable_dropout. Raises ValueError for settings that the method cannot honour.
    """

    def __init__(
        self,
        model,
        reward_funcs,
        args: GRPOConfig,
        *more,
        method: str,
        hyper: dict | None = None,
        prefix_baseline: bool = False,
        **named,
    ):
        self.method = method_for(args, method, hyper or {})
        self.prefix_baseline = prefix_baseline
        args.disable_dropout = True
        super().__init__(model, reward_funcs, args, *more, **named)
        if self.aux_loss_enabled:
            raise ValueError("--router_aux_loss_coef 0: no loss here balances a mixture's experts")

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)  # (rows of all processes, reward functions)
        if rewards.isnan().all(1).any():  # nan stands for None
            raise ValueError("an answer has no reward: each needs a number")
        self.rewards = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        return rewards

    def _generate_and_score_completions(self, inputs):
        rows = super()._generate_and_score_completions(inputs)
        if "tool_mask" in rows or "pixel_values" in rows:
            raise ValueError("tools and images are not supported: no loss here knows of them")
        if self.model.training:  # in an evaluation, groups have another size
            # TRL's own, but for groups with equal rewards: there rounding leaves it a little, and
            # dapo counts the groups that are not 0.
            A = group_advantages(self.rewards, self.num_generations, self.method.scale)
            rows["advantages"] = of_this_process(self, A, len(inputs))
            rows["rewards"] = of_this_process(self, self.rewards, len(inputs))
        return rows

    def _prepare_inputs(self, generation_batch):
        """TRL's own, but without its shuffle: groups stay whole and in order."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        pieces = self.args.steps_per_generation
        if self._step % (pieces * self.num_iterations) == 0 or self._buffered_inputs is None:
            rows = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = split_tensor_dict(rows, pieces)
        return self._buffered_inputs[self._step % pieces]

    def _score(self, model, inputs: dict) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of one micro-batch's answers: (n, T) each."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        logp, entropy, _ = self._get_per_token_logps_and_entropies(
            model, ids, attention, width, compute_entropy=True
        )
        return logp, entropy.detach()

    def _compute_loss(self, model, inputs):
        if not self.model.training:  # where rewards are the measure, and a loss says nothing
            return torch.zeros((), device=self.accelerator.device)
        size = self.args.gradient_accumulation_steps
        micro_step = self._step % size
        if micro_step == 0:
            start = self._step % self.args.steps_per_generation
            window = self._buffered_inputs[start : start + size]
            # The others go first: between a forward pass with gradient and its backward, a sharded
            # model should see no other forward pass.
            with torch.no_grad():
                others = [self._score(model, x) for x in window[1:]]
        logp, entropy = self._score(model, inputs)
        if micro_step == 0:
            scored = zip((logp.detach(), entropy), *others, strict=True)
            self.value, c = self._loss(*map(torch.cat, scored), window)
            self.pushes = c.split(len(logp))
        surrogate = -(self.pushes[micro_step] * logp).sum()
        # TRL adds micro-steps up, and averages over processes.
        return self.value / size + surrogate - surrogate.detach()

    def _loss(self, logp: Tensor, entropy: Tensor, window: list[dict]) -> tuple[Tensor, Tensor]:
        """The loss of the optimiser batch, and the pushes on this process's rows.

        The pushes are scaled so that an average over processes is the gradient. The entropy
        is logged, in the mean over the batch's tokens.
        """

        def field(name: str) -> Tensor:
            return of_all_processes(self, torch.cat([x[name] for x in window]), 1)  # (N, T)

        tokens, A = field("completion_ids"), field("advantages")
        mask = field("completion_mask").bool()
        spread = of_all_processes(self, entropy, 1)[mask]  # (K,)
        self._metrics["train"]["entropy"].append(spread.mean().item())
        leaf = of_all_processes(self, logp, 1).requires_grad_()  # (N, T)
        old = field("old_per_token_logps") if "old_per_token_logps" in window[0] else leaf.detach()
        ref = field("ref_per_token_logps") if self.beta else None
        adv, G = A[:, None] * mask, self.num_generations
        if self.method.credit:
            adv = self.method.credit(adv, OldPolicy(tokens, mask, old, field("rewards"), G))
        batch = Batch(leaf, old, adv, mask, G, self.max_completion_length, ref)
        iteration = self._step // self.args.steps_per_generation
        loss = self.method.passes[iteration % len(self.method.passes)](batch)
        if self.prefix_baseline:
            loss = prefix_baseline(loss, batch, prefix_nodes(tokens, mask, G))
        c = token_pushes(loss, leaf)
        own = of_this_process(self, c, len(logp))[:, : logp.shape[1]]
        return loss.detach(), own * self.accelerator.num_processes / len(c)


def of_all_processes(trainer: GRPOTrainer, x: Tensor, dim: int) -> Tensor:
    """The rows of all processes, one process after another, padded with 0 to one size of dim."""
    accelerator = trainer.accelerator
    return accelerator.gather(accelerator.pad_across_processes(x, dim=dim).contiguous())


def of_this_process(trainer: GRPOTrainer, x: Tensor, count: int) -> Tensor:
    """The rows of this process among those of all; each process has as many."""
    start = trainer.accelerator.process_index * count
    return x[start : start + count]


# ---------------- what is refused: settings that would change what is learned, or do nothing

# These shape TRL's own losses. Nothing here would read them.
UNREAD = (
    "loss_type",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "multi_objective_aggregation",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "off_policy_mask_threshold",
    "mask_truncated_completions",
)


def method_for(config: GRPOConfig, name: str, hyper: dict[str, object]) -> Method:
    """METHODS[name] with its hyperparameters, TRL's KL term and TRL's scale of the advantages.

    Raises ValueError, in one line, for a method, hyperparameter or setting that cannot be honoured.
    """
    method = bind(name, hyper)
    if method.needs_scores or method.repair:
        raise ValueError(f"--method {name} needs train.py: hidden states, or a second rollout")
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in UNREAD and value != field.default:
            raise ValueError(
                f"--{field.name} {value} has no effect here: the loss is --method's, with --hyper"
            )
    scale = {"group": "std", "none": "mean", "batch": "batch"}[config.scale_rewards]
    if method.scale == "mean" and scale == "std":  # TRL's default; who wants the mean must say so
        raise ValueError(f"--method {name} needs --scale_rewards none, or batch")
    accumulation = config.gradient_accumulation_steps
    rows = accumulation * config.per_device_train_batch_size
    is_torn = config.steps_per_generation % accumulation or rows % config.num_generations
    if is_torn and config.steps_per_generation != accumulation:
        raise ValueError(
            "--steps_per_generation: an optimiser step must have whole groups of one generation"
        )
    passes = len(method.passes)
    if config.num_iterations % passes:  # each pass goes over the generation
        raise ValueError(f"--method {name} needs --num_iterations {passes} or a multiple")
    if config.beta:
        if "kl" not in method.hyper:
            raise ValueError(f"--beta {config.beta} needs --method grpo, which has a KL term")
        kl = {"kl": config.beta, "kl_ratio": config.use_bias_correction_kl}
        method = bind(name, hyper | kl)
    elif method.hyper.get("kl"):  # TRL would load no reference
        raise ValueError("--hyper kl: the KL term is --beta's here")
    return replace(method, scale=scale)
