"""How one training step grows.

    python -m experiments.bench.growth [--across G cap vocabulary] [--points 3]

Seconds and peak memory of a step against the group size G, the cap and the vocabulary, with the
others held fixed. No answer ends early. At most 8 rows hold their activations at once (micro_rows).
Each point has two processes of its own. In one the second and the third step are timed, and the
quicker one counts. In the other the second step's memory is measured; there freed memory returns to
the system at once, which takes time.

Exponent: the least-squares slope of log(seconds), or log(MB), against log(size). 1 is linear, and a
fixed cost pulls it below.
"""

import math
from dataclasses import replace

import torch

from experiments.bench.rollout import Case
from experiments.bench.step import make_case_step, make_config
from experiments.bench.timing import child, last_line, make_parser, rise_mb, turns

BASE = Case(prompts=1, prompt=16, mean=1e9, cap=64, layers=2, width=256, vocab=1000)
SIZES = {
    "G": [4, 8, 16, 32, 64],
    "cap": [64, 128, 256, 512, 1024],
    "vocabulary": [1000, 5000, 30_000, 152_000],
}
FIELDS = {"G": (), "cap": ("cap",), "vocabulary": ("vocab",)}  # of Case


def measure(across: str, size: int, what: str) -> float:
    """Seconds or MB of one step."""
    torch.set_num_threads(1)
    case = replace(BASE, **dict.fromkeys(FIELDS[across], size))
    config = make_config(case)
    if across == "G":
        config = replace(config, group_size=size)
    step = make_case_step(case)
    if what == "seconds":
        return min(turns({"step": lambda: step(config)}, 2)["step"])
    step(config)  # loads the libraries' kernels
    return rise_mb(lambda: step(config))


def exponent(sizes: list[int], values: list[float]) -> float:
    x = [math.log(size) for size in sizes]
    y = [math.log(value) for value in values]
    mean_x = sum(x) / len(x)
    mean_y = sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    parser.add_argument("--across", nargs="+", choices=tuple(SIZES), default=[*SIZES])
    parser.add_argument("--points", type=int, default=9, help="only so many sizes, the smallest")
    one = ("ACROSS", "SIZE", "seconds|MB")
    parser.add_argument("--at", nargs=3, metavar=one, help="one number of one point")
    args = parser.parse_args(argv)
    if args.at:
        across, size, what = args.at
        print(f"{measure(across, int(size), what):.3f}")
        return
    for across in args.across:
        sizes = SIZES[across][: args.points]
        point = ("-m", "experiments.bench.growth", "--at", across)
        seconds = [float(last_line(*point, str(size), "seconds")) for size in sizes]
        megabytes = [child(*point, str(size), "MB")[0] for size in sizes]
        for size, s, mb in zip(sizes, seconds, megabytes, strict=True):
            print(f"{across:10} {size:7} {s:8.2f} s {mb:7.0f} MB")
        slopes = [exponent(sizes, values) for values in (seconds, megabytes)]
        print(f"{across:10} exponent {slopes[0]:8.2f} {slopes[1]:10.2f}")


if __name__ == "__main__":
    main()
