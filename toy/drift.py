"""A token that earns nothing: pushed by one batch that is used again and again, or by fresh ones.

    python -m toy.drift                        the tables: half a minute
    python -m toy.drift --plot toy/drift.png   and the picture (needs matplotlib)

An answer begins with one of two openers, which earn nothing: what follows is alike after both.
Then comes a short or a long solution, of equal reward, or a guess, which is never right. A solution
may slip. The policy has a logit for every choice.

One batch, used 32 times: 8 groups of 8 answers. All of them have the first opener, so where pushes
cancel at shared tokens it stays where it is. Fresh batches: 100 of one group each, answers have
either opener, and only the openers' logit is learnt. So the law of claim C27 says how far it
wanders. toy/README.md says what came out.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

import losses
from losses import Batch
from toy.figure import format_interval, line_style, make_figure, parse_plot, print_table, save
from toy.tax import BOTH, EXACT, LOCAL, ROWS, Row, compute_push

G = 8
# The tokens: openers 0 and 1; short 2, long 3, guess 4; after short right 5 or slip 6, after long
# right 7 or slip 8.
FILLER = 9  # gives an answer its length
# What follows an opener, and an answer's length: short right, short slip, long right, long slip,
# guess.
ENDINGS = (((2, 5), 6), ((2, 6), 6), ((3, 7), 12), ((3, 8), 12), ((4,), 3))
REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
LENGTHS = torch.tensor([length for _, length in ENDINGS])
MASK = torch.arange(12) < LENGTHS[:, None]  # (5, T)
TOKENS = torch.full(MASK.shape, FILLER)  # (5, T), with the first opener
for i, (choices, _) in enumerate(ENDINGS):
    TOKENS[i, : len(choices) + 1] = torch.tensor((0, *choices))


def log_table(w: Tensor) -> Tensor:
    """log pi of every token where it may come. Six logits: the opener, short, long, guess, right
    (after short, after long) -> (10,)."""
    pairs = logsigmoid(torch.stack([w, -w], 1))  # a choice of two has one logit
    branches = w[1:4].log_softmax(0)
    return torch.cat([pairs[0], branches, pairs[4], pairs[5], w.new_zeros(1)])


def chances(w: Tensor) -> Tensor:
    """Of the five answers, after an opener. (5,)."""
    return log_table(w)[TOKENS[:, 1:]].sum(1).exp()


# ---------------- one batch, used again and again

SEEDS, GROUPS, STEPS = 5, 8, 32  # start policies; groups of a batch; steps on it
SIZE = 0.6  # the length of the first step
METHODS = {
    "grpo": ROWS["grpo"],
    LOCAL: ROWS[LOCAL],
    "grpo, no clip": Row(functools.partial(losses.grpo, eps_low=math.inf, eps_high=math.inf)),
    # Its own clip range is made for long answers.
    "gspo": Row(functools.partial(losses.gspo, eps_low=0.2, eps_high=0.28)),
    "reinforce": Row(losses.reinforce),
    "dfpo-min": ROWS["dfpo-min"],
    "dfpo-min, eps 0.2": Row(functools.partial(losses.dfpo_min, eps=0.2)),  # this clip is ours
}
DOTTED = ("grpo, no clip", "dfpo-min, eps 0.2")  # in the picture
MEASURES = ("drift of the opener's log-odds", "expected reward")


def measure(w: Tensor, start: Tensor) -> Tensor:
    """MEASURES. (2,)."""
    return torch.stack([(w - start)[0].abs(), chances(w) @ REWARDS])


def repeat(row: Row, seed: int) -> Tensor:
    """What is measured after 0, 1, ..., STEPS gradient steps on the same answers. (STEPS + 1, 2)"""
    generator = torch.Generator().manual_seed(seed)
    start = w = torch.randn(6, generator=generator, dtype=torch.float64)
    picks = torch.multinomial(chances(w), GROUPS * G, replacement=True, generator=generator)
    tokens, mask = TOKENS[picks], MASK[picks]
    A = losses.group_advantages(REWARDS[picks], G, row.scale)[:, None].expand(mask.shape)
    nodes = losses.prefix_nodes(tokens, mask, G)
    old = log_table(w)[tokens]
    batch, rate, curve = Batch(old, old, A, mask, G, mask.shape[1]), None, [measure(w, start)]
    for _ in range(STEPS):
        push, _ = compute_push(row, batch, nodes, w, lambda w: log_table(w)[tokens])
        rate = rate or SIZE / push.norm()  # the first step is equally long for all methods
        w = w + rate * push
        curve.append(measure(w, start))
    return torch.stack(curve)


# ---------------- fresh batches

BATCHES, RUNS, RATE = 100, 4000, 1.0


def predict_deviation(prefix_baseline: bool) -> float:
    """Of the opener's log-odds after the last batch, from 0, where c = (R - J) / T (C27)."""
    p = chances(torch.zeros(6, dtype=torch.float64))
    c = (REWARDS - p @ REWARDS) / LENGTHS
    square = p @ c**2
    factor = (1 - (p @ c) ** 2 / square) * G / (G - 1) if prefix_baseline else 1.0
    return float(RATE * (BATCHES * 0.25 * square * factor / G).sqrt())


def wander(row: Row, runs: int = RUNS) -> Tensor:
    """The log-odds of the first opener after the last batch, from 0, (runs,).

    All runs stand in one batch of the loss, a group for each. The baseline is exact: what the
    policy expects is J whatever the opener.
    """
    generator, odds = torch.Generator().manual_seed(0), torch.zeros(runs, dtype=torch.float64)
    p = chances(torch.zeros(6, dtype=torch.float64))
    for _ in range(BATCHES):
        picks = torch.multinomial(p, runs * G, replacement=True, generator=generator)
        draws = torch.rand(len(picks), generator=generator, dtype=torch.float64)
        opener = (draws > odds.sigmoid().repeat_interleave(G)).long()  # (N,) 0 or 1
        tokens, mask = TOKENS[picks], MASK[picks]
        tokens[:, 0] = opener

        def forward(odds: Tensor, sign=1 - 2 * opener) -> Tensor:
            logp = logsigmoid(sign * odds.repeat_interleave(G))
            return pad(logp[:, None], (0, MASK.shape[1] - 1))

        old, A = forward(odds), (REWARDS - p @ REWARDS)[picks, None].expand(mask.shape)
        batch = Batch(old, old, A, mask, G, mask.shape[1])
        nodes = losses.prefix_nodes(tokens, mask, G)
        push, _ = compute_push(row, batch, nodes, odds, forward)
        odds = odds + RATE * runs * push  # the loss takes the mean over runs
    return odds


# ---------------- tables and picture


def plot(curves: dict[str, Tensor]):
    figure = make_figure(
        "On one batch used 32 times GRPO pushes a token that earns nothing. A baseline at every\n"
        "prefix stops the push and earns no more. What costs reward here is GRPO's clip.",
        4.0,
    )
    for k, axis in enumerate(figure.subplots(1, 2)):
        for name, curve in curves.items():
            style = line_style(name) | ({"linestyle": ":"} if name in DOTTED else {})
            axis.plot(curve[:, k], label=name, **style)
        axis.set(title=MEASURES[k], xlabel="steps on the same batch")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def main():
    path = parse_plot(__doc__)
    torch.set_num_threads(1)
    curves = {
        name: torch.stack([repeat(row, seed) for seed in range(SEEDS)]).mean(0)
        for name, row in METHODS.items()
    }
    print(f"{STEPS} steps on {GROUPS} groups of {G}, mean of {SEEDS} start policies\n")
    ends = {"start": curves["grpo"][0]} | {name: curve[-1] for name, curve in curves.items()}
    print_table({name: [f"{x:.3f}" for x in end] for name, end in ends.items()}, MEASURES)
    print(f"\n{BATCHES} fresh batches of one group of {G}, {RUNS} runs: log-odds of the opener\n")
    rows = {}
    for name in (EXACT, BOTH):
        end = wander(ROWS[name])
        deviations = predict_deviation(ROWS[name].prefix_baseline), end.std()
        rows[name] = [*(f"{x:.3f}" for x in deviations), format_interval(end)]
    print_table(rows, ["deviation, predicted", "measured", "mean"])
    if path:
        save(plot(curves), path)


if __name__ == "__main__":
    main()
