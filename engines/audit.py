"""Which of an engine's own losses cancel on a token that the whole group shares, and how much is
left where not.

`python -m engines.audit trl` and `python -m engines.audit verl` call every policy loss that the installed package ships
on the random prefix trees of verify.py, as its trainer would, and print for five regimes the mean over shared tokens of
|sum_i c_i| / sum_i |c_i|: 0 = the group's advantages cancel, 1 = all answers push the same way. The first four regimes
are those of claims.py's audit (C2..C12); the fifth is the second again with every group torn in two micro-batches.
Advantages sum to zero in each group; clip ranges and everything else are the engine's defaults, unless a row says more.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

import losses
from claims.cancellation import REGIMES
from claims.trees import Draw
from cli import fail
from losses import Batch, token_coefficients

DRAWS = 24  # random trees, as in verify.py
SETTINGS = (
    (0, 0, True, 1),
    (0, 0, False, 1),
    (0.15, 0, True, 1),
    (0.3, 0.35, True, 1),
    (0, 0, False, 2),
)
TORN = "on-policy, unequal T_i, groups torn in two micro-batches"


@dataclass
class Row:
    """One loss of an engine: its settings, where it is written, and the loss of one micro-batch of
    a batch."""

    name: str
    where: str
    loss: Callable[
        [Batch, Batch, int], Tensor
    ]  # micro-batch, whole batch, number of micro-batches -> its share


def left_over(
    row: Row, draws: list[Draw], spread: float, offset: float, equal: bool, pieces: int
) -> float:
    """Mean over fully shared tokens of |sum_i c_i| / sum_i |c_i|; c is the engine's -N
    dLoss/dlogp."""
    left = []
    for d in draws:
        if d.equal_lengths != equal or d.N % pieces:  # engines cut a batch in pieces of one size
            continue
        b = d.batch(losses, spread, offset)
        logp, old, adv = (x.detach().masked_fill(~b.mask, 0.0) for x in (b.logp, b.logp_old, b.adv))
        whole = replace(b, logp=logp.requires_grad_(), logp_old=old, adv=adv)
        parts = [take(whole, torch.arange(k, d.N, pieces)) for k in range(pieces)]
        c = token_coefficients(sum(row.loss(part, whole, pieces) for part in parts), whole.logp)
        for _, rows, t in d.at_shared():
            if size := c[list(rows), t].abs().sum().item():
                left.append(abs(c[list(rows), t].sum().item()) / size)
    return sum(left) / max(1, len(left))


def take(b: Batch, rows: Tensor) -> SimpleNamespace:
    """Some rows, not always whole groups, as narrow as their longest answer."""
    width = int(b.mask[rows].sum(1).max())
    return SimpleNamespace(
        **{k: getattr(b, k)[rows, :width] for k in ("logp", "logp_old", "adv", "mask")}
    )


# ---------------- TRL


def trl_rows() -> Iterator[Row]:
    """GRPOTrainer._compute_loss on our tensors, with a stand-in for the trainer whose "model" hands
    back our logp."""
    from trl import GRPOConfig, GRPOTrainer

    default = {f.name: f.default for f in fields(GRPOConfig)}
    source, start = inspect.getsourcelines(GRPOTrainer._compute_loss)

    fixed = dict(
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
    )
    fixed |= dict(aux_loss_enabled=False, use_vllm=False, model=SimpleNamespace(training=True))
    one = dict(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    fixed |= dict(
        accelerator=SimpleNamespace(**one), get_gamma_weights=GRPOTrainer.get_gamma_weights
    )

    def loss(part, whole, pieces, loss_type, level, eps_high):
        trainer = SimpleNamespace(
            loss_type=loss_type, importance_sampling_level=level, epsilon_high=eps_high, **fixed
        )
        trainer.epsilon_low, trainer.max_completion_length = default["epsilon"], whole.max_tokens
        trainer.args = SimpleNamespace(**default | {"steps_per_generation": pieces})
        trainer.current_gradient_accumulation_steps, trainer._metrics = (
            pieces,
            {"train": defaultdict(list)},
        )
        scored = part.logp, torch.zeros_like(part.logp), None
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: scored
        mask = part.mask.long()
        inputs = dict.fromkeys(
            ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), mask
        )
        inputs |= {"advantages": part.adv[:, 0], "old_per_token_logps": part.logp_old}
        return GRPOTrainer._compute_loss(
            trainer, trainer.model, inputs | {"num_items_in_batch": whole.mask.sum()}
        )

    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"):
        line = start + next(i for i, text in enumerate(source) if f'"{loss_type}"' in text)
        for level in ("token", "sequence"):
            eps_high = (
                5.0 if loss_type == "cispo" else default["epsilon"]
            )  # 5: what TRL's documentation recommends
            name = f"{loss_type}, {level}" + ", epsilon_high 5" * (loss_type == "cispo")
            yield Row(
                name,
                f"grpo_trainer.py:{line}",
                partial(loss, loss_type=loss_type, level=level, eps_high=eps_high),
            )


# ---------------- verl


def verl_rows() -> Iterator[Row]:
    """Every function of verl's registry, called as verl/workers/utils/losses.py:ppo_loss does."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig, PolicyLossConfig

    def loss(part, whole, pieces, function, agg, options):
        actor = dict(
            strategy="fsdp", rollout_n=whole.group_size, ppo_micro_batch_size_per_gpu=len(part.mask)
        )
        actor |= {k: v for k, v in options.items() if k.startswith("clip_ratio")}
        policy = PolicyLossConfig(**{k: v for k, v in options.items() if k not in actor})
        config = ActorConfig(**actor, policy_loss=policy)
        config.global_batch_info.update(
            dp_size=1, batch_num_tokens=whole.mask.sum().item(), loss_scale_factor=None
        )
        config.global_batch_info["global_batch_size"] = len(whole.mask)
        torch.manual_seed(0)  # clip_cov draws at random
        return function(
            part.logp_old, part.logp, part.adv, part.mask, loss_agg_mode=agg, config=config
        )[0]

    for mode, function in core_algos.POLICY_LOSS_REGISTRY.items():
        if (
            function.__module__ != core_algos.__name__
        ):  # registered by somebody else, such as engines.verl
            continue
        file, line = (
            inspect.getsourcefile(function).rpartition("/")[2],
            inspect.getsourcelines(function)[1],
        )
        own = inspect.signature(function).parameters["loss_agg_mode"].default
        aggregations = AGGREGATIONS if mode == "vanilla" else dict.fromkeys((AGGREGATIONS[0], own))
        if mode in ("sapo", "geo_mean"):
            aggregations = ["its own mean over answers"]  # whatever loss_agg_mode says
        for options in OPTIONS.get(mode, [{}]):
            values = options.get("rollout_correction", options)
            said = " ".join(f"{k} {v}" for k, v in values.items() if v is not None)
            for agg in aggregations:
                name = ", ".join(filter(None, (mode, said, agg)))
                yield Row(
                    name,
                    f"{file}:{line}",
                    partial(loss, function=function, agg=agg, options=options),
                )


AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
)
NARROW = {
    "clip_ratio": 0.02,
    "clip_ratio_low": None,
    "clip_ratio_high": None,
}  # the trees seldom leave DPPO's own 0.2
OPTIONS = {
    "dppo_tv": [{}, NARROW],
    "dppo_kl": [{}, NARROW],
    "dro": [{"dro_beta": 1.0}],
}  # DRO's beta has no default
OPTIONS["bypass_mode"] = [
    {"rollout_correction": {"loss_type": "ppo_clip"}},
    {"rollout_correction": {"loss_type": "reinforce", "rollout_is": "token"}},
    {"rollout_correction": {"loss_type": "reinforce", "rollout_is": "sequence"}},
]


# ---------------- main


def show(x: float) -> str:
    return "0" if x < 1e-9 else f"{x:.3f}" if x >= 5e-4 else f"{x:.0e}"


def main(argv: list[str] | None = None):
    engines = {"trl": trl_rows, "verl": verl_rows}
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1 or argv[0] not in engines:
        fail(f"engines.audit {' '.join(argv)}: one of {', '.join(engines)} is expected")
    try:
        version = importlib.metadata.version(argv[0])
        rows = list(engines[argv[0]]())
    except ImportError as error:
        fail(f"the audit of {argv[0]} needs it installed ({error}): pip install -e '.[{argv[0]}]'")
    print(f"{argv[0]} {version}: what its losses leave at a token that the whole group shares\n")
    print(
        "| "
        + " | ".join(("loss", "where", *REGIMES, TORN))
        + " |\n|---|---"
        + "|---:" * len(SETTINGS)
        + "|"
    )
    draws = [Draw(0, k) for k in range(DRAWS)]
    for row in rows:
        cells = [left_over(row, draws, *setting) for setting in SETTINGS]
        print(f"| {row.name} | `{row.where}` | " + " | ".join(map(show, cells)) + " |")


if __name__ == "__main__":
    main()
