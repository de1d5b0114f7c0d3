"""What a clip does: how hard a winner and a loser push a token, against the token's ratio.

    python -m toy.clips                        the table
    python -m toy.clips --plot toy/clips.png   and the picture, a panel for each kind of clip

A shared token has one ratio r in all answers. losses.py computes |push| / |A| for a winner (A = 1)
and a loser (A = -1) of one length. Where the two lines part, the pushes on a shared token do not
cancel. The article of toy/tree.py shows such a panel for each method of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

import losses
from losses import METHODS, Batch, token_pushes
from toy.figure import make_figure, parse_plot, print_table, save

NAMES = "reinforce grpo grpo-symmetric cispo gspo sapo".split()
OLD = 0.5  # the token's probability when it was sampled; a loss may clip a probability
# They avoid the edges of clip ranges, where rounding decides a derivative.
RATIOS = sorted([*(k / 100 for k in range(1, 200, 2)), 1.0])
TABLE_RATIOS = (0.51, 1.0, 1.51)
TOP, WIDTH, HEIGHT = 2.0, 150, 110  # the largest ratio and |push| / |A|; a panel's frame


def make_group(
    adv: Sequence[float],
    lengths: Sequence[int],
    log_ratio: Tensor | float = 0.0,
    log_old: float = -3.0,
) -> Batch:
    """One group of answers with these advantages and lengths; the longest has L tokens.

    The log-prob of each token was log_old. log_ratio is (N, T), or expands to it.
    """
    A, T = torch.tensor([adv, lengths], dtype=torch.float64)[..., None]  # (N, 1) each
    mask = torch.arange(max(lengths)) < T
    logp_old = torch.full(mask.shape, log_old, dtype=torch.float64)
    logp, adv = (logp_old + log_ratio).requires_grad_(), A.expand(mask.shape)
    return Batch(logp, logp_old, adv, mask, *mask.shape, logp_ref=logp_old)


def weigh(loss: Callable[[Batch], Tensor], ratios: Sequence[float], old: float = OLD) -> Tensor:
    """|push| / |A| of a winner and of a loser at these ratios. (2, ratios).

    Every ratio has a batch of its own: two answers of one token, whose probability was old.
    """
    columns = []
    for ratio in ratios:
        batch = make_group([1, -1], [1, 1], math.log(ratio), math.log(old))
        columns.append(token_pushes(loss(batch), batch.logp) / batch.adv)  # (2, 1)
    return torch.cat(columns, 1)


@cache
def weights() -> dict[str, list[list[float]]]:
    """|push| / |A| of the winner and of the loser at all RATIOS, for each method."""
    rounded = {name: weigh(METHODS[name].passes[0], RATIOS).round(decimals=6) for name in NAMES}
    return {name: (weight + 0.0).tolist() for name, weight in rounded.items()}  # -0 becomes 0


def panel(name: str) -> str:
    """Two lines in a frame, and the gap between them: an <svg> of the article."""

    def points(line: list[float]) -> list[str]:
        places = [
            (r / TOP * WIDTH, HEIGHT * (1 - w / TOP)) for r, w in zip(RATIOS, line, strict=True)
        ]
        return [f"{x:.1f},{y:.1f}" for x, y in places]

    win, lose = map(points, weights()[name])
    parts = [
        '<svg class="panel" viewBox="-14 -20 172 148">',
        f'<text x="0" y="-7" class="name">{name}</text>',
        f'<polygon class="gap" points="{" ".join(win + lose[::-1])}"/>',
        f'<path class="axis" d="M0 0V{HEIGHT}H{WIDTH}M{WIDTH / 2:g} {HEIGHT}v4"/>',
        f'<polyline class="win" points="{" ".join(win)}"/>',
        f'<polyline class="lose" points="{" ".join(lose)}"/>',
        f'<path class="at" d="M{WIDTH / 2:g} 0v{HEIGHT}"/>',
        f'<text x="{WIDTH / 2:g}" y="{HEIGHT + 15}" class="middle">1</text>',
        f'<text x="{WIDTH}" y="{HEIGHT + 15}" class="middle">{TOP:g}</text>',
        f'<text x="{WIDTH * 0.75:g}" y="{HEIGHT + 15}" class="middle label">ratio r</text>',
        '<text x="5" y="8" class="label">|push| / |A|</text>',
        f'<text x="-4" y="{HEIGHT / 2 + 4:g}" class="end">1</text>',
        f'<text x="-4" y="8" class="end">{TOP:g}</text></svg>',
    ]
    return "\n".join(parts)


STYLE = """\
.panel { overflow: visible; font: 11px system-ui, sans-serif; fill: var(--soft); }
.panel .name { font-size: 13px; font-weight: 600; fill: var(--ink); }
.panel .middle { text-anchor: middle; } .panel .end { text-anchor: end; }
.panel .label { fill: var(--ink); stroke: var(--card); stroke-width: 4px; paint-order: stroke; }
.panel polyline, .panel .axis { fill: none; }
.panel .axis { stroke: var(--soft); }
.panel .win { stroke: var(--win); stroke-width: 3.5; }
.panel .lose { stroke: var(--lose); stroke-width: 1.8; stroke-dasharray: 4 2.5; }
.panel .at { stroke: var(--soft); stroke-dasharray: 1.5 2.5; }
.panel .gap { fill: var(--tax); fill-opacity: 0.3; }
"""


def plot():
    """Three kinds of clip. cispo's default, r <= 5, would lie outside the picture."""
    figure = make_figure(
        "PPO's clip looks at the sign of A, so a shared token gets a net push", 3.3
    )
    shown = {
        "PPO's clip (grpo) stops winners\nabove the range, losers below it": losses.grpo,
        "a sign-blind clip (grpo-symmetric)\nstops winners and losers alike": losses.grpo_symmetric,
        "a clip of the weight\n(cispo, 1.5) stops nobody": partial(losses.cispo, eps_high=0.5),
    }
    for axis, (title, loss) in zip(figure.subplots(1, 3, sharey=True), shown.items(), strict=True):
        win, lose = weigh(loss, RATIOS)
        axis.fill_between(RATIOS, win, lose, color="#cc79a7", alpha=0.3, label="net push")
        axis.plot(RATIOS, win, color="#0072b2", linewidth=4, label="winners, A > 0")
        axis.plot(RATIOS, lose, "--", color="#d55e00", label="losers, A < 0")
        axis.set(title=title, xlabel="ratio r of the token", xticks=[0, 1, 2], yticks=[0, 1, 2])
        axis.title.set_fontsize(10)
    figure.axes[0].set_ylabel("|push| / |A|")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def main():
    path = parse_plot(__doc__)
    places = [RATIOS.index(ratio) for ratio in TABLE_RATIOS]
    rows = {
        name: [f"{win[k]:.2f}, {lose[k]:.2f}" for k in places]
        for name, (win, lose) in weights().items()
    }
    print("|push| / |A| of a winner and of a loser, by the ratio of their token\n")
    print_table(rows, [f"r = {ratio:g}" for ratio in TABLE_RATIOS])
    if path:
        save(plot(), path)


if __name__ == "__main__":
    main()
