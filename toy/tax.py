"""When unequal weights cost reward, and why cancelling is not what saves it: three worlds.

    python -m toy.tax                      the table: ten seconds
    python -m toy.tax --plot toy/tax.png   and the picture (needs matplotlib)

An answer follows the better or the worse of two strategies. With the better one it then makes a
good or a bad plan. With a good plan it is right with probability 0.6, with a bad one never. With
the worse strategy it is right with a fixed probability, at most 0.2. Filler without any choice
follows and gives the answer its length. The policy has one logit for the strategy, 2 at the start,
and one for the plan, 0 at the start.

Nothing is sampled. All groups of 4 answers are enumerated, and each counts with its probability
under the policy that began the batch. So each update is an expected update. The schedule is 120
batches of 8 updates each, by plain gradient ascent. The first update has the length 0.1, and its
rate stays. toy/README.md states the results; claims C18 and C22 explain them. Rows with an
expected-reward baseline do not divide by the std (C22).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from toy.figure import COLORS, make_figure, parse_plot, print_table, save
from toy.worlds import (
    BOTH,
    MEAN,
    ROWS,
    Groups,
    Outcome,
    Row,
    plan_log_probs,
    train,
)

G, BATCHES, UPDATES = 4, 120, 8
# The logits of the better strategy and of a good plan.
START = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
RIGHT = 0.6  # with a good plan
# Better strategy: lengths of right and wrong answers. Worse strategy: the probability to be right,
# and the lengths of right and wrong answers.
SETTINGS = {
    "better strategy: wrong is long": ((6, 24), 0.0, (32, 32)),
    "better strategy: wrong is short": ((24, 6), 0.0, (32, 32)),
    "worse strategy: right is short": ((16, 16), 0.2, (4, 24)),
}
LINES = {  # of the picture: their labels, and their styles
    MEAN: ("GRPO, group mean", dict(color=COLORS["grpo"], linewidth=5)),
    BOTH: (
        "GRPO, expected-reward and prefix baseline",
        dict(color="black", linewidth=1.2, linestyle="--"),
    ),
    "dr-grpo": (
        "Dr. GRPO, one divisor for all answers",
        dict(color=COLORS["dr-grpo"], linewidth=2.2),
    ),
}


@cache
def make_groups() -> Groups:
    """All groups of the three worlds."""
    worlds = []
    for (right, wrong), chance, (worse_right, worse_wrong) in SETTINGS.values():
        outcomes = [
            Outcome(0, RIGHT, 1.0, right, plan=0),
            Outcome(0, 1 - RIGHT, 0.0, wrong, plan=0),
            Outcome(0, 1.0, 0.0, wrong, plan=1),
            Outcome(1, chance, 1.0, worse_right),
            Outcome(1, 1 - chance, 0.0, worse_wrong),
        ]
        worlds.append([outcome for outcome in outcomes if outcome.chance])
    return Groups(worlds, G)


# ---------------- the figure


def climb(row: Row) -> Tensor:
    """The logits in all worlds, at the start and after every update."""
    return train(row, make_groups(), plan_log_probs, START.expand(3, -1), UPDATES, BATCHES)


def find_rewards(path: Tensor) -> Tensor:
    """The expected reward before each batch and after the last. (3, BATCHES + 1)."""
    way, plan = path[::UPDATES].sigmoid().unbind(-1)  # (BATCHES + 1, 3)
    worse = torch.tensor([chance for _, chance, _ in SETTINGS.values()], dtype=path.dtype)
    return (way * plan * RIGHT + (1 - way) * worse).T


def plot(curves: dict[str, Tensor]):
    """Three of the rows, with their ends."""
    figure = make_figure("GRPO's division by length costs reward in two of three worlds", 4.2)
    axes = figure.subplots(1, len(SETTINGS), sharey=True)
    axes[0].set(ylabel="expected reward (best: 0.6)", ylim=(0.13, 0.65))
    for k, (axis, setting) in enumerate(zip(axes, SETTINGS, strict=True)):
        for name, (label, style) in LINES.items():
            axis.plot(curves[name][k], label=label, **style)
        for name, place in ((MEAN, "top"), ("dr-grpo", "bottom")):
            end, shift = curves[name][k][-1], 0.012 * (1 if place == "bottom" else -1)
            color = LINES[name][1]["color"]
            axis.text(BATCHES, end + shift, f"{end:.3f}", color=color, ha="right", va=place)
        axis.set(title=f"world {k + 1}\n{setting}", xlabel=f"batches of {UPDATES} updates")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure


def main():
    path = parse_plot(__doc__)
    torch.set_num_threads(1)
    curves = {name: find_rewards(climb(row)) for name, row in ROWS.items()}
    rows = {name: [f"{x:.3f}" for x in curve[:, -1]] for name, curve in curves.items()}
    print(f"Expected reward after {BATCHES} batches of {UPDATES} updates; 0.6 is the best\n")
    print_table(rows, [f"{k}: {name}" for k, name in enumerate(SETTINGS, 1)])
    if path:
        save(plot(curves), path)


if __name__ == "__main__":
    main()
