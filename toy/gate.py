"""What GRPO's min costs off-policy where nothing else differs: equal lengths, one constant divisor.

    python -m toy.gate                   the table: one minute
    python -m toy.gate --plot gate.png   and the picture (needs matplotlib)
    python -m toy.gate --limits          where it holds and where not: ten minutes

An answer is two tokens, each from logits of its own. It is right with probability
.3 + .1 [token 1 is good] + .1 [token 2 is good]. So the best policy earns .5. At the start the good
token has the share .5 in the first place and .001 in the second, where the gradient is 250 times
smaller. Nothing is sampled: all groups of 4 answers are enumerated, and each counts with its
probability under the policy that began the batch. Training is plain gradient ascent with M updates
on each of B batches. What counts is the best end over a grid of learning rates.

What came out (claim C19). With M = 1 all methods reach .500. With M = 2 those with a min end at
.401 at best: grpo, dr-grpo, gspo. All others reach .500 at about half of the rates. A first update
takes token 1 out of the clip range, in the right direction. There the min lets only losers act on
the good token, and only winners on the bad one. Both push back, several times as hard as the first
update pushed forward, because a credit is a small difference of large sums. So a rate that suits
token 2 ruins token 1, and a rate that suits token 1 leaves token 2 where it is. The projection
stops the ruin and does not save token 2.

Its limits. In four times as many batches grpo reaches .498, at one rate of 21, the others at 15.
If token 2 starts at .01, grpo has rates for both. Exact groups make large steps harmless for what
cancels; sampled groups do not. There, with SGD, grpo ends at .399, and the best at .45. AdamW's
steps are equally long for both tokens. With it, exact groups show a cost only at rates above 0.3,
but for gspo at most rates. Sampled groups show none at the rate that is best for each method.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from losses import (
    METHODS,
    Batch,
    Method,
    group_advantages,
    prefix_nodes,
    project,
    token_coefficients,
)
from toy.figure import interval, make_figure, parse_arguments, picture, save_picture
from toy.policy import count_orders

G = 4
NAMES = (
    *("grpo", "dr-grpo", "gspo", "grpo+proj", "grpo-symmetric", "cispo", "dfpo-min"),
    *("dfpo-min eps 0.2", "reinforce", "recentred"),
)
HYPER = {"gspo": {"eps_low": 0.02, "eps_high": 0.02}, "dfpo-min eps 0.2": {"eps": 0.2}}
ADAM = functools.partial(AdamW, betas=(0.9, 0.95), weight_decay=0.0)


class World(NamedTuple):
    """A question to every policy, or one to all of them. An answer is one of a few."""

    answers: Tensor  # (answers, T) int64: token t of an answer is drawn from logits of its own
    right: Tensor  # (questions, answers): its chance to be right
    start: Tensor  # (questions, T, V): the logits


class Setting(NamedTuple):
    """How a policy is trained."""

    world: World
    updates: int  # M, on each batch
    batches: int
    optimizer: Callable = SGD
    sampled: int = 0  # groups in a batch; 0: all that there are, each as often as it is probable
    seed: int = 0  # of the sampling


def two_tokens(*good: float) -> World:
    """P(right) = .3 + .1 [token 1 good] + .1 [token 2 good]. good: their shares at the start."""
    answers = torch.tensor(list(itertools.product((0, 1), repeat=2)))  # 0 is good
    shares = torch.tensor([[p, 1 - p] for p in good], dtype=torch.float64)
    return World(answers, 0.5 - 0.1 * answers.double().sum(1)[None], shares.log()[None])


def one_token(right: Tensor, start: Tensor) -> World:
    """One token is the whole answer. (questions, ways) both."""
    return World(torch.arange(right.shape[1])[:, None], right, start[:, None])


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(policies, T, V), (policies, rows, T) -> (policies, rows, T)."""
    return logits.log_softmax(2).gather(2, tokens.mT).mT


def probabilities(world: World, logits: Tensor) -> Tensor:
    """Of every answer. (policies, T, V) -> (policies, answers)."""
    return log_probs(logits, world.answers.expand(len(logits), -1, -1)).sum(2).exp()


def expected_reward(world: World, logits: Tensor) -> Tensor:
    """(policies, T, V) -> (policies,)."""
    return (probabilities(world, logits) * world.right).sum(1)


class Groups:
    """Every group of G answers, each of them right or wrong. n groups."""

    def __init__(self, world: World):
        outcomes = itertools.product(range(len(world.answers)), (1.0, 0.0))
        groups = list(itertools.combinations_with_replacement(outcomes, G))
        self.world = world
        self.answers = torch.tensor([[answer for answer, _ in group] for group in groups])  # (n, G)
        self.rewards = torch.tensor([[R for _, R in group] for group in groups]).double()  # (n, G)
        self.orders = torch.tensor([count_orders(group) for group in groups])  # (n,)

    def probabilities(self, logits: Tensor) -> Tensor:
        """(policies, T, V) -> (policies, n)."""
        right = self.world.right.expand(len(logits), -1)[:, self.answers]  # (policies, n, G)
        chance = torch.where(self.rewards > 0, right, 1 - right)
        p = probabilities(self.world, logits)[:, self.answers]
        return (p * chance).prod(2) * self.orders

    def batch(self, name: str, logits: Tensor, sampled: int = 0, generator=None):
        """All groups, or a sample of m, under the old policies: tokens (policies, rows, T), Batch.

        Losses are homogeneous in A, so each group's A carries its weight. It also carries the
        number of groups, over which a loss takes the mean.
        """
        weight = self.probabilities(logits)  # (policies, n)
        drawn = torch.arange(weight.shape[1]).expand_as(weight)
        if sampled:
            drawn = torch.multinomial(weight, sampled, replacement=True, generator=generator)
            weight = torch.full(drawn.shape, 1 / sampled, dtype=weight.dtype)  # (policies, m)
        A = group_advantages(self.rewards[drawn].flatten(), G, find(name).scale)
        A = A * (weight * weight.numel()).flatten().repeat_interleave(G)
        tokens = self.world.answers[self.answers[drawn].flatten(1)]  # (policies, rows, T)
        old = log_probs(logits, tokens).flatten(0, 1)  # (N, T)
        mask = torch.ones_like(old, dtype=torch.bool)
        return tokens, Batch(old, old, A[:, None].expand_as(old), mask, G, old.shape[1])


def find(name: str) -> Method:
    return METHODS[name.partition("+")[0].split()[0]]


def compute_push(name: str, tokens: Tensor, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a method's J, (policies, T, V), and the token coefficients, (N, T)."""
    logits = logits.detach().requires_grad_()
    logp = log_probs(logits, tokens).flatten(0, 1)
    loss = find(name).passes[0](replace(batch, logp=logp), **HYPER.get(name, {}))
    if name.endswith("+proj"):
        nodes = prefix_nodes(tokens.flatten(0, 1), batch.mask, G)
        loss = project(loss, logp, batch.adv[:, 0], nodes, batch.mask)
    c = token_coefficients(loss, logp)
    return torch.autograd.grad(logp, logits, c / len(c))[0], c


def train(setting: Setting, name: str, rates: Tensor) -> list[Tensor]:
    """The logits after every update, of one policy per rate. (policies, T, V) each."""
    groups = Groups(setting.world)
    start = setting.world.start.expand(len(rates), -1, -1)
    moved = torch.zeros_like(start)  # at the rate 1; policies do not influence each other
    optimizer = setting.optimizer([moved], lr=1.0)
    generator = torch.Generator().manual_seed(setting.seed)
    path = [start]
    for _ in range(setting.batches):
        tokens, batch = groups.batch(name, path[-1], setting.sampled, generator)
        for _ in range(setting.updates):
            moved.grad = -compute_push(name, tokens, batch, path[-1])[0]
            optimizer.step()
            path.append(start + rates.view(-1, 1, 1) * moved)
    return path


# ---------------- the figure: all groups, plain ascent

GOOD = (0.5, 0.001)  # shares of the two good tokens at the start
RATES = 10 ** torch.linspace(0, 3, 41, dtype=torch.float64)
TOO_LARGE = 30.0  # a rate to show the mechanism at
BATCHES = 120
STYLES = {
    "grpo": dict(color="#B07600", marker="s"),
    "gspo": dict(color="#D55E00", marker="v"),
    "grpo+proj": dict(color="#B07600", marker="s", linestyle="--", markerfacecolor="white"),
    "grpo-symmetric": dict(color="#009E73", marker="^"),
    "dfpo-min": dict(color="#0072B2", marker="D"),
    "recentred": dict(color="#000000", marker="o"),
}


def sweep(setting: Setting, name: str, rates: Tensor = RATES) -> Tensor:
    """The expected reward at the end of a run at each rate. Of sampled groups, which leave noise,
    the mean at the ends of the last batches."""
    ends = train(setting, name, rates)[:: -setting.updates][: LAST if setting.sampled else 1]
    return torch.stack([expected_reward(setting.world, logits) for logits in ends]).mean(0)


def format_sweep(rewards: Tensor) -> str:
    """The best, and how many of the rates end within .01 of the best policy."""
    return f"{float(rewards.max()):.3f} ({int((rewards > 0.49).sum())})"


def sum_by_sign(name: str) -> list[tuple[float, float]]:
    """Of the coefficients of winners and of losers with the good token 1, per answer of a group.

    At both updates of the first batch, M = 2.
    """
    world, rate = two_tokens(*GOOD), torch.tensor([TOO_LARGE], dtype=torch.float64)
    path = train(Setting(world, 2, 1), name, rate)
    tokens, batch = Groups(world).batch(name, path[0])
    good, winner = tokens[0, :, 0] == 0, batch.adv[:, 0] > 0
    sums = []
    for logits in path[:2]:
        c = compute_push(name, tokens, batch, logits)[1][:, 0] / len(good)
        sums.append((float(c[good & winner].sum()), float(c[good & ~winner].sum())))
    return sums


def show(name: str, cells: list[str], width: int = 16):
    print(f"{name:24}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)


def compare_exactly(columns: dict[str, Setting], rates: Tensor = RATES) -> dict:
    """Print a table, a row per method; (column, name) -> reward at each rate."""
    show("", list(columns))
    rewards = {}
    for name in NAMES:
        for title, setting in columns.items():
            rewards[title, name] = sweep(setting, name, rates)
        show(name, [format_sweep(rewards[title, name]) for title in columns])
    return rewards


def plot(rewards: dict, sums: list[tuple[float, float]], path: Path):
    """The mechanism, and the end at every rate."""
    figure = make_figure("GRPO's min undoes a first update. So no rate suits both tokens.", 3.4)
    bars, ends = figure.subplots(1, 2)
    for k, (winners, losers) in enumerate(sums):
        heights = (winners, losers, winners + losers)
        bars.bar([4 * k + x for x in range(3)], heights, color=["#56B4E9", "#CC79A7", "#000000"])
    bars.axhline(0, color="#999999", linewidth=0.8)
    bars.set_xticks([0, 1, 2, 4, 5, 6], ["winners", "losers", "sum"] * 2, rotation=45)
    bars.set_title("grpo: sum c at the good token 1, updates 1 and 2")
    for name, style in STYLES.items():
        ends.plot(RATES, rewards["M = 2", name], label=name, markevery=5, **style)
    control = dict(label="grpo, M = 1", color="#666666", linestyle=":", marker="")
    ends.plot(RATES, rewards["M = 1", "grpo"], **control)
    ends.set_xscale("log")
    ends.set_title(f"reward after {BATCHES} batches, M = 2")
    ends.set_xlabel("learning rate")
    figure.legend(*ends.get_legend_handles_labels(), loc="outside lower center", ncols=7)
    figure.savefig(path)


# ---------------- its limits

ADAM_RATES = 10 ** torch.linspace(-2.5, 0.5, 25, dtype=torch.float64)
QUESTIONS = 150
GROUPS, LAST = 16, 20  # sampled groups in a batch; batches whose reward counts
PAIRS, OTHERS = 40, 24  # runs of a method, in pairs with those of the others; runs per rate before
FEWER = ("grpo", "gspo", "grpo-symmetric", "cispo", "dfpo-min", "recentred")


def compare_on_random_questions(ways: int, updates: int, questions: int):
    """Mean regret, the best way's reward minus the policy's: one rate for all, a rate for each."""
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(questions, ways, generator=generator, dtype=torch.float64)
    start = 2 * torch.randn(questions, ways, generator=generator, dtype=torch.float64)
    setting = Setting(one_token(right, start), updates, BATCHES)
    for name in FEWER:
        ends = [sweep(setting, name, rate.repeat(questions)) for rate in RATES[::5]]
        regret = right.amax(1) - torch.stack(ends)  # (rates, questions)
        cells = [float(regret.mean(1).min()), float(regret.amin(0).mean())]
        show(f"{name}, {ways} ways, M = {updates}", [f"{x:.4f}" for x in cells])


def compare_sampled(setting: Setting, rates: Tensor):
    """With sampled groups: each method at the best of these rates on other seeds."""
    first = None
    for name in FEWER:
        before = sweep(setting._replace(seed=1), name, rates.repeat_interleave(OTHERS))
        best = rates[before.view(-1, OTHERS).mean(1).argmax()]
        rewards = sweep(setting, name, best.repeat(PAIRS))
        first = rewards if first is None else first
        cells = [interval(x.tolist()) for x in (rewards, rewards - first)]
        show(name, [f"{best:.3g}", *(f"{mean:.3f} +- {half:.3f}" for mean, half in cells)], 18)


def show_limits():
    world, easier = two_tokens(*GOOD), two_tokens(GOOD[0], 0.01)
    print(f"\nThe best reward of {len(RATES[::2])} rates, B = 120 if not said\n")
    columns = {
        "M = 2, B = 480": Setting(world, 2, 4 * BATCHES),
        "M = 8": Setting(world, 8, BATCHES),
    }
    compare_exactly(columns | {"M = 2, start .01": Setting(easier, 2, BATCHES)}, RATES[::2])
    print(f"\nThe same with AdamW in expectation, {len(ADAM_RATES)} rates from .003 to 3.2\n")
    columns = {f"M = {M}": Setting(world, M, BATCHES, ADAM) for M in (2, 8)}
    compare_exactly(columns, ADAM_RATES)
    print("\nRandom questions, answers of one token: mean regret\n")
    show("", ["one rate for all", "a rate for each"])
    compare_on_random_questions(2, 2, QUESTIONS)
    compare_on_random_questions(3, 8, QUESTIONS // 5)
    optimizers = {"SGD": (SGD, 2.0 ** torch.arange(9)), "AdamW": (ADAM, ADAM_RATES[::4])}
    for start, M in ((GOOD[1], 2), (GOOD[1], 8), (0.05, 2)):
        for title, (optimizer, rates) in optimizers.items():
            print(f"\nSampled groups, token 2 starts at {start}, M = {M}, {title}\n")
            show("", ["rate", "reward", "minus grpo"], 18)
            setting = Setting(two_tokens(GOOD[0], start), M, BATCHES, optimizer, GROUPS)
            compare_sampled(setting, rates.double())


def main(argv: list[str] | None = None):
    file = dict(type=picture, metavar="FILE", help="draw it, as .svg or .png")
    limits = dict(action="store_true", help="other settings: ten minutes")
    options = parse_arguments(__doc__, argv, {"--plot": file, "--limits": limits})
    torch.set_num_threads(1)
    world = two_tokens(*GOOD)
    print(f"The best reward of {len(RATES)} rates; in brackets, how many end above .49\n")
    rewards = compare_exactly({f"M = {M}": Setting(world, M, BATCHES) for M in (1, 2)})
    print(f"\nSum of c at the good token 1, first batch, M = 2, rate {TOO_LARGE:g}\n")
    show("", ["winners", "losers", "sum"])
    for name in ("grpo", "grpo-symmetric"):
        for k, (winners, losers) in enumerate(sum_by_sign(name), 1):
            cells = (winners, losers, winners + losers)
            show(f"{name}, update {k}", [f"{x:+.5f}" for x in cells])
    if options.limits:
        show_limits()
    save_picture(plot, rewards, sum_by_sign("grpo"), path=options.plot)


if __name__ == "__main__":
    main()
