"""Does toy/tax.py's result survive sampling? Its settings 3 and 5, with sampled groups.

    python -m experiments.sampled_tax

A batch has 16 groups of 4 answers, sampled from the policy. All else is as in toy/tax.py: 120
batches of 8 updates each. The optimiser is SGD or AdamW. Each method has its own learning rate, the
best of a grid on other seeds. The reward is the expected one, the mean of the last 20 batches. As
runs tend to end at one of two rewards, those that end below 0.5 are counted, too. cispo divides by
the same number of tokens in every batch here, not by those of the sampled answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch.optim import SGD, AdamW

from experiments.curves import format_cell, mean, row
from losses import METHODS
from toy import tax

SAMPLED, LAST = 16, 20  # groups in a batch, batches whose reward counts
SETTINGS = tuple(tax.SETTINGS)[2], tuple(tax.SETTINGS)[4]
PAIRS, OTHERS = 40, 8  # runs of a method, in pairs with those of the others; runs per rate
# For SGD, lengths of the first expected update; AdamW's are learning rates.
RATES = {
    "SGD": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
    "AdamW": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
}
LOST = 0.5  # a run that ends below has lost the better way, or the better plan, in part


def scale_of(name: str) -> str:
    return METHODS[name.partition("+")[0]].scale


def make_optimizers(setting: str, name: str, kind: str) -> dict[float, Callable]:
    """rate -> [logits] -> optimizer."""
    if kind == "AdamW":
        return {rate: partial(AdamW, lr=rate, weight_decay=0.0) for rate in RATES[kind]}
    groups, logits = tax.make_groups(setting), torch.tensor(tax.START, dtype=torch.float64)
    batch = tax.start_batch(groups, logits, scale_of(name))
    size = float(tax.compute_push(groups, name, batch, logits)[0].norm())
    return {rate: partial(SGD, lr=rate / size) for rate in RATES[kind]}


def final_rewards(
    setting: str, name: str, make_optimizer: Callable, runs: int, seed: int
) -> list[float]:
    """Of several runs, each with a policy and samples of its own."""
    groups, generator = tax.make_groups(setting, runs), torch.Generator().manual_seed(seed)
    logits = torch.tensor(tax.START * runs, dtype=torch.float64)  # (runs, 2)
    optimizer = make_optimizer([logits])
    rewards = []
    for _ in range(tax.BATCHES):
        old = tax.log_probs(groups, logits)
        p = groups.probabilities(old).view(runs, -1)
        drawn = torch.multinomial(p, SAMPLED, replacement=True, generator=generator)
        counts = torch.zeros_like(p).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=p.dtype))
        batch = groups.batch(old, counts.flatten() / SAMPLED, scale_of(name))
        for _ in range(tax.UPDATES):
            logits.grad = -tax.compute_push(groups, name, batch, logits)[0]
            optimizer.step()
        rewards.append(tax.expected_reward(setting, logits))
    return torch.stack(rewards[-LAST:]).mean(0).tolist()


def main():
    torch.set_num_threads(1)
    for setting, kind in itertools.product(SETTINGS, RATES):
        print(f"\n{setting}, {kind}\n")
        print(
            "| method | rate | reward | lost | minus grpo |\n|---|---:|---:|---:|---:|", flush=True
        )
        rewards = {}
        for name in tax.NAMES:
            optimizers = make_optimizers(setting, name, kind)
            tried = {}
            for rate, optimizer in optimizers.items():
                tried[rate] = mean(final_rewards(setting, name, optimizer, OTHERS, seed=1))
            best = max(tried, key=tried.get)
            rewards[name] = final_rewards(setting, name, optimizers[best], PAIRS, seed=0)
            gaps = [x - y for x, y in zip(rewards[name], rewards["grpo"], strict=True)]
            gap = "" if name == "grpo" else format_cell(gaps, 3, paired=True)
            lost = sum(reward < LOST for reward in rewards[name])
            cells = [format_cell(rewards[name], 3), f"{lost} of {PAIRS}", gap]
            print(row(name, best, cells), flush=True)


if __name__ == "__main__":
    main()
