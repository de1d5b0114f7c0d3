"""AR and Lopti's headline in miniature: whose gradient is it, and does the order of two steps help?

    python -m toy.lopti                         the tables
    python -m toy.lopti --plot toy/lopti.png    and the picture (needs matplotlib)

The policy is the small GPT-2 of train.py after a short warm start, mostly on worked solutions. Its
tokens are parted by their probability into the quarters of 0 to 1. Two questions are asked of one
rollout batch, each from the same policy (AR/Lopti Fig. 1d-f):

1. How long is the gradient of a quarter's tokens, relative to that of all tokens?
2. Which share of the tokens moves the way its advantage points, after two steps?

grpo is here the token mean that Lopti stands on. The optimiser has no history before the first
step. toy/README.md says what came out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

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
MEASURES = {"share of the tokens": "#999999", "length of the gradient": "#D55E00"}  # colours


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


LOW, HIGH = METHODS["lopti"].passes
ORDERS = ((half_grpo, half_grpo), (LOW, HIGH), (HIGH, LOW))  # grpo twice, lopti, reversed


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


def measure(policy: Policy, scored: Scored) -> tuple[Tensor, Tensor]:
    """Of one start and its rollout batch: both measures of each quarter, (2, 4); then with each
    optimiser, in each order, the share of the probable tokens that moves the right way, (2, 3)."""
    batch = scored.batch
    counts = quarter_of(batch)[batch.mask].bincount(minlength=4)
    parts = [climb(policy, scored, "SGD", [only(q)])[1] for q in range(4)]
    whole = climb(policy, scored, "SGD", [token_grpo])[1]
    quarters = torch.stack([counts / counts.sum(), torch.tensor(parts) / whole])
    probable = batch.mask & (quarter_of(batch) == 3) & (batch.adv != 0)
    right = torch.zeros(len(RATES), len(ORDERS), dtype=torch.float64)
    for k, kind in enumerate(RATES):
        for j, losses in enumerate(ORDERS):
            after, _ = climb(policy, scored, kind, losses)
            as_A_says = (after - batch.logp_old) * batch.adv > 0
            right[k, j] = as_A_says[probable].double().mean()
    return quarters, right


def study(starts: int = STARTS) -> tuple[Tensor, dict[str, Tensor]]:
    """The measures of each quarter, (starts, 2, 4); and what the orders do, (starts, 2) each."""
    found = []
    for seed in range(starts):
        config = Config(seed=seed)
        policy, task = make_start(seed, direct=6)
        answers = sample(policy, task, task.test[: config.prompts], 1, config)
        scored = score(policy, answers, METHODS["lopti"], config, reference=None)
        found.append(measure(policy, scored))
    quarters, right = map(torch.stack, zip(*found, strict=True))
    twice, lopti, backwards = right.unbind(2)
    effects = {"grpo twice": twice, "lopti minus grpo twice": lopti - twice}
    return quarters, effects | {"reversed order minus lopti": backwards - lopti}


def print_intervals(rows: dict[str, Tensor], columns: Iterable[str]):
    cells = {name: [format_interval(x.tolist()) for x in row.T] for name, row in rows.items()}
    print_table(cells, columns)


def plot(quarters: Tensor, effects: dict[str, Tensor]):
    columns = zip(RATES, effects["grpo twice"].T, strict=True)
    twice = ", ".join(f"{values.mean():.3f} ({kind})" for kind, values in columns)
    figure = make_figure(
        "Improbable tokens are few, but have the longest gradient. Learning them first (Lopti)\n"
        "helps the probable ones no more than GRPO. With AdamW the reversed order beats Lopti's.",
        4.0,
        "p: a token's probability when it was sampled. The right way: up in answers that beat "
        "their group's mean, down in the others.\nGRPO twice: two steps with half the loss in "
        f"each, as Lopti, too, makes two. Its share: {twice}:\nnear one half, a coin flip. Means "
        "and 95 % intervals of 6 starts. The lengths do not add up to 1: the gradients\nof the "
        "ranges of p have different directions.",
    )
    bars, differences = figure.subplots(1, 2)
    for k, (name, color) in enumerate(MEASURES.items()):
        columns = [interval(column.tolist()) for column in quarters[:, k].T]
        means, halves = zip(*columns, strict=True)
        places = [quarter + 0.36 * (k - 0.5) for quarter in range(4)]
        bars.bar(places, means, 0.36, yerr=halves, label=name, color=color)
    bars.set_xticks(range(4), QUARTERS)
    bars.set_ylim(0, 1.15)  # there is room for the legend
    bars.set_ylabel("relative to all tokens")
    bars.set_title("tokens by their probability p")
    bars.legend(loc="upper left")
    shown = {
        f"{kind}: {name}".replace(" minus", "\nminus"): values[:, k].tolist()
        for k, kind in enumerate(RATES)
        for name, values in effects.items()
        if "minus" in name
    }
    draw_differences(differences, shown)
    differences.set_title("what the order does to tokens with p > .75")
    differences.set_xlabel("difference in the share that moves the right way")
    return figure


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    quarters, effects = study()
    print(f"{STARTS} starts; mean +- half its 95 % interval\n")
    print_intervals(dict(zip(MEASURES, quarters.unbind(1), strict=True)), QUARTERS)
    print(f"\nThe share of the tokens with {QUARTERS[3]} that moves the right way\n")
    print_intervals(effects, RATES)
    if path:
        save(plot(quarters, effects), path)


if __name__ == "__main__":
    main()
