"""How one training step grows: python experiments/bench/growth.py [--points 3] [--across G cap
vocabulary]

Seconds and peak memory of a step against the group size G, the cap and the vocabulary, the others held fixed. No answer
ends early. Exponent: the least-squares slope of log(seconds or MB) against log(size); 1 is linear, and a fixed cost
pulls it below. Each point in a process of its own, its second step.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiments.bench.meter import make_config, steps
from experiments.bench.rollout import Case
from experiments.bench.timing import child, rise_mb, turns

BASE = Case(prompts=1, prompt=16, mean=1e9, cap=64, layers=2, width=256, vocab=1000)
SIZES = {
    "G": [4, 8, 16, 32, 64],
    "cap": [64, 128, 256, 512, 1024],
    "vocabulary": [1000, 5000, 30_000, 152_000],
}


def point(across: str, size: int) -> tuple[float, float]:
    """Seconds and MB of one step."""
    torch.set_num_threads(1)
    case = replace(BASE, **{"cap": {"cap": size}, "vocabulary": {"vocab": size}}.get(across, {}))
    config = replace(make_config(case), group_size=size if across == "G" else 8)
    step = steps(case)
    return turns({"step": lambda: step(config)}, 1)["step"][0], rise_mb(lambda: step(config))


def exponent(sizes: list[int], values: list[float]) -> float:
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum(
        (a - mx) ** 2 for a in x
    )


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--across", nargs="+", choices=tuple(SIZES), default=[*SIZES])
    parser.add_argument("--points", type=int, default=9, help="only so many sizes, the smallest")
    parser.add_argument("--at", nargs=2, metavar=("ACROSS", "SIZE"), help="one point: seconds, MB")
    args = parser.parse_args(argv)
    if args.at:
        return print(*(f"{x:.3f}" for x in point(args.at[0], int(args.at[1]))))
    for across in args.across:
        sizes = SIZES[across][: args.points]
        found = [child(__file__, "--at", across, str(size)) for size in sizes]
        for size, (seconds, megabytes) in zip(sizes, found, strict=True):
            print(f"{across:10} {size:7} {seconds:8.2f} s {megabytes:7.0f} MB")
        seconds, megabytes = ([*x] for x in zip(*found, strict=True))
        print(
            f"{across:10} exponent {exponent(sizes, seconds):8.2f} {exponent(sizes, megabytes):10.2f}"
        )


if __name__ == "__main__":
    main()
