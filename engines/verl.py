"""Methods of METHODS as policy losses of verl, and their advantages as estimators of its own.

Set VERL_USE_EXTERNAL_MODULES=engines.verl for all processes; then, for example,

    algorithm.adv_estimator=tgc-std actor_rollout_ref.actor.policy_loss.loss_mode=tgc-grpo
    actor_rollout_ref.actor.loss_scale_factor=L          (the longest answer, data.max_response_length)

(tgc-mean for dr-grpo.) Hyperparameters other than the papers': an external module of your own that calls
`register("my-grpo", "grpo", eps_high=0.28)`. loss_agg_mode and the clip ranges of verl's configuration are not read.

verl shows a policy loss one micro-batch of one process. Normalisers are rescaled to the whole optimiser batch with what
verl counts there. Methods that couple the answers of a group (GROUPED) get whole groups or stop with the reason: rows
are told apart by the uid that verl's batch carries, and verl's default trainer deals groups out over processes.
Written against verl 0.9.1.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from engines import bind
from losses import METHODS, Batch, Method, OldPolicy, group_advantages

try:
    import verl.workers.utils.losses as verl_losses
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
except ImportError as error:
    raise ImportError(
        f"engines.verl needs verl ({error}); install it with: pip install -e '.[verl]'"
    ) from None

GROUPED = ("dapo", "dfpo-min", "dfpo-orthogonal")  # their loss looks across a group
TOKEN_MEAN = ("dapo", "advantage-reweighting")  # the others divide by the number of answers
WHOLE = (
    "needs whole groups in a micro-batch, which the rows' uids do not show: use verl.trainer.main_ppo_v0 with "
    "trainer.balance_batch=False, actor.shuffle=False, actor.use_dynamic_bsz=False and a ppo_micro_batch_size_per_gpu "
    "and a share of the mini-batch per process that are multiples of rollout.n"
)
rows_of = {"uid": None}  # of the micro-batch that is being scored


def ppo_loss(config, model_output, data, dp_group=None, of_verl=verl_losses.ppo_loss):
    """verl's own, after noting which rows are of one group: it hands uids on to nobody."""
    rows_of["uid"] = [str(x) for x in data["uid"]] if "uid" in data else None
    return of_verl(config, model_output, data, dp_group)


def policy_loss(
    name: str,
    method: Method,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict]:
    """One micro-batch's share of METHODS[name]'s loss on the optimiser batch. verl's call
    signature. (n, T) each.

    Shares add up over micro-batches; processes are averaged, so each is multiplied by their number.
    """
    if rollout_is_weights is not None:
        raise ValueError(f"{name}: rollout correction weighs tokens behind the loss; switch it off")
    if (config.clip_ratio, config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c) != (
        0.2,
        0.2,
        0.2,
        3.0,
    ):
        raise ValueError(
            f"{name}: clip_ratio... of the actor are not read; see engines.verl.register"
        )
    if config.loss_scale_factor is None:
        raise ValueError(
            f"{name}: actor.loss_scale_factor must be L, the longest answer (data.max_response_length)"
        )
    info, n, group_size = config.global_batch_info, len(log_prob), config.rollout_n
    tensors = (log_prob, old_log_prob, advantages, response_mask.bool())
    if name in GROUPED:
        order = by_group(rows_of["uid"], group_size, name, log_prob.device)
        tensors = [x[order] for x in tensors]
    else:  # nothing is coupled, so all rows may pass for one group; one empty row more, as one alone is no group
        tensors, group_size = [pad(x, (0, 0, 0, 1)) for x in tensors], n + 1
    logp, old, adv, mask = tensors
    if name == "dapo" and not (adv * mask).view(-1, group_size * adv.shape[1]).any(1).all():
        raise ValueError(
            f"{name} leaves equal-reward groups out of its mean; set algorithm.filter_groups.enable=True"
        )
    if method.credit:
        adv = method.credit(adv, OldPolicy(mask.long(), mask, old, adv[:, 0], group_size))
    loss = method.passes[0](Batch(logp, old, adv, mask, group_size, config.loss_scale_factor))
    share = (
        mask.sum() / info["batch_num_tokens"]
        if name in TOKEN_MEAN
        else len(logp) / info["global_batch_size"]
    )
    kl = ((old - logp.detach()) * mask).sum() / mask.sum().clamp(min=1)
    return loss * share * info["dp_size"], {"actor/ppo_kl": kl.item()}


def by_group(uids: list[str] | None, group_size: int, name: str, device) -> Tensor:
    """The order that makes groups contiguous; ValueError unless all of them are whole. -> (n,) row
    numbers."""
    rows: dict[str, list[int]] = {}
    for i, uid in enumerate(uids or ["none"]):
        rows.setdefault(uid, []).append(i)
    if uids is None or group_size < 2 or any(len(x) != group_size for x in rows.values()):
        raise ValueError(f"{name} {WHOLE}")
    return torch.tensor([i for x in rows.values() for i in x], device=device)


def advantages(
    scale: str, token_level_rewards: Tensor, response_mask: Tensor, index, **_
) -> tuple[Tensor, Tensor]:
    """group_advantages for verl: rows of one uid are a group; verl's own padding may be a group of
    one, and gets 0."""
    rewards, rows = token_level_rewards.sum(1), {}
    for i, uid in enumerate(index):
        rows.setdefault(uid, []).append(i)
    adv = torch.zeros_like(rewards)
    for group in rows.values():
        if len(group) > 1:
            adv[group] = group_advantages(rewards[group], len(group), scale)
    adv = adv[:, None] * response_mask
    return adv, adv


def register(mode: str, method: str, **hyper):
    """Make `policy_loss.loss_mode=mode` METHODS[method] with these hyperparameters; ValueError for
    what verl cannot."""
    bound = bind(method, hyper)
    if len(bound.passes) > 1:
        raise ValueError(
            f"method {method} makes two optimiser steps on each mini-batch, verl makes one; use train.py"
        )
    register_policy_loss(mode)(partial(policy_loss, method, bound))


def refused(reason: str, *_, **__):
    raise ValueError(reason)


verl_losses.ppo_loss = (
    ppo_loss  # the workers import it later: this module is loaded with verl itself
)
for scale in ("std", "mean"):
    register_adv_est(f"tgc-{scale}")(partial(advantages, scale))
for name in METHODS:
    try:
        register(f"tgc-{name}", name)
    except ValueError as error:
        register_policy_loss(f"tgc-{name}")(partial(refused, str(error)))
