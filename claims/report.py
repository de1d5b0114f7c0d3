"""What a loss does, on one page: a loss in a file of your own, or a method of losses.py.

    python verify.py mine.py                   the function `loss` of the file
    python verify.py mine.py:other eps=0.1     another one, with a hyperparameter
    python verify.py gspo                      a method, for comparison
    python verify.py mine.py --plot mine.png   and a picture (needs matplotlib)

A line that ends in "!" is a surprise. All batches are small and made up; tokens whose ratio moves
were sampled with probability 0.05. The worlds are those of toy/README.md, and there a KL term
holds the policy at its start. A loss knows advantages only, so the page cannot say what your
rewards do, nor what happens if a number is added to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import losses
from claims.cancellation import REGIMES, net_share, shared_pushes
from claims.evidence import Tree
from claims.formulas import FORMULAS
from losses import Batch, Method
from toy import crumb, tax
from toy.clips import RATIOS as PLOT_RATIOS
from toy.clips import make_group, weigh
from toy.figure import COLORS, make_figure, save
from toy.worlds import Row, Toy

LENGTHS = (2, 4, 8, 16)
OWN = "#0072B2"  # this loss, in the picture
OLD = 0.05  # the probability with which a token was sampled whose ratio moves
RATIOS = (0.1, 0.5, 0.75, 0.95, 1, 1.05, 1.25, 2, 10)
WORLDS = {  # the ends of grpo and of dr-grpo, and the best; tests/test_report.py computes them
    "  world 1: the wrong answers are long": (0.596, 0.597, 0.6),
    "  world 2: the wrong answers are short": (0.411, 0.597, 0.6),
    "  world 3: the worse strategy is short when it is right": (0.205, 0.597, 0.6),
    "  the crumb, from a share of 5%: mostly the scale": (0.1, 0.45, 0.45),
}
Loss = Callable[[Batch], Tensor]
Line = tuple  # a label, then numbers or words


def changed(batch: Batch, f: Callable[[Tensor], Tensor] = torch.clone) -> Batch:
    """A batch of its own, with f of each (N, T) tensor. logp begins a graph."""
    x = {k: f(x.detach().clone()) for k, x in vars(batch).items() if isinstance(x, Tensor)}
    return replace(batch, **x | {"logp": x["logp"].requires_grad_()})


def push(loss: Loss, batch: Batch) -> Tensor:
    """On every token of a copy, because a loss may spoil its batch; nan if the loss is. (N, T)."""
    batch = changed(batch)
    value = loss(batch)
    return losses.token_pushes(value, batch.logp) + 0 * value.detach()


def factor(c: Tensor, d: Tensor) -> float:
    """k if d = k c and k is not 0, otherwise nan."""
    if c.equal(d):
        return 1.0
    k = float((c * d).sum() / (c * c).sum().clamp(min=1e-300))
    return k if k and torch.allclose(d, k * c, rtol=1e-6, atol=1e-8) else math.nan


# ---------------- the parts of the page


def cancelling(loss: Loss, trees: list[Tree]) -> Iterator[Line]:
    so = push(loss, make_group([0.5, -0.5, 0.5, -0.5], [4, 5, 2, 4]))[:, 0]
    yield "PUSHES on the word so, in the four answers of losses.py", *so
    yield "  their sum, which is 0 if they cancel", so.sum()
    yield ("NET PUSH on a token that all share. 0: cancels, 1: all push one way, nan: none",)
    for name, (*moved, equal_lengths) in REGIMES.items():
        some = [tree for tree in trees if tree.equal_lengths == equal_lengths]
        net = torch.cat([net_share(shared_pushes(loss, tree, *moved)) for tree in some])
        yield f"  {name}", net.mean()


def by_length(loss: Loss) -> Tensor:
    """Push / A of winners and of losers, the mean over an answer's tokens. (2, LENGTHS)."""
    n = len(LENGTHS)
    batch = make_group([1] * n + [-1] * n, [*LENGTHS] * 2)
    weight = batch.max_tokens * (push(loss, batch) * batch.adv).sum(1) / batch.mask.sum(1)
    return weight.view(2, n)


def weights(loss: Loss, name: str, hyper: dict) -> Iterator[Line]:
    (win, lose), A = by_length(loss), [1, -1, 1, -1]
    yield "WEIGHT of a token, by the length of its answer", *LENGTHS
    yield "  winners. 1 1 1 1: one divisor, 8 4 2 1: own length", *win
    yield "  losers", *lose
    # A winner and a loser of one token each, alone in their batch.
    win, lose = weigh(loss, RATIOS, old=OLD)
    yield "WEIGHT of a token, by its ratio; a group of two tokens", *RATIOS
    yield "  a winner's. PPO's clip: 0 from 1.25 on", *win
    yield "  a loser's. PPO's clip: 0 up to 0.75", *lose
    if win[4] and not win[5] and not lose[3]:  # at 1, at 1.05, and at 0.95
        wider = [f"{key}=0.2" for key, x in hyper.items() if type(x) is float and 0 < x < 0.05]
        yield (f"  The clip stops nearly all. Wider: python verify.py {' '.join([name, *wider])}",)
    yield "ONE TOKEN OF A WINNER MOVES; pushes are multiplied by", "own", "answer", "others"
    for label, log_r in (("  its ratio is 3", math.log(3)), ("  its ratio is 1/3", -math.log(3))):
        moved = torch.zeros(4, 4, dtype=torch.float64)
        moved[0, 0] = log_r
        k = push(loss, make_group(A, [4] * 4, moved)) / push(loss, make_group(A, [4] * 4))
        yield label, k[0, 0], k[0, 1], k[1, 0]


def bites(loss: Loss) -> Iterator[Line]:
    """What would go wrong in a run, or surprise there."""
    tree = Tree(0, 16)  # three groups of nine answers, of unequal length
    # Equal answers must not tie, because a median may take either.
    tree.noise += 0.07 * tree.randn(*tree.mask.shape)
    batch, G = tree.batch(0.15, garbage=0.5), tree.G
    c, used = push(loss, batch), changed(batch)
    loss(used)  # which should leave no trace

    def again(f: Callable = torch.clone, **more) -> Tensor:
        return push(loss, replace(changed(batch, f), **more))

    lower = dict(logp=batch.logp - 1, logp_old=batch.logp_old - 1, logp_ref=batch.logp_ref - 1)
    twice = again(lambda x: x.repeat(2, 1))[: tree.N]
    wider = again(lambda x: torch.cat([x, x[:, -1:]], 1))[:, :-1]
    tried = {  # the pushes, and what they should be
        "  it is called again on its batch": (push(loss, used), c),
        "  answers have another order": (again(lambda x: x.flip(0)).flip(0), c),
        "  there are twice as many. 2: a sum, not a mean": (twice, c),
        "  a group is alone. Not 1: a token mean, or mixed groups": (again(lambda x: x[:G]), c[:G]),
        "  advantages are doubled, over 2": (again(adv=2 * batch.adv) / 2, c),
        "  all are 0, as with equal rewards": (again(adv=0 * batch.adv), 0 * c),
        "  no answer has tokens": (again(mask=batch.mask & False), 0 * c),
        "  padding is wider": (wider, c),
        "  padding has log-probs of 10000": (push(loss, tree.batch(0.15)), c),
        "  log-probs are lower, ratios not. !: a forgotten detach?": (again(**lower), c),
    }
    yield "PUSHES ARE MULTIPLIED in a batch of three groups if", "by"
    for name, (d, usual) in tried.items():
        k = factor(usual, d)
        by = "other" if math.isnan(k) and d.isfinite().all() else k
        yield name, by, *([] if torch.allclose(d, usual, rtol=1e-6) else "!")


def twins(loss: Loss, hyper: dict) -> Iterator[Line]:
    trees = [Tree(1, k) for k in range(25)]
    batches = [x.batch(spread, garbage=0.5) for spread in (0, 0.2, 0.8, 2.4) for x in trees]
    own = [push(loss, batch) for batch in batches]
    if "eps" in hyper:
        hyper = {"eps_low": hyper["eps"], "eps_high": hyper["eps"]} | hyper
    found, on_policy = [], []
    for name in FORMULAS:
        twin = getattr(losses, name)
        twin = partial(twin, **{k: x for k, x in hyper.items() if k in losses.defaults(twin)})
        factors = (factor(push(twin, x), c) for x, c in zip(batches, own, strict=True))
        agree = sum(1 for _ in takewhile(math.isfinite, factors))
        if agree == len(batches):
            found.append(name)
        elif agree >= len(trees):  # the first are on-policy
            on_policy.append(name)
    yield ("THE SAME PUSHES on 100 batches, but for a factor in each, as",)
    yield (f"  always: {', '.join(found) or 'none'}",)
    yield (f"  on-policy only: {', '.join(on_policy) or 'none'}",)


def bias(loss: Loss, trees: list[Tree]) -> Iterator[Line]:
    yield "EXPECTED UPDATE against the reward's gradient, G = 3", "cosine"
    for name, off_policy in (("  on-policy. Unbiased: 1", False), ("  off-policy", True)):
        toys = [Toy(tree.seed) for tree in trees[::4]]
        pairs = [(toy.expected_update(loss, off_policy).flatten(), toy.exact) for toy in toys]
        yield name, fmean(float(cosine_similarity(g, exact.flatten(), 0)) for g, exact in pairs)


@cache
def curves(row: Row) -> list[Tensor]:
    """The expected reward in the worlds of toy/tax.py and in the crumb."""
    return [*tax.find_rewards(tax.climb(row)), crumb.train_rare(row, crumb.STARTS[1:2])[:, 0]]


def worlds(row: Row) -> Iterator[Line]:
    yield "EXPECTED REWARD at the end", "this", "grpo", "dr-grpo", "best"
    for (name, others), curve in zip(WORLDS.items(), curves(row), strict=True):
        yield name, curve[-1], *others


def report(name: str, method: Method) -> Iterator[Line]:
    loss, trees = method.passes[0], [Tree(0, k) for k in range(24)]
    yield tuple(head(name, method))
    yield from cancelling(loss, trees)
    yield from weights(loss, name, method.hyper)
    yield from bites(loss)
    yield from twins(loss, method.hyper)
    yield from bias(loss, trees)
    yield from worlds(Row(loss, method.scale))


def head(name: str, method: Method) -> list[str]:
    """What the page is about: the loss, its scale and its hyperparameters."""
    return [f"{name}, scale {method.scale}", *(f"{key}={x}" for key, x in method.hyper.items())]


def draw(title: str, row: Row):
    """Weights by ratio and by length; the reward in four worlds, beside grpo's and dr-grpo's."""
    figure = make_figure(title, 5.2)
    axes = figure.subplots(2, 3).flatten()
    by_ratio = weigh(row.loss, PLOT_RATIOS, old=OLD)
    weights = (
        ("its ratio", PLOT_RATIOS, by_ratio, ""),
        ("length of its answer", LENGTHS, by_length(row.loss), "o"),  # no line between is measured
    )
    for axis, (label, x, (win, lose), marker) in zip(axes, weights, strict=False):
        axis.plot(x, win, marker, color=OWN, linewidth=4, alpha=0.5, label="winner")
        axis.plot(x, lose, marker + "--", color=OWN, label="loser")
        axis.set(title="weight of a token", xlabel=label, ylim=(min(0, win.min()), None))
    others = {"grpo": Row(losses.grpo), "dr-grpo": Row(losses.dr_grpo, "mean")}
    for k, title in enumerate((*tax.SETTINGS, "the crumb")):
        axis = axes[2 + k]
        axis.plot(curves(row)[k], color=OWN, linewidth=4, label="this")
        for label, other in others.items():
            axis.plot(curves(other)[k], color=COLORS[label], label=label)
        axis.set(title=title, xlabel="batches", ylim=(0, 0.65))
    axes[3].set(ylabel="expected reward")
    for k in (0, 2):
        axes[k].legend()
    return figure


def print_page(name: str, hyper: dict[str, str], plot: Path | None = None):
    """The page on mine.py, mine.py:other or a method; and its picture, as .svg or .png."""
    method = losses.bind(name, hyper)
    if len(method.passes) > 1 or method.credit:
        raise ValueError(f"{name} is more than one loss of a batch")
    for label, *cells in report(name, method):
        cells = [x if isinstance(x, str) else f"{round(float(x), 9) + 0:.3g}" for x in cells]
        print(f"{label:58}" if cells else label, *(f"{x:>6}" for x in cells))
    if plot:
        save(draw(" ".join(head(name, method)), Row(method.passes[0], method.scale)), plot)
