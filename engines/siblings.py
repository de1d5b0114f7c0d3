"""How many tokens of a model's answers have a sibling at their history?

Cancelling can only do something where two answers of a group take a token after the same words.
This samples a group of answers to each of --prompts held-out prompts, and prints the share of such
tokens. The flags are train.py's; nothing is trained.

    python -m engines.siblings --model runs/NAME/start --prompts 100
    python -m engines.siblings --task gsm8k --model Qwen/Qwen2.5-0.5B-Instruct
"""

from __future__ import annotations

import torch
from torch import Tensor

import train
from losses import histories, prefix_nodes


def has_sibling(nodes: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """Whether another answer of the group takes a token after the same words. (N, T) bool.

    nodes are prefix_nodes, (N, T).
    """
    history = histories(nodes, group_size)[mask]  # of K tokens
    _, at, visitors = history.unique(return_inverse=True, return_counts=True)
    return torch.zeros_like(mask).masked_scatter(mask, visitors[at] > 1)


def main(argv: list[str] | None = None):
    config = train.parse(argv)
    task = train.load_task(config)
    policy = train.load_policy(config, task, config.model)
    answers = train.sample(policy, task, task.test[: config.prompts], 0, config)
    mask = answers.mask
    nodes = prefix_nodes(answers.tokens, mask, config.group_size)
    shared = has_sibling(nodes, mask, config.group_size)
    print(f"{int(mask.sum())} tokens of {len(mask)} answers")
    for first in (3, 10, config.max_tokens):
        share = shared[:, :first].sum() / mask[:, :first].sum()
        print(f"of the first {first} tokens of an answer, {share:.3f} have a sibling")


if __name__ == "__main__":
    main()
