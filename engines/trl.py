"""TRL's GRPOTrainer with any method of METHODS, on as many processes as accelerate starts.

A loss of losses.py is a function of the (N, T) log-probs of a whole optimiser batch. TRL calls its
loss once for each micro-batch of each process, on shuffled rows, so that groups are torn. Here the
rows stay in order. At the first micro-step of an optimiser step, the log-probs of all its
micro-batches and processes are gathered, and the loss is taken once. Its token coefficients are
then carried through the model piece by piece, as train.py's update does. So value and gradient are
those of losses.py for any number of processes and accumulation steps.

Cost: with A accumulation steps, an optimiser step scores A - 1 micro-batches once more, without
gradient. Written against TRL 1.16, for text without tools.

`log_learning_tax` measures a trainer that keeps TRL's own loss.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from engines.siblings import has_sibling
from losses import (
    Batch,
    Method,
    OldPolicy,
    group_advantages,
    learning_tax,
    prefix_baseline,
    prefix_nodes,
    token_coefficients,
)
from train import bind


class Trainer(GRPOTrainer):
    """GRPOTrainer(model, reward_funcs, args, ...) with the loss of METHODS[method].

    hyper: hyperparameters of the method; the weight of grpo's KL term is args.beta. cancel: give
    the loss the cancelled gradient of losses.prefix_baseline. Logs what log_learning_tax logs.
    Raises ValueError for settings that the method cannot honour.
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
        self.takes_sampler, self.prefix_baseline = method == "recentred", prefix_baseline
        super().__init__(model, reward_funcs, args, *more, **named)
        refuse_dropout(self.model)
        log_learning_tax(self)

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)  # (rows of all processes, reward functions)
        if rewards.isnan().all(1).any():
            raise ValueError("an answer has no reward: each needs a number")
        self.rewards = (rewards * self.reward_weights.to(rewards.device)).nansum(1)  # None is nan
        return rewards

    def _generate_and_score_completions(self, inputs):
        # Transformers generates in step on all processes if it knows that the model is sharded.
        # accelerate does not tell it. A process whose answers end first would then go on alone.
        self.model._is_fsdp_managed_module = isinstance(self.model, FSDPModule)
        rows = super()._generate_and_score_completions(inputs)
        if "tool_mask" in rows or "pixel_values" in rows:
            raise ValueError("tools and images are not supported: no loss here knows of them")
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

    def _log_probs(self, model, inputs: dict) -> tuple[Tensor, Tensor]:
        """Log-probs, 0 on padding, and entropies of one micro-batch's answers: (n, T) each."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        logp, entropy, _ = self._get_per_token_logps_and_entropies(
            model, ids, attention, width, compute_entropy=True
        )
        return logp.masked_fill(inputs["completion_mask"] == 0, 0.0), entropy

    def _compute_loss(self, model, inputs):
        if not self.model.training:  # where rewards are the measure, and a loss says nothing
            return torch.zeros((), device=self.accelerator.device)
        size = self.args.gradient_accumulation_steps
        micro_step = self._step % size
        if micro_step == 0:
            start = self._step % self.args.steps_per_generation
            window = self._buffered_inputs[start : start + size]
            # The others go first: between a forward pass with gradient and its backward, FSDP
            # allows no other forward pass.
            with torch.no_grad():
                others = [self._log_probs(model, x)[0] for x in window[1:]]
        logp, entropy = self._log_probs(model, inputs)
        if micro_step == 0:
            self.value, c = self._loss(torch.cat([logp.detach(), *others]), window)
            self.coefficients = c.split(len(logp))
        own_mean = entropy.detach()[inputs["completion_mask"].bool()].mean()
        log_number(self, "entropy", self.accelerator.gather(own_mean).mean().item())
        surrogate = -(self.coefficients[micro_step] * logp).sum()
        # TRL adds micro-steps up, and averages over processes.
        return self.value / size + surrogate - surrogate.detach()

    def _loss(self, logp: Tensor, window: list[dict]) -> tuple[Tensor, Tensor]:
        """The loss of the optimiser batch, and the coefficients of this process's rows.

        The coefficients are scaled so that an average over processes is the gradient.
        """

        def field(name: str) -> Tensor:
            return of_all_processes(self, torch.cat([x[name] for x in window]), 1)  # (N, T)

        tokens, rewards = field("completion_ids"), field("rewards")
        mask = field("completion_mask").bool()
        leaf = of_all_processes(self, logp, 1).requires_grad_()  # (N, T)
        old = field("old_per_token_logps") if "old_per_token_logps" in window[0] else leaf.detach()
        if self.takes_sampler and "sampling_per_token_logps" in window[0]:
            sampled = field("sampling_per_token_logps")
            old = torch.where(sampled.isnan(), old, sampled)  # vLLM does not score every token
        ref = field("ref_per_token_logps") if self.beta else None
        G = self.num_generations
        adv = group_advantages(rewards, G, self.method.scale)[:, None] * mask
        if self.method.credit:
            adv = self.method.credit(adv, OldPolicy(tokens, mask, old, rewards, G))
        batch = Batch(leaf, old, adv, mask, G, self.max_completion_length, ref)
        iteration = self._step // self.args.steps_per_generation % self.num_iterations
        loss = self.method.passes[iteration % len(self.method.passes)](batch)
        if self.prefix_baseline:
            loss = prefix_baseline(loss, batch, prefix_nodes(tokens, mask, G))
        c = token_coefficients(loss, leaf)
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


# ---------------- what is logged beside the loss


def log_number(trainer: GRPOTrainer, name: str, value: float):
    trainer._metrics["train"][name].append(value)


def log_learning_tax(trainer: GRPOTrainer):
    """Have a GRPOTrainer log the learning tax of its own loss, whatever loss_type it has.

    Call it before trainer.train(). "learning_tax" (C15) then stands beside TRL's own metrics, one
    value an optimiser step, of all its micro-batches and processes. So does "sibling_share", the
    share of tokens at whose history another answer of the group takes one, too. Loss, gradient,
    answers and random numbers stay as they are. What is measured is what reaches the log-probs:
    clip, averages, KL term and importance correction. An entropy bonus is not.
    """
    LearningTax(trainer)


class LearningTax:
    """Three methods of a trainer, wrapped: nodes at generation, log-probs, their gradient."""

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self.visits = []  # of the tokens of each micro-batch so far
        self.generate = trainer._generate_and_score_completions
        self.score = trainer._get_per_token_logps_and_entropies
        self.take_loss = trainer._compute_loss
        trainer._generate_and_score_completions = self.generate_with_nodes
        trainer._get_per_token_logps_and_entropies = self.score_and_keep
        trainer._compute_loss = self.take_loss_and_measure

    def generate_with_nodes(self, inputs):
        """A group is known only here: TRL shuffles its rows afterwards, and these with them."""
        rows, G = self.generate(inputs), self.trainer.num_generations
        if self.trainer.model.training:
            tokens = of_all_processes(self.trainer, rows["completion_ids"], 1)  # (N, T)
            mask = of_all_processes(self.trainer, rows["completion_mask"], 1).bool()
            nodes = prefix_nodes(tokens, mask, G)
            shared = has_sibling(nodes, mask, G).long()  # accelerate cannot pad bools
            # An optimiser step may span two generations, so each has numbers of its own, and all
            # of them are above 0, which is padding.
            nodes += (1 + self.trainer._step) << 32
            count, width = rows["completion_ids"].shape
            rows["nodes"] = of_this_process(self.trainer, nodes, count)[:, :width]
            rows["shared"] = of_this_process(self.trainer, shared, count)[:, :width]
        return rows

    def score_and_keep(self, *args, **kwargs):
        scored = self.score(*args, **kwargs)
        self.logp = scored[0]
        return scored

    def take_loss_and_measure(self, model, inputs):
        loss, trainer = self.take_loss(model, inputs), self.trainer
        if not trainer.model.training:
            return loss
        c = -torch.autograd.grad(loss, self.logp, retain_graph=True)[0]  # times a constant
        A = inputs["advantages"][:, None].expand_as(c)
        seen = inputs["completion_mask"].bool()
        self.visits.append([x[seen] for x in (c, A, inputs["nodes"], inputs["shared"])])
        if trainer.accelerator.sync_gradients:  # the last micro-batch of an optimiser step
            pieces = [torch.cat(x) for x in zip(*self.visits, strict=True)]
            pieces = [of_all_processes(trainer, x, 0) for x in pieces]
            c, A, nodes, shared = (x[pieces[2] > 0] for x in pieces)
            # Every token is a row of its own.
            here = torch.ones_like(nodes, dtype=torch.bool)[:, None]
            tax = learning_tax(c[:, None], A, nodes[:, None], here)
            log_number(trainer, "learning_tax", tax)
            log_number(trainer, "sibling_share", shared.float().mean().item())
            self.visits = []
        return loss


# ---------------- what is refused: settings that would change what is learnt, or do nothing

# These shape TRL's own losses. Nothing here would read them.
UNREAD = (
    "loss_type",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "vllm_importance_sampling_mode",
    "multi_objective_aggregation",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "off_policy_mask_threshold",
    "mask_truncated_completions",
)


def method_for(config: GRPOConfig, name: str, hyper: dict[str, object]) -> Method:
    """METHODS[name] with its hyperparameters, and with config.beta as weight of the k3 KL term.

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
    scale = {"std": "group", "mean": "none"}[method.scale]
    if config.scale_rewards != scale:
        raise ValueError(f"--method {name} needs --scale_rewards {scale}")
    if config.beta and "kl" not in method.hyper:
        raise ValueError(f"--beta {config.beta} needs --method grpo, which has a KL term")
    if method.hyper.get("kl"):
        raise ValueError("the weight of the KL term is TRL's --beta here, not kl")
    accumulation = config.gradient_accumulation_steps
    takes_whole_generation = config.steps_per_generation == accumulation
    rows = accumulation * config.per_device_train_batch_size
    is_torn = config.steps_per_generation % accumulation or rows % config.num_generations
    if is_torn and not takes_whole_generation:
        raise ValueError(
            "--steps_per_generation: an optimiser step must have whole groups of one generation"
        )
    passes = len(method.passes)
    if passes > 1 and (config.num_iterations % passes or not takes_whole_generation):
        raise ValueError(
            f"--method {name} needs --num_iterations {passes} or a multiple, "
            "and --steps_per_generation equal to --gradient_accumulation_steps"
        )
    return bind(name, hyper | {"kl": config.beta}) if config.beta else method


def refuse_dropout(model: torch.nn.Module):
    """ValueError for a model that drops out: a micro-batch goes through it twice."""
    for name, module in model.named_modules():
        is_dropout = isinstance(module, torch.nn.Dropout)
        rate = module.p if is_dropout else getattr(module, "attention_dropout", 0)
        if isinstance(rate, float) and rate > 0:
            raise ValueError(f"{name} has dropout: the two passes would differ; set it to 0")
