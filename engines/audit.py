"""Which losses of an engine cancel at a token that the whole group shares, and what others leave.

`python -m engines.audit trl` and `python -m engines.audit verl` call every policy loss of the
installed package on the random prefix trees of verify.py. A cell is the mean over shared tokens of
|sum_i c_i| / sum_i |c_i|. At 0 the answers cancel, at 1 all of them push the same way. The first
four regimes are those of verify.py's audit (C2 to C12). The last one tears every group over two
micro-batches. Advantages sum to zero in each group. Clip ranges and everything else are the
engine's defaults, unless the row says more.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import losses
from claims.evidence import Draw
from engines.shipped import Row, trl_rows, verl_rows
from losses import Batch, token_coefficients

DRAWS = 24  # random trees, as in verify.py


@dataclass
class Regime:
    """Where a loss is called: |log ratio| of a token lies between offset and offset + spread."""

    name: str
    spread: float = 0.0
    offset: float = 0.0
    equal_lengths: bool = True
    micro_batches: int = 1


REGIMES = (
    Regime("on-policy, equal T_i"),
    Regime("on-policy, unequal T_i", equal_lengths=False),
    Regime("off-policy, inside the clip", spread=0.15),
    Regime("off-policy, outside it", spread=0.3, offset=0.35),
    Regime("on-policy, unequal T_i, torn", equal_lengths=False, micro_batches=2),
)


def left_over(row: Row, draws: list[Draw], regime: Regime) -> float:
    """Mean over shared tokens of |sum_i c_i| / sum_i |c_i|; c is the engine's -N dLoss/dlogp."""
    left = []
    for d in draws:
        # Engines cut a batch into micro-batches of one size.
        if d.equal_lengths != regime.equal_lengths or d.N % regime.micro_batches:
            continue
        whole = whole_batch(d, regime)
        loss = sum(row.loss(part, whole) for part in micro_batches(whole, regime.micro_batches))
        left += d.left_shared(token_coefficients(loss, whole.logp))
    return sum(left) / max(1, len(left))


def whole_batch(d: Draw, regime: Regime) -> Batch:
    """A tree's answers, with 0 on the padding, where it has garbage."""
    b = d.batch(losses, regime.spread, regime.offset)
    names = ("logp", "logp_old", "adv", "logp_ref")
    clean = {name: getattr(b, name).detach().masked_fill(~b.mask, 0.0) for name in names}
    clean["logp"].requires_grad_()
    return replace(b, **clean)


def micro_batches(b: Batch, count: int) -> list[SimpleNamespace]:
    """Rows dealt out in turns, so that groups are torn; each as narrow as its longest answer."""
    parts = []
    for k in range(count):
        width = int(b.mask[k::count].sum(1).max())
        names = ("logp", "logp_old", "adv", "mask")
        part = {name: getattr(b, name)[k::count, :width] for name in names}
        parts.append(SimpleNamespace(**part))
    return parts


def show(x: float) -> str:
    return "0" if x < 1e-9 else f"{x:.3f}" if x >= 5e-4 else f"{x:.0e}"


def main(argv: list[str] | None = None):
    engines = {"trl": trl_rows, "verl": verl_rows}
    what = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m engines.audit", description=what)
    parser.add_argument("engine", choices=engines)
    engine = parser.parse_args(argv).engine
    try:
        version = importlib.metadata.version(engine)
        rows = list(engines[engine]())
    except ImportError as error:
        sys.exit(f"error: the audit of {engine} needs it installed ({error}): pip install {engine}")
    print(f"{engine} {version}: what its losses leave at a token that the whole group shares\n")
    print(f"| loss | where | {' | '.join(regime.name for regime in REGIMES)} |")
    print("|---|---" + "|---:" * len(REGIMES) + "|")
    draws = [Draw(0, k) for k in range(DRAWS)]
    for row in rows:
        cells = [show(left_over(row, draws, regime)) for regime in REGIMES]
        print(f"| {row.name} | `{row.where}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
