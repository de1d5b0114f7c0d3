"""What a loss does, on one page: a loss in a file of your own, or a method of losses.py.

    python verify.py mine.py                   the function `loss` of the file
    python verify.py mine.py:other eps=0.1     another one, with a hyperparameter
    python verify.py gspo                      a method, for comparison

The page begins with what it found, in three sentences; claims/README.md explains its lines. All
batches are small and made up. In the rows by length and by ratio, and in the expected update, a KL
term's reference is the policy itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import compress

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import losses
from claims.cancellation import REGIMES, net_push
from claims.evidence import Tree, random_trees
from claims.formulas import FORMULAS
from losses import Batch, Method
from toy import crumb, tax
from toy.worlds import Row, Toy

LENGTHS = (2, 4, 8, 16)
RATIOS = (0.1, 0.45, 0.75, 0.95, 1, 1.05, 1.25, 2.1, 9, 12)  # beside the edges that people clip at
WORLDS = {  # the ends of grpo and of dr-grpo, and the best; tests/test_report.py computes them
    "  the better strategy's wrong answers are short": (0.411, 0.597, 0.6),
    "  the worse strategy's right answers are short": (0.205, 0.597, 0.6),
    "  the usual answer earns 0.1, a rare one 1 at times": (0.1, 0.45, 0.45),
}
ALONE = "a group is alone (a token mean, or a statistic of the batch)"
Loss = Callable[[Batch], Tensor]
Line = tuple  # a label, then numbers or words


# ---------------- batches made by hand, and what a loss does to them


def make_group(adv: list[float], lengths: list[int], log_ratio: Tensor | float = 0.0) -> Batch:
    """Answers to one prompt, which begin with the same token."""
    A, T = torch.tensor([adv, lengths], dtype=torch.float64)[..., None]  # (G, 1) each
    row, place = torch.arange(len(adv))[:, None], torch.arange(max(lengths))
    mask, tokens = place < T, row * (place > 0)
    old = -3 + 0.3 * torch.sin(tokens + 2.0 * place).double()  # as unequal as real ones
    logp, ref, rewards = (old + log_ratio).requires_grad_(), old + log_ratio, (A > 0)[:, 0].double()
    return Batch(logp, old, A.expand(mask.shape), mask, *mask.shape, ref, tokens, rewards)


def changed(batch: Batch, f: Callable[[Tensor], Tensor] = torch.clone) -> Batch:
    """A batch of its own, with f of each tensor. logp begins a graph."""
    x = {k: f(x.detach()) for k, x in vars(batch).items() if isinstance(x, Tensor)}
    return replace(batch, **x | {"logp": x["logp"].requires_grad_()})


def push(loss: Loss, batch: Batch) -> Tensor:
    """On every token of a copy, because a loss may spoil its batch; nan if the loss is. (N, T)."""
    batch = changed(batch)
    value = loss(batch)
    return losses.token_pushes(value, batch.logp) + 0 * value.detach()


def move(loss: Loss, rows: int | slice, ratio: float) -> Tensor:
    """The pushes of two winners and two losers of four tokens, if the third token of these rows has
    another ratio. Rows 0 and 2 win. (4, 4)."""
    log_ratio = torch.zeros(4, 4, dtype=torch.float64)
    log_ratio[rows, 2] = math.log(ratio)
    batch = make_group([1, -1, 1, -1], [4] * 4, log_ratio)
    batch.tokens[:, 1] //= 2  # pairs share a second one
    return push(loss, batch)


def factor(c: Tensor, d: Tensor) -> float:
    """k if d = k c and k is positive, otherwise nan."""
    if c.equal(d):
        return 1.0
    k = float((c * d).sum() / (c * c).sum())
    return k if k > 0 and torch.allclose(d, k * c, rtol=1e-6, atol=1e-8) else math.nan


# ---------------- the parts of the page: lines, and what they found in words


def cancelling(loss: Loss) -> Iterator[Line]:
    yield ("NET PUSH on a shared token. 0: pushes cancel, 1: all push one way",)
    nets = {name: net_push(loss, random_trees(), *regime) for name, regime in REGIMES.items()}
    yield from ((f"  {name}", net) for name, net in nets.items())
    cancels = "; ".join(name for name, net in nets.items() if net < 1e-6)
    yield (f"Pushes on a shared token cancel: {cancels or 'never'}.",)


def by_length(loss: Loss) -> Iterator[Line]:
    n, T = len(LENGTHS), torch.tensor(LENGTHS)
    batch = make_group([1] * n + [-1] * n, [*LENGTHS] * 2)
    weight = (push(loss, batch) * batch.adv)[:, 1:].sum(1).view(2, n) / (T - 1)
    win, lose = weight / weight[0, -1]
    yield "WEIGHT of a token, by the length of its answer", *LENGTHS
    yield "  a winner's. Own length: 8 4 2 1", *win
    yield "  a loser's", *lose
    c = push(loss, make_group([1, 1, -1, -1], [4, 4, 8, 8]))
    yield "  a loser's of 8 tokens over a winner's of 4. One divisor: 1", -c[2, 3] / c[0, 3]


def by_ratio(loss: Loss, odd: list[str]) -> Iterator[Line]:
    usual = move(loss, 0, 1)
    yield "WEIGHT of a token that 4, that 2 share, over one's own", *usual[0, :2] / usual[0, 2]
    # For each ratio the pushes if a winner's token moves, and if a loser's does. (2, ratios, 4, 4)
    c = torch.stack([torch.stack([move(loss, row, r) for r in RATIOS]) for row in (0, 1)])
    win, lose = torch.stack([c[0, :, 0, 2], -c[1, :, 1, 2]]) / usual[:2, 2].abs().max()
    yield "WEIGHT of a token, by its ratio, if it alone moves", *RATIOS
    yield "  a winner's. PPO's clip: 0 from 1.25 on", *win
    yield "  a loser's. PPO's clip: 0 up to 0.75", *lose
    back = torch.tensor(RATIOS).log().sign() * (lose - win)
    yield "  the difference. +: back to the old policy, -: further away", *back
    yield ("PUSHES ARE MULTIPLIED, if a winner's token has such a ratio, on",)
    k, names = c / usual, ("earlier tokens", "itself", "later tokens", "other answers")
    k = torch.stack([torch.cat([k[i, :, i, 1:], k[i, :, 1 - i, :1]], 1) for i in (0, 1)])
    yield from ((f"  {name}", *x) for name, x in zip(names, k[0].T, strict=True))
    seen = (k - 1).abs().nan_to_num().amax((0, 1)) > 1e-6
    moved = [*compress(names, seen)]
    if not moved and not torch.allclose(move(loss, slice(4), 2.1), usual):
        moved = ["all, if the group moves together"]

    def silent(weight: Tensor) -> str:
        return " ".join(f"{r:g}" for r, x in zip(RATIOS, weight, strict=True) if not x) or "none"

    sentence = f"A token's ratio changes the push on: {', '.join(moved) or 'nothing'}. Ratios at"
    yield (f"{sentence} which winners push nothing: {silent(win)}; losers: {silent(lose)}.",)
    if usual[0, 2] < 0:
        odd.append("winners are pushed down")


def pull(loss: Loss, odd: list[str]) -> Iterator[Line]:
    pulls = []
    for ratio in (2, 1, 0.5):
        batch = make_group([1, -1, 1, -1], [1] * 4)
        batch.logp_ref[:2] -= math.log(ratio)
        pulls.append(push(loss, batch)[:2].mean())  # of a winner and a loser
    twice, same, half = pulls
    yield "PULL on a token at 2 and 0.5 times its reference. - +: back", twice - same, half - same
    if twice > same or half < same:
        odd.append("the pull is away from the reference")


def changes(loss: Loss, odd: list[str]) -> Iterator[Line]:
    """What would go wrong in a run, or surprise there."""
    tree, pushes = Tree(0, 16), partial(push, loss)  # three groups of nine, of unequal length
    # Equal answers must not tie, because a median may take either.
    tree.noise += 0.07 * tree.randn(*tree.mask.shape)
    batch = tree.batch(0.15, garbage=0.5)
    c, used, no_kl = pushes(batch), changed(batch), replace(batch, logp_ref=batch.logp)
    loss(used)  # which should leave no trace
    lower = {k: getattr(batch, k) - 0.9 * batch.logp_old for k in ("logp", "logp_old", "logp_ref")}

    def widen(x: Tensor) -> Tensor:
        return torch.cat([x, x[:, -1:]], 1) if x.dim() == 2 else x

    tried = {  # the pushes, and what they should be
        "it is called again on its batch": (pushes(used), c),
        "there are twice as many (2: a sum)": (
            pushes(changed(batch, lambda x: torch.cat([x, x])))[: tree.N],
            c,
        ),
        ALONE: (pushes(changed(batch, lambda x: x[:9])), c[:9]),
        "advantages are doubled": (pushes(replace(no_kl, adv=2 * batch.adv)), 2 * pushes(no_kl)),
        "all rewards are equal": (
            pushes(replace(no_kl, adv=0 * c, rewards=0 * batch.rewards)),
            0 * c,
        ),
        "no answer has tokens": (pushes(replace(batch, mask=batch.mask & False)), 0 * c),
        "padding is wider, of log-probs of 10000": (
            pushes(changed(tree.batch(0.15), widen))[:, :-1],
            c,
        ),
        "log-probs differ, ratios do not (a clip by probability?)": (
            pushes(replace(batch, **lower)),
            c,
        ),
    }
    yield f"CHANGES THAT SHOULD MULTIPLY NO PUSH: {len(tried)}; those that do", "by"
    for name, (d, usual) in tried.items():
        if not torch.allclose(d, usual, rtol=1e-6):
            k = factor(usual, d)
            yield f"  {name}", k
            if name != ALONE or math.isnan(k):
                odd.append(name)


def twins(loss: Loss, hyper: dict) -> Iterator[Line]:
    yield ("THE SAME PUSHES on random batches, but for a factor in each, as",)
    for label, spreads in (("on-policy", [0]), ("off-policy", [0.2, 0.8, 2.4])):
        trees = [Tree(1, k) for k in range(25)]
        batches = [x.batch(spread, garbage=0.5) for spread in spreads for x in trees]
        own, found = [push(loss, batch) for batch in batches], []
        for name in FORMULAS:
            known = losses.defaults(getattr(losses, name))
            twin = partial(getattr(losses, name), **{k: hyper[k] for k in hyper if k in known})
            pairs = zip(batches, own, strict=True)
            if all(math.isfinite(factor(push(twin, batch), c)) for batch, c in pairs):
                found.append(name)
        yield (f"  {label}: {', '.join(found) or 'none'}",)


def bias(loss: Loss, scale: str) -> Iterator[Line]:
    yield ("EXPECTED UPDATE on-policy, cosine with the gradient. Unbiased: 1",)
    toy = Toy(4)  # one on which biases are large
    toy.logp_old = toy.logp.detach()  # also the reference: no KL term pulls
    R = toy.groups.rewards
    for label, low in (("0 and 1", 0.0), ("0, 0.1 and 1", 0.1)):
        toy.groups.rewards = torch.where(R > 0.5, 1.0, low * (R > -0.5)).double()
        exact = toy.expected_update(losses.reinforce, False)  # the gradient, but for a factor
        g = toy.expected_update(loss, False, scale)
        yield f"  rewards of {label}", cosine_similarity(g.flatten(), exact.flatten(), 0)


def worlds(row: Row) -> Iterator[Line]:
    yield "EXPECTED REWARD at the end, if", "this", "grpo", "dr-grpo", "best"
    _, *curves = tax.find_rewards(tax.climb(row))  # in the first world all end alike
    curves.append(crumb.train_rare(row, crumb.STARTS[1:2])[:, 0])
    for (name, others), curve in zip(WORLDS.items(), curves, strict=True):
        yield name, curve[-1], *others


def report(name: str, method: Method) -> Iterator[Line]:
    loss, odd = method.passes[0], []
    lines = [*cancelling(loss), *by_length(loss), *by_ratio(loss, odd), *pull(loss, odd)]
    lines += [*changes(loss, odd), *twins(loss, method.hyper)]
    lines.append((f"What stands out: {', '.join(odd) or 'nothing'}.",))
    for part in losses.functions(method)[1:]:
        lines += [(f"{name} also has {part.func.__name__}, which this page does not show.",)]
    if ALONE in odd:
        lines.append(("It mixes groups, so no expected update and no end is computed.",))
    else:
        lines += [*bias(loss, method.scale), *worlds(Row(loss, method.scale))]
    yield f"{name}, scale {method.scale}", *(f"{key}={x}" for key, x in method.hyper.items())
    yield from sorted(lines, key=lambda line: not line[0].endswith("."))  # sentences first


def print_page(name: str, hyper: dict[str, str]):
    """The page on mine.py, mine.py:other or a method."""

    def text(x: str | float | Tensor) -> str:
        return x if isinstance(x, str) else f"{round(float(x), 9) + 0:.3g}".replace("nan", "-")

    for label, *cells in report(name, losses.bind(name, hyper)):
        print(f"{label:60}" if cells else label, *(f"{text(x):>6}" for x in cells))
