"""NTHR's headline in miniature: does one step make a question's own right answers likelier?

    python -m experiments.nthr

The policy is the small GPT-2 of train.py. Its warm start has seen worked solutions only. They are
all right, so a wrong answer is mostly a right one with a slip. A question gets G answers. Where
some are right and some are wrong, a method makes one step on these G answers alone. Delta is the
change of log pi of the right answers, on average (NTHR Fig. 1 and 4). Every method starts from the
same policy and learns from the same answers. The step is train.py's own, with its gradient clip.
The optimiser has no history. NEIGHBOURS.md says what came out.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from losses import bind
from toy.arithmetic import Arithmetic
from toy.figure import format_interval, print_table
from train import (
    Answers,
    Config,
    Policy,
    adamw,
    learn,
    load_policy,
    log_probs_in_pieces,
    sample,
    score,
    warm_start,
)

METHODS = {
    "grpo": bind("nthr", {"eta": 1}),  # the paper's: its token mean, nothing softened
    "nthr": bind("nthr", {}),
    "random": bind("nthr-random", {}),
    "pos-only": bind("pos-only", {}),
}
RATES = {"SGD": 0.02, "AdamW": 3e-4}
STARTS, QUESTIONS = 6, 8  # policies, questions to each


def make_start(seed: int, direct: int) -> tuple[Policy, Arithmetic]:
    """A policy after its warm start. Of direct demonstrations every direct-th stays; 0: none."""
    config, task = Config(seed=seed, warm_steps=300, warm_rows=32), Arithmetic()
    pairs = enumerate(task.train)
    task.train = [item for i, item in pairs if "+" in item.demo or direct and i % direct == 0]
    policy = load_policy(config, task, "scratch")
    warm_start(policy, task, METHODS["grpo"], config)
    return policy, task


def find_questions(policy: Policy, task: Arithmetic, seed: int) -> list[Answers]:
    """The answers to the first unseen questions that got right and wrong ones."""
    asked = (
        sample(policy, task, [item], number, Config(seed=seed))
        for number, item in enumerate(task.test)
    )
    mixed = (answers for answers in asked if 0 < answers.rewards.mean() < 1)
    return [next(mixed) for _ in range(QUESTIONS)]


def measure_delta(policy: Policy, answers: Answers, name: str, kind: str) -> float:
    """Delta of one step from `policy`, which stays as it is. In nats."""
    config = Config(lr=RATES[kind], minibatches=1, schedule="constant")
    trial = replace(policy, model=copy.deepcopy(policy.model))
    scored = score(trial, answers, METHODS[name], config, reference=None)
    if kind == "SGD":
        optimizer = torch.optim.SGD(trial.model.parameters(), lr=config.lr)
    else:
        optimizer = adamw(trial.model, config.lr)  # without a history
    learn(trial, optimizer, scored, METHODS[name], config)
    after, _ = log_probs_in_pieces(trial, answers, config)
    moved = (after - scored.batch.logp_old).sum(1)  # (G,)
    return float(moved[answers.rewards == 1].mean())


def study(starts: int = STARTS) -> dict[str, dict[str, Tensor]]:
    """optimiser -> method -> Delta, the mean over the questions to each policy, (starts,)."""
    deltas = {kind: {name: torch.zeros(starts) for name in METHODS} for kind in RATES}
    for seed in range(starts):
        policy, task = make_start(seed, direct=0)
        for answers in find_questions(policy, task, seed):
            for kind, table in deltas.items():
                for name, means in table.items():
                    means[seed] += measure_delta(policy, answers, name, kind) / QUESTIONS
    return deltas


def main():
    torch.set_num_threads(1)
    deltas = study()
    print(f"{STARTS} starts x {QUESTIONS} questions; mean +- half its 95 % interval of the starts")
    for kind, table in deltas.items():
        rows = {
            name: [format_interval(delta - table[other], "+.3f") for other in ("grpo", "random")]
            for name, delta in table.items()
        }
        print(f"\n{kind} {RATES[kind]:g}: Delta")
        print_table(rows, ["minus grpo's", "minus random's"])


if __name__ == "__main__":
    main()
