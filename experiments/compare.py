"""Train several methods on several seeds, and compare them.

    python -m experiments.compare --method grpo,gspo+proj,dfpo-min --seeds 5

NAME+proj is the method NAME under --project. A method may have hyperparameters and a learning rate
of its own, as in gspo:eps_low=0.2,eps_high=0.28,lr=3e-4. Any other flag of train.py holds for all
runs. Each run is a process of train.py with a directory of its own, OUT/METHOD-sSEED, and a log in
OUT/.logs. As many run at once as there are cores; on a GPU, one. Runs of one seed share their warm
start, OUT/start-sSEED. Methods that repair their answers have another one, OUT/start-repair-sSEED,
because their warm start contains corrections. The same command resumes what was cut off. At the end
stands the table of curves.py. Choose the learning rates first, on other seeds.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from experiments.curves import INCIDENTAL, format_table, group_runs, read_run
from losses import METHODS
from train import Config, parse

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
# The settings that change a warm start, next to the seed and to whether the method repairs.
WARM = ("task", "model", "layers", "width", "data", "train_items")
WARM += ("warm_steps", "warm_rows", "warm_lr", "repair_references")


@dataclass
class Job:
    """A run of train.py, or a warm start that runs share: one of 0 steps."""

    folder: Path
    config: Config
    args: list[str]  # what train.py is called with; empty if there is nothing left to do
    start: Path | None = None  # the folder of its warm start

    @property
    def log(self) -> Path:
        return self.folder.parent / ".logs" / f"{self.folder.name}.log"


def read_options(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and those that are for train.py."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = "methods, comma-separated: NAME, NAME+proj, NAME:KEY=VALUE,lr=VALUE (default grpo)"
    parser.add_argument("--method", default="grpo", help=what)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="the first one (default 0)")
    parser.add_argument("--out", default="runs/compare", help="directory (default runs/compare)")
    options, others = parser.parse_known_args(argv)
    if options.seeds < 1:
        sys.exit(f"error: --seeds {options.seeds}: must be at least 1")
    return options, others


def plan(argv: list[str] | None = None) -> list[Job]:
    """The warm starts and runs that argv asks for, a start before its runs.

    Ends the program, in one line, over arguments that some run would refuse.
    """
    options, others = read_options(argv)
    jobs: dict[Path, Job] = {}
    asked: list[Config] = []
    # A comma before KEY= goes on with the settings of a method. Any other ends the method.
    for variant in re.split(r",(?!\w+=)", options.method):
        flags = read_variant(variant, others)
        for seed in range(options.seed, options.seed + options.seeds):
            folder = Path(options.out, f"{variant.replace(':', ',')}-s{seed}")
            args = [*flags, "--seed", str(seed)]
            config, start = parse(args), None
            settings = replace(config, out="")
            if settings in asked:
                sys.exit(f"error: --method {options.method}: {variant} stands there twice")
            asked.append(settings)
            if config.model == "scratch" and config.warm_steps:
                repair = METHODS[config.method].repair and config.task == "arithmetic"
                start = Path(options.out, f"start-repair-s{seed}" if repair else f"start-s{seed}")
                if start not in jobs:
                    jobs[start] = plan_run(start, [*args, "--steps", "0"])
                args = start_from(start, args, config)
            jobs[folder] = plan_run(folder, args, start)
    return list(jobs.values())


def read_variant(variant: str, others: list[str]) -> list[str]:
    """NAME, NAME+proj or NAME:KEY=VALUE,... with the flags for all runs -> flags of train.py."""
    name, _, settings = variant.partition(":")
    method, plus, _ = name.partition("+")
    own = dict(re.findall(r"(\w+)=([^,]+)", settings))
    understood = method + ("+proj" if plus else "") + (":" if own else "")
    understood += ",".join("=".join(setting) for setting in own.items())
    if understood != variant or "=" in name:
        expected = "NAME or NAME+proj, or with settings of its own NAME:KEY=VALUE,lr=VALUE"
        sys.exit(f"error: --method {variant}: expected {expected}")
    flags = [*others, "--method", method, *(["--project"] if plus else [])]
    if "lr" in own:
        flags += ["--lr", own.pop("lr")]
    if own:
        hyper = dict(text.split("=", 1) for text in parse(flags).hyper) | own  # of all, and its own
        flags += ["--hyper", *(f"{key}={value}" for key, value in hyper.items())]
    return flags


def start_from(start: Path, args: list[str], before: Config) -> list[str]:
    """Arguments of the run with the configuration `before`, but from this warm start.

    --model decides which preset train.py takes, so the values of the old one are spelled out.
    """
    args = [*args, "--model", str(start.resolve() / "start"), "--warm-steps", "0"]
    after = parse(args)
    for name, value in asdict(before).items():
        if name not in ("model", "warm_steps", "out") and value != getattr(after, name):
            args += ["--" + name.replace("_", "-"), str(value)]
    return args


def plan_run(folder: Path, args: list[str], start: Path | None = None) -> Job:
    """All of a run is left to do, or the rest, or nothing. One of other flags is refused."""
    config = parse(args)
    if not (folder / "config.json").exists():
        # What a kill in the first moment left may be empty; train.py goes on with a config.json.
        return Job(folder, config, [*args, "--out", str(folder)], start)
    try:
        run = read_run(folder)
    except ValueError as error:
        sys.exit(f"error: {error}; remove it, or choose another --out")
    for key, value in asdict(config).items():
        matters = key in WARM if config.steps == 0 else key not in INCIDENTAL
        if matters and run.config.get(key) != value:
            was = f"{key} {run.config.get(key)}, not {value}"
            sys.exit(f"error: {folder} was made with {was}; choose another --out")
    rest = ["--resume", str(folder), "--micro-rows", str(config.micro_rows)]
    return Job(folder, config, [] if run.finished else rest, start)


def run_all(jobs: list[Job]) -> dict[Path, str]:
    """Run what is left of the jobs, several at once. Returns folder -> why it failed."""
    waiting = [job for job in jobs if job.args]
    running: list[tuple[Job, subprocess.Popen]] = []
    failures = {}
    try:
        while waiting or running:
            while waiting and len(running) < count_at_once(waiting[0].config):
                job = waiting.pop(0)
                running.append((job, launch(job)))
            time.sleep(0.1)
            for job, process in running:
                if process.poll() is not None:
                    if process.returncode:
                        failures[job.folder] = explain(job, process.returncode)
                    print(f"{job.folder}: {'failed' if process.returncode else 'done'}", flush=True)
            running = [pair for pair in running if pair[1].returncode is None]
    except KeyboardInterrupt:
        # The processes are in our group and have the signal, too: each saves its step and ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for _, process in running:
            process.wait()
        sys.exit("stopped; the same command resumes")
    return failures


def launch(job: Job) -> subprocess.Popen:
    command = [sys.executable, "-u", str(TRAIN), *job.args]
    try:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with open(job.log, "a") as file:
            print("$", shlex.join(command), file=file, flush=True)
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    except OSError as error:
        sys.exit(f"error: {job.log} cannot be written: {error.strerror}")


def explain(job: Job, code: int) -> str:
    """The last line that a failed process wrote, and where the others are."""
    last = job.log.read_text(errors="replace").strip().splitlines()[-1]
    if code < 0:
        last = f"killed by {signal.Signals(-code).name}, perhaps for memory"
    return f"{last}; its log is {job.log}"


def count_at_once(config: Config) -> int:
    """How many runs there are cores for; one on a GPU, and where a run takes all cores."""
    if torch.cuda.is_available() or not config.threads:
        return 1
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count()
    return max(1, cores // config.threads)


def main(argv: list[str] | None = None):
    jobs = plan(argv)
    runs = [job for job in jobs if job.config.steps]
    needed = {job.start for job in runs if job.args}
    starts = [job for job in jobs if job.args and job.folder in needed]
    left = sum(bool(job.args) for job in runs)
    print(f"{len(runs)} runs, {left} of them to do, from {len(starts)} warm starts", flush=True)
    failures = run_all(starts)
    failures |= run_all([job for job in runs if job.start not in failures])
    if failures:
        # In the order of the plan, not in that of ending.
        failed = [job.folder for job in jobs if job.folder in failures]
        lines = [f"{folder}: {failures[folder]}" for folder in failed]
        sys.exit("error: " + "\n       ".join(lines))
    made = [read_run(job.folder) for job in runs]
    if unfinished := [Path(run.folder).name for run in made if not run.finished]:
        sys.exit(f"stopped: {', '.join(unfinished)} unfinished; the same command resumes")
    print("\n" + format_table(group_runs(made)))


if __name__ == "__main__":
    main()
