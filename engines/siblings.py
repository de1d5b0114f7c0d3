"""Would a baseline at every history pay in my run?

It can only do something where two answers of a group take a token after the same words: siblings.
And it pays only where those words decide much of the reward, claim C27. This samples a group of
answers to each of --prompts held-out prompts, scores them, and prints for the first tokens

    sibling_share  the share of tokens with a sibling,
    decided        how much of the reward is decided before a token with a sibling is taken,
    visitors       how many answers take a token at its history, on average,
    break_even     where `decided` is above it, --prefix-baseline takes noise away; below, it adds.

The flags are train.py's; nothing is trained.

    python -m engines.siblings --model runs/NAME/start --prompts 100
    python -m engines.siblings --task gsm8k --model Qwen/Qwen2.5-0.5B-Instruct
"""

from __future__ import annotations

from torch import Tensor

import train
from losses import decided, histories, prefix_nodes


def count_siblings(
    tokens: Tensor, mask: Tensor, rewards: Tensor, group_size: int, logp: Tensor | None = None
) -> dict[str, float]:
    """sibling_share and what losses.decided finds, {} there if no reward differs.

    (N, T) ids, (N, T) bool, (N,), G, (N, T) -> numbers.
    """
    nodes = prefix_nodes(tokens, mask, group_size)
    history = histories(nodes, group_size)[mask]  # of K tokens
    _, at, visitors = history.unique(return_inverse=True, return_counts=True)
    share = (visitors[at] > 1).double().mean().item()
    return {"sibling_share": share} | decided(rewards, nodes, mask, group_size, logp)


def main(argv: list[str] | None = None):
    config = train.parse(argv)
    task = train.load_task(config)
    policy = train.load_policy(config, task, config.model)
    answers = train.sample(policy, task, task.test[: config.prompts], 0, config)
    for first in (3, 10, config.max_tokens):
        tokens, mask, logp = (x[:, :first] for x in (answers.tokens, answers.mask, answers.logp))
        numbers = count_siblings(tokens, mask, answers.rewards, config.group_size, logp)
        said = ", ".join(f"{name} {value:.3f}" for name, value in numbers.items())
        print(f"first {first} tokens of {len(mask)} answers: {said}")


if __name__ == "__main__":
    main()
