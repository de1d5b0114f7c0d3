"""Any method of METHODS inside TRL's GRPOTrainer, on as many processes as accelerate starts.

A loss of losses.py is a function of the (N, T) log-probs of a whole optimiser batch. TRL calls its
loss once for each micro-batch of each process, on shuffled rows, so that groups are torn. Here the
rows stay in order. At the first micro-step of an optimiser step, the log-probs of all its
micro-batches and processes are gathered, and the loss is taken once. Its token coefficients are
then carried through the model piece by piece, as train.py's update does. So value and gradient are
those of losses.py for any number of processes and accumulation steps.

Cost: with A accumulation steps, an optimiser step scores A - 1 micro-batches once more, without
gradient. Written against TRL 1.16, for text without tools.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from engines.trl_settings import bind_method, refuse_dropout
from losses import (
    Batch,
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
        self.method = bind_method(method, hyper or {}, config, project)
        if any(given.get(name) for name in ("tools", "environment_factory", "rollout_func")):
            raise ValueError(
                "tools, environment_factory and rollout_func are not supported: "
                "the mask would have holes"
            )
        super().__init__(*args, **kwargs)
        if self._is_vlm or self.aux_loss_enabled:
            raise ValueError("vision models and router auxiliary losses are not supported")
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

    def _whole(self, x: Tensor) -> Tensor:
        """The rows of all processes, padded to one width."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(x, dim=1).contiguous())

    def _loss(
        self, logp: Tensor, window: list[dict], group_size: int
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of the optimiser batch, and the coefficients of this process's rows.

        The coefficients are scaled so that an average over processes is the gradient.
        """

        def field(name: str) -> Tensor:
            return self._whole(torch.cat([x[name] for x in window]))

        tokens = field("completion_ids")
        mask = field("completion_mask").bool()
        rewards = field("rewards")
        leaf = self._whole(logp).requires_grad_()  # (N, T)
        old = field("old_per_token_logps") if "old_per_token_logps" in window[0] else leaf.detach()
        ref = field("ref_per_token_logps") if self.beta else None
        advantages = group_advantages(rewards, group_size, self.method.scale)  # (N,)
        adv = advantages[:, None] * mask
        if self.method.credit:
            old_policy = OldPolicy(tokens, mask, old, rewards, group_size, self.temperature)
            adv = self.method.credit(adv, old_policy)
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
