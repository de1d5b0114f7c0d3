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

from engines import bind_method
from losses import (
    Batch,
    Method,
    OldPolicy,
    bind,
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


class Trainer(GRPOTrainer):
    """GRPOTrainer(model, reward_funcs, args, ...) with the loss of METHODS[method].

    args.beta weighs the k3 KL term. hyper: hyperparameters of the method. project: the projection
    of claim C17. Raises ValueError for what the method or TRL cannot honour, before the model is
    loaded where that is possible.
    """

    def __init__(
        self, *args, method: str, hyper: dict | None = None, project: bool = False, **kwargs
    ):
        given = inspect.signature(GRPOTrainer.__init__).bind(None, *args, **kwargs).arguments
        config = given.get("args")
        if not isinstance(config, GRPOConfig):
            raise ValueError("args: a GRPOConfig is needed")
        self.project = project
        self.method = method_for(config, method, hyper or {}, project)
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
        if rewards.isnan().all(1).any():
            raise ValueError(
                "every reward function returned None for an answer; each answer needs a number"
            )
        self.rewards = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
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
        self._log_entropy(entropy.detach(), inputs["completion_mask"])
        surrogate = -(self.coefficients[micro_step] * logp).sum()
        # TRL adds micro-steps up, and averages over processes.
        return self.value / size + surrogate - surrogate.detach()

    def _log_entropy(self, entropy: Tensor, mask: Tensor):
        sums = torch.stack([(entropy * mask).sum(), mask.sum()])
        total, tokens = self.accelerator.reduce(sums, "sum")
        self._metrics["train"]["entropy"].append((total / tokens.clamp(min=1)).item())

    def _loss(
        self, logp: Tensor, window: list[dict], group_size: int
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of the optimiser batch, and the coefficients of this process's rows.

        The coefficients are scaled so that an average over processes is the gradient.
        """

        def field(name: str) -> Tensor:
            return of_all_processes(self, torch.cat([x[name] for x in window]), 1)

        tokens = field("completion_ids")
        mask = field("completion_mask").bool()
        rewards = field("rewards")
        leaf = of_all_processes(self, logp, 1).requires_grad_()  # (N, T)
        old = field("old_per_token_logps") if "old_per_token_logps" in window[0] else leaf.detach()
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
            surrogate = project(loss, leaf, advantages, nodes, mask) if self.project else loss
            c = token_coefficients(surrogate, leaf)
        self._metrics["train"]["learning_tax"].append(learning_tax(c, advantages, nodes, mask))
        start = self.accelerator.process_index * len(logp)
        own = c[start : start + len(logp), : logp.shape[1]]
        return loss.detach(), own * self.accelerator.num_processes / len(c)


def of_all_processes(trainer: GRPOTrainer, x: Tensor, dim: int) -> Tensor:
    """The rows of all processes, one process after another, padded with 0 to one size of dim."""
    accelerator = trainer.accelerator
    return accelerator.gather(accelerator.pad_across_processes(x, dim=dim).contiguous())


# ---------------- the meter in a trainer that keeps TRL's own loss


def log_learning_tax(trainer: GRPOTrainer):
    """Have a GRPOTrainer log the learning tax of its own loss, whatever loss_type it has.

    Call it before trainer.train(). "learning_tax" then stands beside TRL's own metrics, one value
    an optimiser step (C15), of all its micro-batches and processes. Loss, gradient, answers and
    random numbers stay as they are. What is measured is what reaches the log-probs: clip, averages,
    KL term and importance correction. An entropy bonus is not.
    """
    LearningTax(trainer)


class LearningTax:
    """Three methods of a trainer, wrapped: nodes at generation, log-probs, their gradient."""

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self.visits = []  # (c, A, node) of the tokens of each micro-batch so far
        self.next_node = 0
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
            nodes = prefix_nodes(whole, seen, self.trainer.num_generations) + self.next_node
            self.next_node += whole.numel()  # an optimiser step may span two generations
            start = self.trainer.accelerator.process_index * len(tokens)
            rows["nodes"] = nodes[start : start + len(tokens), : tokens.shape[1]]
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
        seen = inputs["completion_mask"].bool()
        A = inputs["advantages"].view(len(c), -1).expand_as(c)  # TRL also allows one a token
        self.visits.append((c[seen], A[seen], inputs["nodes"][seen]))
        if self.trainer.accelerator.sync_gradients:  # the last micro-batch of an optimiser step
            # Every token is a row of its own. Padding has A = 0, which the tax leaves out.
            pieces = zip(*self.visits, strict=True)
            c, A, nodes = (of_all_processes(self.trainer, torch.cat(x), 0) for x in pieces)
            here = torch.ones_like(nodes, dtype=torch.bool)[:, None]
            tax = learning_tax(c[:, None], A, nodes[:, None], here)
            self.trainer._metrics["train"]["learning_tax"].append(tax)
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


def method_for(config: GRPOConfig, name: str, hyper: dict[str, object], projected: bool) -> Method:
    """METHODS[name] with its hyperparameters, and with config.beta as weight of the k3 KL term.

    Raises ValueError, in one line, for a method, hyperparameter or setting that cannot be honoured.
    """
    method = bind_method(name, hyper)
    refuse_settings(config, method, projected)
    refuse_batching(config, len(method.passes))
    return bind(name, hyper | {"kl": config.beta}) if config.beta else method


def refuse_settings(config: GRPOConfig, method: Method, projected: bool):
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != config.world_size:
        raise ValueError(
            f"{started} processes were started, and each would train alone, in one output_dir: "
            "TRL sees no others (on CPUs it needs --use_cpu True)"
        )
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in UNREAD and value != field.default:
            raise ValueError(
                f"{field.name} {value} has no effect here: hyperparameters are given as hyper"
            )
    scale = {"std": "group", "mean": "none"}[method.scale]
    if config.scale_rewards != scale:
        raise ValueError(f"scale_rewards must be {scale!r} for this method's advantages")
    takes_kl = "kl" in inspect.signature(method.passes[0]).parameters
    if config.beta and (projected or not takes_kl):
        raise ValueError("beta needs a method whose pass is grpo, not projected")
    if config.beta and config.use_bias_correction_kl:
        raise ValueError("beta weighs the plain k3 here: set use_bias_correction_kl=False")
    if config.use_vllm and config.vllm_importance_sampling_correction:
        raise ValueError(
            "vllm_importance_sampling_correction weighs tokens behind the loss: set it to False"
        )


def refuse_batching(config: GRPOConfig, passes: int):
    """ValueError unless every optimiser step is on whole groups, and every pass has its steps."""
    accumulation = config.gradient_accumulation_steps
    rows = accumulation * config.per_device_train_batch_size
    if config.steps_per_generation % accumulation:
        raise ValueError(
            "steps_per_generation must be a multiple of gradient_accumulation_steps, "
            "so that an optimiser step is of one generation"
        )
    takes_whole_generation = config.steps_per_generation == accumulation
    if rows % config.num_generations and not takes_whole_generation:
        raise ValueError(
            f"{rows} rows an optimiser step and process are not whole groups of "
            f"num_generations {config.num_generations}"
        )
    if passes > 1 and (config.num_iterations % passes or not takes_whole_generation):
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
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            raise ValueError(f"{name} has dropout: the two passes would differ; set it to 0")
