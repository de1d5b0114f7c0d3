"""verl's own policy losses as losses of ours, for the page of verify.py:

    python verify.py engines/verl_loss.py                   verl's default
    python verify.py engines/verl_loss.py name=gspo divisor=seq-mean-token-mean

It needs an installed verl; written against verl 0.9.1. divisor is verl's loss_agg_mode.
"""

from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from losses import Batch


def loss(batch: Batch, name: str = "vanilla", divisor: str = "token-mean") -> Tensor:
    rows, logp = dict(rollout_n=batch.group_size, ppo_micro_batch_size_per_gpu=1), batch.logp
    config = ActorConfig(strategy="fsdp", loss_agg_mode=divisor, **rows)
    facts = batch.logp_old, logp, batch.adv, batch.mask.to(logp.dtype)
    return get_policy_loss_fn(name)(*facts, loss_agg_mode=divisor, config=config)[0]
