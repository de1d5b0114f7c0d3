"""Train several methods on several seeds, and compare them.

    python -m experiments.compare --method grpo "grpo --prefix-baseline" --seeds 5 --plot curves.png
    python -m experiments.compare --runs runs/*

A method may bring flags of train.py, in quotes: "gspo --hyper eps_low=0.2 --lr 3e-4". Every other
flag of train.py holds for all runs. Each run is a process of train.py, with a directory in --out
and a log beside it. The same command goes on with what was cut off, and trains nothing twice.

The seeds are --seed and those after it, --seeds of them. --runs trains nothing, and reads runs of
train.py. --plot draws the means over seeds, with bands of their intervals from three seeds on.

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
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import HfArgumentParser

import train
from toy.figure import interval

# Flags that do not make a run another experiment.
INCIDENTAL = ["seed", "out", "resume", "threads", "micro_rows", "fast", "trace"]


@dataclass
class Options:
    method: list[str] = field(default_factory=lambda: ["grpo"])
    seeds: int = 3
    seed: int = 0  # the first of them
    out: str = "runs/compare"
    runs: list[str] = field(default_factory=list)
    plot: str = ""


def main(argv: list[str] | None = None):
    form = argparse.RawDescriptionHelpFormatter
    parser = HfArgumentParser(
        Options, description=__doc__, formatter_class=form, allow_abbrev=False
    )
    options, shared = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    folders = [Path(run) for run in options.runs] or train_all(options, shared)
    finished = [folder for folder in folders if is_finished(folder)]
    for folder in folders:
        if folder not in finished:
            print(f"left out: {folder} is not a finished run; see {folder}.log")
    if not finished:
        sys.exit("error: there is no finished run to read")
    runs = read_runs(finished)
    print(make_tables(compute_outcomes(runs)))
    if options.plot:
        draw(runs).savefig(options.plot)


# ---------------- making runs


def train_all(options: Options, shared: list[str]) -> list[Path]:
    """Trains what is not there yet; shared are the flags for all runs. Returns their folders."""
    folders, todo = [], {}
    seeds = range(options.seed, options.seed + options.seeds)
    for method, seed in itertools.product(options.method, seeds):
        folder = Path(options.out, re.sub(r"[^\w.=]+", "-", f"{method} s{seed}"))
        flags = [*shared, "--method", *shlex.split(method), "--seed", str(seed)]
        config = train.parse(flags)
        train.choose_method(config)  # mistakes end here, before anything runs
        check_same(folder, asdict(config))
        folders.append(folder)
        if not is_finished(folder):
            todo[folder] = flags
    Path(options.out).mkdir(parents=True, exist_ok=True)
    at_once = 1 if torch.cuda.is_available() else os.cpu_count()
    print(f"{len(todo)} runs to do, {at_once} at once", flush=True)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(train_one, todo, todo.values()))
    return folders


def check_same(folder: Path, asked: dict):
    """Refuse a run that is there already and was made with other flags."""
    if (folder / "config.json").exists():
        for key, was in json.loads((folder / "config.json").read_text()).items():
            if key not in INCIDENTAL and was != asked.get(key):
                other = f"{key} {was}, not {asked.get(key)}"
                sys.exit(f"error: {folder} was made with {other}; choose another --out")


def train_one(folder: Path, flags: list[str]):
    began = (folder / "config.json").exists()
    flags = ["--resume", str(folder)] if began else [*flags, "--out", str(folder)]
    with open(f"{folder}.log", "a") as log:
        command = [sys.executable, train.__file__, *flags]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)


# ---------------- reading runs


def is_finished(folder: Path) -> bool:
    """Whether metrics.jsonl has all its lines: the evaluation at step 0, and one for each step."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return False
    steps = json.loads((folder / "config.json").read_text())["steps"]
    return metrics.read_text().count("\n") == steps + 1


def read_runs(folders: list[Path]) -> pd.DataFrame:
    """The lines of all metrics.jsonl. Column "method" names all flags in which the runs differ."""
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    flags = pd.DataFrame(configs).drop(columns=[*INCIDENTAL, "method"])
    differing = [key for key in flags if flags[key].nunique() > 1]
    runs = {}
    for folder, config in zip(folders, configs, strict=True):
        settings = [f"{key} {config[key]}" for key in differing if config[key] not in ("", False)]
        run = ", ".join([config["method"], *settings]), config["seed"]
        if run in runs:
            sys.exit(f"error: {folder} is a second run of {run[0]} with seed {run[1]}")
        lines = pd.read_json(folder / "metrics.jsonl", lines=True)
        openers = lines.filter(regex="^opener ")
        lines["drift"] = (openers - openers.iloc[0]).abs().sum(axis=1, min_count=1) / 2
        runs[run] = lines
    return pd.concat(runs, names=["method", "seed"]).reset_index(["method", "seed"])


def compute_outcomes(runs: pd.DataFrame) -> pd.DataFrame:
    """What each run came to: a row for each method and seed."""
    outcomes = {}
    for run, lines in runs.groupby(["method", "seed"], sort=False):
        reward, last = lines["reward"], lines.iloc[-1]  # step 0 has no reward
        reached = lines["step"][reward.rolling(5).mean() >= 0.8]
        outcomes[run] = {
            "reward": reward.mean(),
            "final": reward.tail(10).mean(),
            "greedy": last["greedy"],
            "Steps(0.8)": reached.min() if len(reached) else math.inf,
            "jitter": reward.diff().diff().abs().mean(),
            "drift": last["drift"],
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
        return f"never in {never} of {len(values)}"
    if values.isna().all():  # this method does not have it
        return ""
    mean, half = values.mean(), half_interval(values)
    return f"{mean:.3f}" if math.isnan(half) else f"{mean:.3f} +- {half:.3f}"


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


def draw(runs: pd.DataFrame):
    """A matplotlib Figure: means over seeds, and with three seeds bands of their 95 % intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.3, 6.2), layout="constrained")
    rewards = compute_outcomes(runs)["reward"].groupby("method", sort=False).mean()
    figure.suptitle(f"{rewards.idxmax()} has the highest mean reward: {rewards.max():.3f}")
    panels = {"reward": 5, "greedy": 1, "length": 5, "entropy": 1}
    for axis, (key, window) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        curves = runs.pivot(index=["method", "seed"], columns="step", values=key).T
        curves = curves.dropna(how="all").rolling(window, min_periods=1).mean()
        for method in rewards.index:
            mean = curves[method].mean(axis="columns")
            half = curves[method].apply(half_interval, axis="columns")
            axis.plot(mean, label=method)
            if curves[method].shape[1] >= 3:
                axis.fill_between(mean.index, mean - half, mean + half, alpha=0.15)
        axis.set(title=f"{key}, mean of {window} steps" if window > 1 else key, xlabel="step")
    lines = axis.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    main()
