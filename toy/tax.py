"""When unequal weights cost reward, and why cancelling is not what saves it: three worlds.

    python -m toy.tax                      the tables: a minute
    python -m toy.tax --plot toy/tax.png   and the picture (needs matplotlib)

An answer follows the better or the worse of two strategies. With the better one it then makes a
good or a bad plan. With a good plan it is right with probability 0.6, with a bad one never. With
the worse strategy it is right with a fixed probability, at most 0.2. Filler without any choice
follows and gives the answer its length. The policy has one logit for the strategy, 2 at the start,
and one for the plan, 0 at the start.

Nothing is sampled. All groups of 4 answers are enumerated, and each counts with its probability
under the policy that began the batch. So each update is an expected update. The schedule is 120
batches of 8 updates each, by plain gradient ascent. The first update has the length 0.1, and its
rate stays. toy/README.md states the results; claims C18 and C22 explain them.

In brackets the first table prints the tax share, the part of all pushes on shared tokens that is
due to unequal weights (1/T for GRPO). It is about as high in world 1 as in the others, so it does
not say what the tax costs. Rows with an expected-reward baseline do not divide by the std (C22).

A second table shows that the harm survives Adam. At rates from 0.01 to 0.3 GRPO ends near 0.42 in
world 2 and at 0.200 in world 3. From a rate of 0.5 on, its end in world 2 depends on the rate. In
world 3 the first updates are then so large that they settle the choice before the lengths can.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

import losses
from toy.figure import COLORS, make_figure, parse_plot, print_table, save
from toy.worlds import (
    BOTH,
    EXACT,
    LOCAL,
    MEAN,
    ROWS,
    Groups,
    Outcome,
    Row,
    adam,
    plan_log_probs,
    train,
    weighed_pushes,
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
NAMES = (MEAN, EXACT, BOTH, LOCAL, "gspo", "dr-grpo", "cispo", "dfpo-min")
ADAM_RATES = torch.tensor([0.01, 0.03, 0.1, 0.3, 0.5, 1, 3], dtype=torch.float64)
ADAM_ROWS = (MEAN, "dr-grpo")
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
def make_groups(*settings: str) -> Groups:
    worlds = []
    for (right, wrong), chance, (worse_right, worse_wrong) in map(SETTINGS.get, settings):
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
    return train(row, make_groups(*SETTINGS), plan_log_probs, START.expand(3, -1), UPDATES, BATCHES)


def expected_reward(setting: str, logits: Tensor) -> Tensor:
    """(..., 2) -> (...)."""
    way, plan = logits.sigmoid().unbind(-1)
    return way * plan * RIGHT + (1 - way) * SETTINGS[setting][1]


def find_rewards(path: Tensor) -> Tensor:
    """The expected reward before each batch and after the last. (3, BATCHES + 1)."""
    return torch.stack([expected_reward(x, path[::UPDATES, k]) for k, x in enumerate(SETTINGS)])


def find_taxes(row: Row, path: Tensor) -> Tensor:
    """The tax share of a batch's last update in each world, the mean over all batches. (3,)."""
    groups, taxes = make_groups(*SETTINGS), []
    for first, last in zip(path[:-1:UPDATES], path[UPDATES - 1 :: UPDATES], strict=True):
        batch, counts = groups.batch(plan_log_probs(groups, first), row.scale)
        batch = replace(batch, logp=plan_log_probs(groups, last).requires_grad_())
        c = weighed_pushes(row, batch, counts, groups.nodes)
        own = [batch.mask & (groups.world == k)[:, None] for k in range(3)]
        taxes.append([losses.learning_tax(c, batch.adv[:, 0], groups.nodes, x) for x in own])
    return torch.tensor(taxes).mean(0)


def find_adam_rewards(setting: str, row: Row) -> Tensor:
    """The expected reward after the last batch, with Adam at each of ADAM_RATES."""
    rates, starts = ADAM_RATES[:, None], START.expand(len(ADAM_RATES), -1)
    groups = make_groups(*[setting] * len(rates))
    path = train(row, groups, plan_log_probs, starts, UPDATES, BATCHES, adam(rates))
    return expected_reward(setting, path[-1])


def plot(curves: dict[tuple[str, str], Tensor]):
    figure = make_figure("GRPO's division by length costs reward in two of three worlds", 4.2)
    axes = figure.subplots(1, len(SETTINGS), sharey=True)
    axes[0].set(ylabel="expected reward (best: 0.6)", ylim=(0.13, 0.65))
    for k, (axis, setting) in enumerate(zip(axes, SETTINGS, strict=True), 1):
        for name, (label, style) in LINES.items():
            axis.plot(curves[setting, name], label=label, **style)
        for name, place in ((MEAN, "top"), ("dr-grpo", "bottom")):
            end, shift = curves[setting, name][-1], 0.012 * (1 if place == "bottom" else -1)
            color = LINES[name][1]["color"]
            axis.text(BATCHES, end + shift, f"{end:.3f}", color=color, ha="right", va=place)
        axis.set(title=f"world {k}\n{setting}", xlabel=f"batches of {UPDATES} updates")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure


def main():
    path = parse_plot(__doc__)
    torch.set_num_threads(1)
    rows, curves = {}, {}
    for name in NAMES:
        logits = climb(ROWS[name])
        rewards = find_rewards(logits)
        curves |= {(setting, name): x for setting, x in zip(SETTINGS, rewards, strict=True)}
        rows[name] = [f"{x:.3f}" for x in rewards[:, -1]]
        if name not in (EXACT, BOTH, LOCAL):  # the tax share is defined for the others
            taxes = find_taxes(ROWS[name], logits)
            rows[name] = [f"{x} ({t:.3f})" for x, t in zip(rows[name], taxes, strict=True)]
    print(f"Expected reward after {BATCHES} batches of {UPDATES} updates; 0.6 is the best.")
    print("In brackets: the tax share of a batch's last update, mean over all batches\n")
    print_table(rows, [f"{k}: {name}" for k, name in enumerate(SETTINGS, 1)])
    print("\nThe same with Adam, by its learning rate\n")
    rows = {
        f"{setting}; {name}": [f"{x:.3f}" for x in find_adam_rewards(setting, ROWS[name])]
        for setting, name in itertools.product([*SETTINGS][1:], ADAM_ROWS)  # where GRPO loses
    }
    print_table(rows, ADAM_RATES.tolist())
    if path:
        save(plot(curves), path)


if __name__ == "__main__":
    main()
