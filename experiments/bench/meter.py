"""What the learning-tax meter and --project cost: python experiments/bench/meter.py [--cases a b]
[--rounds 20]

One training step on the same weights, prompts and answers, three ways in turn: as it is; without the meter (no prefix
tree, no tax); with --project. a: the toy's shape, b: GSM8K's on a CPU, as in experiments/bench/rollout.py. Medians of the
rounds' quotients, less 1.
"""

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import train
from experiments.bench.rollout import CASES, EOS, GROUP, Case, build
from experiments.bench.timing import ratio, turns


@dataclass
class Task:
    """Random prompts; a reward that half of the answers get, by their token ids."""

    prompts: list[list[int]]

    @property
    def train(self) -> list[list[int]]:
        return self.prompts

    def encode(self, tokenizer, items: list[list[int]]) -> list[list[int]]:
        return items

    def reward(self, text: list[int], item: list[int]) -> float:
        return float(sum(text) % 2)


class Ids:
    """A tokenizer whose text is the list of ids itself."""

    def batch_decode(self, ids: list[list[int]]) -> list[list[int]]:
        return ids


def with_ends(case: Case):
    """The case's random model, which hardly ever ends an answer, with a bias that makes the lengths
    geometric."""
    model, head = build(case, "cpu")[0], torch.nn.Linear(case.width, case.vocab)
    head.weight.data, head.bias.data = (
        model.get_output_embeddings().weight.data.clone(),
        torch.zeros(case.vocab),
    )
    head.bias.data[EOS] = math.log((case.vocab - 1) / (case.mean - 1))
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    return model


def steps(case: Case):
    """A function that makes the same training step whenever it is called: the learning rate is
    0."""
    model, prompts = with_ends(case), build(case, "cpu")[1]
    optimizer = train.adamw(model, 0.0)

    def step(config: train.Config) -> dict:
        return train.train_step(
            model, None, Ids(), optimizer, torch.tensor([EOS]), Task(prompts), config, {}, 1
        )

    return step


def make_config(case: Case, minibatches: int = 1) -> train.Config:
    sizes = dict(
        prompts=case.prompts, group_size=GROUP, max_tokens=case.cap, minibatches=minibatches
    )
    return train.Config(
        **sizes, micro_rows=case.prompts * GROUP, lr=0.0, reference=False, schedule="constant"
    )


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=("a", "b"), default=["a", "b"])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    for name in args.cases:
        config = make_config(CASES[name], minibatches=4 if name == "a" else 1)
        step = steps(CASES[name])

        def bare(step=step, config=config):
            none = dict(prefix_nodes=lambda tokens, *_: tokens, learning_tax=lambda *_: 0.0)
            with mock.patch.multiple(train, **none):
                step(config)

        projected = replace(config, project=True)
        sides = dict(
            bare=bare,
            metered=lambda s=step, c=config: s(c),
            projected=lambda s=step, c=projected: s(c),
        )
        seconds = turns(sides, args.rounds)
        meter, projection = (
            ratio(seconds["metered"], seconds["bare"]),
            ratio(seconds["projected"], seconds["metered"]),
        )
        print(
            f"{name}: a step {median(seconds['metered']):.3f} s, the meter {meter - 1:+.1%} of it,",
            end=" ",
        )
        print(f"--project {projection - 1:+.1%} more (medians of {args.rounds})")


if __name__ == "__main__":
    main()
