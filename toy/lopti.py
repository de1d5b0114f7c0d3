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
    print_row,
    save_picture,
)
from toy.nthr import make_optimizer, make_start
from train import Config, Policy, Scored, in_pieces, sample, score, update

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
    config, norms = Config(), []
    for loss in losses:
        logp, _ = in_pieces(trial, scored.answers, config)
        part = replace(scored, batch=replace(scored.batch, logp=logp))
        _, _, norm = update(trial, optimizer, loss, part, config)
        norms.append(norm)
    return in_pieces(trial, scored.answers, config)[0], norms[0]


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
    found[GRADIENT, "gradient, of all = 1"] = torch.tensor(parts) / whole
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


def study() -> Measures:
    """What is measured of every start, stacked: (STARTS, 4)."""
    found = []
    for seed in range(STARTS):
        config = Config(seed=seed)
        policy, task = make_start(seed, direct=6)
        answers = sample(policy, task, task.test[: config.prompts], 1, config)
        found.append(measure(policy, score(policy, None, answers, config)))
    return {key: torch.stack([measures[key] for measures in found]) for key in found[0]}


def show(measures: Measures):
    print(f"{STARTS} starts; mean +- half its 95 % interval")
    above = None
    for (table, name), values in measures.items():
        if table != above:
            print(f"\n{table}")
            print_row("", QUARTERS, 20)
        above = table
        print_row(name, [format_interval(column.tolist(), ".4f") for column in values.T], 20)


def plot(measures: Measures, path: Path):
    """The first two questions; the third for the probable tokens, relative to the control."""
    finding = "Rare tokens have the longest gradient. Lopti's order of two steps is no gain here."
    figure = make_figure(finding, 3)
    *axes, last = figure.subplots(1, 3)
    titles = {GRADIENT: "a quarter's tokens alone", MOVES + "SGD": "how far p moves, SGD"}
    for axis, (table, title) in zip(axes, titles.items(), strict=True):
        axis.set_title(title)
        axis.set_xlabel("p of the tokens")
        for name in [name for key, name in measures if key == table]:
            columns = [interval(column.tolist()) for column in measures[table, name].T]
            axis.errorbar(QUARTERS, *zip(*columns, strict=True), label=name)
        axis.set_xticks(QUARTERS, [quarter.removeprefix("p ") for quarter in QUARTERS])
        axis.legend()
    axes[0].set_ylim(0, 1.15)  # there is room for the legend
    axes[1].set_yscale("log")
    differences = {
        f"{table.removeprefix(RIGHT)}:\n{name}": values[:, 3].tolist()
        for (table, name), values in measures.items()
        if " - " in name
    }
    draw_differences(last, differences)
    last.set_title("p > .75 moving the right way")
    last.set_xlabel("share of these tokens:\nfirst method minus second")
    figure.savefig(path)


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    measures = study()
    show(measures)
    save_picture(plot, measures, path=path)


if __name__ == "__main__":
    main()
