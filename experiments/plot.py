"""Draw what happened in training, from metrics.jsonl, method by method.

    python -m experiments.plot runs/*                  curves.png and curves.svg, here
    python -m experiments.plot runs --out grpo.svg     all runs in a directory; .png or .svg

Runs that differ only in the seed are one line: their mean at each step. The band is its 95 %
interval over seeds (Student's t). A panel is drawn if one of the runs has at least 3 points in it.
So a quantity that is measured at evaluations only needs three of them. The terminal gets all the
curves as bars. Pictures need matplotlib (pip install -e '.[plot]'); the bars do not.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from experiments import fail
from experiments.curves import (
    COLOURS,
    MARKERS,
    SMOOTH,
    Run,
    drift,
    group_runs,
    interval,
    mean,
    read_runs,
)

LINES = ("-", "-.", ":", (0, (6, 1)))  # 4 of them and 9 markers: 36 lines that differ in grey
FEWEST = 3  # points of a curve: two are a straight line, whatever happened between them
Groups = dict[str, dict[int, Run]]  # label -> seed -> run, as curves.group_runs gives them
Curve = dict[int, float]  # step -> value
Point = tuple[int, float, float]  # step, mean over seeds, half its interval (nan for one seed)


@dataclass
class Panel:
    title: str
    unit: str
    lines: dict[str, list[Point]]  # by label
    most_points: int  # of any run

    @property
    def is_share(self) -> bool:
        """Of 1: the axis shows all of 0 to 1."""
        return self.unit.startswith(("share", "probability"))


def find_curve(run: Run, key: str, window: int = 1) -> Curve:
    """A metric where it was measured, each value the mean of the last `window` steps. The metric
    "drift opener" is the drift of the opener from the start."""
    kind = key.removeprefix("drift ")
    if kind != key:
        lines = run.evaluations
        values = {line["step"]: drift(lines[0], line, kind) for line in lines}
    else:
        lines = run.lines
        logged = [line.get(key) for line in lines]
        means = [mean(logged[max(0, end - window) : end]) for end in range(1, len(lines) + 1)]
        values = {line["step"]: value for line, value in zip(lines, means, strict=True)}
    return {step: value for step, value in values.items() if not math.isnan(value)}


def find_panels(groups: Groups) -> list[Panel]:
    """All that these runs have measured."""
    smooth = f", mean of {SMOOTH} steps"
    quantities = [  # title, unit, key, window
        ("reward on training prompts", "share right" + smooth, "reward", SMOOTH),
        ("greedy accuracy, held-out", "share of problems", "greedy", 1),
        ("learning tax", "part of |c|" + smooth, "tax", SMOOTH),
        ("entropy of the next token", "nats", "entropy", 1),
    ]
    runs = [run for by_seed in groups.values() for run in by_seed.values()]
    names = dict.fromkeys(key for run in runs for line in run.evaluations for key in line)
    for kind in ("opener", "form"):
        quantities.append((f"drift of the {kind}", "KL(now || start), nats", f"drift {kind}", 1))
        for name in names:
            if name.startswith(kind + " "):
                title = f"{kind} '{name.removeprefix(kind + ' ')}'"
                quantities.append((title, "probability", name, 1))
    quantities.append(("length of an answer", "tokens", "length", 1))
    quantities.append(("KL to the start", "nats/token" + smooth, "kl_start", SMOOTH))
    panels = []
    for title, unit, key, window in quantities:
        lines = {}
        most = 0
        for label, by_seed in groups.items():
            curves = [find_curve(run, key, window) for run in by_seed.values()]
            lines[label] = average(curves)
            most = max(most, *map(len, curves))
        if any(lines.values()):
            panels.append(Panel(title, unit, lines, most))
    return panels


def average(curves: list[Curve]) -> list[Point]:
    """Over the seeds that have a value at a step. A mean that is not finite is left out."""
    steps = sorted({step for curve in curves for step in curve})
    points = [
        (step, *interval([curve[step] for curve in curves if step in curve])) for step in steps
    ]
    return [point for point in points if math.isfinite(point[1])]


# ---------------- for the terminal


def bars(points: list[Point], low: float, high: float, width: int = 24) -> str:
    """A curve as one line of text: the means of up to `width` equal stretches, between low and
    high."""
    unicode = "utf" in (sys.stdout.encoding or "").lower()
    blocks = "".join(map(chr, range(0x2581, 0x2589))) if unicode else "_.:-=+*#"
    n = min(width, len(points))
    values = [value for _, value, _ in points]
    stretches = [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]
    heights = [(mean(stretch) - low) / (high - low) if high > low else 0.0 for stretch in stretches]
    return "".join(blocks[min(7, int(8 * height))] for height in heights).ljust(width)


def summarise(panels: list[Panel], groups: Groups) -> str:
    """Bars, first and last value of every panel. Single probabilities are left out, because their
    drift is there."""
    width = max(map(len, groups))
    text = []
    for panel in panels:
        if panel.unit == "probability":
            continue
        drawn = {label: points for label, points in panel.lines.items() if points}
        values = [value for points in drawn.values() for _, value, _ in points]
        for label, points in drawn.items():
            title = panel.title if label == next(iter(drawn)) else ""
            blocks = bars(points, min(values), max(values))
            _, last, half = points[-1]
            spread = f" +- {half:.3f}" if math.isfinite(half) else ""
            ends = f"{points[0][1]:.3f} -> {last:.3f}{spread}"
            text.append(f"{title:27} {label:{width}}  {blocks}  {ends}")
    for label, runs in groups.items():
        ends = sorted({run.lines[-1]["step"] for run in runs.values()})
        if len(ends) > 1:
            rest = f"steps {ends[0]} to {ends[-1]}; the line continues with those left"
            text.append(f"{label}: its seeds end at {rest}")
    return "\n".join(text)


# ---------------- for the eye


def choose_styles(groups: Groups) -> dict[str, dict]:
    """Colour says the method; marker and line style tell lines apart without it. +proj is dashed
    and hollow."""
    styles = {}
    for i, (label, runs) in enumerate(groups.items()):
        config = next(iter(runs.values())).config
        colour = COLOURS.get(config["method"], "#999999")
        styles[label] = {
            "color": colour,
            "linestyle": "--" if config.get("project") else LINES[i % len(LINES)],
            "marker": MARKERS[i % len(MARKERS)],
            "markerfacecolor": "white" if config.get("project") else colour,
        }
    return styles


def draw(panels: list[Panel], groups: Groups):
    """A matplotlib Figure."""
    from matplotlib.figure import Figure

    columns = 3 if len(panels) <= 6 else 4
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(2.8 * columns, 1.9 * rows + 0.7), layout="constrained", dpi=110)
    styles = choose_styles(groups)
    last = max(run.lines[-1]["step"] for runs in groups.values() for run in runs.values())
    handles = {}
    for number, panel in enumerate(panels, 1):
        axis = figure.add_subplot(rows, columns, number)
        for label, line in draw_panel(axis, panel, styles).items():
            handles.setdefault(f"{label} (seeds: {len(groups[label])})", line)
        axis.set_xlim(-0.03 * last, 1.03 * last)
        if number > len(panels) - columns:
            axis.set_xlabel("training step", fontsize=7)
    band = "its 95 % interval (Student's t; none for one seed), which the frame may cut"
    figure.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=max(1, 30 * columns // max(map(len, handles))),
        title=f"line: mean over seeds; band: {band}",
        fontsize=8,
        title_fontsize=8,
    )
    return figure


def draw_panel(axis, panel: Panel, styles: dict[str, dict]) -> dict:
    """Lines and bands of one panel. Returns label -> line."""
    handles = {}
    low, high = 0.0, float(panel.is_share)
    shade = f"{min(34, 100 // len(styles)):02x}"  # many bands: lighter ones
    for i, (label, points) in enumerate(panel.lines.items()):
        if not points:
            continue
        steps, values, halves = zip(*points, strict=True)
        style = styles[label]
        colour = style["color"]
        every = max(1, len(steps) // 6)
        marks = {"markevery": (i % every, every), "ms": 4.5}
        (handles[label],) = axis.plot(steps, values, lw=1.3, **marks, **style)
        axis.fill_between(
            steps,
            [v - h for v, h in zip(values, halves, strict=True)],
            [v + h for v, h in zip(values, halves, strict=True)],
            facecolor=colour + shade,
            edgecolor=colour + "99",
            linestyle=style["linestyle"],
            linewidth=0.5,
        )
        low = min(low, *values)
        high = max(high, *values)
    size = high - low or 1.0
    axis.set_ylim(low - 0.04 * size, high + (0.04 if panel.is_share else 0.3) * size)
    axis.set_title(panel.title, fontsize=9)
    axis.set_ylabel(panel.unit, fontsize=7)
    axis.tick_params(labelsize=7)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(axis="y", linewidth=0.3)
    return handles


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs, or directories of runs")
    what = "picture, .png or .svg; an older one is replaced (default: both, named curves)"
    parser.add_argument("--out", metavar="FILE", help=what)
    options = parser.parse_args(argv)
    files = ["curves.png", "curves.svg"] if options.out is None else [options.out]
    if Path(files[0]).suffix not in (".png", ".svg"):
        fail(f"--out {options.out}: a name that ends in .png or .svg is expected")
    try:
        runs = read_runs(options.runs)
        begun = [run for run in runs if run.lines]
        groups = group_runs(begun) if begun else {}
    except ValueError as error:
        fail(str(error))
    for run in runs:
        if not run.lines:
            print(f"left out: {run.folder} has no metrics yet", file=sys.stderr)
    panels = find_panels(groups) if groups else []
    if not panels:
        fail("nothing to draw: these runs have no metrics yet")
    print(summarise(panels, groups))
    panels = [panel for panel in panels if panel.most_points >= FEWEST]
    if not panels:
        fail(f"nothing to draw: no curve has {FEWEST} points yet")
    try:
        import matplotlib
    except ImportError:
        sys.exit("error: pictures need matplotlib; pip install -e '.[plot]'")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    figure = draw(panels, groups)
    for file in files:
        try:
            figure.savefig(file)
        except OSError as error:
            fail(f"{file} cannot be written: {error.strerror}")
        print(f"picture: {file}")


if __name__ == "__main__":
    main()
