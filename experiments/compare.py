"""Several methods and seeds, run and compared.

    python train.py --method grpo,gspo,dfpo-min --seeds 5 [any other flag of train.py]

NAME+proj is the method under --project, NAME+projK also under --context K. As many runs go at once as there are cores
(on a GPU one), each in a directory of its own, OUT/NAME/METHOD-sSEED (--name: default "compare"), with what it printed
in .logs beside it. The same command again goes on where it was cut off. At the end: the table of curves.py. Every flag
but the method is the same for all, so choose learning rates first, on other seeds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from cli import Parser, fail
from config import Config, parse
from experiments.curves import APART, grouped, read_run, table


def wanted(argv: list[str]) -> bool:
    """Whether these arguments of train.py ask for more than one run."""
    values = [b for a, b in zip(argv, argv[1:], strict=False) if a == "--method"]
    values += [a.partition("=")[2] for a in argv if a.startswith("--method=")]
    return any(a.partition("=")[0] == "--seeds" for a in argv) or any(
        "," in v or "+" in v for v in values
    )


def runs_of(argv: list[str]) -> dict[Path, list[str]]:
    """Run directory -> the arguments of train.py that make it, all of them checked."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--method", default=Config.method)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument("--name", default="compare")
    parser.add_argument("--out", default=Config.out)
    parser.add_argument("--starts", default="")
    parser.add_argument("--micro-rows", default="")
    given, rest = parser.parse_known_args(argv)
    if given.seeds < 1:
        fail(f"--seeds {given.seeds}: must be at least 1")
    folder, found = Path(given.out) / given.name, {}
    smaller = ["--micro-rows", given.micro_rows] if given.micro_rows else []
    for variant in given.method.split(","):
        method, _, context = variant.partition("+proj")
        if variant != method and not re.fullmatch(r"([1-9][0-9]*)?", context):
            fail(f"--method {variant}: expected NAME, NAME+proj or NAME+projK with K from 1")
        for seed in range(given.seed, given.seed + given.seeds):
            args = ["--method", method, "--seed", str(seed), "--out", str(folder), *smaller, *rest]
            args += ["--starts", given.starts or str(folder / ".starts")]
            args += ["--project"] if variant != method else []
            args += ["--context", context] if context else []
            run = folder / f"{variant}-s{seed}"
            if run in found:
                fail(f"--method {given.method}: {variant} stands there twice")
            asked = parse(args)
            if run.is_dir():
                args = go_on(run, asked, smaller)
            found[run] = args + ["--name", run.name] if args and not run.is_dir() else args
    return found


def go_on(run: Path, asked: Config, smaller: list[str]) -> list[str]:
    """The arguments that finish an unfinished run; none if it is finished. One made with other
    flags is refused."""
    try:
        made = read_run(run)
    except ValueError:
        fail(f"{run} is in the way: it is no run; remove it, or choose another --name")
    for key, value in json.loads(json.dumps(asdict(asked))).items():
        if key not in APART and (was := made.config.get(key)) != value:
            fail(
                f"{run} was made with {key} {was}, not {value}; another experiment needs another --name"
            )
    return [] if made.finished else ["--resume", str(run), *smaller]


def one(train: Callable, run: Path, args: list[str]) -> str:
    """A run, in a process of its own, which prints into a file. Returns what went wrong, if
    anything."""
    log = run.parent / ".logs" / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush(), sys.stderr.flush()
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    try:
        train(args)
    except SystemExit as end:
        if end.code:
            sys.stdout.flush(), sys.stderr.flush()
            lines = log.read_text().strip().splitlines()
            return (
                end.code
                if isinstance(end.code, str)
                else lines[-1]
                if lines
                else f"exit code {end.code}"
            )
    except KeyboardInterrupt:
        return "interrupted"
    except Exception as error:  # one run's misfortune, such as a full GPU, is not the others'
        traceback.print_exc()
        return f"{type(error).__name__}: {error}; see {log}"
    return ""


def leave_with_parent():
    """In a worker: end when the process that started it is gone, however it went."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def made(run: Path) -> int:
    """How many steps it has made, as far as its metrics say."""
    try:
        return max(0, (run / "metrics.jsonl").read_bytes().count(b"\n") - 1)
    except OSError:
        return 0


def at_once(config: Config) -> int:
    """How many runs there are cores for; on a GPU, or where a run takes all cores, one."""
    if config.device != "cpu" and torch.cuda.is_available() or not config.threads:
        return 1
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // config.threads)


def make(runs: dict[Path, list[str]], train: Callable[[list[str]], None]) -> list[str]:
    """Make the runs that have arguments, several at once. Returns what went wrong, run by run."""
    left = {run: args for run, args in runs.items() if args}
    print(f"{len(runs)} runs, {len(left)} of them to be made or finished", flush=True)
    bars, problems, futures = {}, [], {}
    workers = min(len(left), at_once(parse(next(iter(left.values()))))) if left else 1
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=leave_with_parent) as pool:
        try:
            while left or futures:
                while (
                    left and len(futures) < workers
                ):  # not all at once: the pool's queue cannot be taken back
                    run = next(iter(left))
                    futures[run] = pool.submit(one, train, run, left.pop(run))
                time.sleep(0.2)
                for run, future in list(futures.items()):
                    if run.is_dir() and run not in bars:
                        total = json.loads((run / "config.json").read_text())["config"]["steps"]
                        bars[run] = tqdm(total=total, desc=run.name, disable=None, leave=False)
                    if run in bars:
                        bars[run].update(made(run) - bars[run].n)
                    if future.done():
                        futures.pop(run)
                        bars.pop(run, tqdm(disable=True)).close()
                        problems += [f"{run}: {future.result()}"] if future.result() else []
                        tqdm.write(f"{run}: {made(run)} steps")
        except KeyboardInterrupt:
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # the runs finish their step and save; the pool waits for them
            sys.exit("stopped; the same command goes on from here")
        except BrokenProcessPool:
            sys.exit(
                "error: a run's process was killed, perhaps for memory; the same command goes on from here"
            )
    return problems


def compare(argv: list[str], train: Callable[[list[str]], None]):
    """Make the runs that argv asks for and are not there yet, then print their table."""
    runs = runs_of(argv)
    if problems := make(runs, train):
        sys.exit("error: " + "\n       ".join(problems))
    try:
        made = [read_run(run) for run in runs]
        if left := [Path(run.folder).name for run in made if not run.finished]:
            sys.exit(f"stopped: {', '.join(left)} unfinished; the same command goes on from here")
        print("\n" + table(grouped(made)))
    except ValueError as error:
        fail(str(error))
