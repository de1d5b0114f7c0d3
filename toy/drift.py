"""A token that earns nothing: which loss moves it, and does the reward notice?

    python -m toy.drift        the table: seconds

    prompt - opener -+- short -+- right    6 tokens
                     |         `- slip     6
                     |- long --+- right   12
                     |         `- slip    12
                     `- guess - wrong      3

An answer begins with an opener, which earns nothing. A short or a long solution of equal reward
follows, or a guess, which is never right. A solution may slip. The policy has a logit for every
choice, and one for the opener against another opener that no answer takes.

Training has 20 batches of 8 groups of 8 answers, with 4 updates each, by plain gradient ascent. All
answers share the opener, so its log-odds stay where pushes cancel at shared tokens. Under GRPO they
do not cancel, because guesses are short and wrong. toy/README.md states the results.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import losses
from losses import Batch
from toy.figure import print_table
from toy.policy import pad
from toy.worlds import LOCAL, MEAN, ROWS, Row, ascend

SEEDS = 5  # start policies
G, GROUPS, BATCHES, UPDATES = 8, 8, 20, 4  # answers of a group; groups of a batch; updates on it
SIZE = 0.2  # the length of the first update

# Every answer, with its length. Tokens: 1 is the opener; then 2 short, 3 long or 4 guess; after
# short 5 right or 6 slip, after long 7 right or 8 slip. Filler, 0, gives an answer its length.
ANSWERS = (((1, 2, 5), 6), ((1, 2, 6), 6), ((1, 3, 7), 12), ((1, 3, 8), 12), ((1, 4), 3))
REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
TOKENS, MASK = pad([(*path, *[0] * (T - len(path))) for path, T in ANSWERS])  # (5, 12)
NAMES = (MEAN, LOCAL, "dr-grpo", "dfpo-min")


def log_table(w: Tensor) -> Tensor:
    """log pi of every token at its place. Six logits: the opener, short, long, guess, right
    after short, right after long -> (9,)."""
    ends = logsigmoid(torch.stack([w[4:], -w[4:]], 1)).flatten()  # a choice of two has one logit
    return torch.cat([w.new_zeros(1), logsigmoid(w[:1]), w[1:4].log_softmax(0), ends])


def chances(w: Tensor) -> Tensor:
    """Of the five answers, after the opener. (5,)."""
    return log_table(w)[TOKENS[:, 1:]].sum(1).exp()


def train(row: Row, seed: int) -> Tensor:
    """How far the opener's log-odds move, and the expected reward after the last batch. (2,)."""
    generator = torch.Generator().manual_seed(seed)
    start = w = torch.randn(6, generator=generator, dtype=torch.float64)
    rate = None
    for _ in range(BATCHES):
        picks = torch.multinomial(chances(w), GROUPS * G, replacement=True, generator=generator)
        tokens, mask = TOKENS[picks], MASK[picks]
        A = losses.group_advantages(REWARDS[picks], G, row.scale)[:, None].expand(mask.shape)
        nodes, old = losses.prefix_nodes(tokens, mask, G), log_table(w)[tokens]
        batch = Batch(old, old, A, mask, G, mask.shape[1], logp_ref=old)
        counts = torch.full(picks.shape, 1 / len(picks), dtype=torch.float64)
        for _ in range(UPDATES):
            push = ascend(
                row, batch, counts, nodes, lambda w, tokens=tokens: log_table(w)[tokens], w
            )
            rate = rate or SIZE / push.norm()  # all methods: first updates of one length
            w = w + rate * push
    return torch.stack([(w - start)[0].abs(), chances(w) @ REWARDS])


def measure(row: Row) -> Tensor:
    """The mean of `train` over start policies. (2,)."""
    return torch.stack([train(row, seed) for seed in range(SEEDS)]).mean(0)


def main():
    torch.set_num_threads(1)
    print(f"{BATCHES} batches of {UPDATES} updates, mean of {SEEDS} start policies\n")
    rows = {name: [f"{x:.3f}" for x in measure(ROWS[name])] for name in NAMES}
    print_table(rows, ["drift of the opener's log-odds", "final expected reward"])


if __name__ == "__main__":
    main()
