"""What the learning-tax meter and --project cost.

    python -m experiments.bench.meter [--cases a b] [--rounds 20]

Makes one training step on the same weights, prompts and answers in three ways, interleaved: with
the meter, as it is; bare, without prefix tree and tax; projected, with --project. Case a has the
toy's shape and b GSM8K's on a CPU, as in rollout.py. Prints what the meter takes relative to the
bare step, and the projection relative to the metered one.
"""

from dataclasses import replace
from statistics import median
from unittest import mock

import train
from experiments.bench.rollout import CASES
from experiments.bench.step import make_case_step, make_config
from experiments.bench.timing import make_parser, show_ratio, turns


def time_sides(name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of the step in its three ways."""
    config = make_config(CASES[name], minibatches=4 if name == "a" else 1)
    step = make_case_step(CASES[name])
    no_meter = dict(prefix_nodes=lambda tokens, *_: tokens, learning_tax=lambda *_: 0.0)

    def bare():
        with mock.patch.multiple(train, **no_meter):
            step(config)

    sides = {
        "bare": bare,
        "metered": lambda: step(config),
        "projected": lambda: step(replace(config, project=True)),
    }
    return turns(sides, rounds)


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=("a", "b"), default=["a", "b"])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    for name in args.cases:
        seconds = time_sides(name, args.rounds)
        print(f"{name}: a step {median(seconds['metered']):.3f} s")
        for over, under in (("metered", "bare"), ("projected", "metered")):
            print(f"{name}: {over} / {under} {show_ratio(seconds[over], seconds[under])}")


if __name__ == "__main__":
    main()
