"""What the figures of toy/ share: a flag, losses, tables, intervals, pictures (matplotlib)."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from losses import METHODS, Batch, Method, project

# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom.
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179]
# Okabe and Ito's colours, safe for the colour-blind. Names stand at the ends of their lines.
COLORS = {
    "grpo": "#B07600",
    "dr-grpo": "#009E73",
    "grpo-symmetric": "#009E73",
    "cispo": "#000000",
    "recentred": "#000000",
    "gspo": "#D55E00",
    "dfpo-min": "#0072B2",
    "pos-only": "#777777",
    "ibpo": "#0072B2",
}
WIDTH = 8.3  # inches; README shows a picture about 830 pixels wide
STYLE = {
    "axes.prop_cycle": "cycler(color=['#000000', '#D55E00', '#0072B2'], marker=['o', 'D', 's'])",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.markersize": 4.5,
    "errorbar.capsize": 3,
    "savefig.dpi": 120,
}


def find_method(name: str) -> Method:
    """Of a row such as "grpo", "grpo+proj" (its projection) or "dfpo-min eps 0.2"."""
    return METHODS[re.split("[ +]", name)[0]]


def compute_loss(name: str, hyper: dict[str, dict], batch: Batch, nodes: Tensor) -> Tensor:
    """Of such a row. hyper: the hyperparameters of some of them. Nodes: (N, T)."""
    plain, _, projected = name.partition("+")
    loss = find_method(name).passes[0](batch, **hyper.get(plain, {}))
    return project(loss, batch.logp, batch.adv[:, 0], nodes, batch.mask) if projected else loss


def parse_arguments(doc: str, argv: list[str] | None, flags: dict) -> argparse.Namespace:
    """Of a script with this docstring; flags: name -> options. A mistake ends in one line."""
    name = re.search(r"python -m [\w.]+", doc)
    parser = argparse.ArgumentParser(name and name[0], description=doc.splitlines()[0])
    for flag, options in flags.items():
        parser.add_argument(flag, **options)
    parser.error = lambda message: sys.exit(f"error: {message}")
    return parser.parse_args(argv)


def parse_plot(doc: str, argv: list[str] | None) -> Path | None:
    """What --plot says, the only flag of a script with this docstring."""
    plot = dict(type=picture, metavar="FILE", help="draw it, as .svg or .png")
    return parse_arguments(doc, argv, {"--plot": plot}).plot


def picture(text: str) -> Path:
    """A file to be drawn, refused before anything is computed."""
    path = Path(text)
    if path.suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{text}: a name that ends in .svg or .png is expected")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not importlib.util.find_spec("matplotlib"):
        raise argparse.ArgumentTypeError("it needs matplotlib (pip install -e '.[plot]')")
    return path


def quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t; above the table, its expansion in 1/freedom."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    return 1.960 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half its 95 % interval (Student's t). A nan is left out; the half is nan for a
    single value, and where a value is infinite."""
    values = [v for v in values if not math.isnan(v)]
    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return sum(values) / n if n else math.nan, math.nan
    return statistics.fmean(values), quantile(n - 1) * statistics.stdev(values) / n**0.5


def format_interval(values: list[float], form: str = ".3f") -> str:
    mean, half = interval(values)
    return f"{mean:{form}} +- {half:{form.lstrip('+')}}"


def print_row(name: str, cells: Iterable[str], width: int = 18):
    print(f"{name:24}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)


def make_figure(finding: str, height: float):
    """An empty figure of README's width, with what it shows as its title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(finding, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def line_style(name: str) -> dict:
    """Of a method; dashed for a variant, such as grpo+proj."""
    plain = re.split("[ +,]", name)[0]
    return dict(color=COLORS[plain], linestyle="-" if name == plain else "--", marker="")


def draw_lines(axis, curves: dict[str, list[float]], x=None, halves: dict | None = None):
    """A line for each method, over x or 0, 1, ..., with half intervals if given. Its name stands at
    the line's end, where names keep a distance."""
    for name, curve in curves.items():
        x = range(len(curve)) if x is None else x
        axis.errorbar(x, curve, halves and halves[name], **line_style(name))
    axis.autoscale_view()  # now places on the axis, linear or not, are known
    place = (axis.transData - axis.transAxes).transform
    heights = {name: place((float(x[-1]), curve[-1]))[1] for name, curve in curves.items()}
    names, gap = sorted(curves, key=heights.get), 18 / axis.get_window_extent().height
    places = []
    for name in names:
        above = places[-1] + gap if places else -math.inf
        places.append(max(heights[name], above))
    for i in reversed(range(len(names))):
        places[i] = min(places[i], places[i + 1] - gap if i + 1 < len(names) else 1 - gap / 2)
        text = dict(va="center", fontsize=9, color=line_style(names[i])["color"])
        axis.annotate(names[i], (1.02, places[i]), xycoords="axes fraction", **text)


def draw_differences(axis, differences: dict[str, list[float]]):
    """The mean of each and its interval, one below the other, beside a line at 0."""
    for y, values in enumerate(differences.values()):
        mean, half = interval(values)
        axis.errorbar(mean, -y, xerr=half, color="#000000", marker="o")
    axis.axvline(0, color="#999999", linewidth=0.8)
    axis.set_yticks([-y for y in range(len(differences))], differences)
    axis.margins(y=0.12)


def save_picture(plot: Callable, *data, path: Path | None):
    """plot(*data, path), if there is a path. A file that cannot be written ends in one line."""
    if not path:
        return
    import matplotlib

    try:
        with matplotlib.rc_context(STYLE):
            plot(*data, path)
    except OSError as error:
        sys.exit(f"error: --plot {path} cannot be written: {error.strerror}")
    print(f"\npicture: {path}")
