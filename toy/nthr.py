"""NTHR's headline in miniature: does one step make a question's own right answers likelier?

    python -m toy.nthr                        the table
    python -m toy.nthr --plot toy/nthr.png    and the picture (needs matplotlib)

The policy is the small GPT-2 of train.py. Its warm start has seen worked solutions only. They are
all right, so a wrong answer is mostly a right one with a slip. A question gets G answers. Where
some are right and some are wrong, a method makes one step on these G answers alone. Delta is the
change of log pi of the right answers, on average (NTHR Fig. 1 and 4).

Every method starts from the same policy and learns from the same answers. nthr blames some tokens
of wrong answers less, by the factor eta. random blames as many tokens of each answer less, drawn
at random. eta is 2|0.5 - p|, with p the share of right answers, or 0. pos-only blames nothing. The
step is train.py's own, with its gradient clip. The optimiser has no history. A step of SGD is as
long as the gradient, which is short for random and pos-only; with "one length" it is 0.02 for all.

This script imports train. Only toy.lopti imports it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from llm import fail
from llm.policy import Policy, load_policy
from llm.runs import adamw
from toy.arithmetic import Arithmetic
from toy.figure import draw_differences, interval, parse_plot, save_picture
from train import Answers, Config, learn, log_probs, sample, score, warm_start

METHODS = {  # name: a method and its hyperparameters
    "grpo": ("grpo", []),
    "nthr": ("nthr", []),
    "random": ("nthr-random", []),
    "nthr, eta 0": ("nthr", ["eta=0"]),
    "random, eta 0": ("nthr-random", ["eta=0"]),
    "pos-only": ("pos-only", []),
}
RATES = {"SGD": 0.02, "SGD, one length": 0.02, "AdamW": 3e-4}
SHORT = 1e-4  # no gradient is shorter: clipped to it, all have one length
STARTS, QUESTIONS = 6, 8  # policies, questions to each
WARM = dict(warm_steps=300, warm_rows=32)


def make_start(seed: int, direct: int) -> tuple[Policy, Arithmetic]:
    """A policy after its warm start. Of direct demonstrations every direct-th stays; 0: none."""
    config, task = Config(seed=seed, **WARM), Arithmetic()
    pairs = enumerate(task.train)
    task.train = [item for i, item in pairs if "+" in item.demo or direct and i % direct == 0]
    policy = load_policy(config, task, "scratch")
    warm_start(policy, task, config)
    return policy, task


def find_questions(policy: Policy, task: Arithmetic, seed: int) -> list[Answers]:
    """The answers to the first unseen questions that got right and wrong ones."""
    found = []
    for number, item in enumerate(task.test):
        answers = sample(policy, task, [item], number, Config(seed=seed))
        if 0 < answers.rewards.mean() < 1:
            found.append(answers)
        if len(found) == QUESTIONS:
            return found
    fail(f"start {seed}: only {len(found)} of {QUESTIONS} questions got right and wrong answers")


def make_optimizer(policy: Policy, kind: str, lr: float) -> torch.optim.Optimizer:
    """One without a history."""
    if kind.startswith("SGD"):
        return torch.optim.SGD(policy.model.parameters(), lr=lr)
    return adamw(policy.model, lr)


def measure_delta(policy: Policy, answers: Answers, name: str, kind: str) -> float:
    """Delta of one step from `policy`, which stays as it is. In nats."""
    method, hyper = METHODS[name]
    config = Config(method=method, hyper=hyper, lr=RATES[kind], minibatches=1, schedule="constant")
    if kind == "SGD, one length":
        config = replace(config, lr=config.lr / SHORT, grad_clip=SHORT)
    trial = replace(policy, model=copy.deepcopy(policy.model))
    scored = score(trial, None, answers, config)
    learn(trial, make_optimizer(trial, kind, config.lr), scored, config)
    with torch.no_grad():
        after, _, _ = log_probs(trial, answers.rows, config)
    moved = (after - scored.batch.logp_old).sum(1)  # (G,)
    return float(moved[answers.rewards == 1].mean())


def study() -> dict[tuple[str, str], Tensor]:
    """(optimiser, method) -> Delta of every question, (STARTS, QUESTIONS)."""
    deltas = {(kind, name): torch.zeros(STARTS, QUESTIONS) for kind in RATES for name in METHODS}
    for seed in range(STARTS):
        policy, task = make_start(seed, direct=0)
        questions = find_questions(policy, task, seed)
        for (kind, name), table in deltas.items():
            values = [measure_delta(policy, answers, name, kind) for answers in questions]
            table[seed] = torch.tensor(values)
    return deltas


def format_mean(values: Tensor, sign: str = "") -> str:
    """Mean +- half its 95 % interval. (STARTS, QUESTIONS): a start counts with its mean."""
    middle, half = interval(values.mean(1).tolist())
    return f"{middle:{sign}.3f} +- {half:.3f}"


def show(deltas: dict[tuple[str, str], Tensor]):
    print(f"{STARTS} starts x {QUESTIONS} questions; mean +- half its 95 % interval")
    for kind, lr in RATES.items():
        titles = ("Delta", "minus grpo's", "minus random's", "above grpo's", "Delta <= 0")
        print(f"\n{f'{kind} {lr:g}':21}" + "".join(f"{title:>18}" for title in titles))
        for name in METHODS:
            delta = deltas[kind, name]
            gain = delta - deltas[kind, "grpo"]
            cells = [format_mean(delta), format_mean(gain, "+"), ""]
            if "nthr" in name:
                cells[2] = format_mean(delta - deltas[kind, name.replace("nthr", "random")], "+")
            cells += [f"{share.float().mean():.0%}" for share in (gain > 0, delta <= 0)]
            print(f"{name:21}" + "".join(f"{cell:>18}" for cell in cells))


def plot(deltas: dict[tuple[str, str], Tensor], path: Path):
    """Delta of each question with SGD; then what the methods add to grpo's, by optimiser."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.9), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(RATES), width_ratios=(2, 1, 1, 1))
    order = deltas["SGD", "grpo"].flatten().argsort()
    for name in ("grpo", "pos-only", "nthr, eta 0"):
        line = "-" if name == "grpo" else ""
        left.plot(deltas["SGD", name].flatten()[order], label=name, linestyle=line)
    left.axhline(0, color="#999999", linewidth=0.8)
    left.set_title("SGD: Delta of each question, ordered by grpo's")
    left.legend()
    for axis, kind in zip(others, RATES, strict=True):
        grpo, names = deltas[kind, "grpo"], [name for name in METHODS if name != "grpo"]
        gains = {name: (deltas[kind, name] - grpo).mean(1).tolist() for name in names}
        draw_differences(axis, gains)
        axis.tick_params(labelleft=kind == "SGD")
        axis.set_title(kind)
        axis.set_xlabel("Delta minus grpo's")
    figure.savefig(path, dpi=100)
    print(f"\npicture: {path}")


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    deltas = study()
    show(deltas)
    save_picture(plot, deltas, path=path)


if __name__ == "__main__":
    main()
