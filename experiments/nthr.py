"""NTHR's Fig. 1 in miniature: does a step make right answers more likely? README.md has the result.

    python -m experiments.nthr

It takes half a minute. The policy is the small GPT-2 of train.py after a short warm start that has
seen worked solutions only, so a wrong answer is mostly a right one with a slip. Delta is how much
one step on a question's G answers changes log pi of its right ones. All steps begin with the same
policy, by an AdamW without a history. Intervals are 95%, over start policies.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice
from statistics import fmean

import torch

import losses
import train
from llm import credit
from llm.models import warm_start
from losses import METHODS, Method
from tasks.arithmetic import Arithmetic
from toy.figure import format_interval

STARTS, QUESTIONS = 6, 8  # start policies, and questions to each
# grpo stands for NTHR's loss with nothing softened.
COMPARED = {"grpo": Method((losses.nthr_grpo,))}
COMPARED |= {name: METHODS[name] for name in ("nthr", "pos-only")}


def measure_delta(policy, task, answers, method: Method, config) -> float:
    trial = replace(policy, model=copy.deepcopy(policy.model))
    train.assess(policy, None, answers, method, config)
    if method.credit:  # without repairs, so without random numbers
        credit.assign(policy, task, answers, method, config, train.ask, train.read_answers, None)
    train.learn(trial, train.adamw(trial.model), answers, method, 1, config)
    with torch.no_grad():
        before, after = (train.log_probs(x, answers, config.temperature) for x in (policy, trial))
    return (after - before).sum(1)[answers.rewards == 1].mean().item()


def compare(seed: int) -> dict[str, float]:
    """Delta of each method, in the mean over the first questions with right and wrong answers."""
    config = train.Config(seed=seed, lr=3e-4, minibatches=1, warm_steps=300, warm_rows=32)
    task = Arithmetic()
    task.train = [item for item in task.train if "+" in item.demo]
    policy = train.load_policy(config, task, "scratch")
    warm_start(policy, task, train.adamw(policy.model), METHODS["grpo"], config)
    rollouts = (train.sample(policy, task, [x], i, config) for i, x in enumerate(task.test))
    mixed = list(islice((x for x in rollouts if 0 < x.rewards.mean() < 1), QUESTIONS))
    return {
        name: fmean(measure_delta(policy, task, answers, method, config) for answers in mixed)
        for name, method in COMPARED.items()
    }


def main():
    torch.set_num_threads(1)
    found = [compare(seed) for seed in range(STARTS)]
    for name in ("nthr", "pos-only"):
        gaps = [deltas[name] - deltas["grpo"] for deltas in found]
        print(f"{name}: Delta minus grpo's {format_interval(gaps, '+.3f')}")


if __name__ == "__main__":
    main()
