"""Does cancelling pay where one small batch is used many times?

    python -m toy.reuse               exact worlds: ten minutes
    python -m toy.reuse --noise RUN   a finished run of train.py on the toy: five minutes

Claim C22 says that `cancel` moves no expected update, if theta does not depend on the batch. After
the first of M updates on one batch it does. So what happens then is measured here.

An answer is an opener, which earns nothing, and then one of two ways, right with probability .6 and
.4. A batch is a few sampled groups. Whole training runs are compared, each method at the learning
rate that is best on other seeds. All methods see the same random numbers, so runs are compared in
pairs. In one world all answers have two tokens, and every history has weights of its own. There
cancelling costs noise, as C23 says. The other world is built so that cancelling saves noise: right
answers are six times as long as wrong ones, groups are larger, and the opener and the ways have
weights in common, so that what the opener learns by chance changes the ways.

What came out (measured): in the first world grpo+cancel is nowhere ahead of grpo, and mostly a few
thousandths behind. In the other it is nowhere behind, and at best a hundredth ahead. dfpo-min is
ahead by .01 to .04 where a batch is used 4 or 16 times. But that is not owed to cancelling: r A,
which has no clip and one divisor and does not cancel, gains most of that.

--noise compares gradients, not runs: how long their random part is beside their mean, over one pass
through the training problems. On-policy `cancel` changes it by some per cent. Four updates later it
multiplies it by 3.3 and 1.8, because it divides by the ratios of others, and gives clipped tokens a
push again.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import losses
import train as trainer
from losses import Batch
from toy.figure import format_interval, interval
from toy.tax import CANCELLED, EXACT, ROWS, Row, compute_push


class World(NamedTuple):
    G: int  # answers of a group
    lengths: tuple[int, int]  # of right and of wrong answers, filler without a choice included
    shared: float  # how strongly the weights that all places have in common act


WORLDS = {
    "groups of 4, equal lengths": World(4, (2, 2), shared=0.0),
    "groups of 8, right answers longer, shared weights": World(8, (12, 2), shared=1.0),
}
RIGHT = torch.tensor([0.6, 0.4], dtype=torch.float64)  # the chance to be right on each way
METHODS = {name: ROWS[name] for name in (EXACT, CANCELLED, "dfpo-min")}
# r A over one divisor: neither a clip nor a length biases it, and it does not cancel. It tells what
# dfpo-min owes to cancelling from what it owes to having neither.
METHODS["r A"] = Row(partial(losses.dr_grpo, eps_low=torch.inf, eps_high=torch.inf), "exact")
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


def learn(row: Row, world: World, weights: Tensor, uniform: Tensor, updates: int, rates: Tensor):
    """The weights after some updates on one batch, by plain ascent. (K, 4, 2).

    The batch is made of random numbers, (K, n, 3): for the opener, the way and the reward.
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


def train(
    row: Row, world: World, groups: int, updates: int, rates: Tensor, runs: int, seed: int
) -> Tensor:
    """The expected reward after BATCHES batches of so many groups, (rates, runs)."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(len(rates) * runs, 4, 2, dtype=torch.float64)
    for _ in range(BATCHES):
        size = (runs, groups * world.G, 3)
        uniform = torch.rand(size, generator=generator, dtype=torch.float64)
        uniform = uniform.repeat(len(rates), 1, 1)  # the same at each rate
        weights = learn(row, world, weights, uniform, updates, rates.repeat_interleave(runs))
    return expected_reward(world, weights).view(-1, runs)


def show_worlds():
    print(f"Expected reward after {BATCHES} batches, {RUNS} runs; the others minus the first\n")
    print("| world | groups | M |", " | ".join(METHODS), "|")
    for title, groups, updates in itertools.product(WORLDS, (4, 8, 16), (1, 4, 16)):
        ends, setting = {}, (WORLDS[title], groups, updates)
        for name, row in METHODS.items():
            best = train(row, *setting, RATES, OTHERS, seed=1).mean(1).argmax()
            ends[name] = train(row, *setting, RATES[best, None], RUNS, seed=0)[0]
        first, *others = ends.values()
        cells = [format_interval((end - first).tolist(), "+.4f") for end in others]
        print("|", title, groups, updates, f"{first.mean():.4f}", *cells, sep=" | ", flush=True)


# ---------------- the toy of train.py: the noise of a gradient


def collect(sampler: trainer.Policy, learner: trainer.Policy, task, config: trainer.Config) -> dict:
    """Method -> its gradient on each batch, without and with cancel: (batches, 2, parameters).

    sampler: the old policy, which answers. learner: the policy whose gradient it is.
    """
    weights = [*learner.model.parameters()]
    gradients = {"reinforce": [], "grpo": []}  # their advantages are the same
    method = trainer.bind("grpo", {})
    for step, items in enumerate(trainer.prompt_batches(task, config), 1):
        answers = trainer.sample(sampler, task, items, step, config)
        scored = trainer.score(sampler, answers, method, config, None)
        logp, _ = trainer.log_probs(learner, answers, config.temperature)
        batch = replace(scored.batch, logp=logp)
        for name, rows in gradients.items():
            loss = getattr(losses, name)(batch)
            for used in (loss, losses.cancel(loss, batch, scored.nodes)):
                parts = torch.autograd.grad(used, weights, retain_graph=True)
                rows.append(torch.cat([part.flatten() for part in parts]))
    return {name: torch.stack(rows).unflatten(0, (-1, 2)) for name, rows in gradients.items()}


def factor(products: Tensor) -> float:
    """How many times as noisy the second of two gradients is, from products of samples (2, n, n).

    Noise is the trace of the covariance over the squared length of the mean. The squared length of
    a mean of n holds the noise of the mean as well, trace / n. It is taken off.
    """
    n = products.shape[1]
    square = products.mean((1, 2))
    trace = (products.diagonal(dim1=1, dim2=2).sum(1) - n * square) / (n - 1)
    plain, cancelled = trace / (square - trace / n)
    return float(cancelled / plain)


def show_noise(run: str):
    config = trainer.Config(**trainer.read_config(run))
    task, method = trainer.load_task(config), trainer.bind_flags(config)
    # Other seeds than the run's: what it has learnt depends on its own batches.
    config = replace(config, seed=config.seed + 1)
    before = replace(config, seed=config.seed + 1)

    def load(path) -> trainer.Policy:
        return trainer.load_policy(config, task, str(path))

    start, end = load(f"{run}/start"), load(trainer.newest_checkpoint(Path(run)))
    later = load(f"{run}/start")  # and one step on a batch of its own
    answers = trainer.sample(start, task, trainer.prompt_batches(task, before)[0], 1, before)
    scored = trainer.score(start, answers, method, before, None)
    trainer.learn(later, trainer.adamw(later.model, config.lr), scored, method, before)
    print("How many times as noisy the gradient is with cancel\n")
    policies = {"start": (start, start), "end": (end, end), "one step later": (start, later)}
    for title, pair in policies.items():
        for name, gradients in collect(*pair, task, config).items():
            rows = gradients.transpose(0, 1)  # (2, n, parameters)
            products = (rows @ rows.mT).double()
            n = len(gradients)
            # A 95 % interval: each batch is left out once (jackknife).
            rests = [torch.arange(n) != i for i in range(n)]
            without = [factor(products[:, rest][:, :, rest]) for rest in rests]
            half = (n - 1) * interval(without)[1]
            print(f"{title}, {name}: {factor(products):.3g} +- {half:.2g}", flush=True)


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
