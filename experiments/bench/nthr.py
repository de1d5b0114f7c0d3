"""What NTHR's credit rule costs: python experiments/bench/nthr.py [rounds]

Time: one toy step of nthr against one of grpo from the same weights on the same prompts, turn and turn about; the
median of the ratios and their quartiles. Memory: what 8 answers of 1024 tokens with d = 1024 and 1000 different ids
add, hidden states included, as the rise of the process's peak resident set (Linux).
"""

import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import train
from losses import METHODS, OldPolicy, nthr


def step_ratio(rounds: int) -> list[float]:
    task = train.Arithmetic()
    with tempfile.TemporaryDirectory() as out:
        config = train.parse(
            ["--warm-steps", "300", "--out", out, "--name", "bench", "--no-reference"]
        )
        torch.set_num_threads(config.threads)
        run = train.start_run(config, task, torch.device("cpu"))
    _, _, model, _, tokenizer, _, eos, _ = run
    seconds = {"grpo": [], "nthr": []}
    for i in range(rounds):
        for method in sorted(seconds, reverse=i % 2):
            twin = copy.deepcopy(model)
            optimizer = train.adamw(twin, config.lr)
            chosen = replace(config, method=method)
            start = time.perf_counter()
            train.train_step(twin, None, tokenizer, optimizer, eos, task, chosen, {}, i + 1)
            seconds[method].append(time.perf_counter() - start)
    return [
        b / a for a, b in zip(seconds["grpo"][1:], seconds["nthr"][1:], strict=True)
    ]  # the first one warms up


def peak_mb(field: str) -> float:
    line = next(
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)
    )
    return int(line.split()[1]) * 1024 / 1e6


def memory():
    torch.set_num_threads(1)
    G, T, d, V = 8, 1024, 1024, 32_000
    tokens = torch.arange(G * T).view(G, T) % 1000 * 32
    head, mask = (
        torch.randn(V, d),
        torch.ones(G, T, dtype=torch.bool),
    )  # head and log-probs are there without nthr
    logp, adv, rewards = torch.full((G, T), -1.0), torch.ones(G, T), torch.tensor([1.0, 0.0] * 4)
    for _ in range(2):  # the first one loads the libraries' kernels
        before = peak_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # start the peak anew
        nthr(adv, OldPolicy(tokens, mask, logp, rewards, G, hidden=torch.randn(G, T, d), head=head))
    print(f"{peak_mb('VmHWM') - before:.1f}")


def main(rounds: int = 30):
    ratios = step_ratio(rounds)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"toy step, nthr / grpo: {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {len(ratios)} pairs)"
    )
    env = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "1000000"
    }  # what is freed goes back to the system at once
    command = [sys.executable, __file__, "memory"]
    tries = [subprocess.run(command, capture_output=True, text=True, env=env) for _ in range(5)]
    megabytes = statistics.median(float(x.stdout) for x in tries)
    print(
        f"memory of 8 x 1024 tokens, d = 1024, 1000 ids: {megabytes:.0f} MB, of which hidden states 34 MB"
    )


if __name__ == "__main__":
    assert METHODS["nthr"].needs_hidden
    memory() if sys.argv[1:] == ["memory"] else main(*map(int, sys.argv[1:]))
