"""How the benches measure: sides that take turns in one process, and the peak of memory."""

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch


def now(device: str = "cpu") -> float:
    """Seconds. On a CPU those of this process alone, so that other programs count less.

    The process has one thread, which never waits.
    """
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def turns(sides: dict[str, Callable], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of every side, one number a round. A first round more warms up.

    A round runs all sides, every second one in reverse order. So what slows the machine for a
    while slows all of them.
    """
    torch.set_num_threads(1)
    seconds = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name in list(sides)[:: -1 if i % 2 else 1]:
            start = now(device)
            sides[name]()
            seconds[name].append(now(device) - start)
    return {name: x[1:] for name, x in seconds.items()}


def show_ratio(over: list[float], under: list[float]) -> str:
    """The median of the rounds' quotients, and their quartiles."""
    each = torch.tensor([a / b for a, b in zip(over, under, strict=True)])
    low, middle, high = each.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return f"{middle:.2f} (quartiles {low:.2f} to {high:.2f}, {len(over)} rounds)"


def peak_gb(work: Callable, device: str = "cpu") -> float:
    """What work() adds at its peak, to this process (Linux), or to the GPU's allocator.

    Of a CPU process that has freed much before, it is too little: its memory is used again.
    """
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 1e9
    gc.collect()  # garbage that goes while work() runs would hide its rise
    before = resident_gb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    work()
    return resident_gb("VmHWM") - before


def resident_gb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(name))
    return int(kilobytes) * 1024 / 1e9
