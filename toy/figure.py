"""What the figures of toy/ share: their flag, intervals over seeds, pictures (with matplotlib)."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path

# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom.
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179]
STYLE = {  # of pictures; a plot may say otherwise. Okabe and Ito's colours; markers tell in grey
    "axes.prop_cycle": "cycler(color=['#000000', '#D55E00', '#0072B2'], marker=['o', 'D', 's'])",
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "lines.markersize": 4.5,
    "errorbar.capsize": 3,
}


def parse_plot(doc: str, argv: list[str] | None) -> Path | None:
    """What --plot says, the only flag of a script with this docstring."""
    from llm import fail  # here, as experiments/curves.py needs this file without torch

    name = re.search(r"python -m toy\.\w+", doc)
    parser = argparse.ArgumentParser(name and name[0], description=doc.splitlines()[0])
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw it, as .svg or .png")
    parser.error = fail
    return parser.parse_args(argv).plot


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


def draw_differences(axis, differences: dict[str, list[float]]):
    """The mean of each and its interval, one below the other, beside a line at 0."""
    for y, values in enumerate(differences.values()):
        mean, half = interval(values)
        axis.errorbar(mean, -y, xerr=half, color="#000000", marker="o")
    axis.axvline(0, color="#999999", linewidth=0.8)
    axis.set_yticks([-y for y in range(len(differences))], differences)


def save_picture(plot: Callable, *data, path: Path | None):
    """plot(*data, path), if there is a path. A file that cannot be written ends in one line."""
    from llm import fail

    if not path:
        return
    import matplotlib

    try:
        with matplotlib.rc_context(STYLE):
            plot(*data, path)
    except OSError as error:
        fail(f"--plot {path} cannot be written: {error.strerror}")
