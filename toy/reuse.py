"""Does cancelling pay where one small batch is used many times?

    python -m toy.reuse               exact worlds: ten minutes
    python -m toy.reuse --noise RUN   a finished run of train.py on the toy: five minutes

Claim C22 says that `cancel` moves no expected update, if theta does not depend on the batch. After
the first of M updates on one batch it does. So what happens then is measured here.

An answer is an opener, which earns nothing, and then one of two ways, right with probability .6 and
.4. A batch is a few sampled groups. Whole training runs are compared, each method at the learning
rate that is best on other seeds. All methods see the same random numbers, so runs are compared in
pairs. In one world all answers have two tokens, and every history has weights of its own. There
cancelling costs noise, as C23 says: on-policy the gradient is 1.48 times as noisy. The other world
is built so that cancelling saves noise, .84 times: right answers are six times as long as wrong
ones, groups are larger, and the opener and the ways have weights in common, so that what the opener
learns by chance changes the ways.

What came out (measured): in the first world grpo+cancel is nowhere ahead of grpo, and mostly a few
thousandths behind. In the other it is nowhere behind, and at best a hundredth ahead. dfpo-min is
ahead by .01 to .04 where a batch is used 4 or 16 times. But that is not owed to cancelling: r A,
which has no clip and one divisor and does not cancel, gains most of that, and cancelling adds
nothing to it.

--noise compares gradients, not runs: how long their random part is beside their mean. On-policy
`cancel` changes it by some per cent. One step later it multiplies it by 1.8 to 3.6, because it
divides by the ratios of others, and gives clipped tokens a push again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import train as trainer
from losses import (
    Batch,
    cancel,
    dfpo_min,
    dr_grpo,
    group_advantages,
    grpo,
    gspo,
    prefix_nodes,
    reinforce,
)
from toy.figure import format_interval


class World(NamedTuple):
    G: int  # answers of a group
    lengths: tuple[int, int]  # of right and of wrong answers, filler without a choice included
    shared: float  # how strongly the weights that all places have in common act


class Row(NamedTuple):
    loss: Callable[[Batch], Tensor]
    cancelled: bool = False
    exact: bool = True  # the advantage is R - J; else the group's, as METHODS ships it


WORLDS = {
    "groups of 4, equal lengths": World(4, (2, 2), shared=0.0),
    "groups of 8, right answers longer, shared weights": World(8, (12, 2), shared=1.0),
}
RIGHT = torch.tensor([0.6, 0.4], dtype=torch.float64)  # the chance to be right on each way
# r A over one divisor: neither a clip nor a length biases it, and it does not cancel. It tells what
# dfpo-min owes to cancelling from what it owes to having neither.
unclipped = partial(dr_grpo, eps_low=torch.inf, eps_high=torch.inf)
ROWS = {
    "grpo": Row(grpo),
    "grpo+cancel": Row(grpo, cancelled=True),
    "dfpo-min": Row(dfpo_min, exact=False),
    "r A": Row(unclipped),
    "r A+cancel": Row(unclipped, cancelled=True),
}
PAIRS = {  # what is subtracted from what
    "grpo+cancel minus grpo": ("grpo+cancel", "grpo"),
    "dfpo-min minus grpo": ("dfpo-min", "grpo"),
    "r A minus grpo": ("r A", "grpo"),
    "r A+cancel minus r A": ("r A+cancel", "r A"),
}
BATCHES = 10
RATES = 2.0 ** torch.arange(-1, 10, dtype=torch.float64)
OTHERS, RUNS = 128, 400  # runs at each rate, on other seeds, to choose one; runs at that rate


# ---------------- exact worlds: K policies at once, which do not influence each other


def choices(world: World, weights: Tensor) -> Tensor:
    """log pi of both openers, of both ways after the first, of both after the second: (K, 3, 2)."""
    return (weights[:, 1:] + world.shared * weights[:, :1]).log_softmax(2)


def expected_reward(world: World, weights: Tensor) -> Tensor:
    """J, exactly. (K, 4, 2) -> (K,)."""
    p = choices(world, weights).exp()
    return (p[:, 0] * (p[:, 1:] @ RIGHT)).sum(1)


def draw(world: World, weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Answers made of random numbers (K, n, 3): openers and ways (K, n, 2), rewards (K, n)."""
    p = choices(world, weights).exp()[:, :, 0]  # (K, 3) of the first choice
    opener = (uniform[..., 0] > p[:, :1]).long()  # (K, n)
    way = (uniform[..., 1] > p[:, 1:].gather(1, opener)).long()
    return torch.stack([opener, way], 2), (uniform[..., 2] < RIGHT[way]).double()


def learn(row: Row, world: World, weights: Tensor, drawn: tuple, updates: int, rates: Tensor):
    """The weights after some updates on one batch, by plain ascent. (K, 4, 2)."""
    tokens, rewards = drawn
    length = torch.where(rewards > 0, *world.lengths).flatten()  # (N,), N = K n
    mask = torch.arange(max(world.lengths)) < length[:, None]  # (N, T)
    filler = (0, mask.shape[1] - 2)
    nodes = prefix_nodes(pad(tokens.flatten(0, 1), filler), mask, world.G)
    places = torch.stack([tokens[..., 0], 2 + 2 * tokens[..., 0] + tokens[..., 1]], 2).flatten(1)

    def forward(weights: Tensor) -> Tensor:
        logp = choices(world, weights).flatten(1).gather(1, places)  # (K, 2 n)
        return pad(logp.view(-1, 2), filler)  # (N, T)

    A = (rewards - expected_reward(world, weights)[:, None]).flatten()
    if not row.exact:
        A = group_advantages(rewards.flatten(), world.G, "std")
    old, adv = forward(weights), A[:, None].expand(mask.shape)
    for _ in range(updates):
        weights = weights.requires_grad_()
        batch = Batch(forward(weights), old, adv, mask, world.G, mask.shape[1])
        loss = row.loss(batch)
        if row.cancelled:
            loss = cancel(loss, batch, nodes)
        # A loss is a mean over all K policies' answers; times K it is each one's own.
        (slope,) = torch.autograd.grad(loss * len(weights), weights)
        # Within bounds, so that no ratio becomes 0: cancel divides by it.
        weights = (weights.detach() - rates[:, None, None] * slope).clamp(-50, 50)
    return weights


def train(row: Row, world: World, groups: int, updates: int, rates: Tensor, seed: int) -> Tensor:
    """The expected reward after BATCHES batches of so many groups. (rates, runs) -> the same."""
    generator, weights = torch.Generator().manual_seed(seed), torch.zeros(rates.numel(), 4, 2)
    weights = weights.double()
    for _ in range(BATCHES):
        size = (rates.shape[1], groups * world.G, 3)
        uniform = torch.rand(size, generator=generator, dtype=torch.float64)
        drawn = draw(world, weights, uniform.repeat(len(rates), 1, 1))  # the same at each rate
        weights = learn(row, world, weights, drawn, updates, rates.flatten())
    return expected_reward(world, weights).view(rates.shape)


def show_worlds():
    for title, world in WORLDS.items():
        print(f"\nExpected reward after {BATCHES} batches: {title}; {RUNS} runs")
        print("Rates of:", ", ".join(ROWS), "\n")
        print("| groups | M |", " | ".join(["grpo", *PAIRS]), "| rates |")
        for groups in (4, 8, 16):
            for updates in (1, 4, 16):
                ends, best = {}, {}
                for name, row in ROWS.items():
                    grid = RATES[:, None].expand(-1, OTHERS)
                    before = train(row, world, groups, updates, grid, seed=1)
                    best[name] = RATES[before.mean(1).argmax()]
                    rates = best[name].expand(1, RUNS)
                    ends[name] = train(row, world, groups, updates, rates, seed=0)[0]
                cells = [
                    format_interval((ends[a] - ends[b]).tolist(), "+.4f") for a, b in PAIRS.values()
                ]
                cells = [groups, updates, f"{ends['grpo'].mean():.4f}", *cells]
                rates = ", ".join(f"{rate:g}" for rate in best.values())
                print("|", " | ".join(map(str, [*cells, rates])), "|", flush=True)


# ---------------- the toy of train.py: the noise of a gradient

LOSSES = {
    "reinforce": reinforce,
    "grpo": grpo,
    # Its own clip range is made for long answers.
    "gspo": partial(gspo, eps_low=0.2, eps_high=0.28),
    "dfpo-min": dfpo_min,
}
NOISE_BATCHES = 60


def collect(sampler: trainer.Policy, learner: trainer.Policy, task, config: trainer.Config) -> dict:
    """Method -> the gradient of each batch, (NOISE_BATCHES, parameters).

    sampler: the old policy, which answers. learner: the policy whose gradient it is.
    """
    weights, gradients = [*learner.model.parameters()], {}
    shipped = trainer.bind("reinforce", {})  # all four have its advantages
    for step, items in enumerate(trainer.prompt_batches(task, config), 1):
        answers = trainer.sample(sampler, task, items, step, config)
        scored = trainer.score(sampler, answers, shipped, config, None)
        logp, _ = trainer.log_probs(learner, answers, config.temperature)
        batch = replace(scored.batch, logp=logp)
        for name, loss_fn in LOSSES.items():
            loss = loss_fn(batch)
            for key, used in ((name, loss), (f"{name}+cancel", cancel(loss, batch, scored.nodes))):
                parts = torch.autograd.grad(used, weights, retain_graph=True)
                flat = torch.cat([part.flatten() for part in parts])
                gradients.setdefault(key, []).append(flat)
    return {key: torch.stack(rows) for key, rows in gradients.items()}


def noise(products: Tensor) -> float:
    """Trace of the gradient's covariance over the squared length of its mean.

    products: those of every two of n gradients, (n, n). The squared length of a mean of n holds the
    noise of the mean as well, trace / n. It is taken off.
    """
    n = len(products)
    square = products.sum() / n**2
    trace = (products.trace() - n * square) / (n - 1)
    return float(trace / (square - trace / n))


def format_factor(cancelled: Tensor, plain: Tensor) -> str:
    """How many times as noisy, and a 95 % interval: each gradient is left out once (jackknife)."""
    n, factors = len(plain), []
    for i in range(n):
        rest = torch.arange(n) != i
        factors.append(noise(cancelled[rest][:, rest]) / noise(plain[rest][:, rest]))
    # The deviation of the estimate; t is 2.00 with 59 degrees of freedom.
    half = 2.0 * statistics.pstdev(factors) * (n - 1) ** 0.5
    return f"{noise(cancelled) / noise(plain):.3g} +- {half:.2g}"


def show_noise(run: str):
    config = trainer.Config(**trainer.read_config(run))
    task, method = trainer.load_task(config), trainer.bind_flags(config)
    # Other seeds than the run's: what it has learnt depends on its own batches.
    config = replace(config, steps=NOISE_BATCHES, seed=config.seed + 1)
    before = replace(config, steps=1, seed=config.seed + 1)

    def load(path) -> trainer.Policy:
        return trainer.load_policy(config, task, str(path))

    start, end = load(f"{run}/start"), load(trainer.newest_checkpoint(Path(run)))
    later = load(f"{run}/start")  # and one step on a batch of its own
    answers = trainer.sample(start, task, trainer.prompt_batches(task, before)[0], 1, before)
    scored = trainer.score(start, answers, method, before, None)
    trainer.learn(later, trainer.adamw(later.model, config.lr), scored, method, before)
    print(f"\nNoise of the gradient, {NOISE_BATCHES} batches\n")
    print("| policy | method | noise | with cancel | how many times |")
    policies = {"start": (start, start), "end": (end, end), "one step later": (start, later)}
    for title, pair in policies.items():
        gradients = collect(*pair, task, config)
        products = {name: (rows @ rows.T).double() for name, rows in gradients.items()}
        for name in LOSSES:
            plain, cancelled = products[name], products[f"{name}+cancel"]
            cells = [f"{noise(plain):.3g}", f"{noise(cancelled):.3g}"]
            cells = [title, name, *cells, format_factor(cancelled, plain)]
            print("|", " | ".join(cells), "|", flush=True)


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise", metavar="RUN", help="a folder of train.py: its gradients' noise")
    run = parser.parse_args(argv).noise
    torch.set_num_threads(1)
    if run:
        show_noise(run)
    else:
        show_worlds()


if __name__ == "__main__":
    main()
