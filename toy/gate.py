"""What PPO's clip costs where nothing else differs: equal lengths, one constant divisor.

    python -m toy.gate                       the table: a minute or two
    python -m toy.gate --plot toy/gate.png   and the picture (needs matplotlib)

An answer is two tokens, each with a logit of its own. It is right with probability
0.3 + 0.1 [token 1 is good] + 0.1 [token 2 is good], so the best policy earns 0.5. At the start the
good token has a share of 0.5 in the first place and of 0.001 in the second, where the gradient is
250 times smaller. Nothing is sampled: all groups of 4 answers are enumerated, and each counts with
its probability under the policy that began the batch. Training makes M updates on each of 120
batches, by plain gradient ascent or by Adam. The table prints the best final reward over 21
learning rates. toy/README.md states the results; claims C19 and C22 explain them.

Adam gives both tokens updates of one size, so one rate suits both. With Adam GRPO reaches 0.500 at
rates from 0.1 to 2 with two updates on each batch, and from 0.03 to 0.5 with eight.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from toy.figure import COLORS, make_figure, pale_line, parse_plot, print_table, save
from toy.worlds import (
    ADAM,
    BOTH,
    EXACT,
    MEAN,
    PLAIN,
    ROWS,
    Groups,
    Outcome,
    Row,
    plan_log_probs,
    train,
)

G, BATCHES = 4, 120
# The logits of the good tokens.
START = torch.tensor([[0.0, math.log(0.001 / 0.999)]], dtype=torch.float64)
RATES = 10 ** torch.linspace(0.25, 3.25, 21, dtype=torch.float64)
ADAM_RATES = torch.tensor([0.01, 0.03, 0.1, 0.3, 0.5, 0.75, 1, 2, 3, 10], dtype=torch.float64)
NAMES = (MEAN, EXACT, BOTH, "dr-grpo", "gspo", "cispo", "dfpo-min", "grpo-symmetric")
NAMES += ("reinforce", "dfpo-min, eps 0.2")
LINES = (MEAN, "grpo-symmetric")  # of the picture, and with Adam


def make_groups() -> Groups:
    """Every group of G answers. An answer is two tokens, good (0) or bad (1), right or wrong."""
    outcomes = []
    for first, second in itertools.product((0, 1), repeat=2):
        right = 0.5 - 0.1 * (first + second)
        outcomes.append(Outcome(first, right, reward=1.0, length=2, plan=second))
        outcomes.append(Outcome(first, 1 - right, reward=0.0, length=2, plan=second))
    return Groups(outcomes, G)


def sweep(row: Row, rates: Tensor = RATES, optimizer=PLAIN, M: int = 2) -> Tensor:
    """The expected reward at the end of a run at each rate; M: updates on a batch."""
    groups, rates = make_groups(), rates[:, None]
    path, _ = train(row, groups, plan_log_probs, START, M, BATCHES, rates, optimizer)
    return 0.3 + 0.1 * path[-1].sigmoid().sum(1)


def plot(plain: dict[str, Tensor], adam: dict[str, Tensor]):
    figure = make_figure(
        "With Adam at ordinary rates PPO's clip costs nothing; without Adam it costs 0.1", 4.3
    )
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, rates, ends in ((left, ADAM_RATES, adam), (right, RATES, plain)):
        axis.plot(rates, ends[MEAN], **pale_line("grpo"))
        style = dict(color=COLORS["grpo-symmetric"], linewidth=2, linestyle="--")
        axis.plot(rates, ends["grpo-symmetric"], **style)
        axis.set(xscale="log", xlabel="learning rate")
    left.set(title="Adam", ylabel="final expected reward", ylim=(0.285, 0.52))
    levels = {0.5: "both tokens\nare good", 0.4: "one token\nis good", 0.3: "no token\nis good"}
    left.set_yticks([*levels], [f"{level}: {text}" for level, text in levels.items()])
    right.set_title("plain gradient ascent")
    orange, violet = COLORS["grpo"], COLORS["grpo-symmetric"]
    best = plain[MEAN].max()
    left.text(0.12, 0.49, "both clips:\n0.500 at rates\nfrom 0.1 to 2", va="top")
    left.text(3, 0.39, "PPO's clip\n(grpo)", color=orange, ha="center", va="top")
    right.text(95, 0.49, "sign-blind clip\n(grpo-symmetric):\n0.500", color=violet, va="top")
    right.text(1.8, 0.39, "token 2\nlearns too\nslowly", va="top")
    right.text(19, 0.3, "PPO's clip:\ntoken 1 is\npushed back", color=orange, ha="right")
    late = f"PPO's clip:\ntoken 2 is\npushed back,\n{best:.3f} at best"
    right.text(190, 0.39, late, color=orange, va="top")
    world = (
        "The world: an answer has two tokens, and is right with probability 0.3, plus 0.1 for each "
        "good token.\nAt the start, token 1 is good in half of the answers, and token 2 in one of "
        "a thousand."
    )
    figure.supxlabel(world, x=0.01, ha="left", fontsize=10.5)
    return figure


def main():
    path = parse_plot(__doc__)
    torch.set_num_threads(1)
    plain = {name: sweep(ROWS[name]) for name in NAMES}
    adam = {(name, M): sweep(ROWS[name], ADAM_RATES, ADAM, M) for M in (2, 8) for name in LINES}
    print(f"Plain gradient ascent: the best final reward over {len(RATES)} learning rates\n")
    print_table({name: [f"{x.max():.3f}"] for name, x in plain.items()}, ["M = 2"])
    print("\nAdam, by its learning rate\n")
    rows = {f"M = {M}; {name}": [f"{x:.3f}" for x in ends] for (name, M), ends in adam.items()}
    print_table(rows, ADAM_RATES.tolist())
    if path:
        save(plot(plain, {name: adam[name, 2] for name in LINES}), path)


if __name__ == "__main__":
    main()
