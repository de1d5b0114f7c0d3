"""What the benches measure with: interleaved sides in one process, quartiles, peak memory."""

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from llm import fail


def make_parser(doc: str) -> argparse.ArgumentParser:
    """A parser whose --help is the bench's docstring, and whose errors are one line."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=plain, allow_abbrev=False)
    parser.error = fail
    return parser


def now(device: str) -> float:
    """Seconds. On a CPU those of this process alone, so that other programs count less.

    The process has one thread, which never waits.
    """
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def turns(sides: dict[str, Callable], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of every side, one number a round. Each round runs all sides, interleaved.

    Every second round runs them in reverse order. An extra first round warms up.
    """
    torch.set_num_threads(1)
    seconds = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name in sorted(sides, reverse=i % 2):
            start = now(device)
            sides[name]()
            seconds[name].append(now(device) - start)
    return {name: x[1:] for name, x in seconds.items()}


def quartiles(over: list[float], under: list[float]) -> list[float]:
    """First quartile, median and third quartile of the rounds' quotients."""
    each = torch.tensor([a / b for a, b in zip(over, under, strict=True)])
    return each.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()


def show_ratio(over: list[float], under: list[float]) -> str:
    low, middle, high = quartiles(over, under)
    return f"{middle:.3f} (quartiles {low:.3f} to {high:.3f}, {len(over)} rounds)"


def rise_mb(work: Callable, device: str = "cpu") -> float:
    """How much memory work() adds at its peak, to the process (Linux) or the GPU's allocator."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    gc.collect()  # garbage that goes while work() runs would hide its rise
    before = resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    work()
    return resident_mb("VmHWM") - before


def resident_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(field))
    return int(kilobytes) * 1024 / 1e6


def child(*command: str) -> list[float]:
    """The numbers that a Python command prints last, run in a process of its own.

    That process returns freed memory to the system at once, so that its peak means something.
    """
    at_once = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    return [float(x) for x in last_line(*command, env=os.environ | at_once).split()]


def last_line(*command: str, env: dict[str, str] | None = None) -> str:
    """What a Python command prints last, run in a process of its own."""
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env)
    if run.returncode:
        reason = (run.stderr.strip() or "killed, out of memory?").splitlines()[-1]
        sys.exit(f"error: {' '.join(command)} failed: {reason}")
    return run.stdout.splitlines()[-1]
