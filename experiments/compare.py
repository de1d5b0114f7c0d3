"""Train several methods on several seeds, and compare them.

    python -m experiments.compare --method grpo "grpo --prefix-baseline" --seeds 5 --plot curves.png
    python -m experiments.compare --runs runs/*

A method may bring flags of train.py, in quotes: "gspo --hyper eps_low=0.2 --lr 3e-4". Every other
flag of train.py holds for all runs. Each run is a process of train.py, with a directory in --out
and a log beside it. As many run at once as there are cores that this process may use, or --at-once,
and one where there is a GPU. The same command resumes what was cut off, and trains nothing twice.
If the task is a file, and it has been edited since a run began, a line says so.

The seeds are --seed and those after it, --seeds of them. --runs trains nothing, and reads runs of
train.py. --curves names numbers of metrics.jsonl. The table has the last value of each, and --plot
draws them: the mean over seeds, in a band from the lowest seed to the highest.

The table has the mean over seeds and half its 95% interval (Student's t). Below are the
differences to the first method, paired by seed: runs of one seed share their warm start (unless
only one of them repairs) and the order of their prompts.

    reward        mean over the whole run
    final         mean over its last 10 steps
    Steps(0.8)    first step at which the mean of 5 steps is at least 0.8
    jitter        mean size of the second difference of the reward curve (our definition, because
                  that of DFPO's paper is not public)
    greedy, ...   the curves at the end; greedy is the held-out accuracy of greedy answers

"none in 1 of 5" means that one run of five has no such number, because it never got there.
"""

from __future__ import annotations

import argparse
import glob
import itertools
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
from llm.runs import count_cores, read_config
from toy.figure import format_interval, make_figure

# Flags that do not make a run another experiment.
INCIDENTAL = ["seed", "out", "resume", "resumed"]
INCIDENTAL += ["threads", "micro_rows", "offload", "fast", "track"]


def main(argv: list[str] | None = None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--method", nargs="+", default=["grpo"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/compare")
    at_once = 1 if torch.cuda.is_available() else count_cores()
    parser.add_argument("--at-once", type=int, default=at_once)
    parser.add_argument("--runs", nargs="+")
    parser.add_argument("--plot")
    parser.add_argument("--curves", nargs="+", default=["reward", "greedy", "entropy"])
    options, shared = parser.parse_known_args(argv)
    if options.runs and shared:
        parser.error(f"--runs trains nothing, so it takes no {shared[0]}")
    seeds = range(options.seed, options.seed + options.seeds)
    if options.runs:  # not every shell expands a star
        folders = [Path(x) for given in options.runs for x in sorted(glob.glob(given)) or [given]]
        folders = [x for x in dict.fromkeys(folders) if (x / "metrics.jsonl").exists()]
    else:
        trained = train_all(options.method, seeds, shared, options.out, options.at_once)
        folders = [folder for folder in trained if is_finished(folder)]
        for folder in sorted({*trained} - {*folders}):
            print(f"left out: {folder} is not a finished run; see {folder}.log")
    for folder in filter(is_outdated, folders):
        anew = "to train anew, delete the folder or choose another --out"
        print(f"{folder} was trained with a different version of its task file: {anew}")
    if not folders:
        sys.exit("error: there is no run to read")
    runs = read_runs(folders)
    print(make_tables(compute_outcomes(runs, options.curves)))
    if options.plot:
        draw(runs, options.curves).savefig(options.plot)


# ---------------- making runs


def train_all(
    methods: list[str], seeds: range, shared: list[str], out: str, at_once: int
) -> list[Path]:
    """Trains what is not there yet; shared are the flags for all runs. Returns their folders."""
    commands = {}
    # A number stands for the flags in a name, so that no run is taken for one with others. (All of
    # them would be too long for the name of a file.)
    flags_id = zlib.crc32(" ".join(shared).encode())
    for method, seed in itertools.product(methods, seeds):
        name = re.sub(r"[^\w.=+]+", "-", f"{method} {flags_id:08x} s{seed}")
        flags = [*shared, "--method", *shlex.split(method), "--seed", str(seed)]
        commands[Path(out, name)] = flags
    todo = [folder for folder in commands if not is_finished(folder)]
    Path(out).mkdir(parents=True, exist_ok=True)
    print(f"{len(todo)} runs to do, {at_once} at once", flush=True)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda folder: train_one(folder, commands[folder]), todo))
    return [*commands]


def train_one(folder: Path, flags: list[str]):
    began = (folder / "config.json").exists()
    flags = ["--resume", str(folder)] if began else [*flags, "--out", str(folder)]
    with open(f"{folder}.log", "a", encoding="utf-8") as log:
        command = [sys.executable, train.__file__, *flags]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)


# ---------------- reading runs: (method, seed) -> the lines of metrics.jsonl, a row for each step


def is_finished(folder: Path) -> bool:
    return (folder / "model").exists()  # what train.py writes last


def is_outdated(folder: Path) -> bool:
    """Whether the task's file has changed since the run began. The run has a copy."""
    file = Path(read_config(folder)["task"])
    copy = folder / f"task{file.suffix}"  # none of our own tasks
    return copy.exists() and file.exists() and file.read_bytes() != copy.read_bytes()


def read_runs(folders: list[Path]) -> dict[tuple[str, int], pd.DataFrame]:
    """A method's name has all flags in which the runs differ, what --resume changed, and how far a
    run went that is not finished."""
    configs = [read_config(folder) for folder in folders]
    flags = pd.DataFrame(configs).drop(columns=[*INCIDENTAL, "method"], errors="ignore")
    differing = [key for key in flags if flags[key].nunique() > 1]
    runs = {}
    for folder, config in zip(folders, configs, strict=True):
        given = [key for key in differing if config[key] != "" and config[key] is not False]
        settings = [key if config[key] is True else f"{key} {config[key]}" for key in given]
        for change in config["resumed"]:
            for key in change.keys() - {*INCIDENTAL, "after_step"}:
                old, new = change[key]
                settings.append(f"{key} {old} -> {new} after step {change['after_step']}")
        lines = pd.read_json(folder / "metrics.jsonl", lines=True).set_index("step")
        if not is_finished(folder):
            settings.append(f"{lines.index[-1]} of {config['steps']} steps")
        run = ", ".join([config["method"], *settings]), config["seed"]
        if run in runs:
            sys.exit(f"error: {folder} is a second run of {run[0]} with seed {run[1]}")
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
    figure, held_out = make_figure("Mean and range over the seeds", 3.3), None
    for axis, key in zip(figure.subplots(1, len(curves), squeeze=False).flat, curves, strict=True):
        # greedy and sampled have numbers at evaluated steps only
        table = pd.DataFrame({run: lines[key] for run, lines in runs.items()}).dropna(how="all")
        axis.axhline(0, color="black", linewidth=0.5)  # so that panels begin there
        for method in table.columns.unique(0):
            seeds = table[method].agg(["mean", "min", "max"], axis="columns").dropna()
            axis.plot(seeds["mean"], label=method)
            axis.fill_between(seeds.index, seeds["min"], seeds["max"], alpha=0.2)
        axis.set(title=key, xlabel="step")
        if key in ("sampled", "greedy"):
            axis.set_ylabel("mean reward, held out")
            held_out = held_out or axis  # one scale for both
            axis.sharey(held_out)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    main()
