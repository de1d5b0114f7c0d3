"""What GRPO's min costs off-policy where nothing else differs: equal lengths, one constant divisor.

    python -m toy.gate                       the table: one minute
    python -m toy.gate --plot toy/gate.png   and the picture (needs matplotlib)
    python -m toy.gate --limits              where it holds and where not: ten minutes

An answer is two tokens, each from logits of its own. It is right with probability
.3 + .1 [token 1 is good] + .1 [token 2 is good]. So the best policy earns .5. At the start the good
token has the share .5 in the first place and .001 in the second, where the gradient is 250 times
smaller. Nothing is sampled: all groups of 4 answers are enumerated, and each counts with its
probability under the policy that began the batch. Training is plain gradient ascent with M updates
on each of B batches. What counts is the best end over a grid of learning rates. toy/README.md says
what came out, and claim C19 why.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from losses import Batch, group_advantages, prefix_nodes
from toy.figure import (
    draw_lines,
    find_method,
    format_interval,
    make_figure,
    parse_arguments,
    picture,
    print_row,
    save_picture,
)
from toy.tax import compute_push
from toy.worlds import Groups, Outcome

G = 4
NAMES = (
    *("grpo", "dr-grpo", "gspo", "grpo+proj", "grpo-symmetric", "cispo", "dfpo-min"),
    *("dfpo-min eps 0.2", "reinforce", "recentred"),
)
ADAM = functools.partial(AdamW, betas=(0.9, 0.95), weight_decay=0.0)


class Setting(NamedTuple):
    """How a policy is trained."""

    good: tuple[float, float]  # the shares of the good tokens at the start
    updates: int  # M, on each batch
    batches: int
    optimizer: Callable = SGD
    sampled: int = 0  # groups in a batch; 0: all that there are, each as often as it is probable
    seed: int = 0  # of the sampling


def make_groups() -> Groups:
    """Every group of G answers. An answer is two tokens, good (0) or bad (1), right or wrong."""
    outcomes = []
    for first, second in itertools.product((0, 1), repeat=2):
        right = 0.5 - 0.1 * (first + second)
        outcomes.append(Outcome(first, right, reward=1.0, length=2, plan=second))
        outcomes.append(Outcome(first, 1 - right, reward=0.0, length=2, plan=second))
    return Groups(outcomes, G)


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(policies, 2, 2), (policies, rows, 2) -> (policies, rows, 2)."""
    return logits.log_softmax(2).gather(2, tokens.mT).mT


def expected_reward(logits: Tensor) -> Tensor:
    """(policies, 2, 2) -> (policies,)."""
    return 0.3 + 0.1 * logits.softmax(2)[:, :, 0].sum(1)


def start_batch(name: str, groups: Groups, logits: Tensor, sampled: int, generator):
    """All groups, or a sample, under the old policies: tokens (policies, rows, 2), and a Batch.

    Losses are homogeneous in A, so each group's A carries its weight. It also carries the number of
    groups, over which a loss takes the mean.
    """
    tokens = torch.stack([groups.way, groups.plan], 1).expand(len(logits), -1, -1)
    chance = groups.chance * log_probs(logits, tokens).sum(2).exp()
    weight = chance.unflatten(1, (-1, G)).prod(2) * groups.orders  # (policies, groups)
    drawn = torch.arange(weight.shape[1]).expand_as(weight)
    if sampled:
        drawn = torch.multinomial(weight, sampled, replacement=True, generator=generator)
        weight = torch.full(drawn.shape, 1 / sampled, dtype=weight.dtype)  # (policies, sampled)
    A = group_advantages(groups.rewards.view(-1, G)[drawn].flatten(), G, find_method(name).scale)
    A = A * (weight * weight.numel()).flatten().repeat_interleave(G)
    tokens = tokens[0].view(-1, G, 2)[drawn].flatten(1, 2)
    old = log_probs(logits, tokens).flatten(0, 1)  # (N, 2)
    mask = torch.ones_like(old, dtype=torch.bool)
    return tokens, Batch(old, old, A[:, None].expand_as(old), mask, G, max_tokens=2)


def push(name: str, tokens: Tensor, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a method's J, (policies, 2, 2), and the token coefficients, (N, 2)."""
    nodes = prefix_nodes(tokens.flatten(0, 1), batch.mask, G) if "+" in name else batch.mask
    return compute_push(name, batch, nodes, logits, lambda z: log_probs(z, tokens).flatten(0, 1))


def train(setting: Setting, name: str, rates: Tensor) -> list[Tensor]:
    """The logits after every update, of one policy per rate. (policies, 2, 2) each."""
    groups, good = make_groups(), torch.tensor(setting.good, dtype=torch.float64)
    start = torch.stack([good, 1 - good], 1).log().expand(len(rates), -1, -1)
    moved = torch.zeros_like(start)  # at the rate 1; policies do not influence each other
    optimizer = setting.optimizer([moved], lr=1.0)
    generator = torch.Generator().manual_seed(setting.seed)
    path = [start]
    for _ in range(setting.batches):
        tokens, batch = start_batch(name, groups, path[-1], setting.sampled, generator)
        for _ in range(setting.updates):
            moved.grad = -push(name, tokens, batch, path[-1])[0]
            optimizer.step()
            path.append(start + rates.view(-1, 1, 1) * moved)
    return path


# ---------------- the figure: all groups, plain ascent

GOOD = (0.5, 0.001)  # shares of the two good tokens at the start
RATES = 10 ** torch.linspace(0, 3, 41, dtype=torch.float64)
TOO_LARGE = 30.0  # a rate to show the mechanism at
BATCHES = 120
LINES = ("grpo", "grpo+proj", "grpo-symmetric", "recentred")  # of the picture


def sweep(setting: Setting, name: str, rates: Tensor = RATES) -> Tensor:
    """The expected reward at the end of a run at each rate. Of sampled groups, which leave noise,
    the mean at the ends of the last batches."""
    ends = train(setting, name, rates)[:: -setting.updates][: LAST if setting.sampled else 1]
    return torch.stack([expected_reward(logits) for logits in ends]).mean(0)


def sum_by_sign(name: str) -> list[tuple[float, float, float]]:
    """Of the coefficients of winners, of losers and of both with the good token 1, per answer.

    At both updates of the first batch, M = 2.
    """
    path = train(Setting(GOOD, 2, 1), name, torch.tensor([TOO_LARGE], dtype=torch.float64))
    tokens, batch = start_batch(name, make_groups(), path[0], 0, None)
    good, winner = tokens[0, :, 0] == 0, batch.adv[:, 0] > 0
    sums = []
    for logits in path[:2]:
        c = push(name, tokens, batch, logits)[1][:, 0] / len(good)
        winners, losers = float(c[good & winner].sum()), float(c[good & ~winner].sum())
        sums.append((winners, losers, winners + losers))
    return sums


def compare(columns: dict[str, Setting], rates: Tensor = RATES) -> dict:
    """Print the best reward, and how many of the rates end within .01 of the best policy.

    Returns (column, name) -> reward at each rate.
    """
    print_row("", columns)
    rewards = {}
    for name in NAMES:
        found = [sweep(setting, name, rates) for setting in columns.values()]
        rewards |= {(title, name): x for title, x in zip(columns, found, strict=True)}
        print_row(name, [f"{float(x.max()):.3f} ({int((x > 0.49).sum())})" for x in found])
    return rewards


def plot(rewards: dict, sums: list[tuple[float, float, float]], path: Path):
    """The mechanism, and the end at every rate."""
    finding = (
        "GRPO's min undoes a first update. So no learning rate teaches both good tokens.\n"
        "(An answer is two tokens. Each good one makes a right answer likelier.)"
    )
    figure = make_figure(finding, 3.6)
    bars, ends = figure.subplots(1, 2)
    sides = {"winners": "#56B4E9", "losers": "#CC79A7", "their sum": "#000000"}
    for k, (side, color) in enumerate(sides.items()):
        places = [update + 0.25 * (k - 1) for update in (1, 2)]
        bars.bar(places, [update[k] for update in sums], 0.25, color=color, label=side)
    bars.axhline(0, color="#999999", linewidth=0.8)
    bars.set_xticks([1, 2], ["first update", "second update"])
    bars.set_ylabel("sum of the coefficients c (up: it grows)")
    bars.set_title("grpo: push on the good first token")
    bars.legend()
    ends.set_xscale("log")
    curves = {name: rewards["M = 2", name].tolist() for name in LINES}
    draw_lines(ends, curves, RATES.tolist())
    for reward, learned in ((0.3, "none learned"), (0.4, "one token learned"), (0.5, "both")):
        ends.axhline(reward, color="#999999", linewidth=0.8, linestyle=":")
        ends.annotate(learned, (1, reward), (0, 3), textcoords="offset points", fontsize=8)
    ends.set_ylim(0.29, 0.52)
    ends.set_title(f"reward after {BATCHES} batches of 2 updates")
    ends.set_ylabel("expected reward (best: 0.5)")
    ends.set_xlabel("learning rate")
    figure.savefig(path)


# ---------------- its limits

ADAM_RATES = 10 ** torch.linspace(-2.5, 0.5, 7, dtype=torch.float64)
GROUPS, LAST = 16, 20  # sampled groups in a batch; batches whose reward counts
PAIRS, OTHERS = 40, 24  # runs of a method, in pairs with those of the others; runs per rate before
FEWER = ("grpo", "gspo", "grpo-symmetric", "cispo", "dfpo-min", "recentred")


def compare_sampled(setting: Setting, rates: Tensor):
    """With sampled groups: each method at the best of these rates on other seeds."""
    first = None
    for name in FEWER:
        before = sweep(setting._replace(seed=1), name, rates.repeat_interleave(OTHERS))
        best = rates[before.view(-1, OTHERS).mean(1).argmax()]
        rewards = sweep(setting, name, best.repeat(PAIRS))
        first = rewards if first is None else first
        cells = [format_interval(x.tolist()) for x in (rewards, rewards - first)]
        print_row(name, [f"{best:.3g}", *cells])


def show_limits():
    print(f"\nThe best reward of {len(RATES[::2])} rates, B = 120 if not said\n")
    columns = {
        "M = 2, B = 480": Setting(GOOD, 2, 4 * BATCHES),
        "M = 2, start .01": Setting((GOOD[0], 0.01), 2, BATCHES),
    }
    compare(columns, RATES[::2])
    optimizers = {"SGD": (SGD, 2.0 ** torch.arange(9)), "AdamW": (ADAM, ADAM_RATES)}
    for start, M in ((GOOD[1], 2), (GOOD[1], 8), (0.05, 2)):
        for title, (optimizer, rates) in optimizers.items():
            print(f"\nSampled groups, token 2 starts at {start}, M = {M}, {title}\n")
            print_row("", ["rate", "reward", "minus grpo"])
            setting = Setting((GOOD[0], start), M, BATCHES, optimizer, GROUPS)
            compare_sampled(setting, rates.double())


def main(argv: list[str] | None = None):
    file = dict(type=picture, metavar="FILE", help="draw it, as .svg or .png")
    limits = dict(action="store_true", help="other settings: ten minutes")
    options = parse_arguments(__doc__, argv, {"--plot": file, "--limits": limits})
    torch.set_num_threads(1)
    print(f"The best reward of {len(RATES)} rates; in brackets, how many end above .49\n")
    rewards = compare({f"M = {M}": Setting(GOOD, M, BATCHES) for M in (1, 2)})
    print(f"\nSum of c at the good token 1, first batch, M = 2, rate {TOO_LARGE:g}\n")
    print_row("", ["winners", "losers", "sum"])
    for name in ("grpo", "grpo-symmetric"):
        for k, sums in enumerate(sum_by_sign(name), 1):
            print_row(f"{name}, update {k}", [f"{x:+.5f}" for x in sums])
    if options.limits:
        show_limits()
    save_picture(plot, rewards, sum_by_sign("grpo"), path=options.plot)


if __name__ == "__main__":
    main()
