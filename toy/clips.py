"""What a clip does: how hard a winner and a loser push a token, against the token's ratio.

    python -m toy.clips                        clips.png (needs matplotlib)
    python -m toy.clips mine.py                PPO's clip beside your loss, or a method

A shared token has one ratio r in all answers. losses.py computes |push| / |A| for a winner (A = 1)
and a loser (A = -1) of one length. Where the two differ, the pushes on a shared token do not
cancel. The article of toy/tree.py has such a figure for each method of NAMES.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import losses
from losses import METHODS, Batch, token_pushes
from toy.figure import make_figure, save

NAMES = "reinforce grpo grpo-symmetric cispo gspo dfpo-min".split()
OLD = 0.5  # the token's probability when it was sampled; a loss may clip a probability
# They avoid the edges of clip ranges, where rounding decides a derivative.
RATIOS = sorted([*(k / 100 for k in range(1, 200, 2)), 1.0])


def weigh(loss: Callable[[Batch], Tensor]) -> Tensor:
    """|push| / |A| of a winner and of a loser at all RATIOS. (2, ratios).

    Every ratio has a batch of its own: two answers of one token, which both share.
    """
    adv = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    logp_old, columns = torch.full_like(adv, math.log(OLD)), []
    for ratio in RATIOS:
        batch = Batch(
            logp=(logp_old + math.log(ratio)).requires_grad_(),
            logp_old=logp_old,
            adv=adv,
            mask=adv != 0,
            group_size=2,
            max_tokens=1,
            logp_ref=logp_old,
            tokens=torch.zeros(2, 1, dtype=torch.long),
            rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        )
        columns.append(token_pushes(loss(batch), batch.logp) / adv)  # (2, 1)
    return torch.cat(columns, 1)


def weights() -> dict[str, list[list[float]]]:
    """|push| / |A| of the winner and of the loser at all RATIOS, for each method."""
    rounded = {name: weigh(METHODS[name].passes[0]).round(decimals=6) for name in NAMES}
    return {name: (weight + 0.0).tolist() for name, weight in rounded.items()}  # -0 becomes 0


def plot(name: str = ""):
    """Winners push up, losers down; the area is what they come to. name: a loss to show beside
    PPO's clip."""
    figure = make_figure("PPO's clip stops one side only, so a shared token gets a net push", 3.5)
    first = "PPO's clip, as in GRPO", losses.grpo, "only winners push", "only losers push"
    other = "a clip that ignores the sign of A", losses.grpo_symmetric, *["nobody pushes"] * 2
    if name:
        other = name, losses.bind(name, {}).passes[0], "", ""
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (title, loss, below, above) in zip(axes, (first, other), strict=True):
        win, lose = weigh(loss)
        axis.fill_between(RATIOS, win - lose, color="#cc79a7", alpha=0.35, linewidth=0)
        axis.plot(RATIOS, win, color="#0072b2", linewidth=3)
        axis.plot(RATIOS, -lose, color="#d55e00", linewidth=3)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.text(1, 1.3, "winners, A > 0", color="#0072b2", ha="center")
        axis.text(1, -1.3, "losers, A < 0", color="#d55e00", ha="center", va="top")
        axis.text(1, 2.2, "both push,\nand cancel" if below else "", ha="center", va="top")
        axis.text(0.4, -0.15, below, ha="center", va="top")
        axis.text(1.6, 0.15, above, ha="center")
        axis.set(title=title, xlabel="r = probability now / when sampled", ylim=(-2.1, 2.3))
        axis.set(xticks=[0, 0.8, 1, 1.2, 2], xticklabels="0 0.8 1 1.2 2".split(), yticks=[])
    axes[0].text(1.66, -0.75, "net push", color="#8f3f6d", ha="center")
    axes[0].set_ylabel("push on the token")
    return figure


if __name__ == "__main__":
    save(plot(*sys.argv[1:]), Path("clips.png"))
