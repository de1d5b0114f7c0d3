"""Where the default run's time goes until held-out greedy accuracy 0.95, and its floor.

    python -m experiments.bench.where [--seeds 0 1 2]

The run is the toy of `python train.py --eval-every 5`. The first evaluation that reaches 0.95 ends
it. Seconds are those on the wall, of the whole process, by the function of train.py that is
running. "load" includes the import of transformers' model.

Another run of the first seed counts floating-point operations, and the bytes that go in and out of
all operations other than products and views. The floor of a phase is its FLOPs at the rate of its
largest product, plus its bytes at the rate of adding two matrices of that product's size. Both
rates are the fastest of 200 on one thread, as the run has. What is beyond the floor is many small
operations.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from statistics import median
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import llm.runs
import train
from experiments.bench.timing import last_line, make_parser, turns

GOAL = 0.95
PHASES = {  # name -> the functions that it consists of, and where they are called from
    "load": [(llm.runs, "load_policy"), (llm.runs, "check_context")],
    "warm start": [(train, "warm_start")],
    "sample": [(train, "sample")],
    "score": [(train, "score")],
    "learn": [(train, "learn")],
    "diagnose": [(train, "diagnose")],
    "evaluate": [(train, "evaluate")],
    "write": [
        (train, "record"),
        (train, "keep_groups"),
        (train, "save"),
        (train, "save_start"),
        (llm.runs, "make_directory"),
    ],
}


class GoalReached(Exception):
    pass


class Clock:
    """Wall seconds and calls by phase. A call within another phase belongs to that one."""

    def __init__(self):
        self.current = []  # the phase that is going on, if any
        self.seconds = Counter()
        self.calls = Counter()

    def timed(self, phase: str, function: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            if self.current:
                return function(*args, **kwargs)
            self.current.append(phase)
            self.calls[phase] += 1
            start = time.perf_counter()
            try:
                result = function(*args, **kwargs)
            finally:
                self.seconds[self.current.pop()] += time.perf_counter() - start
            if phase == "evaluate" and result[0]["greedy"] >= GOAL:
                raise GoalReached
            return result

        return wrapped


class Count(TorchDispatchMode):
    """By phase: FLOPs of matrix products and attention, and bytes in and out of all else."""

    def __init__(self, current: list[str]):
        super().__init__()
        self.current = current
        self.flops = Counter()
        self.bytes = Counter()
        self.largest = {}  # the (M, K, N) of the largest product

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        phase = self.current[0] if self.current else "rest"
        name = function.overloadpacket.__name__.rstrip("_")
        shapes = [x.shape for x in args if isinstance(x, Tensor)]
        if name in ("mm", "addmm", "bmm"):
            shape = (*shapes[-2], shapes[-1][-1])  # ([batch], M, K, N)
            self.flops[phase] += 2 * torch.Size(shape).numel()
            if len(shape) == 3:
                larger = (self.largest.get(phase, shape), shape)
                self.largest[phase] = max(larger, key=lambda s: s[0] * s[1] * s[2])
        elif "scaled_dot_product" in name:  # shapes are (batch, heads, T, d)
            backward = "backward" in name  # whose first tensor is a gradient
            work = shapes[backward].numel() * shapes[1 + backward][2]
            self.flops[phase] += (10 if backward else 4) * work
        elif not function.is_view and name != "_unsafe_view":
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            self.bytes[phase] += sum(x.numel() * x.element_size() for x in tensors)
        return out


def run(seed: int, counted: bool) -> dict:
    """A run in this process: steps and wall seconds; if counted, also FLOPs, bytes and products."""
    clock = Clock()
    counter = Count(clock.current) if counted else nullcontext()
    with ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryDirectory())
        for phase, functions in PHASES.items():
            for module, name in functions:
                timed = clock.timed(phase, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, timed))
        stack.enter_context(counter)
        try:
            train.main(["--seed", str(seed), "--eval-every", "5", "--out", f"{out}/run"])
        except GoalReached:
            result = {"step": clock.calls["learn"], "seconds": clock.seconds}
            if counted:
                keys = ("flops", "bytes", "largest")
                result |= {key: getattr(counter, key) for key in keys}
            return result
    sys.exit(f"error: seed {seed} ends before it reaches {GOAL}")


def rates(shape: tuple[int, int, int]) -> tuple[float, float]:
    """FLOPs a second of an (M, K) x (K, N) product; bytes a second of adding (M, N) matrices."""
    a = torch.randn(shape[:2])
    b = torch.randn(shape[1:])
    c = a @ b
    d = a @ b
    seconds = turns({"product": lambda: torch.mm(a, b, out=c), "sum": lambda: c + d}, 200)
    flops = 2 * a.numel() * shape[2]
    moved = 3 * 4 * c.numel()
    return flops / min(seconds["product"]), moved / min(seconds["sum"])


def run_in_child(*args: str) -> dict:
    """run() in a process of its own, with the seconds of the whole process as "total"."""
    start = time.perf_counter()
    result = json.loads(last_line("-m", "experiments.bench.where", *args))
    result["total"] = time.perf_counter() - start
    result["seconds"]["rest"] = result["total"] - sum(result["seconds"].values())
    return result


def show_floor(counted: dict, phase: str) -> str:
    """The columns of a phase that are counted, not timed. Empty where it makes no product."""
    shape = counted["largest"].get(phase)
    if not shape:
        return ""
    flops = counted["flops"][phase]
    moved = counted["bytes"][phase]
    flops_rate, bytes_rate = rates(shape)
    return (
        f"{flops / 1e9:8.1f}{moved / 1e9:8.1f}  {' x '.join(map(str, shape)):16}"
        f"{flops_rate / 1e9:9.1f}{bytes_rate / 1e9:7.1f}"
        f"{flops / flops_rate + moved / bytes_rate:10.2f}"
    )


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--one", type=int, metavar="SEED", help="run this seed here, print as JSON")
    parser.add_argument("--count", action="store_true", help="with --one, count operations")
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(run(args.one, args.count)))
        return
    runs = [run_in_child("--one", str(seed)) for seed in args.seeds]
    counted = run_in_child("--one", str(args.seeds[0]), "--count")
    for seed, result in zip(args.seeds, runs, strict=True):
        print(f"seed {seed}: {GOAL} at step {result['step']}, {result['total']:.1f} s")
    total = median(result["total"] for result in runs)
    medians = f"medians by phase, counts of seed {args.seeds[0]}"
    print(f"median {total:.1f} s on {os.cpu_count()} cores; {medians}:\n")
    print("phase        seconds  share   GFLOP      GB  M x K x N         GFLOP/s   GB/s   floor s")
    for phase in (*PHASES, "rest"):
        seconds = median(result["seconds"].get(phase, 0.0) for result in runs)
        line = f"{phase:11}{seconds:9.2f}{seconds / total:7.1%}{show_floor(counted, phase)}"
        print(line.rstrip())


if __name__ == "__main__":
    main()
