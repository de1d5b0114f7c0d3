"""What a clip does: how hard a winner and a loser push a token, against the token's ratio.

    python -m toy.clips      toy/clips.svg: a small panel for each method

A shared token has one ratio r in all answers. losses.py computes |push| / |A| for a winner (A = 1)
and a loser (A = -1) of one length. Where the two lines part, the pushes on a shared token do not
cancel. The article of toy/tree.py shows the same panels.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from losses import METHODS, Batch, token_pushes

NAMES = "reinforce grpo grpo-symmetric cispo dapo gspo dppo symmetric-trust sapo".split()
OLD = 0.5  # the token's probability when it was sampled; losses that clip a probability need it
# They avoid the edges of clip ranges, where rounding decides a derivative.
RATIOS = sorted([*(k / 100 for k in range(1, 200, 2)), 1.0])
TOP, WIDTH, HEIGHT = 2.0, 150, 110  # the largest ratio and |push| / |A|; a panel's frame


@cache
def weights() -> dict[str, list[list[float]]]:
    """|push| / |A| of the winner and of the loser at all RATIOS, for each method.

    Every ratio has a group of its own: two answers of one token.
    """
    ratio = torch.tensor(RATIOS, dtype=torch.float64).repeat_interleave(2)[:, None]  # (N, 1)
    old = torch.full_like(ratio, OLD).log()
    adv = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(len(RATIOS))[:, None]
    table = {}
    for name in NAMES:
        logp = (old + ratio.log()).requires_grad_()
        batch = Batch(logp, old, adv, torch.ones_like(adv, dtype=torch.bool), 2, max_tokens=1)
        weight = token_pushes(METHODS[name].passes[0](batch), logp) / adv
        table[name] = weight.view(-1, 2).T.round(decimals=6).tolist()
    return table


def panel(name: str, place: str = "") -> str:
    """Two lines in a frame, and the gap between them. place: attributes of its <svg>."""

    def points(line: list[float]) -> list[str]:
        pairs = zip(RATIOS, line, strict=True)
        return [f"{r / TOP * WIDTH:.1f},{HEIGHT * (1 - w / TOP):.1f}" for r, w in pairs]

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
        f'<text x="-4" y="8" class="end">{TOP:g}</text></svg>',
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


def picture() -> str:
    """All panels in one file for a README, light or dark like the reader's screen."""
    columns = 3
    rows = -(-len(NAMES) // columns)
    frames = [
        panel(
            name,
            f'x="{10 + k % columns * 200}" y="{64 + k // columns * 165}" width="185" height="160"',
        )
        for k, name in enumerate(NAMES)
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 {64 + rows * 165}">',
        "<title>|push| / |A| of winners and losers against the ratio, for each method</title>",
        f"<style>\n:root {{ {LIGHT} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n{STYLE}</style>",
        '<path d="M0 0H620V1000H0z" style="fill: var(--card)"/>',
        '<g class="panel"><text x="14" y="20" class="name" style="font-size: 15px">',
        "Where the two lines part, pushes on a shared token do not cancel</text>",
        '<path d="M14 38h24" class="win"/><text x="44" y="42">winners</text>',
        '<path d="M114 38h24" class="lose"/><text x="144" y="42">losers</text>',
        '<path d="M206 32h24v12h-24z" class="gap"/><text x="236" y="42">their net push</text></g>',
        *frames,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    path = Path(__file__).with_name("clips.svg")
    path.write_text(picture(), "utf-8")
    print(path)
