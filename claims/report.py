"""What a loss does, on one page: a loss in a file of your own, or a method of losses.py.

    python verify.py mine.py                   the function `loss` of the file
    python verify.py mine.py:other eps=0.1     another one, with a hyperparameter
    python verify.py gspo                      a method, for comparison
    python verify.py mine.py --plot mine.png   and a picture (needs matplotlib)

The page begins with what it found, in three sentences; claims/README.md explains its lines. All
batches are small and made up. A KL term's reference is the policy itself, except where its pull is
measured and in the worlds, where it is the policy at the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import losses
from claims.cancellation import net_share, shared_pushes
from claims.evidence import Tree
from claims.formulas import FORMULAS
from losses import Batch, Method
from toy import crumb, tax
from toy.clips import RATIOS as PLOT_RATIOS
from toy.figure import make_figure, save
from toy.worlds import Row, Toy

LENGTHS = (2, 4, 8, 16)
RATIOS = (0.1, 0.45, 0.75, 0.95, 1, 1.05, 1.25, 2.1, 9, 12)  # beside the edges that people clip at
MOVES = {  # spread and offset of the ratios
    "on-policy": (0, 0),
    "ratios within 16%": (0.15, 0),
    "ratios beyond 30%": (0.3, 0.35),
}
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
    logp_old = -3 + 0.3 * torch.sin(tokens + 2.0 * place).double()  # as unequal as real ones
    logp = (logp_old + log_ratio).requires_grad_()
    more = dict(logp_ref=logp.detach().clone(), tokens=tokens, rewards=1.0 * (A > 0)[:, 0])
    return Batch(logp, logp_old, A.expand(mask.shape), mask, *mask.shape, **more)


def changed(batch: Batch, f: Callable[[Tensor], Tensor] = torch.clone) -> Batch:
    """A batch of its own, with f of each tensor. logp begins a graph."""
    x = {k: f(x.detach().clone()) for k, x in vars(batch).items() if isinstance(x, Tensor)}
    return replace(batch, **x | {"logp": x["logp"].requires_grad_()})


def at_reference(loss: Loss) -> Loss:
    """The loss, with the policy itself as its reference."""
    return lambda batch: loss(replace(batch, logp_ref=batch.logp.detach()))


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


def by_ratio(loss: Loss, ratios: tuple) -> Tensor:
    """The weight of a winner's and of a loser's token that alone moves. (2, ratios)."""
    usual = move(loss, 0, 1)[:2, 2].abs().max()
    return torch.tensor(
        [[A * move(loss, row, r)[row, 2] / usual for r in ratios] for row, A in ((0, 1), (1, -1))]
    )


def by_length(loss: Loss) -> Tensor:
    """The weight of a token of winners and of losers, over a winner's of 16. (2, LENGTHS)."""
    n = len(LENGTHS)
    batch = make_group([1] * n + [-1] * n, [*LENGTHS] * 2)
    weight = (push(loss, batch) * batch.adv)[:, 1:].sum(1).view(2, n) / (torch.tensor(LENGTHS) - 1)
    return weight / weight[0, -1]


def factor(c: Tensor, d: Tensor) -> float:
    """k if d = k c and k is positive, otherwise nan."""
    if c.equal(d):
        return 1.0
    k = float((c * d).sum() / (c * c).sum().clamp(min=1e-300))
    return k if k > 0 and torch.allclose(d, k * c, rtol=1e-6, atol=1e-8) else math.nan


# ---------------- the parts of the page: lines, and what they found in words


def cancelling(loss: Loss, found: list[str]) -> Iterator[Line]:
    so = push(loss, make_group([0.5, -0.5, 0.5, -0.5], [4, 5, 2, 4]))[:, 0]
    yield "PUSHES on the word so, in the four answers of losses.py", *so
    yield "  their sum, which is 0 if they cancel", so.sum()
    yield "NET PUSH on a shared token, 0 to 1, if lengths are", "equal", "not"
    cancels, trees = [], [Tree(0, k) for k in range(24)]
    for name, moved in MOVES.items():
        nets = []
        for equal in (True, False):
            some = [x for x in trees if x.equal_lengths == equal]
            net = torch.cat([net_share(shared_pushes(loss, x, *moved)) for x in some])
            nets.append(net.sum() / max(1, len(net)))  # 0 if nobody is pushed
        yield f"  {name}", *nets
        if nets[0] < 1e-6:
            cancels.append(name if nets[1] < 1e-6 else f"{name} if lengths are equal")
    found.append(f"Pushes on a shared token cancel: {', '.join(cancels) or 'never'}.")


def weights(loss: Loss, found: list[str], odd: list[str]) -> Iterator[Line]:
    win, lose = by_length(loss)
    yield "WEIGHT of a token, by the length of its answer", *LENGTHS
    yield "  a winner's. Own length: 8 4 2 1", *win
    yield "  a loser's", *lose
    c = push(loss, make_group([1, 1, -1, -1], [4, 4, 8, 8]))
    yield "  a loser's of 8 tokens over a winner's of 4. One divisor: 1", -c[2, 3] / c[0, 3]
    usual = move(loss, 0, 1)
    yield "  of a token that 4, that 2 share, over one's own", *usual[0, :2] / usual[0, 2]
    win, lose = by_ratio(loss, RATIOS)
    yield "WEIGHT of a token, by its ratio, if it alone moves", *RATIOS
    yield "  a winner's. PPO's clip: 0 from 1.25 on", *win
    yield "  a loser's. PPO's clip: 0 up to 0.75", *lose
    back = torch.tensor(RATIOS).log().sign() * (lose - win)
    yield "  the difference. +: back to the old policy, -: further away", *back
    if win[RATIOS.index(1)] < 0:
        odd.append("winners are pushed down")
    yield "PUSHES ARE MULTIPLIED, if a winner's token moves, on", "before", "it", "after", "others"
    moves = []
    for row, ratio in ((0, 3), (0, 1 / 3), (1, 3), (1, 1 / 3)):
        k = move(loss, row, ratio) / usual
        moves.append(torch.stack([*k[row, 1:], k[1 - row, 0]]))
        if row == 0:
            yield f"  to the ratio {ratio:.2g}", *("-" if x.isnan() else x for x in moves[-1])
    seen = (torch.stack(moves) - 1).abs().nan_to_num().amax(0) > 1e-6
    names = ("later tokens", "itself", "earlier tokens", "other answers")
    looks = [name for name, x in zip(names, seen, strict=True) if x]
    if not looks and not torch.allclose(move(loss, slice(4), 3), usual):
        looks = ["the group together"]
    winners, losers = (
        " ".join(f"{r:g}" for r, x in zip(RATIOS, w, strict=True) if not x) or "none"
        for w in (win, lose)
    )
    found.append(
        f"A token's weight depends on the ratio of: {', '.join(looks) or 'none'}. Ratios at which"
        f" winners push nothing: {winners}; losers: {losers}."
    )


def pull(loss: Loss, odd: list[str]) -> Iterator[Line]:
    pulls = []
    for ratio in (2, 1, 0.5):
        batch = make_group([1, -1, 1, -1], [4] * 4)
        batch.logp_ref[:2, 3] -= math.log(ratio)
        pulls.append(4 * push(loss, batch)[:2, 3].mean())  # of a winner and a loser
    twice, same, half = pulls
    yield "PULL on a token at 2 and 0.5 times its reference. - +: back", twice - same, half - same
    if twice > same > half:
        odd.append("the pull is away from the reference")


def changes(loss: Loss, odd: list[str]) -> Iterator[Line]:
    """What would go wrong in a run, or surprise there."""
    tree = Tree(0, 16)  # three groups of nine answers, of unequal length
    # Equal answers must not tie, because a median may take either.
    tree.noise += 0.07 * tree.randn(*tree.mask.shape)
    batch, G, no_kl = tree.batch(0.15, garbage=0.5), tree.G, at_reference(loss)
    c, used = push(loss, batch), changed(batch)
    loss(used)  # which should leave no trace

    def again(f: Callable = torch.clone, loss: Loss = loss, **more) -> Tensor:
        return push(loss, replace(changed(batch, f), **more))

    def widen(x: Tensor) -> Tensor:
        return torch.cat([x, x[:, -1:]], 1) if x.dim() == 2 else x

    names = ("logp", "logp_old", "logp_ref")
    other = {k: getattr(batch, k) - 0.9 * batch.logp_old for k in names}
    tried = {  # the pushes, and what they should be
        "it is called again on its batch": (push(loss, used), c),
        "answers have another order": (again(lambda x: x.flip(0)).flip(0), c),
        "there are twice as many (2: a sum)": (again(lambda x: torch.cat([x, x]))[: tree.N], c),
        ALONE: (again(lambda x: x[:G]), c[:G]),
        "advantages are doubled": (again(loss=no_kl, adv=2 * batch.adv) / 2, again(loss=no_kl)),
        "all rewards are equal": (again(loss=no_kl, adv=0 * c, rewards=0 * batch.rewards), 0 * c),
        "no answer has tokens": (again(mask=batch.mask & False), 0 * c),
        "padding is wider": (again(widen)[:, :-1], c),
        "padding has log-probs of 10000": (push(loss, tree.batch(0.15)), c),
        "log-probs differ, ratios do not (a clip by probability?)": (again(**other), c),
    }
    yield f"CHANGES THAT SHOULD MULTIPLY NO PUSH: {len(tried)}; those that do", "by"
    for name, (d, usual) in tried.items():
        if not torch.allclose(d, usual, rtol=1e-6):
            k = factor(usual, d)
            yield f"  {name}", "other" if math.isnan(k) and d.isfinite().all() else k
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


def bias(row: Row) -> Iterator[Line]:
    yield "EXPECTED UPDATE, cosine with the gradient. Unbiased: 1", "on-pol.", "off"
    for label, low in (("0 and 1", 0.0), ("0, 0.1 and 1", 0.1)):
        cosines = []
        for toy in (Toy(Tree(0, k).seed) for k in range(0, 24, 4)):
            R = toy.groups.rewards
            toy.groups.rewards = torch.where(R > 0, 1.0, low * (R > -0.7)).double()
            reward = dict(zip(toy.rows, toy.groups.rewards.tolist(), strict=True))
            exact = toy.policy.grad_expected_reward((), reward.__getitem__).flatten()
            for off_policy in (False, True):
                g = toy.expected_update(at_reference(row.loss), off_policy, row.scale)
                cosines.append(float(cosine_similarity(g.flatten(), exact, 0)))
        yield f"  rewards of {label}", fmean(cosines[::2]), fmean(cosines[1::2])


def worlds(row: Row) -> Iterator[Line]:
    yield "EXPECTED REWARD at the end, if", "this", "grpo", "dr-grpo", "best"
    _, *curves = tax.find_rewards(tax.climb(row))  # in the first world all end alike
    curves.append(crumb.train_rare(row, crumb.STARTS[1:2])[:, 0])
    for (name, others), curve in zip(WORLDS.items(), curves, strict=True):
        yield name, curve[-1], *others


def report(name: str, method: Method) -> Iterator[Line]:
    loss, found, odd = method.passes[0], [], []
    lines = [*cancelling(loss, found), *weights(loss, found, odd), *pull(loss, odd)]
    lines += [*changes(loss, odd), *twins(loss, method.hyper)]
    found.append(f"What stands out: {', '.join(odd) or 'nothing'}.")
    for part in losses.functions(method)[1:]:
        found.append(f"{name} also has {part.func.__name__}, which this page does not show.")
    if ALONE in odd:
        found.append("It mixes groups, so no expected update and no end is computed.")
    else:
        row = Row(loss, method.scale)
        lines += [*bias(row), *worlds(row)]
    yield f"{name}, scale {method.scale}", *(f"{key}={x}" for key, x in method.hyper.items())
    yield from ((sentence,) for sentence in found)
    yield from lines


def draw(title: str, loss: Loss):
    """Weights by ratio and by length."""
    figure = make_figure(f"{title}: the weight of a token", 3)
    panels = {
        "its ratio": (PLOT_RATIOS, by_ratio(loss, PLOT_RATIOS)),
        "length of its answer": (LENGTHS, by_length(loss)),
    }
    axes = figure.subplots(1, 2)
    for axis, (label, (x, (win, lose))) in zip(axes, panels.items(), strict=True):
        axis.plot(x, win, linewidth=4, alpha=0.5, label="winner")
        axis.plot(x, lose, "--", label="loser")
        axis.set(xlabel=label)
    axes[0].legend()
    return figure


def print_page(name: str, hyper: dict[str, str], plot: Path | None = None):
    """The page on mine.py, mine.py:other or a method; and its picture, as .svg or .png."""
    method = losses.bind(name, hyper)
    for label, *cells in report(name, method):
        cells = [x if isinstance(x, str) else f"{round(float(x), 9) + 0:.3g}" for x in cells]
        print(f"{label:60}" if cells else label, *(f"{x:>6}" for x in cells))
    if plot:
        save(draw(name, method.passes[0]), plot)
