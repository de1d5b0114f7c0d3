"""Methods of METHODS as policy losses of verl, and their advantages as estimators of verl's.

Set VERL_USE_EXTERNAL_MODULES=engines.verl for all processes. Then, for example,

    algorithm.adv_estimator=tgc-std actor_rollout_ref.actor.policy_loss.loss_mode=tgc-grpo
    actor_rollout_ref.actor.loss_scale_factor=L

where L is the longest answer, data.max_response_length. Methods with the scale "mean", such as
dr-grpo, take tgc-mean. For hyperparameters other than the papers', write an external module that
calls `register("my-grpo", "grpo", eps_high=0.28)`. loss_agg_mode and the clip ranges of verl's
configuration are not read.

verl calls a policy loss once for each micro-batch of each process. Normalisers are rescaled to the
whole optimiser batch with what verl counts there. Methods that couple the answers of a group get
whole groups, or stop with the reason. They tell rows apart by the uid in verl's batch, and verl's
default trainer deals the rows of a group out over processes. How a loss is averaged, and whether
it couples answers, is found out by calling it. Written against verl 0.9.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from engines import bind_method
from losses import METHODS, Batch, Method, OldPolicy, group_advantages

try:
    import verl.workers.utils.losses as verl_losses
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
except ImportError as error:
    raise ImportError(
        f"engines.verl needs verl ({error}); install it with: pip install -e '.[verl]'"
    ) from None

DEFAULT_CLIP = {
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
}
NEEDS_GROUPS = (
    "needs whole groups in a micro-batch, which the rows' uids do not show: set "
    "trainer.use_v1=False, trainer.balance_batch=False, actor.shuffle=False, "
    "actor.use_dynamic_bsz=False and a ppo_micro_batch_size_per_gpu and a share of the mini-batch "
    "per process that are multiples of rollout.n"
)
# verl hands no uids to a loss, so ppo_loss leaves those of the current micro-batch here.
rows_of = {"uid": None}


def ppo_loss(config, model_output, data, dp_group=None, of_verl=verl_losses.ppo_loss):
    """verl's own, after noting which rows are of one group."""
    rows_of["uid"] = [str(x) for x in data["uid"]] if "uid" in data else None
    return of_verl(config, model_output, data, dp_group)


@dataclass
class Adapter:
    """A method of METHODS as a policy loss of verl."""

    name: str
    method: Method

    def __post_init__(self):
        self.by_tokens = divides_by_tokens(self.method)
        self.coupled = couples_answers(self.method)

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config=None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict]:
        """A micro-batch's share of the method's loss on the optimiser batch, and verl's metrics.

        The signature is verl's; the tensors are (n, T). verl adds up the shares of micro-batches
        and averages over processes, so a share is multiplied by their number.
        """
        if rollout_is_weights is not None:
            raise ValueError(
                f"{self.name}: rollout correction weighs tokens behind the loss; switch it off"
            )
        refuse_settings(self.name, config)
        tensors = (log_prob, old_log_prob, advantages, response_mask.bool())
        if self.coupled:
            group_size = config.rollout_n
            order = by_group(rows_of["uid"], group_size, self.name, log_prob.device)
            tensors = [x[order] for x in tensors]
        else:
            # Nothing is coupled, so all rows may pass for one group. An empty row is added, because
            # a row alone is no group.
            group_size = len(log_prob) + 1
            tensors = [pad(x, (0, 0, 0, 1)) for x in tensors]
        logp, old, adv, mask = tensors
        groups = (adv * mask).view(-1, group_size * adv.shape[1])
        if self.coupled and self.by_tokens and not groups.any(1).all():
            raise ValueError(
                f"{self.name} leaves equal-reward groups out of its mean; it needs "
                "algorithm.filter_groups.enable=True, which only trainer.use_v1=True reads"
            )
        if self.method.credit:
            facts = OldPolicy(mask.long(), mask, old, adv[:, 0], group_size)
            adv = self.method.credit(adv, facts)
        batch = Batch(logp, old, adv, mask, group_size, config.loss_scale_factor)
        loss = self.method.passes[0](batch)
        info = config.global_batch_info
        if self.by_tokens:
            share = mask.sum() / info["batch_num_tokens"]
        else:
            share = len(logp) / info["global_batch_size"]
        kl = ((old - logp.detach()) * mask).sum() / mask.sum().clamp(min=1)
        return loss * share * info["dp_size"], {"actor/ppo_kl": kl.item()}


def divides_by_tokens(method: Method) -> bool:
    """Whether two more answers without a token leave the gradient as it is. Else they halve it."""
    adv = torch.tensor([1.0, -0.5, 0.0, 0.0])
    two, four = (gradient(method, adv[:n], torch.zeros(n), adv[:n] != 0) for n in (2, 4))
    return torch.allclose(two, four[:2])


def couples_answers(method: Method) -> bool:
    """Whether an answer's gradient depends on the advantages or ratios of other answers."""
    one = gradient(method, torch.tensor([1.0, -0.5, 1, -1]), torch.zeros(4))
    other = gradient(method, torch.tensor([1.0, -1.0, 0, 0]), torch.tensor([0, 0.1, 0, 0.1]))
    return not torch.allclose(one[0], other[0])


def gradient(method: Method, adv: Tensor, old: Tensor, seen: Tensor | None = None) -> Tensor:
    """dLoss/dlogp of answers of one token with log pi = 0, in groups of 2. (n,), ... -> (n, 1)."""
    logp = torch.zeros(len(adv), 1, requires_grad=True)
    mask = torch.ones(len(adv), 1, dtype=torch.bool) if seen is None else seen[:, None]
    batch = Batch(logp, old[:, None], adv[:, None], mask, group_size=2, max_tokens=1)
    return torch.autograd.grad(method.passes[0](batch), logp)[0]


def refuse_settings(name: str, config):
    if any(getattr(config, key) != value for key, value in DEFAULT_CLIP.items()):
        raise ValueError(
            f"{name}: clip_ratio... of the actor are not read; see engines.verl.register"
        )
    if config.loss_scale_factor is None:
        raise ValueError(
            f"{name}: actor.loss_scale_factor must be L, the longest answer "
            "(data.max_response_length)"
        )


def by_group(uids: list[str] | None, group_size: int, name: str, device) -> Tensor:
    """The order of rows that makes groups contiguous: (n,). ValueError unless all are whole."""
    rows: dict[str, list[int]] = {}
    for i, uid in enumerate(uids or ["none"]):
        rows.setdefault(uid, []).append(i)
    if uids is None or group_size < 2 or any(len(x) != group_size for x in rows.values()):
        raise ValueError(f"{name} {NEEDS_GROUPS}")
    return torch.tensor([i for x in rows.values() for i in x], device=device)


def advantages(
    scale: str, token_level_rewards: Tensor, response_mask: Tensor, index, **_
) -> tuple[Tensor, Tensor]:
    """group_advantages for verl, where the rows of one uid are a group. (n, T) twice.

    A row of verl's own padding is a group of one, and gets 0.
    """
    rewards = token_level_rewards.sum(1)
    rows: dict[str, list[int]] = {}
    for i, uid in enumerate(index):
        rows.setdefault(uid, []).append(i)
    adv = torch.zeros_like(rewards)
    for group in rows.values():
        if len(group) > 1:
            adv[group] = group_advantages(rewards[group], len(group), scale)
    adv = adv[:, None] * response_mask
    return adv, adv


def register(mode: str, name: str, **hyper):
    """Make `policy_loss.loss_mode=mode` METHODS[name] with these hyperparameters.

    Raises ValueError for what verl cannot honour.
    """
    method = bind_method(name, hyper)
    if len(method.passes) > 1:
        raise ValueError(
            f"method {name} makes two optimiser steps on each mini-batch, verl makes one; "
            "use train.py"
        )
    register_policy_loss(mode)(Adapter(name, method))


def refuse(reason: str, *_, **__):
    raise ValueError(reason)


# The workers import it later, because verl loads this module with itself.
verl_losses.ppo_loss = ppo_loss
for scale in ("std", "mean"):
    register_adv_est(f"tgc-{scale}")(partial(advantages, scale))
for name in METHODS:
    try:
        register(f"tgc-{name}", name)
    except ValueError as error:
        register_policy_loss(f"tgc-{name}")(partial(refuse, str(error)))
