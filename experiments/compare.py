"""Train several methods on several seeds, and compare them.

    python -m experiments.compare --method grpo "grpo --prefix-baseline" --seeds 5 --plot curves.png
    python -m experiments.compare --runs runs/*

A method may bring flags of train.py, in quotes: "gspo --hyper eps_low=0.2 --lr 3e-4". Every other
flag of train.py applies to all runs. Each run is a process of train.py, with a folder in --out and
a log beside it. As many run at once as torch has threads, or --at-once, and one if there is a GPU.
The same command resumes what was cut off, and trains nothing twice. After an edit of your task or
loss choose another --out, because finished runs are those of the old file.

The seeds are --seed and those after it, --seeds of them. --runs trains nothing, and reads runs of
train.py. --curves names numbers of metrics.jsonl. The table shows the last value of each, and
--plot draws them: the mean over seeds, in a band from the lowest seed to the highest.

The table shows the mean over seeds and half its 95% interval (Student's t). Below are the
differences from the first method, paired by seed: runs of one seed share their warm start (unless
only one of them repairs) and the order of their prompts.

    reward        mean over the whole run
    final         mean over its last 10 steps
    Steps(0.8)    first step at which the mean of 5 steps is at least 0.8
    jitter        mean size of the second difference of the reward curve (our definition, because
                  that of DFPO's paper is not public)
    greedy, ...   the curves at the end; greedy is the mean reward of held-out greedy answers

"none in 1 of 5" means that one run of five has no such number, because it never got there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import torch

import train
from toy.figure import format_interval, make_figure

# Flags that do not make a run another experiment.
INCIDENTAL = ["method", "seed", "out", "resume", "threads", "micro_rows", "offload", "track"]


def main(argv: list[str] | None = None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--method", nargs="+", default=["grpo"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default="runs/compare")
    at_once = 1 if torch.cuda.is_available() else torch.get_num_threads()
    parser.add_argument("--at-once", type=int, default=at_once)
    parser.add_argument("--runs", nargs="+", type=Path)
    parser.add_argument("--plot")
    parser.add_argument("--curves", nargs="+", default=["reward", "greedy", "entropy"])
    options, shared = parser.parse_known_args(argv)
    if options.runs:
        parser.parse_args(argv)  # which refuses a flag of train.py, because nothing is trained
    folders = options.runs or train_all(options, shared)
    folders = [folder for folder in folders if (folder / "metrics.jsonl").exists()]
    runs = read_runs(folders)
    print(make_tables(compute_outcomes(runs, options.curves)))
    if options.plot:
        draw(runs, options.curves).savefig(options.plot)


# ---------------- making runs


def train_all(options, shared: list[str]) -> list[Path]:
    """Train what is not there yet; shared are the flags for all runs. Returns their folders."""
    commands = {}
    # A number stands for the flags in a name, so that no run is taken for one with others. (All of
    # them would be too long for the name of a file.)
    flags_id = zlib.crc32(" ".join(shared).encode())
    seeds = range(options.seed, options.seed + options.seeds)
    for method, seed in itertools.product(options.method, seeds):
        name = re.sub(r"[^\w.=+]+", "-", f"{method} {flags_id:08x} s{seed}")
        flags = ["--method", *shlex.split(method), "--seed", str(seed)]
        commands[options.out / name] = [*shared, *flags]
    todo = {folder: flags for folder, flags in commands.items() if not is_finished(folder)}
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{len(todo)} runs to do, {options.at_once} at once", flush=True)
    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(train_one, todo, todo.values()))
    return [*commands]


def train_one(folder: Path, flags: list[str]):
    began = (folder / "config.json").exists()
    flags = ["--resume", str(folder)] if began else [*flags, "--out", str(folder)]
    with open(f"{folder}.log", "a", encoding="utf-8") as log:
        command = [sys.executable, train.__file__, *flags]
        if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode:
            print(f"{folder} has failed; see {folder}.log", flush=True)


# ---------------- reading runs: (method, seed) -> the lines of metrics.jsonl, a row for each step


def is_finished(folder: Path) -> bool:
    return (folder / "model").exists()  # what train.py writes last


def read_runs(folders: list[Path]) -> dict[tuple[str, int], pd.DataFrame]:
    """A method's name has all flags in which the runs differ, and how far an unfinished run is."""
    configs = [json.loads((x / "config.json").read_text("utf-8")) for x in folders]
    flags = pd.DataFrame(configs).drop(columns=INCIDENTAL, errors="ignore").astype(str)
    differing, runs = flags.loc[:, flags.nunique() > 1], {}
    for folder, config, (_, row) in zip(folders, configs, differing.iterrows(), strict=True):
        settings = [f"{key} {x}" for key, x in row.items() if x not in ("", "False")]
        lines = pd.read_json(folder / "metrics.jsonl", lines=True).set_index("step")
        if lines.index[-1] < config["steps"]:
            settings.append(f"{lines.index[-1]} of {config['steps']} steps")
        run = ", ".join([config["method"], *settings]), config["seed"]
        if run in runs:
            raise ValueError(f"{folder} is a second run of {run[0]} with seed {run[1]}")
        runs[run] = lines
    return runs


def compute_outcomes(runs: dict[tuple[str, int], pd.DataFrame], curves: list[str]) -> pd.DataFrame:
    """What each run came to: a row for each method and seed."""
    outcomes = {}
    for run, lines in runs.items():
        reward = lines["reward"]  # step 0 has none
        ends = {key: lines[key].dropna().iloc[-1] for key in curves if key != "reward"}
        outcomes[run] = {
            "reward": reward.mean(),
            "final": reward.tail(10).mean(),
            "Steps(0.8)": reward.index[reward.rolling(5).mean() >= 0.8].min(),  # nan: no step is
            "jitter": reward.diff().diff().abs().mean(),
        } | ends
    return pd.DataFrame(outcomes).T


# ---------------- tables and picture


def show(values: pd.Series) -> str:
    """A cell: a mean over seeds, with its interval if there are several."""
    if missing := values.isna().sum():
        return f"none in {missing} of {len(values)}"
    return format_interval(values) if len(values) > 1 else f"{values.item():.3f}"


def make_tables(outcomes: pd.DataFrame) -> str:
    """Methods, and below them their differences to the first one, over the seeds that both have."""
    rows = {name: outcomes.loc[name] for name in outcomes.index.unique(0)}
    first, *others = rows
    for name in others:
        rows[f"{name} minus {first}"] = (rows[name] - rows[first]).dropna(how="all")
    table = {
        name: {"seeds": len(row)} | {key: show(row[key]) for key in row}
        for name, row in rows.items()
        if len(row)
    }
    return pd.DataFrame(table).T.to_string()


def draw(runs: dict[tuple[str, int], pd.DataFrame], curves: list[str]):
    """A matplotlib Figure with a panel for each of the curves."""
    figure = make_figure("Mean and range over the seeds", 3.3)
    for axis, key in zip(figure.subplots(1, len(curves), squeeze=False).flat, curves, strict=True):
        # greedy and sampled have numbers at evaluated steps only
        table = pd.DataFrame({run: lines[key] for run, lines in runs.items()}).dropna(how="all")
        for method in table.columns.unique(0):
            seeds = table[method].agg(["mean", "min", "max"], axis="columns").dropna()
            axis.plot(seeds["mean"], label=method)
            axis.fill_between(seeds.index, seeds["min"], seeds["max"], alpha=0.2)
        axis.axhline(0, color="black", linewidth=0.5)  # so that panels begin there
        axis.set(title=key, xlabel="step")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    main()
