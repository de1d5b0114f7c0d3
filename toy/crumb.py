"""The crumb: a small reward for the format can hold a policy at 0.1, if A is divided by the std.

    python -m toy.crumb                        the table: seconds
    python -m toy.crumb --plot toy/crumb.png   and the picture (needs matplotlib)

    prompt -+- usual strategy: format ------ 0.1   always; the answer is wrong
            `- rare strategy: no format -+-- 1     with probability 0.45
                                         `-- 0

An answer is one token, its strategy, and the policy has a logit for each strategy. So all lengths
are equal, and with one update per batch nothing is clipped. The rows differ only in what divides
R - mean. Nothing is sampled: all groups are enumerated, and each counts with its probability. So
the batch of "batch" is very large, and has this prompt only. toy/README.md states the results;
claims C29c and C30 explain them.

The policy trains by Adam (rate 0.03, G = 8). Divided by the group's std, the rare strategy dies out
if its share at the start is below 0.0795.
"""

from __future__ import annotations

import torch
from torch import Tensor

import losses
from toy.figure import COLORS, make_figure, parse_plot, print_table, save
from toy.worlds import Groups, Outcome, Row, adam, train, way_log_probs

CRUMB, RIGHT = 0.1, 0.45  # the usual strategy's reward; the rare one's probability to earn 1
RARE_WAY = [Outcome(0, 1.0, CRUMB, 1), Outcome(1, RIGHT, 1.0, 1), Outcome(1, 1 - RIGHT, 0.0, 1)]
SCALES = {  # of group_advantages: the style in the pictures, in which two lines often coincide
    "std": dict(color=COLORS["grpo"], linewidth=2),
    "batch": dict(color="black", linewidth=1.3, linestyle="--"),
    "mean": dict(color=COLORS["dr-grpo"], alpha=0.35, linewidth=7, zorder=1),  # pale, beneath
}
STARTS = torch.tensor([[0.98, 0.02], [0.95, 0.05], [0.92, 0.08]], dtype=torch.float64)  # shares
G, BATCHES, ADAM_RATE = 8, 300, 0.03


def train_rare(row: Row, starts: Tensor = STARTS) -> Tensor:
    """The expected reward from each of the starts. (BATCHES + 1, starts)."""
    groups = Groups([RARE_WAY] * len(starts), G)
    path = train(row, groups, way_log_probs, starts.log(), 1, BATCHES, adam(ADAM_RATE))
    return path.softmax(2) @ torch.tensor([CRUMB, RIGHT], dtype=path.dtype)


def plot_rare(rewards: dict[str, Tensor]):
    figure = make_figure(
        "Dividing by the group's std keeps the reward at 0.1 if better answers are rare", 3.5
    )
    panels = figure.subplots(1, len(STARTS), sharey=True)
    for k, (panel, start) in enumerate(zip(panels, STARTS, strict=True)):
        for scale, style in SCALES.items():
            panel.plot(rewards[scale][:, k], **style)
        panel.set(title=f"rare strategy: {start[1]:.0%} at the start", xlabel="updates")
    labels = (
        (0.41, "divided by nothing\n(dr-grpo), or the\nbatch's std (dashed)", COLORS["dr-grpo"]),
        (0.18, "divided by the\ngroup's std (grpo)", COLORS["grpo"]),
    )
    for height, text, color in labels:
        panels[0].text(BATCHES, height, text, color=color, ha="right", va="top")
    panels[0].set(ylabel="expected reward", ylim=(0, 0.5))
    return figure


def main():
    path = parse_plot(__doc__)
    torch.set_num_threads(1)
    rare = {scale: train_rare(Row(losses.grpo, scale)) for scale in SCALES}
    rows = {scale: [f"{x:.3f}" for x in rewards[-1]] for scale, rewards in rare.items()}
    print(f"Expected reward after {BATCHES} updates, by the rare strategy's share; G = {G}.\n")
    print_table(rows, [f"{share:.0%} at the start" for share in STARTS[:, 1].tolist()])
    if path:
        save(plot_rare(rare), path)


if __name__ == "__main__":
    main()
