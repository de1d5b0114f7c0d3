"""AR and Lopti's headline in miniature: whose gradient is it, and does the order of two steps help?

    python -m toy.lopti                         the tables
    python -m toy.lopti --plot toy/lopti.png    and the picture (needs matplotlib)

The policy is the small GPT-2 of train.py after a short warm start, mostly on worked solutions. Its
tokens are parted by their probability into the quarters of 0 to 1. Three questions are asked of one
rollout batch, each from the same policy (AR/Lopti Fig. 1d-f and 2b):

1. How long is the gradient of a quarter's tokens, relative to that of all tokens?
2. How far do tokens move if all, only the improbable or only the probable ones are updated?
3. Which share of the tokens moves the way its advantage points? Lopti makes two optimiser steps, so
   its control is two steps of grpo. With SGD these have half the rate each, one full step together.
   The control of the reversed order, probable tokens first, is lopti.

grpo is here the token mean that AR and Lopti stand on. The optimiser has no history before the
first step. "reset" takes AdamW's history away again before the second step.

This script imports train and toy.nthr. Nothing imports it.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from llm import fail
from llm.policy import Policy
from losses import METHODS, Batch, OldPolicy, advantage_reweighting, token_grpo
from toy.figure import interval, save_picture
from toy.nthr import make_optimizer, make_start
from train import Config, Scored, log_probs, sample, score, update

QUARTERS = ("p < .25", ".25 to .5", ".5 to .75", "p > .75")
RATES = {"SGD": 0.1, "AdamW": 1e-3}
SHORT = dict(warm_steps=300, warm_rows=32)  # a warm start of seconds
CONTROLS = {  # what a line of the third table is compared with
    "AR": "grpo",
    "grpo twice": "grpo",
    "lopti": "grpo twice",
    "reversed": "lopti",
    "lopti, reset": "grpo twice",
    "reversed, reset": "lopti, reset",
}
MOVERS = tuple(f"only {name}" for name in (QUARTERS[0], QUARTERS[3]))
STYLES = (
    dict(color="#000000", marker="o"),
    dict(color="#D55E00", marker="D"),
    dict(color="#0072B2", marker="s", linestyle="--"),
)
Measures = dict[tuple[str, ...], Tensor]


def quarter_of(batch: Batch) -> Tensor:
    """In which quarter of 0 to 1 a token's old probability lies: 0 to 3. (N, T)."""
    return (4 * batch.logp_old.exp()).long().clamp(max=3)


def only(quarter: int) -> Callable[[Batch], Tensor]:
    """grpo's loss on the tokens of one quarter, divided by the number of all tokens."""

    def loss(batch: Batch) -> Tensor:
        others = quarter_of(batch) != quarter
        return token_grpo(replace(batch, adv=batch.adv.masked_fill(others, 0.0)))

    return loss


LOPTI = METHODS["lopti"].passes
ROUTES = {  # name: a loss for each optimiser step
    "grpo": (token_grpo,),
    "AR": (token_grpo,),  # on reweighted advantages
    **{f"only {name}": (only(q),) for q, name in enumerate(QUARTERS)},
    "grpo twice": (token_grpo, token_grpo),
    "lopti": LOPTI,
    "reversed": LOPTI[::-1],
    "lopti, reset": LOPTI,
    "reversed, reset": LOPTI[::-1],
}


def flat_weights(policy: Policy) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in policy.model.parameters()])


def climb(
    policy: Policy, scored: Scored, kind: str, name: str
) -> tuple[Tensor, list[Tensor], float]:
    """The steps of a route, on a copy of the policy.

    Returns log pi afterwards (N, T), the moves of the weights, and the first gradient's norm.
    """
    trial = replace(policy, model=copy.deepcopy(policy.model))
    rate = RATES[kind] / (2 if (kind, name) == ("SGD", "grpo twice") else 1)
    optimizer, config, moves, norms = make_optimizer(trial, kind, rate), Config(), [], []
    for loss in ROUTES[name]:
        if "reset" in name:
            optimizer = make_optimizer(trial, kind, rate)
        before = flat_weights(trial)
        logp, _, _ = log_probs(trial, scored.rows, config)
        batch = replace(scored.batch, logp=logp.detach())
        norms.append(update(optimizer, loss, batch, logp, config.grad_clip)[1])
        moves.append(flat_weights(trial) - before)
    with torch.no_grad():
        after, _, _ = log_probs(trial, scored.rows, config)
    return after, moves, norms[0]


def mean_by_quarter(values: Tensor, batch: Batch, mask: Tensor) -> Tensor:
    """(N, T) -> (4,)."""
    quarter = quarter_of(batch)
    return torch.stack([values[mask & (quarter == q)].double().mean() for q in range(4)])


def measure(policy: Policy, scored: Scored, rewards: Tensor) -> Measures:
    """(what, optimiser, route) -> a value for each quarter (4,), or one value (1,)."""
    batch, rows = scored.batch, scored.rows
    old = OldPolicy(rows.tokens, rows.mask, batch.logp_old, rewards, batch.group_size)
    reweighted = replace(scored, batch=replace(batch, adv=advantage_reweighting(batch.adv, old)))
    tokens = quarter_of(batch)[batch.mask]
    measures = {("share",): tokens.bincount(minlength=4).double() / len(tokens)}
    for kind, name in [(kind, name) for kind in RATES for name in ROUTES]:
        if kind == "SGD" and "reset" in name:  # SGD has no history
            continue
        after, moves, norm = climb(policy, reweighted if name == "AR" else scored, kind, name)
        measures["norm", kind, name] = torch.tensor([norm])
        moved = (after.exp() - batch.logp_old.exp()).abs()
        measures["moved", kind, name] = mean_by_quarter(moved, batch, batch.mask)
        right = (after - batch.logp_old) * batch.adv > 0
        measures["right", kind, name] = mean_by_quarter(right, batch, batch.adv != 0)
        if len(moves) == 2:
            measures["cosine", kind, name] = cosine_similarity(*moves, dim=0)[None]
    return measures


def study(starts: int, full_start: bool) -> Measures:
    """What is measured of every start, stacked: (starts, 4) or (starts, 1)."""
    found = []
    for seed in range(starts):
        config = Config(seed=seed, **({} if full_start else SHORT))
        policy, task = make_start(config, direct=1 if full_start else 6)
        answers = sample(policy, task, task.test[: config.prompts], 1, config)
        found.append(measure(policy, score(policy, None, answers, config), answers.rewards))
    return {key: torch.stack([measures[key] for measures in found]) for key in found[0]}


def relative_norm(measures: Measures) -> Tensor:
    """Of a quarter's gradient, that of all tokens being 1. (starts, 4)."""
    parts = [measures["norm", "SGD", f"only {name}"] for name in QUARTERS]
    return torch.cat(parts, 1) / measures["norm", "SGD", "grpo"]


def gain(measures: Measures, kind: str, name: str) -> Tensor:
    """How many more tokens move the right way than with the control, as a share. (starts, 4)."""
    return measures["right", kind, name] - measures["right", kind, CONTROLS[name]]


def show(measures: Measures):
    def line(name: str, columns, places: int = 3):
        numbers = [interval(column.tolist()) for column in columns]
        cells = [f"{mean:.{places}f} +- {half:.{places}f}" for mean, half in numbers]
        print(f"{name:34}" + "".join(f"{cell:>19}" for cell in cells))

    def head(title: str, names: tuple[str, ...]):
        print(f"\n{title:34}" + "".join(f"{name:>19}" for name in names))

    print(f"{len(measures['share',])} starts; mean +- half its 95 % interval")
    head("1. one quarter alone", QUARTERS)
    line("share of the tokens", measures["share",].T)
    line("gradient, of all = 1", relative_norm(measures).T)
    for kind, rate in RATES.items():
        head(f"2. moves of p, {kind} {rate:g}", QUARTERS)
        for name in ("grpo", *MOVERS):
            line(name, measures["moved", kind, name].T, 4)
    for kind in RATES:
        names = ("p < .25", "p > .75")
        more = tuple(f"{name}, - control" for name in names)
        head(f"3. the right way, {kind}", (*names, *more, "cosine of steps"))
        for name in ("grpo", *CONTROLS):
            if ("right", kind, name) not in measures:
                continue
            columns = [*measures["right", kind, name].T[::3]]
            if name in CONTROLS:
                columns += gain(measures, kind, name).T[::3]
            if ("cosine", kind, name) in measures:
                columns += measures["cosine", kind, name].T
            line(f"{name} (to {CONTROLS[name]})" if name in CONTROLS else name, columns)


def plot(measures: Measures, path: Path):
    """The three questions; the third for the probable tokens alone, relative to the control."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.9), layout="constrained")
    first, second, third = figure.subplots(1, 3, width_ratios=(1, 1, 1.2))
    lines = {"share of the tokens": measures["share",], "gradient": relative_norm(measures)}
    moved = {name: measures["moved", "SGD", name] for name in ("grpo", *MOVERS)}
    for axis, group in ((first, lines), (second, moved)):
        for (name, values), style in zip(group.items(), STYLES, strict=False):
            mean, half = zip(*(interval(column.tolist()) for column in values.T), strict=True)
            axis.errorbar(QUARTERS, mean, half, label=name, capsize=3, **style)
        axis.legend(fontsize=8)
    first.set_title("a quarter's tokens alone (all = 1)", fontsize=9)
    second.set_yscale("log")
    second.set_title("how far p moves, SGD", fontsize=9)
    names = [name for name in CONTROLS if CONTROLS[name] != "grpo"]
    for i, (kind, style) in enumerate(zip(RATES, STYLES, strict=False)):
        for y, name in enumerate(names):
            if ("right", kind, name) in measures:
                mean, half = interval(gain(measures, kind, name)[:, 3].tolist())
                label = kind if name == "lopti" else None
                place = -y - 0.2 * i
                third.errorbar(mean, place, xerr=half, capsize=3, label=label, **style)
    third.axvline(0, color="#999999", linewidth=0.8)
    labels = [f"{name}\n- {CONTROLS[name]}" for name in names]
    third.set_yticks([-y - 0.1 for y in range(len(names))], labels)
    third.set_title("share of p > .75 that moves the right way", fontsize=9)
    third.legend(fontsize=8, loc="lower right")
    for axis in figure.axes:
        axis.tick_params(labelsize=8)
    figure.savefig(path, dpi=90)
    print(f"\npicture: {path}")


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser("python -m toy.lopti", description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .svg or .png")
    parser.add_argument("--starts", type=int, default=5, help="start policies (default 5)")
    parser.add_argument("--full-start", action="store_true", help="train.py's own, slow warm start")
    parser.error = fail
    options = parser.parse_args(argv)
    if options.starts < 2:
        fail(f"--starts {options.starts}: at least 2 are needed, for an interval")
    torch.set_num_threads(1)
    measures = study(options.starts, options.full_start)
    show(measures)
    save_picture(plot, measures, path=options.plot)


if __name__ == "__main__":
    main()
