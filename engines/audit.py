"""Which losses of an engine cancel at a token that the whole group shares, and what others leave.

`python -m engines.audit trl` and `python -m engines.audit verl` call every policy loss of the
installed package on the random prefix trees of verify.py. A cell is the mean over shared tokens of
|sum_i c_i| / sum_i |c_i|. At 0 the answers cancel, at 1 all of them push the same way. The first
four regimes are those of verify.py's audit (C2 to C12). The last one tears every group over two
micro-batches. Advantages sum to zero in each group. Clip ranges and everything else are the
engine's defaults, unless the row says more.
"""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

import losses
from claims.trees import Draw
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
        b = d.batch(losses, regime.spread, regime.offset)
        logp, old, adv = (x.detach().masked_fill(~b.mask, 0.0) for x in (b.logp, b.logp_old, b.adv))
        whole = replace(b, logp=logp.requires_grad_(), logp_old=old, adv=adv)
        every = regime.micro_batches
        micro_batches = [take(whole, torch.arange(k, d.N, every)) for k in range(every)]
        loss = sum(row.loss(micro_batch, whole) for micro_batch in micro_batches)
        left += d.left_shared(token_coefficients(loss, whole.logp))
    return sum(left) / max(1, len(left))


def take(b: Batch, rows: Tensor) -> SimpleNamespace:
    """Some rows, not always whole groups, as narrow as their longest answer."""
    width = int(b.mask[rows].sum(1).max())
    names = ("logp", "logp_old", "adv", "mask")
    return SimpleNamespace(**{name: getattr(b, name)[rows, :width] for name in names})


def show(x: float) -> str:
    return "0" if x < 1e-9 else f"{x:.3f}" if x >= 5e-4 else f"{x:.0e}"


def main(argv: list[str] | None = None):
    engines = {"trl": trl_rows, "verl": verl_rows}
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1 or argv[0] not in engines:
        sys.exit(f"error: engines.audit {' '.join(argv)}: one of {', '.join(engines)} is expected")
    try:
        version = importlib.metadata.version(argv[0])
        rows = list(engines[argv[0]]())
    except ImportError as error:
        install = f"pip install -e '.[{argv[0]}]'"
        sys.exit(f"error: the audit of {argv[0]} needs it installed ({error}): {install}")
    print(f"{argv[0]} {version}: what its losses leave at a token that the whole group shares\n")
    print(f"| loss | where | {' | '.join(regime.name for regime in REGIMES)} |")
    print("|---|---" + "|---:" * len(REGIMES) + "|")
    draws = [Draw(0, k) for k in range(DRAWS)]
    for row in rows:
        cells = [show(left_over(row, draws, regime)) for regime in REGIMES]
        print(f"| {row.name} | `{row.where}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
