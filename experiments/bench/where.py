"""Where the default run's time goes until held-out greedy 0.95, and its floor: python
experiments/bench/where.py [--seeds 0 1 2]

The toy of `python train.py --eval-every 5`, ended by the first evaluation that reaches it; seconds on the wall, of the
whole process. Another run of the first seed counts floating-point operations, and the bytes that go in and out of all
operations but products and views. Floor: FLOPs at the rate of a product of the phase's largest shape, plus bytes at the
rate of adding two matrices of that product's size (fastest of 200, one thread, as the run): what is beyond it is many
small operations.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from experiments.bench.timing import last_line, turns

GOAL = 0.95
PHASES = {
    "load": ("load_model", "check_context"),
    "warm start": ("warm_start",),
    "rollout": ("rollout",),
    "reward": ("decode",),  # and Arithmetic.reward
    "score": ("score_all",),
    "update": ("learn",),
    "evaluate": ("evaluate",),
    "write": ("record", "save", "write_config", "new_run"),
}


class Reached(Exception):
    pass


class Count(TorchDispatchMode):
    """FLOPs of matrix products and attention, bytes in and out of everything else, by the phase
    that is going on."""

    def __init__(self, phase: list[str]):
        super().__init__()
        self.phase, self.flops, self.bytes, self.largest = phase, Counter(), Counter(), {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        phase, name = (
            self.phase[0] if self.phase else "rest",
            function.overloadpacket.__name__.rstrip("_"),
        )
        shapes = [x.shape for x in args if isinstance(x, Tensor)]
        if name in ("mm", "addmm", "bmm"):
            shape = (*shapes[-2], shapes[-1][-1])  # ([batch], M, K, N)
            self.flops[phase] += 2 * torch.Size(shape).numel()
            if len(shape) == 3:
                self.largest[phase] = max(
                    self.largest.get(phase, shape), shape, key=lambda s: s[0] * s[1] * s[2]
                )
        elif "scaled_dot_product" in name:
            backward = (
                "backward" in name
            )  # whose first tensor is a gradient; shapes are (batch, heads, T, d)
            self.flops[phase] += (
                (10 if backward else 4) * shapes[backward].numel() * shapes[1 + backward][2]
            )
        elif not function.is_view and name != "_unsafe_view":
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            self.bytes[phase] += sum(x.numel() * x.element_size() for x in tensors)
        return out


def one(seed: int, count: bool) -> dict:
    """A run in this process: its steps and wall seconds by phase; if counted, FLOPs, bytes and
    largest products."""
    current, seconds, steps = [], Counter(), []

    def timed(phase: str, function):
        def wrapped(*args, **kwargs):
            if current:  # part of another phase
                return function(*args, **kwargs)
            current.append(phase)
            start = time.perf_counter()
            try:
                result = function(*args, **kwargs)
            finally:
                seconds[current.pop()] += time.perf_counter() - start
            if phase == "evaluate" and result[0]["greedy"] >= GOAL:
                raise Reached
            return result

        return wrapped

    for phase, names in PHASES.items():
        for name in names:
            setattr(train, name, timed(phase, getattr(train, name)))
    train.Arithmetic.reward = timed("reward", train.Arithmetic.reward)
    step = train.train_step
    train.train_step = lambda *args: steps.append(step(*args)) or steps[-1]
    counter = Count(current) if count else nullcontext()
    with tempfile.TemporaryDirectory() as out, counter:
        try:
            train.main(["--seed", str(seed), "--eval-every", "5", "--out", out])
        except Reached:
            counts = (
                dict(flops=counter.flops, bytes=counter.bytes, largest=counter.largest)
                if count
                else {}
            )
            return dict(step=len(steps), seconds=seconds) | counts
    sys.exit(f"error: seed {seed} ends before it reaches {GOAL}")


def rates(shape: tuple[int, int, int]) -> tuple[float, float]:
    """FLOPs a second of an (M, K) x (K, N) product, bytes a second of adding two (M, N)
    matrices."""
    a, b = torch.randn(shape[:2]), torch.randn(shape[1:])
    c, d = a @ b, a @ b
    seconds = turns({"product": lambda: torch.mm(a, b, out=c), "sum": lambda: c + d}, 200)
    return 2 * a.numel() * shape[2] / min(seconds["product"]), 3 * 4 * c.numel() / min(
        seconds["sum"]
    )


def child(*args: str) -> dict:
    start = time.perf_counter()
    found = json.loads(last_line(__file__, *args)) | dict(total=time.perf_counter() - start)
    found["seconds"]["rest"] = found["total"] - sum(found["seconds"].values())
    return found


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--one", type=int, metavar="SEED", help="run this seed here, print what was found as JSON"
    )
    parser.add_argument(
        "--count", action="store_true", help="with --one: count FLOPs and bytes, which is slow"
    )
    args = parser.parse_args(argv)
    if args.one is not None:
        return print(json.dumps(one(args.one, args.count)))
    runs = [child("--one", str(seed)) for seed in args.seeds]
    counted = child("--one", str(args.seeds[0]), "--count")
    for seed, found in zip(args.seeds, runs, strict=True):
        print(f"seed {seed}: greedy {GOAL} at step {found['step']}, after {found['total']:.1f} s")
    total = median(found["total"] for found in runs)
    print(
        f"median {total:.1f} s on {os.cpu_count()} cores; medians by phase, counts of seed {args.seeds[0]}:\n"
    )
    print("phase        seconds  share   GFLOP      GB  M x K x N         GFLOP/s   GB/s   floor s")
    for phase in (*PHASES, "rest"):
        seconds = median(found["seconds"].get(phase, 0.0) for found in runs)
        print(f"{phase:11}{seconds:9.2f}{seconds / total:7.1%}", end="")
        if shape := counted["largest"].get(phase):
            work = counted["flops"][phase], counted["bytes"][phase]
            speed = rates(shape)
            print(
                f"{work[0] / 1e9:8.1f}{work[1] / 1e9:8.1f}  {' x '.join(map(str, shape)):16}",
                end="",
            )
            print(
                f"{speed[0] / 1e9:9.1f}{speed[1] / 1e9:7.1f}{work[0] / speed[0] + work[1] / speed[1]:10.2f}",
                end="",
            )
        print()


if __name__ == "__main__":
    main()
