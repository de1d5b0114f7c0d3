"""Two neighbouring papers, a figure of each in miniature. README.md says what came out.

    python -m experiments.neighbours nthr     does a step make right answers more likely?
    python -m experiments.neighbours lopti    whose gradient is it, and does the order help?

Each takes less than a minute. The policy is the small GPT-2 of train.py after a short warm start.
All steps begin with the same policy, and their optimisers have no history. Intervals are 95%, over
start policies.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pandas as pd
import torch
from torch import Tensor

import losses
import train
from llm.start import warm_start
from losses import METHODS, Method, token_grpo
from tasks.arithmetic import Arithmetic
from toy.figure import format_interval

STARTS, QUESTIONS = 6, 8  # policies; and of nthr, questions to each
# A short warm start, and one update a step.
SHORT = {"warm_steps": 300, "warm_rows": 32, "minibatches": 1}


# ---------------- a step of train.py's small model


def make_start(config, direct: int) -> tuple[train.Policy, Arithmetic]:
    """A policy after its warm start. Of direct demonstrations every direct-th stays; 0: none."""
    task = Arithmetic()
    pairs = enumerate(task.train)
    task.train = [item for i, item in pairs if "+" in item.demo or direct and i % direct == 0]
    policy = train.load_policy(config, task, "scratch")
    warm_start(policy, task, train.adamw(policy.model), METHODS["grpo"], config)
    return policy, task


def step(policy, task, answers, method: Method, config) -> tuple[Tensor, float]:
    """A step of train.py on a copy of the policy, by AdamW without a history.

    Returns how far the tokens' log pi moves, (N, T), and the norm of the first gradient.
    """
    trial = replace(policy, model=copy.deepcopy(policy.model))
    train.assess(policy, None, answers, method, config)
    if method.credit:
        train.reshape_credit(policy, task, answers, method, 1, config)
    optimizer = train.adamw(trial.model)
    updates = train.learn(trial, optimizer, answers, method, 1, config)
    with torch.no_grad():
        before, after = (train.log_probs(x, answers, config.temperature) for x in (policy, trial))
    return after - before, updates[0]["grad_norm"]


# ---------------- NTHR, Fig. 1 and 4

# grpo stands for NTHR's loss with nothing softened.
SOFTENED = {
    "grpo": Method((losses.nthr_grpo,)),
    "nthr": METHODS["nthr"],
    "pos-only": METHODS["pos-only"],
}


def find_questions(policy, task: Arithmetic, config) -> Iterator:
    """The answers to the unseen questions that get right and wrong ones."""
    for number, item in enumerate(task.test):
        answers = train.sample(policy, task, [item], number, config)
        if 0 < answers.rewards.mean() < 1:
            yield answers


def measure_deltas() -> pd.DataFrame:
    """Delta, the change of log pi of a question's right answers by a step on its G answers.

    The warm start has seen worked solutions only, all of them right, so a wrong answer is mostly a
    right one with a slip. A column for each method; a row for each start, the mean over its
    questions.
    """
    rows = []
    for seed in range(STARTS):
        config = train.Config(seed=seed, lr=3e-4, **SHORT)
        policy, task = make_start(config, direct=0)
        for answers in islice(find_questions(policy, task, config), QUESTIONS):
            row = {"start": seed}
            for name, method in SOFTENED.items():
                moved, _ = step(policy, task, answers, method, config)
                row[name] = moved.sum(1)[answers.rewards == 1].mean().item()
            rows.append(row)
    return pd.DataFrame(rows).groupby("start").mean()


def nthr():
    deltas = measure_deltas()
    gaps = deltas.sub(deltas["grpo"], axis="index")
    print(f"Delta minus grpo's, {STARTS} starts")
    print(gaps.agg(format_interval, form="+.3f").to_string())


# ---------------- AR and Lopti, Fig. 1d-f

QUARTERS = ("p < .25", ".25 to .5", ".5 to .75", "p > .75")
# Lopti makes two optimiser steps, so its control does, too. (AdamW ignores how large a loss is.)
ORDERS = {
    "grpo twice": Method((token_grpo, token_grpo)),
    "lopti": METHODS["lopti"],
    "reversed": Method(METHODS["lopti"].passes[::-1]),
}


def measure_tokens(policy, task, answers, config) -> dict[tuple[str, str], float]:
    """The tokens are parted by their probability into the quarters of 0 to 1.

    Of each quarter: its share of the tokens, and the norm of its gradient (all tokens: 1). Of each
    order: the share of the tokens with p > .75 that moves the way their A points.
    """
    found, quarter = {}, (4 * answers.logp_sampled.exp()).long().clamp(max=3)  # (N, T) 0 to 3
    _, whole = step(policy, task, answers, Method((token_grpo,)), config)
    for q, name in enumerate(QUARTERS):
        chosen = quarter == q
        alone = Method((token_grpo,), credit=lambda adv, old, chosen=chosen: adv * chosen)
        _, norm = step(policy, task, answers, alone, config)
        found["share of the tokens", name] = chosen[answers.mask].double().mean().item()
        found["norm of the gradient", name] = norm / whole
    for name, method in ORDERS.items():
        moved, _ = step(policy, task, answers, method, config)
        probable = answers.mask & (quarter == 3) & (answers.adv != 0)
        right = (moved * answers.adv > 0)[probable]
        found["p > .75, moved as A points", name] = right.double().mean().item()
    return found


def lopti():
    rows = []
    for seed in range(STARTS):
        config = train.Config(seed=seed, **SHORT)
        policy, task = make_start(config, direct=6)
        answers = train.sample(policy, task, task.test[: config.prompts], 1, config)
        rows.append(measure_tokens(policy, task, answers, config))
    table = pd.DataFrame(rows)
    *_, twice, first, backwards = table  # the names of the columns
    table["minus grpo twice", "lopti"] = table[first] - table[twice]
    table["minus lopti", "reversed"] = table[backwards] - table[first]
    print(f"{STARTS} starts\n{table.agg(format_interval).to_string()}")


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    figures = {"nthr": nthr, "lopti": lopti}
    parser.add_argument("figure", choices=figures)
    torch.set_num_threads(1)
    figures[parser.parse_args().figure]()


if __name__ == "__main__":
    main()
