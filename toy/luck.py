"""When does a baseline at every prefix pay? Where luck decides the reward before the policy does.

    python -m toy.luck                       the table: three minutes
    python -m toy.luck --plot toy/luck.png   and the picture (needs matplotlib)

An answer is three tokens. The environment says easy or hard, the policy takes one of two ways, and
then one of two fillers, which earn nothing. The policy has one logit for the way and one for the
filler, the same after easy and after hard. The environment's token is not trained, but it is a part
of the prefix. Training is sampled: every update has a fresh batch of 8 groups.

`prefix_baseline` subtracts from a way's push what other answers of its prefix got: easy ones are
compared with easy ones. That moves no expected update (claim C22, fixed baseline). It takes away
the noise of the luck, and adds that of a mean of fewer answers (claim C27). So with and without it
are compared in pairs of runs with the same random numbers, each at the learning rate that is best
on other seeds for this number of batches. toy/README.md says what came out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import losses
from losses import Batch
from toy.figure import (
    format_interval,
    interval,
    line_style,
    make_figure,
    parse_plot,
    print_table,
    save,
)
from toy.tax import ADAM, LOCAL, PLAIN, ROWS, Row, compute_push


class World(NamedTuple):
    """Chances to be right: after easy on the good and on the other way, then after hard."""

    right: tuple[tuple[float, float], tuple[float, float]]
    good: float = 0.5  # the share of the good way at the start
    chosen: bool = False  # whether the policy takes the first token, too, and learns it


WORLDS = {
    "easy .9, hard .1": World(((0.95, 0.85), (0.15, 0.05))),
    "easy .7, hard .3": World(((0.75, 0.65), (0.35, 0.25))),
    "no luck": World(((0.55, 0.45), (0.55, 0.45))),
    "luck is chosen": World(((0.95, 0.85), (0.15, 0.05)), chosen=True),
    "rare good way": World(((0.9, 0.9), (0.9, 0.1)), good=0.02),
}
LUCKY, *OTHERS = WORLDS
CELLS = [  # of the table: world, G, optimiser
    (LUCKY, 8, "Adam"),
    (LUCKY, 8, "plain ascent"),
    (LUCKY, 4, "Adam"),
    *((world, 8, "Adam") for world in OTHERS),
]
PANELS = (LUCKY, "easy .7, hard .3", "no luck", "rare good way")  # of the picture
BATCHES, GROUPS = 20, 8  # of a run; of a batch
TRIALS, RUNS = 200, 400  # runs at each rate, on other seeds, to choose one; runs at that rate
STEPS = 2.0 ** torch.arange(-1, 3.5, 0.5, dtype=torch.float64)
# Each with the largest norm of a gradient, and with the learning rates that are tried.
OPTIMISERS = {
    "Adam": (ADAM, 0.05, STEPS),
    "plain ascent": (PLAIN, math.inf, 32 * STEPS),
}


def tabulate(world: World) -> Tensor:
    """The chance to be right by first token and way. (2, 2)."""
    return torch.tensor(world.right, dtype=torch.float64)


def expected_reward(world: World, logits: Tensor) -> Tensor:
    """J, exactly. (K, 3) -> (K,)."""
    p = logits.sigmoid()
    first, way = torch.stack([p, 1 - p], 2)[:, :2].unbind(1)  # (K, 2) each
    return ((first @ tabulate(world)) * way).sum(1)


def decided(world: World) -> float:
    """rho^2 at the start: which share of the reward's variance the first token decides."""
    means = tabulate(world) @ torch.tensor([world.good, 1 - world.good], dtype=torch.float64)
    return float(means.var(correction=0) / (means.mean() * (1 - means.mean())))


def find_push(
    row: Row, world: World, G: int, logits: Tensor, tokens: Tensor, rewards: Tensor
) -> Tensor:
    """Each of K policies' gradient from its own n answers, all of them in one batch of the loss.

    (K, 3) logits, (K, n, 3) tokens of 0 or 1, (K, n) rewards -> (K, 3).
    """
    rows = tokens.flatten(0, 1)  # (N, 3), N = K n
    mask = torch.ones_like(rows, dtype=torch.bool)
    nodes = losses.prefix_nodes(rows, mask, G)  # the environment's token, too, is a prefix
    mask[:, 0] = world.chosen  # but no loss sees it, unless it is the policy's

    def forward(logits: Tensor) -> Tensor:
        return logsigmoid((1 - 2 * tokens) * logits[:, None]).flatten(0, 1)

    A = losses.group_advantages(rewards.flatten(), G, row.scale)[:, None].expand(mask.shape)
    old = forward(logits)
    batch = Batch(old, old, A, mask, G, max_tokens=2 + world.chosen)
    push, _ = compute_push(row, batch, nodes, logits, forward)
    return len(logits) * push  # the loss is a mean over all K policies' answers


def train(
    row: Row, world: World, G: int, optimiser: str, rates: Tensor, runs: int, seed: int
) -> Tensor:
    """The share of the attainable gain after each batch, (BATCHES, rates, runs)."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.tensor([[0.5, world.good, 0.5]], dtype=torch.float64).logit()
    first, right = expected_reward(world, start), tabulate(world)
    best = right.max() if world.chosen else right.mean(0).max()
    # An optimiser whose rate is 1 moves all policies, and each has its own rate times that.
    moved = torch.zeros(len(rates) * runs, 3, dtype=torch.float64)
    make, clip, _ = OPTIMISERS[optimiser]
    update = make([moved], maximize=True)
    rates, logits, shares = rates.repeat_interleave(runs)[:, None], start + moved, []
    for _ in range(BATCHES):
        uniform = torch.rand(runs, GROUPS * G, 4, generator=generator, dtype=torch.float64)
        uniform = uniform.repeat(len(moved) // runs, 1, 1)  # the same at each rate
        tokens = (uniform[..., :3] > logits.sigmoid()[:, None]).long()
        rewards = (uniform[..., 3] < right[tokens[..., 0], tokens[..., 1]]).double()
        push = find_push(row, world, G, logits, tokens, rewards)
        moved.grad = push * (clip / push.norm(dim=1, keepdim=True)).clamp(max=1)
        update.step()
        logits = start + rates * moved
        shares.append((expected_reward(world, logits) - first) / (best - first))
    return torch.stack(shares).view(BATCHES, -1, runs)


def compare(world: World, G: int, optimiser: str) -> list[Tensor]:
    """The shares under grpo without and with the baseline, (BATCHES, RUNS) each.

    Nothing is used twice, and all answers are equally long: so ratios are 1, and grpo is also gspo,
    cispo and grpo-symmetric. A share after n batches is that of runs at the rate which is best for
    n batches.
    """
    curves, rates = [], OPTIMISERS[optimiser][2]
    for row in (ROWS["grpo"], ROWS[LOCAL]):
        best = train(row, world, G, optimiser, rates, TRIALS, seed=1).mean(2).argmax(1)
        used, place = best.unique(return_inverse=True)  # place: (BATCHES,)
        shares = train(row, world, G, optimiser, rates[used], RUNS, seed=0)
        curves.append(shares[torch.arange(BATCHES), place])
    return curves


def plot(curves: dict[str, list[Tensor]]):
    figure = make_figure(
        "A baseline at every prefix learns faster where luck decides most of the reward.\n"
        "With less luck it brings nothing, and without luck or with a rare good way it loses.",
        3.5,
    )
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for axis, world in zip(axes, PANELS, strict=True):
        for name, curve in zip(("grpo", LOCAL), curves[world], strict=True):
            means, halves = torch.tensor([interval(shares) for shares in curve]).T
            batches, style = range(1, BATCHES + 1), line_style(name)
            axis.plot(batches, means, label=name, **style)
            band = means - halves, means + halves
            axis.fill_between(batches, *band, color=style["color"], alpha=0.15, lw=0)
        axis.set(title=world, xlabel="batches")
    axes[0].set_ylabel("share of the attainable gain")
    lines = axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=2)
    return figure


def main():
    path = parse_plot(__doc__)
    torch.set_num_threads(1)
    rows, curves = {}, {}
    for name, G, optimiser in CELLS:
        without, with_baseline = compare(WORLDS[name], G, optimiser)
        curves.setdefault(name, (without, with_baseline))
        cells = [f"{decided(WORLDS[name]):.2f}"]
        for batches in (5, 20):
            pair = without[batches - 1], with_baseline[batches - 1]
            cells += [f"{pair[0].mean():.3f}", format_interval(pair[1] - pair[0], "+.3f")]
        rows[f"{name}, G = {G}, {optimiser}"] = cells
    print(f"Share of the attainable gain after 5 and 20 batches, {RUNS} pairs of runs; how much")
    print("more with a baseline at every prefix. decided: by the first token, at the start\n")
    print_table(rows, ["decided", "after 5", "with", "after 20", "with"])
    if path:
        save(plot(curves), path)


if __name__ == "__main__":
    main()
