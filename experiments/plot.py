"""Draw what happened in training, from metrics.jsonl, method by method.

    python -m experiments.plot runs/*                  curves.png, here
    python -m experiments.plot runs --out grpo.svg     all runs in a directory; .png or .svg

Runs that differ only in the seed are one line: their mean at each step. The band is its 95 %
interval over seeds (Student's t). Needs matplotlib (pip install -e '.[plot]').
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from experiments.curves import SMOOTH, Run, group_runs, interval, mean, read_runs

# Okabe and Ito's colours, safe for the colour-blind, and a grey.
COLOURS = "#E69F00 #0072B2 #D55E00 #009E73 #CC79A7 #56B4E9 #000000 #999999".split()
MARKERS, LINES = "osv^D<>pX", ("-", "-.", ":", (0, (6, 1)))
Groups = dict[str, dict[int, Run]]  # label -> seed -> run, as curves.group_runs gives them
Point = tuple[int, float, float]  # step, mean over seeds, half its interval (nan for one seed)


@dataclass
class Panel:
    title: str
    unit: str
    lines: dict[str, list[Point]]  # by label

    @property
    def is_share(self) -> bool:
        """Of 1: the axis shows all of 0 to 1."""
        return self.unit.startswith("share")


def find_curve(run: Run, key: str, window: int = 1) -> dict[int, float]:
    """step -> a metric, where it was measured; each the mean of the last `window` steps."""
    logged = [line.get(key, math.nan) for line in run.lines]
    curve = {}
    for end, line in enumerate(run.lines, 1):
        value = mean(logged[max(0, end - window) : end])
        if math.isfinite(value):
            curve[line["step"]] = value
    return curve


def average(curves: list[dict[int, float]]) -> list[Point]:
    """Over the seeds that have a value at a step."""
    steps = sorted({step for curve in curves for step in curve})
    return [(step, *interval([curve[step] for curve in curves if step in curve])) for step in steps]


def find_panels(groups: Groups) -> list[Panel]:
    """All that these runs have measured."""
    smooth = f", mean of {SMOOTH} steps"
    quantities = [  # title, unit, key, window
        ("reward on training prompts", "share right" + smooth, "reward", SMOOTH),
        ("greedy accuracy, held-out", "share of problems", "greedy", 1),
        ("learning tax", "part of |c|" + smooth, "tax", SMOOTH),
        ("entropy of the next token", "nats", "entropy", 1),
        ("length of an answer", "tokens", "length", 1),
        ("KL to the start", "nats/token" + smooth, "kl_start", SMOOTH),
        ("drift of the openers", "share of answers", "drift opener", 1),
        ("drift of the forms", "share of answers", "drift form", 1),
    ]
    runs = [run for by_seed in groups.values() for run in by_seed.values()]
    names = dict.fromkeys(key for run in runs for line in run.evaluations for key in line)
    ways = [name for name in names if name.startswith(("opener ", "form "))]
    quantities += [(name, "share of answers", name, 1) for name in ways]
    panels = []
    for title, unit, key, window in quantities:
        lines = {
            label: average([find_curve(run, key, window) for run in by_seed.values()])
            for label, by_seed in groups.items()
        }
        if any(lines.values()):
            panels.append(Panel(title, unit, lines))
    return panels


def choose_styles(groups: Groups) -> dict[str, dict]:
    """A colour for each method. Marker and line style tell lines apart without it. +proj is dashed
    and hollow."""
    configs = {label: next(iter(runs.values())).config for label, runs in groups.items()}
    methods = list(dict.fromkeys(config["method"] for config in configs.values()))
    styles = {}
    for i, (label, config) in enumerate(configs.items()):
        colour = COLOURS[methods.index(config["method"]) % len(COLOURS)]
        styles[label] = {
            "color": colour,
            "linestyle": "--" if config["project"] else LINES[i % len(LINES)],
            "marker": MARKERS[i % len(MARKERS)],
            "markerfacecolor": "white" if config["project"] else colour,
        }
    return styles


def draw(panels: list[Panel], groups: Groups):
    """A matplotlib Figure."""
    from matplotlib.figure import Figure

    columns = 4
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(2.8 * columns, 1.9 * rows + 0.7), layout="constrained", dpi=110)
    styles, handles = choose_styles(groups), {}
    for number, panel in enumerate(panels, 1):
        axis = figure.add_subplot(rows, columns, number)
        for label, points in panel.lines.items():
            if points:
                line = draw_line(axis, points, styles[label])
                handles.setdefault(f"{label} (seeds: {len(groups[label])})", line)
        axis.set_title(panel.title, fontsize=9)
        axis.set_ylabel(panel.unit, fontsize=7)
        axis.tick_params(labelsize=7)
        axis.grid(axis="y", linewidth=0.3)
        if panel.is_share:
            axis.set_ylim(-0.04, 1.04)
        if number > len(panels) - columns:
            axis.set_xlabel("training step", fontsize=7)
    band = "line: mean over seeds; band: its 95 % interval (Student's t; none for one seed)"
    figure.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=columns,
        title=band,
        fontsize=8,
        title_fontsize=8,
    )
    return figure


def draw_line(axis, points: list[Point], style: dict):
    """A line and its band. Returns the line."""
    steps, values, halves = zip(*points, strict=True)
    every = max(1, len(steps) // 6)
    (line,) = axis.plot(steps, values, lw=1.3, ms=4, markevery=every, **style)
    low = [v - h for v, h in zip(values, halves, strict=True)]
    high = [v + h for v, h in zip(values, halves, strict=True)]
    axis.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
    return line


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs, or directories of runs")
    what = "picture, .png or .svg; an older one is replaced (default: curves.png)"
    parser.add_argument("--out", metavar="FILE", default="curves.png", help=what)
    options = parser.parse_args(argv)
    if Path(options.out).suffix not in (".png", ".svg"):
        sys.exit(f"error: --out {options.out}: a name that ends in .png or .svg is expected")
    try:
        import matplotlib

        runs = read_runs(options.runs)
        for run in runs:
            if not run.lines:
                print(f"left out: {run.folder} has no metrics yet", file=sys.stderr)
        groups = group_runs([run for run in runs if run.lines])
        matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
        draw(find_panels(groups), groups).savefig(options.out)
    except ImportError:
        sys.exit("error: pictures need matplotlib; pip install -e '.[plot]'")
    except ValueError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {options.out} cannot be written: {error.strerror}")
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
