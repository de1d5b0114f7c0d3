"""When the learning tax costs reward, and that cancelling is not what saves it: three settings.

    python -m toy.tax                      the tables: a minute
    python -m toy.tax --plot toy/tax.png   and the picture (needs matplotlib)

An answer takes the better or the worse of two ways. On the better way it then makes a good or a
bad plan. With a good plan it is right with probability 0.6, with a bad one never. On the worse way
it is right with a fixed probability, at most 0.2. Filler without any choice follows and gives the
answer its length. The policy has one logit for the way, 2 at the start, and one for the plan, 0 at
the start.

Nothing is sampled. All groups of 4 answers are enumerated, and each counts with its probability
under the policy that began the batch. So an update is an expectation. The schedule is 120 batches
of 8 updates each, by plain gradient ascent; the first update has the length 0.1, and its rate
stays. A second table has Adam on the same exact updates. toy/README.md says what came out, and
claims C18 and C22 why.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from toy.figure import line_style, make_figure, parse_plot, print_table, save
from toy.worlds import ADAM, BOTH, EXACT, LOCAL, ROWS, Groups, Outcome, Row, plan_log_probs, train

G, BATCHES, UPDATES = 4, 120, 8
# The logits of the better way and of a good plan.
START = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
RIGHT = 0.6  # with a good plan
# lengths of right and wrong answers on the better way; chance to be right on the worse way, and
# lengths there
SETTINGS = {
    "better way: wrong is long": ((6, 24), 0.0, (32, 32)),
    "better way: wrong is short": ((24, 6), 0.0, (32, 32)),
    "worse way: right is short": ((16, 16), 0.2, (4, 24)),
}
NAMES = ("grpo", EXACT, BOTH, LOCAL, "gspo", "dr-grpo", "cispo", "dfpo-min")
ADAM_RATES = torch.tensor([0.01, 0.03, 0.1, 0.3, 0.5, 1, 3], dtype=torch.float64)
ADAM_ROWS = ("grpo", "dr-grpo")
LINES = (EXACT, BOTH, LOCAL, "gspo", "dr-grpo")  # of the picture


def make_groups(setting: str) -> Groups:
    (right, wrong), chance, (worse_right, worse_wrong) = SETTINGS[setting]
    outcomes = [
        Outcome(0, RIGHT, 1.0, right, plan=0),
        Outcome(0, 1 - RIGHT, 0.0, wrong, plan=0),
        Outcome(0, 1.0, 0.0, wrong, plan=1),
        Outcome(1, chance, 1.0, worse_right),
        Outcome(1, 1 - chance, 0.0, worse_wrong),
    ]
    return Groups([outcome for outcome in outcomes if outcome.chance], G)


# ---------------- the figure


def expected_reward(setting: str, logits: Tensor) -> Tensor:
    """(..., 2) -> (...)."""
    way, plan = logits.sigmoid().unbind(-1)
    return way * plan * RIGHT + (1 - way) * SETTINGS[setting][1]


def find_rewards(setting: str, row: Row) -> tuple[Tensor, float]:
    """The expected reward before each batch and after the last, (BATCHES + 1,); the tax share."""
    path, tax = train(row, make_groups(setting), plan_log_probs, START, UPDATES, BATCHES)
    return expected_reward(setting, path[::UPDATES, 0]), tax


def find_adam_rewards(setting: str, row: Row) -> Tensor:
    """The expected reward after the last batch, with Adam at each of ADAM_RATES."""
    starts, rates = START.repeat(len(ADAM_RATES), 1), ADAM_RATES[:, None]
    groups = make_groups(setting)
    path, _ = train(row, groups, plan_log_probs, starts, UPDATES, BATCHES, rates, ADAM)
    return expected_reward(setting, path[-1])


def plot(curves: dict[tuple[str, str], Tensor]):
    figure = make_figure(
        "One divisor for all lengths (dr-grpo) ends best in all three worlds. In two of them\n"
        "GRPO with J as baseline loses as much with a baseline at every prefix as without.",
        4.0,
    )
    axes = figure.subplots(1, len(SETTINGS), sharey=True)
    axes[0].set_ylabel("expected reward (best: 0.6)")
    for axis, setting in zip(axes, SETTINGS, strict=True):
        for name in LINES:
            style = line_style(name)
            if name == LOCAL:
                style["linestyle"] = ":"
            axis.plot(curves[setting, name], label=name, **style)
        axis.set(title=setting, xlabel=f"batches of {UPDATES} updates")
    lines = axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=3)
    return figure


def main():
    path = parse_plot(__doc__)
    torch.set_num_threads(1)
    rows, curves = {}, {}
    for name in NAMES:
        rows[name] = []
        for setting in SETTINGS:
            curves[setting, name], tax = find_rewards(setting, ROWS[name])
            of_group = name not in (EXACT, BOTH, LOCAL)  # of this the tax speaks
            cell = f"{curves[setting, name][-1]:.3f}"
            rows[name].append(cell + f" ({tax:.3f})" * of_group)
    print(f"Expected reward after {BATCHES} batches of {UPDATES} updates; 0.6 is the best.")
    print("In brackets: the learning tax of a batch's last update, mean of all batches\n")
    print_table(rows, SETTINGS)
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
