"""AR and Lopti's headline in miniature: whose gradient is it, and does the order of two steps help?

    python -m experiments.lopti

The policy is the small GPT-2 of train.py after a short warm start, mostly on worked solutions. Its
tokens are parted by their probability into the quarters of 0 to 1. Two questions are asked of one
rollout batch, each from the same policy (AR/Lopti Fig. 1d-f):

1. How long is the gradient of a quarter's tokens, relative to that of all tokens?
2. Which share of the tokens with p > .75 moves the way its advantage points, after two steps?

grpo is here the token mean that Lopti stands on. AdamW has no history before the first step.
NEIGHBOURS.md says what came out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from experiments.nthr import make_start
from losses import METHODS, Batch, Method, token_grpo
from toy.figure import format_interval, print_table
from train import (
    Config,
    Policy,
    Scored,
    adamw,
    learn,
    log_probs_in_pieces,
    sample,
    score,
)

STARTS, RATE = 6, 1e-3
QUARTERS = ("p < .25", ".25 to .5", ".5 to .75", "p > .75")


def quarter_of(batch: Batch) -> Tensor:
    """In which quarter of 0 to 1 a token's old probability lies: 0 to 3. (N, T)."""
    return (4 * batch.logp_old.exp()).long().clamp(max=3)


def only(quarter: int) -> Callable[[Batch], Tensor]:
    """grpo's loss on the tokens of one quarter, divided by the number of all tokens."""

    def loss(batch: Batch) -> Tensor:
        others = quarter_of(batch) != quarter
        return token_grpo(replace(batch, adv=batch.adv.masked_fill(others, 0.0)))

    return loss


def half_grpo(batch: Batch) -> Tensor:
    return token_grpo(batch) / 2


LOW, HIGH = METHODS["lopti"].passes
ORDERS = {"grpo twice": (half_grpo, half_grpo), "lopti": (LOW, HIGH), "reversed": (HIGH, LOW)}


def climb(policy: Policy, scored: Scored, losses: Sequence[Callable]) -> tuple[Tensor, float]:
    """An optimiser step for each loss, on a copy of the policy.

    Returns log pi afterwards (N, T), and the first gradient's norm.
    """
    trial = replace(policy, model=copy.deepcopy(policy.model))
    config = Config(lr=RATE, minibatches=1, schedule="constant")
    method = Method(tuple(losses))
    updates = learn(trial, adamw(trial.model, RATE), scored, method, config)
    return log_probs_in_pieces(trial, scored.answers, config)[0], updates[0].grad_norm


def measure(policy: Policy, scored: Scored) -> tuple[Tensor, Tensor]:
    """Of one start and its rollout batch: each quarter's share of the tokens and the length of its
    gradient, (2, 4); the share of the probable tokens that moves the right way, (3,) orders."""
    batch = scored.batch
    counts = quarter_of(batch)[batch.mask].bincount(minlength=4)
    lengths = torch.tensor([climb(policy, scored, [only(q)])[1] for q in range(4)])
    whole = climb(policy, scored, [token_grpo])[1]
    probable = batch.mask & (quarter_of(batch) == 3) & (batch.adv != 0)
    right = []
    for losses in ORDERS.values():
        after, _ = climb(policy, scored, losses)
        as_A_says = (after - batch.logp_old) * batch.adv > 0
        right.append(as_A_says[probable].double().mean())
    return torch.stack([counts / counts.sum(), lengths / whole]), torch.stack(right)


def study(starts: int = STARTS) -> tuple[Tensor, dict[str, Tensor]]:
    """The measures of each quarter, (starts, 2, 4); and what the orders do, (starts,) each."""
    found = []
    for seed in range(starts):
        config = Config(seed=seed)
        policy, task = make_start(seed, direct=6)
        answers = sample(policy, task, task.test[: config.prompts], 1, config)
        scored = score(policy, answers, METHODS["lopti"], config, reference=None)
        found.append(measure(policy, scored))
    quarters, right = map(torch.stack, zip(*found, strict=True))
    twice, lopti, backwards = right.unbind(1)
    effects = {"grpo twice": twice, "lopti minus grpo twice": lopti - twice}
    return quarters, effects | {"reversed order minus lopti": backwards - lopti}


def main():
    torch.set_num_threads(1)
    quarters, effects = study()
    print(f"{STARTS} starts; mean +- half its 95 % interval\n")
    measures = zip(
        ("share of the tokens", "length of the gradient"), quarters.unbind(1), strict=True
    )
    print_table({k: [format_interval(x) for x in row.T] for k, row in measures}, QUARTERS)
    print(f"\nThe share of the tokens with {QUARTERS[3]} that moves the right way\n")
    print_table({k: [format_interval(x)] for k, x in effects.items()}, ["AdamW"])


if __name__ == "__main__":
    main()
