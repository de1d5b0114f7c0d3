"""What a clip does: how hard a winner and a loser push a token, against the token's ratio.

    python -m toy.clips                        the table
    python -m toy.clips --plot toy/clips.svg   and the picture, a panel for each kind of clip

A shared token has one ratio r in all answers. losses.py computes |push| / |A| for a winner (A = 1)
and a loser (A = -1) of one length. Where the two lines part, the pushes on a shared token do not
cancel. The article of toy/tree.py shows such a panel for each method of the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from losses import METHODS, Batch, token_pushes
from toy.figure import parse_plot, print_table

NAMES = "reinforce grpo grpo-symmetric cispo dapo gspo dppo symmetric-trust sapo".split()
OLD = 0.5  # the token's probability when it was sampled; losses that clip a probability need it
# They avoid the edges of clip ranges, where rounding decides a derivative.
RATIOS = sorted([*(k / 100 for k in range(1, 200, 2)), 1.0])
TABLE_RATIOS = (0.51, 1.0, 1.51)
TOP, WIDTH, HEIGHT = 2.0, 150, 110  # the largest ratio and |push| / |A|; a panel's frame


def weigh(loss: Callable[[Batch], Tensor], ratios: Sequence[float], old: float = OLD) -> Tensor:
    """|push| / |A| of a winner and of a loser at these ratios. (2, ratios).

    Every ratio has a group of its own: two answers of one token, whose probability was old.
    """
    ratio = torch.tensor(ratios, dtype=torch.float64).repeat_interleave(2)[:, None]  # (N, 1)
    logp_old = torch.full_like(ratio, old).log()
    adv = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(len(ratios))[:, None]
    logp, mask = (logp_old + ratio.log()).requires_grad_(), torch.ones_like(adv) > 0
    batch = Batch(logp, logp_old, adv, mask, 2, max_tokens=1, logp_ref=logp_old)
    return (token_pushes(loss(batch), logp) / adv).view(-1, 2).T


@cache
def weights() -> dict[str, list[list[float]]]:
    """|push| / |A| of the winner and of the loser at all RATIOS, for each method."""
    rounded = {name: weigh(METHODS[name].passes[0], RATIOS).round(decimals=6) for name in NAMES}
    return {name: (weight + 0.0).tolist() for name, weight in rounded.items()}  # -0 becomes 0


def point(ratio: float, weight: float) -> tuple[str, str]:
    """Where a panel draws it."""
    return f"{ratio / TOP * WIDTH:.1f}", f"{HEIGHT * (1 - weight / TOP):.1f}"


def panel(name: str, place: str = "", labels: str = "") -> str:
    """Two lines in a frame, and the gap between them. place: attributes of its <svg>."""

    def points(line: list[float]) -> list[str]:
        return [",".join(point(*pair)) for pair in zip(RATIOS, line, strict=True)]

    win, lose = map(points, weights()[name])
    parts = [
        f'<svg class="panel" viewBox="-14 -20 172 148" {place}>',
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
        f'<text x="-4" y="8" class="end">{TOP:g}</text>{labels}</svg>',
    ]
    return "\n".join(parts)


LIGHT = "--win: #0072b2; --lose: #d55e00; --tax: #cc79a7; --ink: #1d2126; --soft: #5b636e;"
LIGHT += " --card: #fff;"
DARK = "--win: #56b4e9; --lose: #f08a3c; --tax: #e29fc4; --ink: #e9e6df; --soft: #a4abb5;"
DARK += " --card: #1e2227;"
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


# The picture's panels: what a clip does, and the labels of lines, each with its colour and place.
WINNERS, LOSERS, BOTH = ("winners", "win"), ("losers", "lose"), ("winners and losers", "ink")
SHOWN = {
    "grpo": (
        "PPO's clip stops one of them",
        [(*WINNERS, 0.4, 0.75), (*LOSERS, 0.45, 0.08), (*LOSERS, 1.36, 1.66)]
        + [(*WINNERS, 1.6, 0.08), ("net push", "ink", 1.6, 0.75)],
    ),
    "grpo-symmetric": ("a sign-blind clip stops both", [(*BOTH, 1, 1.35)]),
    "cispo": ("this clip stops neither", [(*BOTH, 1.3, 0.3)]),
}


def picture() -> str:
    """Three panels in one file for a README, light or dark like the reader's screen."""
    frames = []
    for k, (name, (says, labels)) in enumerate(SHOWN.items()):
        style = 'class="middle label" style="fill: var(--{})"'
        texts = [f'<text x="{WIDTH / 2:g}" y="{HEIGHT + 34}" class="middle label">{says}</text>']
        for label, color, *place in labels:
            x, y = point(*place)
            texts.append(f'<text x="{x}" y="{y}" {style.format(color)}>{label}</text>')
        place = f'x="{10 + k * 200}" y="36" width="185" height="160"'
        frames.append(panel(name, place, "\n" + "\n".join(texts)))
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 218">',
        "<title>|push| / |A| of winners and losers against the ratio, for three methods</title>",
        f"<style>\n:root {{ {LIGHT} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n{STYLE}</style>",
        '<path d="M0 0H620V218H0z" style="fill: var(--card)"/>',
        '<g class="panel"><text x="14" y="20" class="name" style="font-size: 15px">',
        "PPO's clip lets winners and losers push a shared token unequally</text></g>",
        *frames,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main():
    path = parse_plot(__doc__)
    if path and path.suffix != ".svg":
        sys.exit(f"error: {path}: this picture is an .svg")
    places = [RATIOS.index(ratio) for ratio in TABLE_RATIOS]
    rows = {
        name: [f"{win[k]:.2f}, {lose[k]:.2f}" for k in places]
        for name, (win, lose) in weights().items()
    }
    print("|push| / |A| of a winner and of a loser, by the ratio of their token\n")
    print_table(rows, [f"r = {ratio:g}" for ratio in TABLE_RATIOS])
    if path:
        path.write_text(picture(), "utf-8")
        print(f"\npicture: {path}")


if __name__ == "__main__":
    main()
