"""Which losses of an engine cancel at a token that the whole group shares, and what others leave.

`python -m engines.audit trl` and `python -m engines.audit verl` call the policy losses of the
installed package, on the answers of verify.py's random prefix trees. Clip ranges and everything
else are the engine's defaults, unless the row says more. Advantages sum to zero in each group.

All log-probs are of real policies over 3 to 5 tokens: the logits of the policy and of the old one
differ by normal noise, of which each has half. A cell is the mean over shared tokens of
|sum_i c_i| / sum_i |c_i|. At 0 the answers cancel, or none of them pushes; at 1 all of them push
the same way. On-policy, answers differ in length. In the other columns they do not, and only those
shared tokens count whose ratio p / p_old lies as far from 1 as the column says.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from claims.evidence import DRAWS, Draw
from engines.shipped import trl_rows, verl_rows
from losses import Batch, token_pushes
from toy.policy import Policy


@dataclass(frozen=True)
class Column:
    name: str
    drift: float  # standard deviation of the noise between the two policies' logits
    least: float  # the ratio at a shared token is at least this or at most 1 / this,
    most: float  # and at most this and at least 1 / this


COLUMNS = (
    Column("on-policy", 0.0, 1.0, 1.0),
    Column("inside: r up to 1.2", 0.1, 1.0, 1.2),
    Column("just outside: 1.3 to 2", 0.6, 1.3, 2.0),
    Column("far: above 2", 2.0, 2.0, float("inf")),
)


def tree_batch(draw: Draw, drift: float) -> Batch:
    """A tree's answers, under a policy, an old one and a reference."""
    gen = torch.Generator().manual_seed(draw.seed)
    W, noise = draw.policy.W.detach(), torch.randn(2, *draw.policy.W.shape, generator=gen).double()

    def log_probs(W):
        """0 on padding. (N, T)."""
        policy = Policy(W, draw.policy.phi, draw.policy.horizon)
        logp = policy.log_probs(draw.prompts, draw.answers)[0]
        return torch.nn.functional.pad(logp, (0, 1)).masked_fill(~draw.mask, 0.0)

    return Batch(
        logp=log_probs(W + drift / 2 * noise[0]).requires_grad_(),
        logp_old=log_probs(W - drift / 2 * noise[0]),
        adv=draw.rows(draw.adv).masked_fill(~draw.mask, 0.0),
        mask=draw.mask,
        group_size=draw.G,
        max_tokens=draw.max_tokens,
        logp_ref=log_probs(W + 0.5 * noise[1]),
    )


@cache
def batches(column: Column) -> list[tuple[Draw, Batch]]:
    """On-policy the trees of `python verify.py --only AUDIT` whose answers differ in length. In the
    other columns those of equal lengths, from three times as many, because few ratios fit."""
    drifts = column.drift > 0
    draws = [Draw(0, k) for k in range(3 * DRAWS if drifts else DRAWS)]
    return [(x, tree_batch(x, column.drift)) for x in draws if x.equal_lengths == drifts]


def left_over(loss: Callable, column: Column) -> list[float]:
    """|sum c| / sum |c| at each shared token of the column; 0 where no answer pushes."""
    left = []
    for draw, b in batches(column):
        c = draw.at_shared(token_pushes(loss(b), b.logp))  # (K, G)
        far = draw.at_shared(b.logp - b.logp_old)[:, 0].detach().abs().exp()  # (K,)
        mixed = draw.at_shared(b.adv).any(1)
        counts = mixed & (far >= column.least) & (far <= column.most + 1e-12)
        size = c.abs().sum(1)
        left += (c.sum(1).abs() / size.masked_fill(size == 0, 1.0))[counts].tolist()
    return left


def show(x: float) -> str:
    return "0" if x < 1e-6 else f"{x:.3f}" if x >= 5e-4 else f"{x:.0e}"


def cells(loss: Callable) -> list[str]:
    """A row of the table."""
    found = [left_over(loss, column) for column in COLUMNS]
    return [show(sum(left) / len(left)) for left in found]


def main(argv: list[str] | None = None):
    engines = {"trl": trl_rows, "verl": verl_rows}
    what = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m engines.audit", description=what)
    parser.add_argument("engine", choices=engines)
    engine = parser.parse_args(argv).engine
    version = importlib.metadata.version(engine)
    print(f"{engine} {version}: what its losses leave at a token that the whole group shares\n")
    print(f"| loss | {' | '.join(column.name for column in COLUMNS)} |")
    print("|---" + "|---:" * len(COLUMNS) + "|")
    for name, loss in engines[engine]().items():
        print(f"| {name} | {' | '.join(cells(loss))} |", flush=True)


if __name__ == "__main__":
    main()
