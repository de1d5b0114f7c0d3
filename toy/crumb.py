"""The crumb: divided by the group's std, a policy can stay at a tenth of the reward for good.

    python -m toy.crumb                        the tables: half a minute
    python -m toy.crumb --plot toy/crumb.png   and the picture (needs matplotlib)

    prompt -+- usual way: format ------- 0.1   surely; the answer is wrong
            `- rare way: no format --+-- 1     with chance 0.45
                                     `-- 0

    prompt -+- first way --------------- 0.7   surely
            |- second way -----------+-- 1     with chance 0.4
            |                        `-- 0.5
            `- third way ------------+-- 0.75  with chance 0.72
                                     `-- 0.1

An answer is one token, its way, and the policy has a logit for each way. So all lengths are equal,
and with one update a batch nothing is clipped. The rows differ in what divides R - mean, and in
nothing else. Nothing is sampled: all groups are enumerated, and each counts with its probability.
So the batch of "batch" is very large, and all of this one prompt. toy/README.md says what came out,
and claims C29 and C30 why.
"""

from __future__ import annotations

import torch
from torch import Tensor

import losses
from toy.figure import COLORS, make_figure, parse_plot, print_table, save
from toy.worlds import ADAM, PLAIN, Groups, Outcome, Row, train, way_log_probs

CRUMB, RIGHT = 0.1, 0.45  # what the usual way earns; the chance of the rare way to earn 1
RARE_WAY = [Outcome(0, 1.0, CRUMB, 1), Outcome(1, RIGHT, 1.0, 1), Outcome(1, 1 - RIGHT, 0.0, 1)]
FIRST, SECOND, THIRD = [(1.0, 0.7)], [(0.4, 1.0), (0.6, 0.5)], [(0.72, 0.75), (0.28, 0.1)]
THREE_WAYS = [
    Outcome(way, chance, reward, 1)
    for way, ends in enumerate((FIRST, SECOND, THIRD))
    for chance, reward in ends
]
SCALES = {  # of group_advantages: in the picture label, colour (a method's with that scale), style
    "mean": ("nothing (dr-grpo)", COLORS["dr-grpo"], "-"),
    "batch": ("the batch's std", "#8C564B", "--"),
    "std": ("the group's std (grpo)", COLORS["grpo"], "-"),
}
STARTS = torch.tensor([[0.98, 0.02], [0.95, 0.05], [0.92, 0.08]], dtype=torch.float64)  # shares
THREE_STARTS = torch.tensor([[0.33, 0.33, 0.34], [0.1, 0.1, 0.8]], dtype=torch.float64)
G, BATCHES, THREE_BATCHES = 8, 300, 1200
ADAM_RATE, PLAIN_RATE = 0.03, 2.0


def expected_reward(outcomes: list[Outcome], shares: Tensor) -> Tensor:
    """J, exactly. (..., W) -> (...)."""
    return sum(shares[..., o.way] * o.chance * o.reward for o in outcomes)


# ---------------- the figure


def train_rare(scale: str) -> Tensor:
    """The expected reward from each of STARTS. (BATCHES + 1, 3)."""
    row, groups, starts = Row(losses.grpo, scale), Groups(RARE_WAY, G), STARTS.log()
    path, _ = train(row, groups, way_log_probs, starts, 1, BATCHES, ADAM_RATE, ADAM)
    return expected_reward(RARE_WAY, path.softmax(2))


def train_three(scale: str, rate: float = PLAIN_RATE, optimizer=PLAIN) -> Tensor:
    """The shares of the three ways, G = 4, from each of THREE_STARTS. (THREE_BATCHES + 1, 2, 3)."""
    row, groups, starts = Row(losses.grpo, scale), Groups(THREE_WAYS, 4), THREE_STARTS.log()
    path, _ = train(row, groups, way_log_probs, starts, 1, THREE_BATCHES, rate, optimizer)
    return path.softmax(2)


def plot(rare: dict[str, Tensor], three: dict[str, Tensor]):
    figure = make_figure(
        "Undivided, or divided by the batch's std, R - mean teaches the better way.\n"
        "Divided by the group's std it keeps a usual way that earns 0.1, or a mixture of ways.",
        3.9,
    )
    panels = figure.subplots(1, 2)
    for scale, (label, color, dashes) in SCALES.items():
        style = dict(color=color, linestyle=dashes, linewidth=2)
        panels[0].plot(rare[scale], **style)
        panels[1].plot(three[scale], **style)
        panels[0].plot([], [], label=label, **style)
    panels[0].text(300, 0.11, "from 0.02 and 0.05", color=COLORS["grpo"], ha="right")
    panels[0].text(300, 0.42, "from 0.08", color=COLORS["grpo"], ha="right")
    panels[0].set(
        title="a rare way of share 0.02, 0.05, 0.08,\nexpected updates", ylabel="expected reward"
    )
    panels[1].set_title("three ways, two starts,\nexpected updates")
    for panel in panels:
        panel.set_xlabel("batches")
    figure.legend(title="R - mean of the group is divided by", loc="outside lower center", ncols=3)
    return figure


def main():
    path = parse_plot(__doc__)
    torch.set_num_threads(1)
    rare, rows = {}, {}
    for scale in SCALES:
        rare[scale] = train_rare(scale)
        rows[scale] = [f"{J:.3f}" for J in rare[scale][-1]]
    print(f"Expected reward after {BATCHES} batches, from three shares of the rare way; G = {G}.\n")
    print_table(rows, [f"from {share:.2f}" for share in STARTS[:, 1].tolist()])
    print(
        "\nThree ways, G = 4, exact: the end of plain ascent from two starts; with Adam J from/to\n"
    )
    three, rows = {}, {}
    for scale in SCALES:
        plain = train_three(scale)
        three[scale] = expected_reward(THREE_WAYS, plain)
        adam = train_three(scale, ADAM_RATE, ADAM)[THREE_BATCHES // 2 :]
        swing = expected_reward(THREE_WAYS, adam)
        ends = [f"{J:.4f}" for J in three[scale][-1]]
        shares = ", ".join(f"{share:.3f}" for share in plain[-1, 0])
        rows[scale] = [*ends, shares, f"{swing.min():.3f} to {swing.max():.3f}"]
    print_table(rows, ["J", "J", "shares, first start", "Adam"])
    if path:
        save(plot(rare, three), path)


if __name__ == "__main__":
    main()
