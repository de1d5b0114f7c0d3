"""Which losses of an engine cancel at a token that the whole group shares, and what others leave.

`python -m engines.audit trl` and `python -m engines.audit verl` call the policy losses of the
installed package. A cell is the mean over shared tokens of |sum_i c_i| / sum_i |c_i|. At 0 the
answers cancel, at 1 all of them push the same way. Advantages sum to zero in each group. Clip
ranges and everything else are the engine's defaults, unless the row says more.

The first three columns are on the random prefix trees of verify.py (C2 to C11). On-policy, answers
differ in length; off-policy they do not. In the last two columns, the answers were drawn by an
engine with other numerics: its log-probs differ from the trainer's by a deviation of 0.02 a token,
in groups of 8, of which half are right. Everything else is on-policy there (C25).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from claims.evidence import DRAWS, Draw
from engines.shipped import Case, trl_rows, verl_rows
from losses import Batch, histories, token_coefficients

SAMPLED = 320_000  # tokens of another sampler, if each group had one answer
GROUP_SIZE, DEVIATION = 8, 0.02


def tree_case(draw: Draw, spread: float, offset: float = 0.0) -> Case:
    """A tree's answers. |log ratio| of a token lies between offset and offset + spread."""
    b = draw.batch(spread, offset)
    names = ("logp", "logp_old", "adv")  # with garbage on the padding
    clean = {name: getattr(b, name).detach().masked_fill(~b.mask, 0.0) for name in names}
    clean["logp"].requires_grad_()
    ids, history = histories(draw.nodes, draw.G).unique(return_inverse=True)
    entropies = torch.rand(len(ids), generator=torch.Generator().manual_seed(0)).double()
    return Case(replace(b, **clean), sampler=b.logp_old, entropy=entropies[history])


def on_trees(loss: Callable, equal_lengths: bool, spread=0.0, offset=0.0) -> list[float]:
    left = []
    for draw in (Draw(0, k) for k in range(DRAWS)):
        if draw.equal_lengths == equal_lengths:
            case = tree_case(draw, spread, offset)
            left += draw.left_shared(token_coefficients(loss(case), case.batch.logp))
    return left


@cache
def sampled_case(length: int) -> Case:
    """Groups whose answers share their first token alone, drawn by a sampler of other numerics."""
    rng = torch.Generator().manual_seed(0)
    rows = SAMPLED // length * GROUP_SIZE

    def at_tokens(draw: Callable) -> Tensor:
        """Numbers for each token; the first is the group's. (N, T)."""
        x = draw(rows, length, generator=rng, dtype=torch.float64)
        x[:, 0] = x[::GROUP_SIZE, 0].repeat_interleave(GROUP_SIZE)
        return x

    logp = -at_tokens(torch.rand)
    # log pi / pi_sampler: its exponential has the mean 1, as under the sampler it must.
    gap = DEVIATION * at_tokens(torch.randn) - DEVIATION**2 / 2
    adv = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(rows // 2)
    batch = Batch(
        logp=logp.clone().requires_grad_(),
        logp_old=logp,
        adv=adv[:, None].expand_as(logp),
        mask=torch.ones(rows, length, dtype=torch.bool),
        group_size=GROUP_SIZE,
        max_tokens=length,
    )
    return Case(batch, sampler=logp - gap, entropy=at_tokens(torch.rand))


def of_another_sampler(loss: Callable, length: int) -> list[float]:
    case = sampled_case(length)
    c = token_coefficients(loss(case), case.batch.logp)[:, 0].view(-1, GROUP_SIZE)
    size = c.abs().sum(1)  # 0 where all answers are masked
    return (c.sum(1).abs() / size)[size > 0].tolist()


# Each says what a loss leaves at single shared tokens.
COLUMNS: dict[str, Callable[[Callable], list[float]]] = {
    "on-policy": partial(on_trees, equal_lengths=False),
    "off-policy, inside the clip": partial(on_trees, equal_lengths=True, spread=0.15),
    "off-policy, outside it": partial(on_trees, equal_lengths=True, spread=0.3, offset=0.35),
    "another sampler, 625 tokens": partial(of_another_sampler, length=625),
    "another sampler, 2,500 tokens": partial(of_another_sampler, length=2500),
}


def left_over(loss: Callable, column: str) -> float:
    left = COLUMNS[column](loss)
    return sum(left) / max(1, len(left))


def show(x: float) -> str:
    return "0" if x < 1e-6 else f"{x:.3f}" if x >= 5e-4 else f"{x:.0e}"


def main(argv: list[str] | None = None):
    engines = {"trl": trl_rows, "verl": verl_rows}
    what = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m engines.audit", description=what)
    parser.add_argument("engine", choices=engines)
    engine = parser.parse_args(argv).engine
    try:
        version, rows = importlib.metadata.version(engine), engines[engine]()
    except ImportError as error:
        sys.exit(f"error: the audit of {engine} needs it installed ({error}): pip install {engine}")
    print(f"{engine} {version}: what its losses leave at a token that the whole group shares\n")
    print(f"| loss | {' | '.join(COLUMNS)} |")
    print("|---" + "|---:" * len(COLUMNS) + "|")
    for name, loss in rows.items():
        cells = [show(left_over(loss, column)) for column in COLUMNS]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
