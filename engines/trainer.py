"""TRL's GRPOTrainer with any method of METHODS, on as many processes as accelerate starts.

A loss of losses.py is a function of the (N, T) log-probs of a whole optimiser batch. TRL calls its
loss once for each micro-batch of each process, on shuffled rows, so that groups are torn. Here the
rows stay in order. At the first micro-step of an optimiser step, the log-probs of all its
micro-batches and processes are gathered, and the loss is taken once. The pushes on its tokens are
then carried through the model piece by piece, as train.py's update does. So value and gradient are
those of losses.py for any number of processes and accumulation steps.

What is scored must be what was sampled. So dropout is switched off, and before the first rollout
the log-probs of a few tokens are compared.

Cost: with K accumulation steps, an optimiser step scores K - 1 micro-batches once more, without
gradient. Written against TRL 1.16, for text: no tool, image or router loss is known here, and
nothing refuses them.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, replace

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import unwrap_model_for_generation
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
        self.prefix_baseline, self.is_compared = prefix_baseline, False
        args.disable_dropout = True
        super().__init__(model, reward_funcs, args, *more, **named)
        drop_nothing(self.model)

    def _generate_single_turn(self, prompt_ids, *more):
        if not (self.is_compared or self.use_vllm or self.use_transformers_continuous_batching):
            self.is_compared = True
            check_gap(self, max(prompt_ids, key=len))
        return super()._generate_single_turn(prompt_ids, *more)

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)  # (rows of all processes, reward functions)
        if rewards.isnan().all(1).any():  # nan stands for None
            raise ValueError("an answer has no reward: each needs a number")
        self.rewards = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        return rewards

    def _generate_and_score_completions(self, inputs):
        rows = super()._generate_and_score_completions(inputs)
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

    def _score(self, model, inputs: dict) -> Tensor:
        """Log-probs of one micro-batch's answers (n, T)."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        return self._get_per_token_logps_and_entropies(model, ids, attention, width)[0]

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
        logp = self._score(model, inputs)
        if micro_step == 0:
            self.value, c = self._loss(torch.cat([logp.detach(), *others]), window)
            self.pushes = c.split(len(logp))
        surrogate = -(self.pushes[micro_step] * logp).sum()
        # TRL adds micro-steps up, and averages over processes.
        return self.value / size + surrogate - surrogate.detach()

    def _loss(self, logp: Tensor, window: list[dict]) -> tuple[Tensor, Tensor]:
        """The loss of the optimiser batch, and the pushes on this process's rows, scaled so that
        an average over processes is the gradient."""

        def field(name: str) -> Tensor:
            return of_all_processes(self, torch.cat([x[name] for x in window]), 1)  # (N, T)

        tokens, A = field("completion_ids"), field("advantages")
        mask = field("completion_mask").bool()
        leaf = of_all_processes(self, logp, 1).requires_grad_()  # (N, T)
        old = field("old_per_token_logps") if "old_per_token_logps" in window[0] else leaf.detach()
        ref = field("ref_per_token_logps") if self.beta else None
        adv, G = A[:, None] * mask, self.num_generations
        if self.method.credit:
            adv = self.method.credit(adv, OldPolicy(tokens, mask, old, field("rewards"), G))
        batch = Batch(
            leaf, old, adv, mask, G, self.max_completion_length, ref, tokens, field("rewards")
        )
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


# ---------------- what is scored must be what was sampled


def drop_nothing(model: torch.nn.Module):
    """Attention's dropout is a number, which disable_dropout does not see; so is a router's
    noise."""
    for module in model.modules():
        for name, value in vars(module).items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)


@torch.no_grad()
def check_gap(trainer: Trainer, prompt: list[int]):
    """Refuse a model, or a sampler, whose answers are scored as if another policy had given them.

    A few tokens are sampled as TRL samples, with all that the model's generation_config.json says.
    Their log-probs are compared with those that the loss will read. Rounding makes 1e-6 nats in
    fp32, and about 0.03 in bf16.
    """
    device, config = trainer.accelerator.device, deepcopy(trainer.generation_config)
    config.update(max_new_tokens=8, output_scores=True, return_dict_in_generate=True)
    ids = torch.tensor([prompt] * 8, device=device)  # (8, W)
    seen = torch.ones_like(ids)
    seen[4:, : len(prompt) // 2] = 0  # as padding
    with (
        torch.random.fork_rng(),  # a resumed run, which also checks, goes on with its own numbers
        unwrap_model_for_generation(
            trainer.model_wrapped, trainer.accelerator, generation_kwargs=trainer.generation_kwargs
        ) as model,
        trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
    ):
        out = model.generate(ids, attention_mask=seen, generation_config=config)
    tokens = out.sequences[:, len(prompt) :]  # (8, T)
    logp = torch.stack(out.scores, 1).float().log_softmax(-1)  # (8, T, V)
    sampled = logp.gather(2, tokens[..., None]).squeeze(2)
    inputs = {"prompt_ids": ids, "prompt_mask": seen, "completion_ids": tokens}
    scored = trainer._score(trainer.model, inputs | {"completion_mask": torch.ones_like(tokens)})
    gap = (scored - sampled)[~sampled.isneginf()].abs().mean().item()  # padding may be filtered out
    if not gap < 0.1:  # a nan, too
        raise ValueError(f"sampled and scored log-probs differ by {gap:.3g} nats a token")


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
    # No loss here knows of them.
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
)


def method_for(config: GRPOConfig, name: str, hyper: dict[str, object]) -> Method:
    """METHODS[name] with its hyperparameters, TRL's KL term and TRL's scale of the advantages.

    Raises ValueError, in one line, for a method, hyperparameter or setting that cannot be honoured.
    """
    method = bind(name, hyper)
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in UNREAD and value != field.default:
            raise ValueError(
                f"--{field.name} {value} is unknown to the losses here; see --method, --hyper"
            )
    words = {"True": "group", "False": "none"}  # a command line's, of which TRL knows the bools
    config.scale_rewards = words.get(config.scale_rewards, config.scale_rewards)
    scale = {"group": "std", "none": "mean", "batch": "batch"}.get(config.scale_rewards)
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
        kl = {"kl": config.beta, "kl_ratio": config.use_bias_correction_kl}
        method = bind(name, hyper | kl)  # which says if the method has no KL term
    return replace(method, scale=scale)
