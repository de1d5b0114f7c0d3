"""The flag, tables, intervals and pictures that toy/ and experiments/ share."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterable
from pathlib import Path

# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom.
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179]
# A method has one colour in all pictures: Okabe and Ito's, which are safe for the colour-blind.
COLORS = {"grpo": "#D55E00", "dr-grpo": "#009E73"}
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10.5,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "savefig.dpi": 120,
}


def parse_plot(doc: str) -> Path | None:
    """The value of --plot, the only flag of a script with this docstring."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .svg or .png")
    return parser.parse_args().plot


def print_table(rows: dict[str, Iterable[str]], columns: Iterable[str]):
    import pandas as pd  # here, because it takes half a second

    print(pd.DataFrame.from_dict(rows, orient="index", columns=[*columns]).to_string())


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Mean and half its 95 % interval (Student's t), of two or more values."""
    values = [*map(float, values)]
    freedom = len(values) - 1
    if freedom <= len(T_975):
        quantile = T_975[freedom - 1]
    else:  # its expansion in 1/freedom
        quantile = 1.960 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
    return statistics.fmean(values), quantile * statistics.stdev(values) / len(values) ** 0.5


def format_interval(values: Iterable[float], form: str = ".3f") -> str:
    mean, half = interval(values)
    return f"{mean:{form}} +- {half:{form.lstrip('+')}}"


def make_figure(finding: str, height: float):
    """An empty figure as wide as a README. Its title is its finding, in one line."""
    os.environ.pop("MPLBACKEND", None)  # a notebook's own; a file needs none
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    figure = Figure(figsize=(8.3, height), layout="constrained")
    figure.suptitle(finding, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def save(figure, path: Path):
    figure.savefig(path)
    print(f"\npicture: {path}")
