"""Train several methods on several seeds, and compare them.

    python -m experiments.compare --method grpo,grpo+cancel,dfpo-min --seeds 5 --plot curves.png
    python -m experiments.compare --runs runs/*

NAME+cancel is the method NAME with --cancel. A method may have settings of its own, as in
gspo:eps_low=0.2,eps_high=0.2,lr=3e-4: hyperparameters, or flags of train.py. Every other flag of
train.py holds for all runs. Each run is a process of train.py, with the directory
OUT/METHOD-sSEED and a log beside it. The same command goes on with what was cut off, and trains
nothing twice.

--runs trains nothing, and reads runs of train.py.

The table has the mean over seeds and half its 95 % interval (Student's t). Below stand the
differences to the first method, paired by seed: runs of one seed share their warm start (unless
only one of them repairs) and the order of their prompts.

    reward        mean over the whole run
    final         mean over its last 10 steps
    greedy        held-out accuracy of greedy answers, at the end
    Steps(0.8)    first step at which the mean of 5 steps is at least 0.8; never: no step is
    jitter        mean size of the second difference of the reward curve (our definition, because
                  that of DFPO's paper is not public)
    drift         the toy's: how far the shares of the openers have moved from the start. It is half
                  the sum of their changes' sizes; 0.3: 30 % of the answers open otherwise
    tax           learning tax, mean over the run
    clipped       share of tokens outside the clip range, mean over the run
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import HfArgumentParser

import train
from toy.figure import COLORS, interval, make_figure
from train import knob

# Flags that do not make a run another experiment.
INCIDENTAL = ["seed", "out", "resume", "threads", "micro_rows", "fast", "trace"]


@dataclass
class Options:
    method: str = knob("grpo", "methods, with commas between them")
    seeds: int = knob(3, "how many seeds")
    seed: int = knob(0, "the first of them")
    out: str = knob("runs/compare", "directory of the runs")
    at_once: int = knob(0, "runs at a time; 0: one for each core, on a GPU one")
    runs: list[str] = field(default_factory=list, metadata={"help": "read these, train nothing"})
    plot: str = knob("", "draw the runs into this file, too")


def main(argv: list[str] | None = None):
    parser = HfArgumentParser(Options, allow_abbrev=False)
    options, shared = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    folders = [Path(run) for run in options.runs]
    if not folders:
        # A comma before KEY= goes on with the settings of a method. Any other ends the method.
        variants = re.split(r",(?!\w+=)", options.method)
        seeds = range(options.seed, options.seed + options.seeds)
        folders = train_all(variants, seeds, options, shared)
    for folder in folders:
        if not finished(folder):
            print(f"left out: {folder} is not a finished run; see {folder}.log")
    frame = read_runs(filter(finished, folders))
    print(make_tables(compute_outcomes(frame)))
    if options.plot:
        draw(frame).savefig(options.plot)


# ---------------- making runs


def find_flags(variant: str) -> list[str]:
    """ "gspo+cancel:eps_low=0.2,lr=3e-4" -> what train.py calls that."""
    name, _, settings = variant.partition(":")
    method = name.removesuffix("+cancel")
    flags, hyper = ["--method", method], []
    if method != name:
        flags.append("--cancel")
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key in asdict(train.Config()):
            flags += [f"--{key}", value]
        else:
            hyper.append(setting)
    return [*flags, "--hyper", " ".join(hyper)] if hyper else flags


def train_all(variants: list[str], seeds: range, options: Options, shared: list[str]) -> list[Path]:
    """Trains what is not there yet; shared are the flags for all runs. Returns their folders."""
    folders, todo = [], {}
    for variant, seed in itertools.product(variants, seeds):
        folder = Path(options.out, f"{variant.replace(':', ',')}-s{seed}")
        args = [*shared, *find_flags(variant), "--seed", str(seed)]
        config = train.parse(args)
        train.bind_flags(config)  # mistakes end here, before anything runs
        check_same(folder, asdict(config))
        folders.append(folder)
        if not finished(folder):
            todo[folder] = args
    Path(options.out).mkdir(parents=True, exist_ok=True)
    at_once = options.at_once or (1 if torch.cuda.is_available() else os.cpu_count())
    print(f"{len(todo)} runs to do, {at_once} at once", flush=True)
    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(train_one, todo, todo.values()))
        except KeyboardInterrupt:  # the runs have it, too; map() cancels those that wait
            sys.exit("stopped; the same command goes on")
    return folders


def check_same(folder: Path, asked: dict):
    """Refuse a run that is there already and was made with other flags."""
    if (folder / "config.json").exists():
        for key, was in json.loads((folder / "config.json").read_text()).items():
            if key not in INCIDENTAL and was != asked.get(key):
                other = f"{key} {was}, not {asked.get(key)}"
                sys.exit(f"error: {folder} was made with {other}; choose another --out")


def train_one(folder: Path, args: list[str]):
    began = (folder / "config.json").exists()
    args = ["--resume", str(folder)] if began else [*args, "--out", str(folder)]
    command = [sys.executable, train.__file__, *args]
    with open(f"{folder}.log", "a") as log:
        print("$", shlex.join(command), file=log, flush=True)
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)


# ---------------- reading runs


def finished(folder: Path) -> bool:
    """Whether metrics.jsonl has all its lines: the evaluation at step 0, and one for each step."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return False
    steps = json.loads((folder / "config.json").read_text())["steps"]
    return metrics.read_text().count("\n") == steps + 1


def read_runs(folders: Iterable[Path]) -> pd.DataFrame:
    """The lines of all metrics.jsonl. Column "method" names all flags in which the runs differ."""
    configs = {folder: json.loads((folder / "config.json").read_text()) for folder in folders}
    if not configs:
        sys.exit("error: there is no finished run to read")
    flags = pd.DataFrame(configs.values()).drop(columns=[*INCIDENTAL, "method", "cancel"])
    differing = [key for key in flags if flags[key].nunique() > 1]
    runs = {}
    for folder, config in configs.items():
        label = config["method"] + "+cancel" * config["cancel"]
        label += "".join(f", {key} {config[key]}" for key in differing if config[key] != "")
        if (label, config["seed"]) in runs:
            sys.exit(f"error: {folder} is a second run of {label} with seed {config['seed']}")
        lines = pd.read_json(folder / "metrics.jsonl", lines=True)
        openers = lines.filter(regex="^opener ")
        lines["drift"] = (openers - openers.iloc[0]).abs().sum(axis=1, min_count=1) / 2
        runs[label, config["seed"]] = lines
    return pd.concat(runs, names=["method", "seed"]).reset_index(["method", "seed"])


def compute_outcomes(frame: pd.DataFrame) -> pd.DataFrame:
    """What each run came to: a row for each method and seed."""
    outcomes = {}
    for run, lines in frame.groupby(["method", "seed"], sort=False):
        reward, last = lines["reward"], lines.iloc[-1]  # step 0 has no reward
        reached = lines["step"][reward.rolling(5).mean() >= 0.8]
        outcomes[run] = {
            "reward": reward.mean(),
            "final": reward.tail(10).mean(),
            "greedy": last["greedy"],
            "Steps(0.8)": reached.min() if len(reached) else math.inf,
            "jitter": reward.diff().diff().abs().mean(),
            "drift": last["drift"],
            "tax": lines["tax"].mean(),
            "clipped": lines["clip_share"].mean() if "clip_share" in lines else math.nan,
        }
    table = pd.DataFrame(outcomes).T.rename_axis(["method", "seed"])
    return table.dropna(axis="columns", how="all")


# ---------------- statistics over seeds


def half_interval(values: pd.Series) -> float:
    """Half of a mean's 95 % interval; nan for a single value."""
    values = values.dropna()
    return interval([*values])[1] if len(values) > 1 else math.nan


def show(values: pd.Series) -> str:
    """A cell. An infinite value is a score that a run never reached, so there is no mean."""
    if never := np.isinf(values).sum():
        return "never" if never == len(values) else f"never in {never} of {len(values)}"
    places = 1 if values.name == "Steps(0.8)" else 3
    if values.isna().all():  # this method does not have it
        return ""
    half = half_interval(values)
    return f"{values.mean():.{places}f}" + ("" if math.isnan(half) else f" +- {half:.{places}f}")


def make_tables(outcomes: pd.DataFrame) -> str:
    """Both tables: methods, and differences to the first one over the seeds that both have."""

    def table(runs: pd.DataFrame) -> str:
        methods = runs.groupby("method", sort=False)
        cells = methods.agg(show)
        cells.insert(0, "seeds", methods.size())
        return cells.T.to_string()

    first = outcomes.index[0][0]
    base = outcomes.xs(first, level="method").reindex(outcomes.index, level="seed")
    # Where one of both never reached a score, there is no difference.
    gaps = (outcomes - base).mask(np.isinf(outcomes + base), math.inf).drop(first, level="method")
    gaps = gaps.dropna(how="all")
    if gaps.empty:
        return table(outcomes)
    return f"{table(outcomes)}\n\nminus {first}, paired by seed:\n{table(gaps)}"


DASHES = ("-", "--", ":", "-.")


def style_lines(labels: list[str]) -> dict[str, dict]:
    """A method has its colour of toy/figure.py, or one that is left. Its variants have dashes."""
    names = ["cancel" if "+cancel" in label else label.split(",")[0] for label in labels]
    left = [color for name, color in COLORS.items() if name not in names] + ["#777777"]
    others = itertools.cycle(left)
    color_of = {name: COLORS.get(name) or next(others) for name in dict.fromkeys(names)}
    colors = [color_of[name] for name in names]
    dashes = [DASHES[colors[:k].count(color) % 4] for k, color in enumerate(colors)]
    styles = [dict(color=c, linestyle=d, marker="") for c, d in zip(colors, dashes, strict=True)]
    return dict(zip(labels, styles, strict=True))


def draw(frame: pd.DataFrame):
    """A matplotlib Figure: means over seeds, and with three seeds bands of their 95 % intervals."""
    panels = {
        "reward": "reward on training prompts, mean of 5 steps",
        "greedy": "greedy accuracy on held-out problems",
        "tax": "learning tax, mean of 5 steps",
        "entropy": "entropy of the next token, nats",
    }
    rewards = compute_outcomes(frame)["reward"].groupby("method", sort=False).mean()
    finding = f"{rewards.idxmax()} has the highest reward: {rewards.max():.3f}, mean of all steps"
    figure = make_figure(finding, 6.2)
    styles = style_lines([*rewards.index])
    for axis, (key, title) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        values = frame[["method", "seed", "step", key]].dropna()
        if "mean of 5" in title:
            runs = values.groupby(["method", "seed"])[key]
            values[key] = runs.transform(lambda curve: curve.rolling(5, min_periods=1).mean())
        points = dict(values=key, index="step", columns="method", sort=False)
        mean = values.pivot_table(**points)
        half = values.pivot_table(**points, aggfunc=half_interval).reindex_like(mean)
        half = half.where(values.pivot_table(**points, aggfunc="count") >= 3)
        for method, curve in mean.items():
            axis.plot(curve.dropna(), label=method, **styles[method])
        low, high = (0, 1) if key in ("reward", "greedy") else axis.get_ylim()
        for method in mean:
            ends = mean[method] - half[method], mean[method] + half[method]
            axis.fill_between(mean.index, *ends, alpha=0.15, color=styles[method]["color"])
        axis.set(title=title, xlabel="step", ylim=(low, high))
    note = "lines: means over seeds; bands: their 95 % intervals, from three seeds on"
    lines = axis.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=3, title=note)
    return figure


if __name__ == "__main__":
    main()
