"""A token that earns nothing: pushed by one batch that is used again and again, or by fresh ones.

    python -m toy.drift                        the tables: half a minute
    python -m toy.drift --plot toy/drift.png   and the picture (needs matplotlib)

An answer begins with one of two openers, which earn nothing: what follows is alike after both.
Then comes a short or a long solution, of equal reward, or a guess, which is never right. A solution
may slip. The policy has a logit for every choice.

One batch, used 32 times: 8 groups of 8 answers. All of them have the first opener, so a method that
cancels at shared tokens leaves it where it is. Fresh batches: 100 of one group each, answers have
either opener, and only the openers' logit is learnt. So the law of claim C23 says how far it
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
from toy.tax import CANCELLED, EXACT, ROWS, Row, compute_push

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
    "grpo, cancel": ROWS["grpo, cancel"],
    "grpo, no clip": Row(functools.partial(losses.grpo, eps_low=math.inf, eps_high=math.inf)),
    # Its own clip range is made for long answers.
    "gspo": Row(functools.partial(losses.gspo, eps_low=0.2, eps_high=0.28)),
    "reinforce": Row(losses.reinforce),
    "dfpo-min": ROWS["dfpo-min"],
    "dfpo-min, eps 0.2": Row(functools.partial(losses.dfpo_min, eps=0.2)),  # this clip is ours
    "pos-only": Row(losses.pos_only),
}
LINES = {  # of the picture, and their labels
    "grpo": "grpo",
    "grpo, cancel": "grpo, cancel",
    "dfpo-min, eps 0.2": "dfpo-min with a clip",
    "dfpo-min": "dfpo-min (no clip)",
    "reinforce": "reinforce (no clip)",
}
MEASURES = ("drift of the opener's log-odds", "entropy of the solutions (nats)", "expected reward")


def measure(w: Tensor, start: Tensor) -> Tensor:
    """MEASURES. (3,)."""
    right = (chances(w) * REWARDS)[[0, 2]]  # short, long
    shares = right / right.sum()
    return torch.stack([(w - start)[0].abs(), -(shares * shares.log()).sum(), right.sum()])


def repeat(row: Row, seed: int) -> Tensor:
    """What is measured after 0, 1, ..., STEPS gradient steps on the same answers. (STEPS + 1, 3)"""
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


def predict_deviation(cancels: bool) -> tuple[float, float]:
    """Of the opener's log-odds after one batch, from 0, where c = (R - J) / T; and t (C23)."""
    p = chances(torch.zeros(6, dtype=torch.float64))
    c = (REWARDS - p @ REWARDS) / LENGTHS
    m, square = p @ c, p @ c**2  # square: m^2 + v
    t = m**2 / square
    factor = (1 - t) * G / (G - 1) if cancels else 1.0
    return float(RATE * (0.25 * square * factor / G).sqrt()), float(t)


def wander(row: Row, runs: int = RUNS) -> Tensor:
    """The log-odds of the first opener before each batch and after the last, (BATCHES + 1, runs).

    All runs stand in one batch of the loss, a group for each. The baseline is exact: what the
    policy expects is J whatever the opener.
    """
    generator, path = torch.Generator().manual_seed(0), [torch.zeros(runs, dtype=torch.float64)]
    p = chances(torch.zeros(6, dtype=torch.float64))
    for _ in range(BATCHES):
        picks = torch.multinomial(p, runs * G, replacement=True, generator=generator)
        draws = torch.rand(len(picks), generator=generator, dtype=torch.float64)
        opener = (draws > path[-1].sigmoid().repeat_interleave(G)).long()  # (N,) 0 or 1
        tokens, mask = TOKENS[picks], MASK[picks]
        tokens[:, 0] = opener

        def forward(odds: Tensor, sign=1 - 2 * opener) -> Tensor:
            logp = logsigmoid(sign * odds.repeat_interleave(G))
            return pad(logp[:, None], (0, MASK.shape[1] - 1))

        old, A = forward(path[-1]), (REWARDS - p @ REWARDS)[picks, None].expand(mask.shape)
        batch = Batch(old, old, A, mask, G, mask.shape[1])
        nodes = losses.prefix_nodes(tokens, mask, G)
        push, _ = compute_push(row, batch, nodes, path[-1], forward)
        path.append(path[-1] + RATE * runs * push)  # the loss takes the mean over runs
    return torch.stack(path)


# ---------------- tables and picture


def plot(curves: dict[str, Tensor], walks: dict[str, Tensor]):
    figure = make_figure(
        "On one batch used 32 times, GRPO pushes a token that earns nothing. Cancelling stops the\n"
        "push and earns no more. What costs reward here is GRPO's clip; plain REINFORCE, without\n"
        "one, earns most. Over fresh batches the token wanders, with and without cancelling.",
        4.4,
        "The token is an opener: what follows does not depend on it. All answers of the one batch "
        "begin with one opener: 8 groups of 8,\nmean of 5 starts. dfpo-min: one weight for the "
        "whole group. A fresh batch: one group of 8, with a fixed baseline, which is the\n"
        "policy's expected reward. The curves are at twice the predicted deviation, the dots at "
        "twice that of 4,000 runs.",
    )
    drift, reward, fresh = figure.subplots(1, 3)
    for axis, k in ((drift, 0), (reward, 2)):
        for name, label in LINES.items():
            style = line_style(name) | ({"linestyle": ":"} if "eps" in name else {})
            axis.plot(curves[name][:, k], label=label, **style)
        axis.set_title(MEASURES[k])
        axis.set_xlabel("steps on the same batch")
    drift.legend(loc=(0.26, 0.12))  # where no line is
    batches = torch.arange(BATCHES + 1)
    runs = fresh.plot(walks[EXACT][:, :: RUNS // 20], color="#BBBBBB", linewidth=0.6, marker="")
    runs[0].set_label("20 runs of grpo")
    for name, label in ((EXACT, "grpo"), (CANCELLED, "grpo, cancel")):
        width, style = predict_deviation(ROWS[name].cancels)[0] * batches**0.5, line_style(name)
        fresh.plot(batches, 2 * width, label=label, **style)
        fresh.plot(batches, -2 * width, **style)
        fresh.plot(batches[::10], 2 * walks[name].std(1)[::10], "o", color=style["color"])
    fresh.set_title("the opener's log-odds")
    fresh.set_xlabel("fresh batches")
    fresh.set_ylim(-0.7, 0.35)  # there is room for the legend
    fresh.legend(loc="lower left")
    return figure


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    curves = {
        name: torch.stack([repeat(row, seed) for seed in range(SEEDS)]).mean(0)
        for name, row in METHODS.items()
    }
    print(f"{STEPS} steps on {GROUPS} groups of {G}, mean of {SEEDS} start policies\n")
    ends = {"start": curves["grpo"][0]} | {name: curve[-1] for name, curve in curves.items()}
    print_table({name: [f"{abs(x):.4f}" for x in end] for name, end in ends.items()}, MEASURES)
    print(f"\n{BATCHES} fresh batches of one group of {G}, {RUNS} runs: log-odds of the opener\n")
    walks = {name: wander(ROWS[name]) for name in (EXACT, CANCELLED)}
    rows = {}
    for name, walk in walks.items():
        width, t = predict_deviation(ROWS[name].cancels)
        numbers = (t, width * BATCHES**0.5, float(walk[-1].std()))
        rows[name] = [*(f"{x:.3f}" for x in numbers), format_interval(walk[-1].tolist())]
    print_table(rows, ["t", "deviation, predicted", "measured", "mean"])
    if path:
        save(plot(curves, walks), path)


if __name__ == "__main__":
    main()
