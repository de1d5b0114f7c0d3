"""What the benches measure with: sides that take turns in one process, medians, peak memory."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch


def now(device: str) -> float:
    """Seconds; on the CPU those of this process, so that other programs count less (one thread,
    which never waits)."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def turns(sides: dict[str, Callable], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of every side, a number a round. All take their turn in each; an extra first round
    warms up."""
    torch.set_num_threads(1)
    seconds = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name in sorted(sides, reverse=i % 2):
            start = now(device)
            sides[name]()
            seconds[name].append(now(device) - start)
    return {name: x[1:] for name, x in seconds.items()}


def ratio(over: list[float], under: list[float]) -> float:
    """Median of the rounds' quotients."""
    return median(a / b for a, b in zip(over, under, strict=True))


def rise_mb(work: Callable, device: str = "cpu") -> float:
    """How much memory work() adds at its peak: of the process (Linux), or of the GPU's
    allocator."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    before = resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # start the peak anew
    work()
    return resident_mb("VmHWM") - before


def resident_mb(field: str) -> float:
    line = next(
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)
    )
    return int(line.split()[1]) * 1024 / 1e6


def child(*command: str) -> list[float]:
    """The numbers that a Python command prints last, run in a process of its own that returns freed
    memory at once."""
    return [
        float(x)
        for x in last_line(*command, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}).split()
    ]


def last_line(*command: str, env: dict[str, str] | None = None) -> str:
    """What a Python command prints last, run in a process of its own."""
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env)
    if run.returncode:
        reason = (run.stderr.strip() or "killed, out of memory?").splitlines()[-1]
        sys.exit(f"error: {' '.join(command)} failed: {reason}")
    return run.stdout.splitlines()[-1]
