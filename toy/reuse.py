"""Does cancelling pay where one small batch is used many times?

    python -m toy.reuse               the table: three minutes

Claim C22 says that `prefix_baseline` moves no expected update, if theta does not depend on the
batch. After the first of M updates on one batch it does. So what happens then is measured here.

An answer is an opener, which earns nothing, and then one of two ways, right with probability .6 and
.4. A batch is 8 sampled groups. Whole training runs are compared, each method at the learning rate
that is best on other seeds. All methods see the same random numbers, so runs are compared in pairs.
In world A all answers have two tokens, and every history has weights of its own. There cancelling
costs noise, as C23 says. World B is built so that cancelling saves noise: right answers are six
times as long as wrong ones, groups are larger, and the opener and the ways have weights in common,
so that what the opener learns by chance changes the ways. toy/README.md says what came out.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import losses
from losses import Batch
from toy.figure import format_interval, print_table
from toy.tax import CANCELLED, EXACT, ROWS, Row, compute_push


class World(NamedTuple):
    G: int  # answers of a group
    lengths: tuple[int, int]  # of right and of wrong answers, filler without a choice included
    shared: float  # how strongly the weights that all places have in common act


WORLDS = {
    "world A": World(4, (2, 2), shared=0.0),
    "world B": World(8, (12, 2), shared=1.0),
}
RIGHT = torch.tensor([0.6, 0.4], dtype=torch.float64)  # the chance to be right on each way
METHODS = {name: ROWS[name] for name in (EXACT, CANCELLED, "dfpo-min")}
# r A over one divisor: neither a clip nor a length biases it, and it does not cancel. It tells what
# dfpo-min owes to cancelling from what it owes to having neither.
METHODS["r A"] = Row(partial(losses.dr_grpo, eps_low=torch.inf, eps_high=torch.inf), "exact")
BATCHES, GROUPS = 10, 8  # of a run; of a batch
RATES = 2.0 ** torch.arange(-1, 10, dtype=torch.float64)
OTHERS, RUNS = 128, 400  # runs at each rate, on other seeds, to choose one; runs at that rate


def choices(world: World, weights: Tensor) -> Tensor:
    """log pi of both openers, of both ways after the first, of both after the second: (K, 3, 2)."""
    return (weights[:, 1:] + world.shared * weights[:, :1]).log_softmax(2)


def expected_reward(world: World, weights: Tensor) -> Tensor:
    """J, exactly. (K, 4, 2) -> (K,)."""
    p = choices(world, weights).exp()
    return (p[:, 0] * (p[:, 1:] @ RIGHT)).sum(1)


def learn(row: Row, world: World, weights: Tensor, uniform: Tensor, updates: int, rates: Tensor):
    """The weights after some updates on one batch, by plain ascent. (K, 4, 2).

    K policies learn at once, and do not influence each other. Their batches are made of random
    numbers, (K, n, 3): for the opener, the way and the reward.
    """
    p = choices(world, weights).exp()[:, :, 0]  # (K, 3) of the first choice
    opener = (uniform[..., 0] > p[:, :1]).long()  # (K, n)
    way = (uniform[..., 1] > p[:, 1:].gather(1, opener)).long()
    places = torch.stack([opener, 2 + 2 * opener + way], 2)  # (K, n, 2), of 6
    rewards = (uniform[..., 2] < RIGHT[way]).double()

    length = torch.where(rewards > 0, *world.lengths).flatten()  # (N,), N = K n
    mask = torch.arange(max(world.lengths)) < length[:, None]  # (N, T)
    filler = (0, mask.shape[1] - 2)
    nodes = losses.prefix_nodes(pad(places.flatten(0, 1), filler), mask, world.G)

    def forward(weights: Tensor) -> Tensor:
        logp = choices(world, weights).flatten(1).gather(1, places.flatten(1))  # (K, 2 n)
        return pad(logp.view(-1, 2), filler)  # (N, T)

    if row.scale == "exact":
        A = (rewards - expected_reward(world, weights)[:, None]).flatten()
    else:
        A = losses.group_advantages(rewards.flatten(), world.G, row.scale)
    old = forward(weights)
    batch = Batch(old, old, A[:, None].expand(mask.shape), mask, world.G, mask.shape[1])
    # A loss is a mean over all K policies' answers; times K it is each one's own.
    rates = len(weights) * rates[:, None, None]
    for _ in range(updates):
        push, _ = compute_push(row, batch, nodes, weights, forward)
        # Within bounds, so that no ratio becomes 0: cancel divides by it.
        weights = (weights + rates * push).clamp(-50, 50)
    return weights


def train(row: Row, world: World, updates: int, rates: Tensor, runs: int, seed: int) -> Tensor:
    """The expected reward at the end of runs, (rates, runs)."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(len(rates) * runs, 4, 2, dtype=torch.float64)
    for _ in range(BATCHES):
        size = (runs, GROUPS * world.G, 3)
        uniform = torch.rand(size, generator=generator, dtype=torch.float64)
        uniform = uniform.repeat(len(rates), 1, 1)  # the same at each rate
        weights = learn(row, world, weights, uniform, updates, rates.repeat_interleave(runs))
    return expected_reward(world, weights).view(-1, runs)


def compare(world: World, updates: int, others: int = OTHERS, runs: int = RUNS) -> list[Tensor]:
    """The ends of the first method's runs, and how far those of the others are above. (runs,)."""
    ends = []
    for row in METHODS.values():
        best = train(row, world, updates, RATES, others, seed=1).mean(1).argmax()
        ends.append(train(row, world, updates, RATES[best, None], runs, seed=0)[0])
    return [ends[0], *(end - ends[0] for end in ends[1:])]


def main():
    torch.set_num_threads(1)
    print(f"Expected reward after {BATCHES} batches, {RUNS} runs; the others minus the first\n")
    rows = {}
    for title, world in WORLDS.items():
        for updates in (4, 16):
            first, *others = compare(world, updates)
            cells = [format_interval(gain, "+.4f") for gain in others]
            rows[f"{title}, M = {updates}"] = [f"{first.mean():.4f}", *cells]
    print_table(rows, METHODS)


if __name__ == "__main__":
    main()
