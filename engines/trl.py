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

import inspect
import os
from dataclasses import fields

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import losses
from losses import (
    Batch,
    Method,
    OldPolicy,
    group_advantages,
    histories,
    learning_tax,
    prefix_nodes,
    token_coefficients,
)
from train import bind

try:
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import split_tensor_dict
except ImportError as error:
    raise ImportError(
        f"engines.trl needs TRL ({error}); install it with: pip install -e '.[trl]'"
    ) from None


class Trainer(GRPOTrainer):
    """GRPOTrainer(model, reward_funcs, args, ...) with the loss of METHODS[method].

    args.beta weighs the k3 KL term. hyper: hyperparameters of the method. cancel: give the loss the
    cancelled gradient of losses.cancel. Raises ValueError for what the method or TRL cannot honour,
    before the model is loaded where that is possible.
    """

    def __init__(
        self, *args, method: str, hyper: dict | None = None, cancel: bool = False, **kwargs
    ):
        given = inspect.signature(GRPOTrainer.__init__).bind(None, *args, **kwargs).arguments
        self.cancel = cancel
        self.takes_sampler = method == "recentred"
        self.method = method_for(given["args"], method, hyper or {})
        if any(given.get(name) for name in ("tools", "environment_factory", "rollout_func")):
            raise ValueError(
                "tools, environment_factory and rollout_func are not supported: "
                "the mask would have holes"
            )
        super().__init__(*args, **kwargs)
        if self._is_vlm or self.aux_loss_enabled:
            raise ValueError("vision models and router auxiliary losses are not supported")
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not self.is_fsdp_enabled:
            raise ValueError("FSDP is asked for, and accelerate has none here: it needs a GPU")
        refuse_dropout(self.model)

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)  # (rows of all processes, reward functions)
        self.rewards = (rewards * self.reward_weights.to(rewards.device)).nansum(1)  # None is nan
        if rewards.isnan().all(1).any() or not self.rewards.isfinite().all():
            raise ValueError("a reward is infinite, or there is none: each answer needs a number")
        return rewards

    def _generate_and_score_completions(self, inputs):
        # Transformers generates in step on all processes if it knows that the model is sharded.
        # accelerate does not tell it. A process whose answers end first would then go on alone.
        self.model._is_fsdp_managed_module = isinstance(self.model, FSDPModule)
        rows = super()._generate_and_score_completions(inputs)
        start = self.accelerator.process_index * len(inputs)
        rows["rewards"] = self.rewards[start : start + len(inputs)]
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
        if not self.model.training:
            logp, _ = self._log_probs(model, inputs)
            return self._loss(logp, [inputs], self.num_generations_eval)[0]
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
            scored = torch.cat([logp.detach(), *others])
            self.value, c = self._loss(scored, window, self.num_generations)
            self.coefficients = c.split(len(logp))
        own_mean = entropy.detach()[inputs["completion_mask"].bool()].mean()
        log_numbers(self, {"entropy": self.accelerator.gather(own_mean).mean().item()})
        surrogate = -(self.coefficients[micro_step] * logp).sum()
        # TRL adds micro-steps up, and averages over processes.
        return self.value / size + surrogate - surrogate.detach()

    def _loss(
        self, logp: Tensor, window: list[dict], group_size: int
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of the optimiser batch, and the coefficients of this process's rows.

        The coefficients are scaled so that an average over processes is the gradient.
        """

        def field(name: str) -> Tensor:
            return of_all_processes(self, torch.cat([x[name] for x in window]), 1)  # (N, T)

        tokens = field("completion_ids")
        mask = field("completion_mask").bool()
        rewards = field("rewards")
        leaf = of_all_processes(self, logp, 1).requires_grad_()  # (N, T)
        old = field("old_per_token_logps") if "old_per_token_logps" in window[0] else leaf.detach()
        if self.takes_sampler and "sampling_per_token_logps" in window[0]:
            sampled = field("sampling_per_token_logps")
            old = torch.where(sampled.isnan(), old, sampled)  # vLLM does not score every token
        ref = field("ref_per_token_logps") if self.beta else None
        advantages = group_advantages(rewards, group_size, self.method.scale)  # (N,)
        adv = advantages[:, None] * mask
        if self.method.credit:
            adv = self.method.credit(adv, OldPolicy(tokens, mask, old, rewards, group_size))
        batch = Batch(leaf, old, adv, mask, group_size, self.max_completion_length, ref)
        iteration = self._step // self.args.steps_per_generation % self.num_iterations
        take_loss = self.method.passes[iteration % len(self.method.passes)]
        if not self.model.training:
            return take_loss(batch), None
        with torch.enable_grad():
            loss = take_loss(batch)
            nodes = prefix_nodes(tokens, mask, group_size)
            before = c = token_coefficients(loss, leaf)
            if self.cancel:
                c = token_coefficients(losses.cancel(loss, batch, nodes), leaf)
        unit = (before / losses.token_ratio(batch).detach())[mask]
        told = {"learning_tax": learning_tax(c, advantages, nodes, mask)}
        told |= what_cancelling_does(unit, histories(nodes, group_size)[mask])
        log_numbers(self, told)
        start = self.accelerator.process_index * len(logp)
        own = c[start : start + len(logp), : logp.shape[1]]
        return loss.detach(), own * self.accelerator.num_processes / len(c)


def of_all_processes(trainer: GRPOTrainer, x: Tensor, dim: int) -> Tensor:
    """The rows of all processes, one process after another, padded with 0 to one size of dim."""
    accelerator = trainer.accelerator
    return accelerator.gather(accelerator.pad_across_processes(x, dim=dim).contiguous())


# ---------------- what is logged beside the loss


def what_cancelling_does(unit: Tensor, history: Tensor) -> dict[str, float]:
    """How many tokens have a sibling, and how much cancelling can do there (C23).

    unit: c / r of K tokens, before cancelling; history: where each was taken. (K,), (K,).
    sibling_share: the share of tokens at whose history another answer of the group takes one, too.
    cancelling_t: t = m^2 / (m^2 + v), m the mean and v the variance of c / r at a history. m^2 is
    estimated by the products of different answers, so t may be negative. Where n answers visit,
    cancelling multiplies the noise by (1 - t) n / (n - 1), so it pays if t is above 1 / n. t is of
    the shared tokens, and left out where no coefficient of theirs differs from 0.
    """
    ids, at = history.unique(return_inverse=True)
    visitors = torch.bincount(at)  # (H,)
    total, squares = (unit.new_zeros(len(ids)).index_add_(0, at, x) for x in (unit, unit**2))
    shared = visitors > 1
    n, total, squares = visitors[shared], total[shared], squares[shared]
    told = {"sibling_share": (n.sum() / len(unit)).item()}
    if size := squares.sum().item():
        told["cancelling_t"] = ((total**2 - squares) / (n - 1)).sum().item() / size
    return told


def log_numbers(trainer: GRPOTrainer, numbers: dict[str, float]):
    for name, value in numbers.items():
        trainer._metrics["train"][name].append(value)


def log_learning_tax(trainer: GRPOTrainer):
    """Have a GRPOTrainer log the learning tax of its own loss, whatever loss_type it has.

    Call it before trainer.train(). "learning_tax" (C15) then stands beside TRL's own metrics, one
    value an optimiser step, of all its micro-batches and processes, and so do the two numbers of
    what_cancelling_does. Loss, gradient, answers and random numbers stay as they are. What is
    measured is what reaches the log-probs: clip, averages, KL term and importance correction. An
    entropy bonus is not.
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
        rows = self.generate(inputs)
        if self.trainer.model.training:
            tokens, mask = rows["completion_ids"], rows["completion_mask"]
            whole = of_all_processes(self.trainer, tokens, 1)  # (N, T)
            seen = of_all_processes(self.trainer, mask, 1).bool()
            nodes = prefix_nodes(whole, seen, self.trainer.num_generations)
            before = histories(nodes, self.trainer.num_generations)
            start = self.trainer.accelerator.process_index * len(tokens)
            own = slice(start, start + len(tokens)), slice(tokens.shape[1])
            # An optimiser step may span two generations, so each has numbers of its own, and all
            # of them are above 0, which is padding.
            first = (1 + self.trainer._step) << 32
            rows["nodes"], rows["histories"] = nodes[own] + first, before[own] + first
        return rows

    def score_and_keep(self, *args, **kwargs):
        scored = self.score(*args, **kwargs)
        self.logp = scored[0]
        return scored

    def take_loss_and_measure(self, model, inputs):
        loss = self.take_loss(model, inputs)
        if not self.trainer.model.training:
            return loss
        c = -torch.autograd.grad(loss, self.logp, retain_graph=True)[0]  # times a constant
        ratio = torch.ones_like(c)
        if "old_per_token_logps" in inputs:
            ratio = (self.logp.detach() - inputs["old_per_token_logps"]).exp()
        A = inputs["advantages"].view(len(c), -1).expand_as(c)  # TRL also allows one a token
        seen = inputs["completion_mask"].bool()
        visit = c, c / ratio, A, inputs["nodes"], inputs["histories"]
        self.visits.append([x[seen] for x in visit])
        if self.trainer.accelerator.sync_gradients:  # the last micro-batch of an optimiser step
            pieces = zip(*self.visits, strict=True)
            pieces = [of_all_processes(self.trainer, torch.cat(x), 0) for x in pieces]
            c, unit, A, nodes, before = (x[pieces[3] > 0] for x in pieces)
            # Every token is a row of its own.
            here = torch.ones_like(nodes, dtype=torch.bool)[:, None]
            told = {"learning_tax": learning_tax(c[:, None], A, nodes[:, None], here)}
            log_numbers(self.trainer, told | what_cancelling_does(unit, before))
            self.visits = []
        return loss


# ---------------- what is refused: whatever would change the value or gradient of losses.py

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


def method_for(config: GRPOConfig, name: str, hyper: dict[str, object]) -> Method:
    """METHODS[name] with its hyperparameters, and with config.beta as weight of the k3 KL term.

    Raises ValueError, in one line, for a method, hyperparameter or setting that cannot be honoured.
    """
    if "kl" in hyper:
        raise ValueError("the weight of the KL term is TRL's --beta here, not kl")
    method = bind(name, hyper)
    if method.needs_scores or method.repair:
        raise ValueError(f"--method {name} needs train.py: hidden states, or a second rollout")
    refuse_settings(config, method)
    refuse_batching(config, len(method.passes))
    return bind(name, hyper | {"kl": config.beta}) if config.beta else method


def refuse_settings(config: GRPOConfig, method: Method):
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != config.world_size:
        raise ValueError(
            f"{started} processes were started, and each would train alone, in one --output_dir: "
            "TRL sees no others (on CPUs it needs --use_cpu)"
        )
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in UNREAD and value != field.default:
            raise ValueError(
                f"--{field.name} {value} has no effect here: the loss is --method's, with --hyper"
            )
    scale = {"std": "group", "mean": "none"}[method.scale]
    if config.scale_rewards != scale:
        raise ValueError(f"this method's advantages need --scale_rewards {scale}")
    if config.beta and "kl" not in method.hyper:
        raise ValueError(f"--beta {config.beta} needs --method grpo, which has a KL term")
    if config.beta and config.use_bias_correction_kl:
        raise ValueError("--beta weighs the plain k3 here: add --use_bias_correction_kl False")
    if config.use_vllm and config.vllm_importance_sampling_correction:
        raise ValueError(
            "vLLM's correction weighs tokens behind the loss: "
            "add --vllm_importance_sampling_correction False"
        )


def refuse_batching(config: GRPOConfig, passes: int):
    """ValueError unless every optimiser step is on whole groups, and every pass has its steps."""
    accumulation = config.gradient_accumulation_steps
    rows = accumulation * config.per_device_train_batch_size
    if config.steps_per_generation % accumulation:
        raise ValueError(
            f"--steps_per_generation must be a multiple of --gradient_accumulation_steps "
            f"{accumulation}, so that an optimiser step is of one generation"
        )
    takes_whole_generation = config.steps_per_generation == accumulation
    if rows % config.num_generations and not takes_whole_generation:
        raise ValueError(
            f"{rows} rows an optimiser step and process are not whole groups of "
            f"--num_generations {config.num_generations}"
        )
    if passes > 1 and (config.num_iterations % passes or not takes_whole_generation):
        raise ValueError(
            f"this method's {passes} passes need --num_iterations {passes} or a multiple, "
            "and --steps_per_generation equal to --gradient_accumulation_steps"
        )


def refuse_dropout(model: torch.nn.Module):
    """ValueError for a model that drops out: a micro-batch goes through it twice."""
    for name, module in model.named_modules():
        rates = [getattr(module, "attention_dropout", 0)]
        if isinstance(module, torch.nn.Dropout):
            rates.append(module.p)
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            raise ValueError(f"{name} has dropout: the two passes would differ; set it to 0")
