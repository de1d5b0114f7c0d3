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

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad
from torch.optim import SGD, Adam, Optimizer

import losses
from losses import Batch
from toy.figure import line_style, make_figure, parse_plot, print_table, save
from toy.worlds import Groups, Outcome


class Row(NamedTuple):
    """A line of a table: a loss, its advantage, and whether it has a baseline at every prefix."""

    loss: Callable[[Batch], Tensor]
    scale: str = "std"  # R minus the group's mean, or "exact": R minus what the policy expects
    prefix_baseline: bool = False


G, BATCHES, UPDATES = 4, 120, 8
START = (2.0, 0.0)  # the logits of the better way and of a good plan
SIZE = 0.1  # the length of the first update
RIGHT = 0.6  # with a good plan
# lengths of right and wrong answers on the better way; chance to be right on the worse way, and
# lengths there
SETTINGS = {
    "better way: wrong is long": ((6, 24), 0.0, (32, 32)),
    "better way: wrong is short": ((24, 6), 0.0, (32, 32)),
    "worse way: right is short": ((16, 16), 0.2, (4, 24)),
}
PREFIX = ", baseline at every prefix"  # what a row's name has if it is so
EXACT = "grpo, J as baseline"
LOCAL, BOTH = "grpo" + PREFIX, EXACT + PREFIX
ROWS = {
    "grpo": Row(losses.grpo),
    EXACT: Row(losses.grpo, "exact"),
    BOTH: Row(losses.grpo, "exact", prefix_baseline=True),
    LOCAL: Row(losses.grpo, prefix_baseline=True),
    # Its own clip, 3e-4, is made for long answers.
    "gspo": Row(functools.partial(losses.gspo, eps_low=0.02, eps_high=0.02)),
    "dr-grpo": Row(losses.dr_grpo, "mean"),
    "cispo": Row(losses.cispo),
    "dfpo-min": Row(losses.dfpo_min),
}
ADAM_RATES = (0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 3.0)
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


# ---------------- training by all groups, several policies at once; toy/gate.py has it, too


def log_probs(groups: Groups, logits: Tensor) -> Tensor:
    """Of the way and of the plan, and 0 for filler, under each policy. (P, 2) -> (P N, T)."""
    choices = torch.stack([groups.way, groups.plan], 1)  # (N, 2): 0, 1, or -1 for none
    logp = logsigmoid((1 - 2 * choices) * logits[:, None])  # (P, N, 2)
    logp = logp.masked_fill(choices < 0, 0.0).flatten(0, 1)
    return pad(logp, (0, groups.mask.shape[1] - 2))


def start_batch(row: Row, groups: Groups, logits: Tensor) -> tuple[Batch, Tensor]:
    """All groups under P policies that have not moved yet, and their tokens' nodes, (P N, T).

    Each group counts with its probability.
    """
    old, P = log_probs(groups, logits), len(logits)
    shares = torch.stack([groups.probabilities(logp) for logp in old.chunk(P)])  # (P, groups)
    nodes = groups.nodes + groups.nodes.numel() * torch.arange(P)[:, None, None]
    return groups.batch(old, shares, row.scale), nodes.flatten(0, 1)


def compute_push(
    row: Row, batch: Batch, nodes: Tensor, weights: Tensor, forward: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The gradient of a row's J by the weights, and the pushes, (N, T).

    forward: weights -> log pi of the batch's tokens, (N, T).
    """
    weights = weights.detach().requires_grad_()
    batch = replace(batch, logp=forward(weights))
    loss = row.loss(batch)
    if row.prefix_baseline:
        loss = losses.prefix_baseline(loss, batch, nodes)
    c = losses.token_pushes(loss, batch.logp)
    return torch.autograd.grad(batch.logp, weights, c / len(c))[0], c


PLAIN = functools.partial(SGD, lr=1.0)  # theta += rate * push
ADAM = functools.partial(Adam, lr=1.0, betas=(0.9, 0.95))  # of exact pushes


def train(
    row: Row,
    groups: Groups,
    start: tuple[float, float],
    updates: int,
    batches: int,
    rates: Tensor | None = None,
    optimizer: Callable[..., Optimizer] = PLAIN,
) -> tuple[Tensor, float]:
    """The logits of one policy per rate after every update, (batches * updates + 1, P, 2).

    And the mean learning tax of the batches' last updates. Without rates there is one policy,
    whose first update has the length SIZE.
    """
    logits = torch.tensor(start, dtype=torch.float64).expand(1 if rates is None else len(rates), 2)
    # The optimiser's own rate is 1. It moves this from 0, and a policy's rate is put on after it.
    moved = torch.zeros_like(logits)
    step = optimizer([moved])
    forward = functools.partial(log_probs, groups)
    path, taxes = [logits], []
    for _ in range(batches):
        batch, nodes = start_batch(row, groups, logits)
        for _ in range(updates):
            push, c = compute_push(row, batch, nodes, logits, forward)
            if rates is None:
                rates = SIZE / push.norm(dim=1)
            moved.grad = -push
            step.step()
            logits = path[0] + rates[:, None] * moved
            path.append(logits)
        taxes.append(losses.learning_tax(c, batch.adv[:, 0], nodes, batch.mask))
    return torch.stack(path), sum(taxes) / len(taxes)


# ---------------- the figure


def expected_reward(setting: str, logits: Tensor) -> Tensor:
    """(..., 2) -> (...)."""
    way, plan = logits.sigmoid().unbind(-1)
    return way * plan * RIGHT + (1 - way) * SETTINGS[setting][1]


def find_rewards(setting: str, row: Row) -> tuple[Tensor, float]:
    """The expected reward before each batch and after the last, (BATCHES + 1,); the mean tax."""
    path, tax = train(row, make_groups(setting), START, UPDATES, BATCHES)
    return expected_reward(setting, path[::UPDATES, 0]), tax


def find_adam_rewards(setting: str, row: Row) -> Tensor:
    """The expected reward after the last batch, with Adam at each of ADAM_RATES."""
    rates = torch.tensor(ADAM_RATES, dtype=torch.float64)
    path, _ = train(row, make_groups(setting), START, UPDATES, BATCHES, rates, ADAM)
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
    for name, row in ROWS.items():
        rows[name] = []
        for setting in SETTINGS:
            curves[setting, name], tax = find_rewards(setting, row)
            of_group = row.scale != "exact" and not row.prefix_baseline  # of this the tax speaks
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
    print_table(rows, ADAM_RATES)
    if path:
        save(plot(curves), path)


if __name__ == "__main__":
    main()
