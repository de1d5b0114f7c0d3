"""What the learning-tax meter and --project cost.

    python -m experiments.bench.meter [--cases a b] [--rounds 20]

Makes one training step on the same weights, prompts and answers in three ways, interleaved: as it
is; without the meter (no prefix tree, no tax); with --project. Case a has the toy's shape and b
GSM8K's on a CPU, as in rollout.py. Prints the medians of the rounds' quotients, minus 1.
"""

from dataclasses import replace
from statistics import median
from unittest import mock

import train
from experiments.bench.rollout import CASES
from experiments.bench.step import make_case_step, make_config
from experiments.bench.timing import make_parser, quotients, turns
from experiments.bench.timing import ratio


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=("a", "b"), default=["a", "b"])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    for name in args.cases:
        seconds = time_sides(name, args.rounds)
        meter = ratio(seconds["metered"], seconds["bare"]) - 1
        projection = ratio(seconds["projected"], seconds["metered"]) - 1
        print(f"{name}: a step {median(seconds['metered']):.3f} s, the meter {meter:+.1%} of it,", end=" ")
        print(f"--project {projection:+.1%} more (medians of {args.rounds})")
