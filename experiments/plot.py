"""metrics.jsonl -> pictures: what happened in training, method by method.

    python plot.py runs/*                    curves.png and curves.svg, here
    python plot.py runs --out grpo.svg       all runs in a directory; one file, .png or .svg decides

Runs that differ only in the seed are one line, their mean at each step, with its 95 % interval over seeds (Student's t)
as a band. A panel without data in any run is left out. The terminal gets the same curves as bars. Needs matplotlib:
pip install -e '.[plot]'; the bars do not.
"""

from __future__ import annotations

import io
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from cli import Parser, fail
from experiments.curves import (
    COLOURS,
    MARKERS,
    SMOOTH,
    Run,
    grouped,
    interval,
    mean,
    moved,
    read_runs,
)

LINES = ("-", "-.", ":", (0, (6, 1)))  # 4 of them and 9 markers: 36 lines that differ in grey
Point = tuple[
    int, float, float
]  # step, mean over seeds, half its 95 % interval (nan for a single seed)


@dataclass
class Panel:
    title: str
    unit: str
    lines: dict[str, list[Point]]  # by label, as curves.grouped gives it
    share: bool  # of 1: the axis shows all of 0 to 1


def curve(run: Run, key: str, window: int = 1) -> dict[int, float]:
    """step -> mean of a metric over the last `window` steps, nan where there is none; "drift
    opener" from the start."""
    kind = key.removeprefix("drift ")
    if kind != key:
        return {line["step"]: moved(run.evaluations[0], line, kind) for line in run.evaluations}
    values = [line.get(key) for line in run.lines]
    return {
        line["step"]: mean(values[max(0, i + 1 - window) : i + 1])
        for i, line in enumerate(run.lines)
    }


def panels(groups: dict[str, dict[int, Run]]) -> list[Panel]:
    """All that is drawn: the lines and their bands. Values that are missing or not finite are left
    out."""
    smooth = f", mean of {SMOOTH} steps"
    wanted = [  # title, unit, key, window, share
        ("reward on training prompts", "share right" + smooth, "reward", SMOOTH, True),
        ("greedy accuracy, held-out", "share of problems", "greedy", 1, True),
        ("learning tax", "share of |c|" + smooth, "tax", SMOOTH, False),
        ("entropy of the next token", "nats", "entropy", 1, False),
    ]
    evaluations = [
        line for runs in groups.values() for run in runs.values() for line in run.evaluations
    ]
    for kind in ("opener", "form"):
        names = dict.fromkeys(
            key for line in evaluations for key in line if key.startswith(kind + " ")
        )
        wanted.append((f"drift of the {kind}", "KL(now || start), nats", f"drift {kind}", 1, False))
        wanted += [
            (f"{kind} '{key.removeprefix(kind + ' ')}'", "probability", key, 1, True)
            for key in names
        ]
    wanted.append(("length of an answer", "tokens", "length", 1, False))
    wanted.append(("KL to the start", "nats/token" + smooth, "kl_start", SMOOTH, False))
    found = []
    for title, unit, key, window, share in wanted:
        lines = {
            label: over_seeds([curve(run, key, window) for run in runs.values()])
            for label, runs in groups.items()
        }
        if any(lines.values()):
            found.append(Panel(title, unit, lines, share))
    return found


def over_seeds(curves: list[dict[int, float]]) -> list[Point]:
    steps = sorted({step for curve in curves for step in curve})
    points = [
        (step, *interval([curve[step] for curve in curves if step in curve])) for step in steps
    ]
    return [point for point in points if math.isfinite(point[1])]


def bars(points: list[Point], low: float, high: float, width: int = 24) -> str:
    """A curve as one line of text: the means of up to `width` equal stretches, between low and
    high."""
    blocks = (
        "".join(map(chr, range(0x2581, 0x2589)))
        if "utf" in (sys.stdout.encoding or "").lower()
        else "_.:-=+*#"
    )
    n, values = min(width, len(points)), [value for _, value, _ in points]
    stretches = [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]
    heights = [(mean(stretch) - low) / (high - low) if high > low else 0.0 for stretch in stretches]
    return "".join(blocks[min(7, int(8 * height))] for height in heights).ljust(width)


def summary(found: list[Panel], groups: dict[str, dict[int, Run]]) -> str:
    """Bars, first and last value of every panel but the single probabilities, whose drift is
    there."""
    width, text = max(map(len, groups)), []
    for panel in found:
        drawn = {
            label: points
            for label, points in panel.lines.items()
            if points and panel.unit != "probability"
        }
        values = [value for points in drawn.values() for _, value, _ in points]
        for label, points in drawn.items():
            title = "" if label != next(iter(drawn)) else panel.title
            first, (_, last, half) = points[0][1], points[-1]
            spread = f" +- {half:.3f}" if math.isfinite(half) else ""
            blocks = bars(points, min(values), max(values))
            text.append(f"{title:27} {label:{width}}  {blocks}  {first:.3f} -> {last:.3f}{spread}")
    for label, runs in groups.items():
        ends = sorted({run.lines[-1]["step"] for run in runs.values()})
        if len(ends) > 1:
            text.append(
                f"{label}: its seeds end at steps {ends[0]} to {ends[-1]}; the line goes on with those left"
            )
    return "\n".join(text)


def styles(groups: dict[str, dict[int, Run]]) -> dict[str, dict]:
    """Colour says the method; marker and line style tell lines apart without it. +proj is dashed
    and hollow."""
    found = {}
    for i, (label, runs) in enumerate(groups.items()):
        config = next(iter(runs.values())).config
        projected = bool(config.get("project"))
        colour = COLOURS.get(config["method"], "#999999")
        line = "--" if projected else LINES[i % 4]
        fill = "white" if projected else colour
        found[label] = dict(
            color=colour, linestyle=line, marker=MARKERS[i % len(MARKERS)], markerfacecolor=fill
        )
    return found


def draw(found: list[Panel], groups: dict[str, dict[int, Run]]):
    from matplotlib.figure import Figure

    columns, style, handles = 3 if len(found) <= 6 else 4, styles(groups), {}
    rows, shade = (
        math.ceil(len(found) / columns),
        f"{min(34, 100 // len(groups)):02x}",
    )  # many bands: lighter ones
    last = max(points[-1][0] for panel in found for points in panel.lines.values() if points) or 1
    figure = Figure(figsize=(2.8 * columns, 1.9 * rows + 0.7), layout="constrained", dpi=110)
    for number, panel in enumerate(found, 1):
        axis, ends = figure.add_subplot(rows, columns, number), [0.0, float(panel.share)]
        for i, (label, points) in enumerate(panel.lines.items()):
            if points:
                steps, values, halves = zip(*points, strict=True)
                low, high = (
                    [v + sign * h for v, h in zip(values, halves, strict=True)] for sign in (-1, 1)
                )
                every = max(1, len(steps) // 6)
                line = axis.plot(
                    steps, values, markevery=(i % every, every), ms=4.5, lw=1.3, **style[label]
                )
                colour, edge = (
                    style[label]["color"],
                    dict(linestyle=style[label]["linestyle"], linewidth=0.5),
                )
                axis.fill_between(
                    steps, low, high, facecolor=colour + shade, edgecolor=colour + "99", **edge
                )
                handles.setdefault(f"{label} (seeds: {len(groups[label])})", line[0])
                ends = [min(ends[0], *values), max(ends[1], *values)]
        size = ends[1] - ends[0] or 1.0
        axis.set_xlim(-0.03 * last, 1.03 * last)
        axis.set_ylim(ends[0] - 0.04 * size, ends[1] + (0.04 if panel.share else 0.3) * size)
        axis.set_title(panel.title, fontsize=9)
        axis.set_ylabel(panel.unit, fontsize=7)
        axis.tick_params(labelsize=7)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(axis="y", linewidth=0.3)
        if number > len(found) - columns:
            axis.set_xlabel("training step", fontsize=7)
    said = "line: mean over seeds; band: its 95 % interval (Student's t; none for one seed), which the frame may cut"
    legend = dict(
        fontsize=8,
        title=said,
        title_fontsize=8,
        ncols=max(1, 30 * columns // max(map(len, handles))),
    )
    figure.legend(handles.values(), handles, loc="outside lower center", **legend)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # once is enough: a second layout would move things by a hair
    return figure


def main(argv: list[str] | None = None):
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="runs, such as runs/*, or directories of runs"
    )
    what = "picture to write, .png or .svg; an older one is replaced (default: both curves.png and curves.svg, here)"
    parser.add_argument("--out", metavar="FILE", help=what)
    options = parser.parse_args(argv)
    files = (
        [Path(options.out)] if options.out is not None else [Path("curves.png"), Path("curves.svg")]
    )
    if files[0].suffix not in (".png", ".svg"):
        fail(f"--out {options.out}: a name that ends in .png or .svg is expected")
    try:
        runs = read_runs(options.runs)
        begun = [run for run in runs if run.lines]
        groups = grouped(begun) if begun else {}
    except ValueError as error:
        fail(str(error))
    for run in runs:
        if not run.lines:
            print(f"left out: {run.folder} has no metrics yet", file=sys.stderr)
    found = panels(groups)
    if not found:
        fail("nothing to draw: these runs have no metrics yet")
    print(summary(found, groups))
    try:
        import matplotlib
        from PIL import Image
    except ImportError:
        sys.exit("error: pictures need matplotlib; pip install -e '.[plot]'")
    # In an SVG text stays text; the same runs give the same bytes.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "plot", "font.sans-serif": "DejaVu Sans"}
    )
    figure = draw(found, groups)
    for file in files:
        try:
            if file.suffix == ".svg":
                figure.savefig(file, metadata={"Date": None})
            else:  # 256 colours: a third of the bytes
                figure.savefig(pixels := io.BytesIO())
                Image.open(pixels).convert("RGB").quantize(256).save(file, optimize=True)
        except OSError as error:
            fail(f"{file} cannot be written: {error.strerror}")
        print(f"picture: {file}")


if __name__ == "__main__":
    main()
