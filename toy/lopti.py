"""AR and Lopti's headline in miniature: whose gradient is it, and does the order of two steps help?

    python -m toy.lopti                         the tables
    python -m toy.lopti --plot toy/lopti.png    and the picture (needs matplotlib)

The policy is the small GPT-2 of train.py after a short warm start, mostly on worked solutions. Its
tokens are parted by their probability into the quarters of 0 to 1. Three questions are asked of one
rollout batch, each from the same policy (AR/Lopti Fig. 1d-f and 2b):

1. How long is the gradient of a quarter's tokens, relative to that of all tokens?
2. How far do tokens move if all, only the improbable or only the probable ones are updated?
3. Which share of the tokens moves the way its advantage points, after two steps?

grpo is here the token mean that Lopti stands on. The optimiser has no history before the first
step. toy/README.md says what came out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from losses import METHODS, Batch, token_grpo
from toy.figure import (
    draw_differences,
    format_interval,
    interval,
    make_figure,
    parse_plot,
    print_table,
    save,
)
from toy.nthr import make_optimizer, make_start
from train import Config, Minibatch, Policy, Scored, log_probs_in_pieces, sample, score, update

STARTS = 6
QUARTERS = ("p < .25", ".25 to .5", ".5 to .75", "p > .75")
RATES = {"SGD": 0.1, "AdamW": 1e-3}
GRADIENT = "1. one quarter alone"
MOVES = "2. how far p moves, "  # and the optimiser
RIGHT = "3. moves the right way, "
Measures = dict[tuple[str, str], Tensor]  # (table, line): a value for each quarter


def quarter_of(batch: Batch) -> Tensor:
    """In which quarter of 0 to 1 a token's old probability lies: 0 to 3. (N, T)."""
    return (4 * batch.logp_old.exp()).long().clamp(max=3)


def only(quarter: int) -> Callable[[Batch], Tensor]:
    """grpo's loss on the tokens of one quarter, divided by the number of all tokens."""

    def loss(batch: Batch) -> Tensor:
        others = quarter_of(batch) != quarter
        return token_grpo(replace(batch, adv=batch.adv.masked_fill(others, 0.0)))

    return loss


def half_grpo(batch: Batch) -> Tensor:
    return token_grpo(batch) / 2


def climb(
    policy: Policy, scored: Scored, kind: str, losses: Sequence[Callable]
) -> tuple[Tensor, float]:
    """An optimiser step for each loss, on a copy of the policy.

    Returns log pi afterwards (N, T), and the first gradient's norm.
    """
    trial = replace(policy, model=copy.deepcopy(policy.model))
    optimizer = make_optimizer(trial, kind, RATES[kind])
    config, rows = Config(), torch.arange(len(scored.answers.tokens))
    updates = []
    for loss in losses:
        part = Minibatch(rows, scored.answers, scored.batch, scored.nodes, moved=bool(updates))
        updates.append(update(trial, optimizer, loss, part, config))
    return log_probs_in_pieces(trial, scored.answers, config)[0], updates[0].grad_norm


def mean_by_quarter(values: Tensor, batch: Batch, mask: Tensor) -> Tensor:
    """(N, T) -> (4,)."""
    quarter = quarter_of(batch)
    return torch.stack([values[mask & (quarter == q)].double().mean() for q in range(4)])


def measure(policy: Policy, scored: Scored) -> Measures:
    """Of one start and its rollout batch."""
    batch, found = scored.batch, {}
    counts = quarter_of(batch)[batch.mask].bincount(minlength=4)
    found[GRADIENT, "share of the tokens"] = counts / counts.sum()
    parts = [climb(policy, scored, "SGD", [only(q)])[1] for q in range(4)]
    whole = climb(policy, scored, "SGD", [token_grpo])[1]
    found[GRADIENT, "length of the gradient"] = torch.tensor(parts) / whole
    movers = {"all": token_grpo, "only p < .25": only(0), "only p > .75": only(3)}
    for kind in RATES:
        for name, loss in movers.items():
            after, _ = climb(policy, scored, kind, [loss])
            moved = (after.exp() - batch.logp_old.exp()).abs()
            found[MOVES + kind, name] = mean_by_quarter(moved, batch, batch.mask)
    low, high = METHODS["lopti"].passes
    for kind in RATES:
        right = []
        for losses in ((half_grpo, half_grpo), (low, high), (high, low)):
            after, _ = climb(policy, scored, kind, losses)
            is_right = (after - batch.logp_old) * batch.adv > 0
            right.append(mean_by_quarter(is_right, batch, batch.adv != 0))
        twice, lopti, reverse = right
        found[RIGHT + kind, "grpo twice"] = twice
        found[RIGHT + kind, "lopti - grpo twice"] = lopti - twice
        found[RIGHT + kind, "reversed - lopti"] = reverse - lopti
    return found


def study(starts: int = STARTS) -> Measures:
    """What is measured of every start, stacked: (starts, 4)."""
    found = []
    for seed in range(starts):
        config = Config(seed=seed)
        policy, task = make_start(seed, direct=6)
        answers = sample(policy, task, task.test[: config.prompts], 1, config)
        found.append(
            measure(policy, score(policy, answers, METHODS["lopti"], config, reference=None))
        )
    return {key: torch.stack([measures[key] for measures in found]) for key in found[0]}


def show(measures: Measures):
    print(f"{STARTS} starts; mean +- half its 95 % interval")
    for table in dict.fromkeys(table for table, _ in measures):
        print(f"\n{table}")
        rows = {
            name: [format_interval(column.tolist(), ".4f") for column in values.T]
            for (its_table, name), values in measures.items()
            if its_table == table
        }
        print_table(rows, QUARTERS)


def plot(measures: Measures, path: Path):
    """The first question; and the third for the probable tokens, relative to the control."""
    figure = make_figure(
        "Improbable tokens are few, but have the longest gradient. Learning them first (Lopti)\n"
        "helps the probable ones no more than GRPO. With AdamW the reversed order is better.",
        3.6,
        "p: a token's probability when it was sampled. GRPO twice: two steps with half the loss "
        "in each, as Lopti, too, makes two.\nThe right way: up in answers that beat "
        "their group's mean, down in the others. Means and 95 % intervals of 6 starts.",
    )
    bars, effects = figure.subplots(1, 2)
    colors = {"share of the tokens": "#999999", "length of the gradient": "#D55E00"}
    for k, (name, color) in enumerate(colors.items()):
        columns = [interval(column.tolist()) for column in measures[GRADIENT, name].T]
        means, halves = zip(*columns, strict=True)
        places = [quarter + 0.36 * (k - 0.5) for quarter in range(4)]
        bars.bar(places, means, 0.36, yerr=halves, label=name, color=color)
    bars.set_xticks(range(4), QUARTERS)
    bars.set_ylim(0, 1.15)  # there is room for the legend
    bars.set_ylabel("all tokens together: 1")
    bars.set_title("tokens by their probability p")
    bars.legend(loc="upper left")
    differences = {
        f"{table.removeprefix(RIGHT)}: " + name.replace(" - ", "\nminus "): values[:, 3].tolist()
        for (table, name), values in measures.items()
        if " - " in name
    }
    draw_differences(effects, differences)
    effects.set_title("what the order does to tokens with p > .75")
    effects.set_xlabel("difference in the share that moves the right way")
    save(figure, path)


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    measures = study()
    show(measures)
    if path:
        plot(measures, path)


if __name__ == "__main__":
    main()
