"""NTHR's headlines in miniature: does one step make a question's own right answers likelier?

    python -m toy.nthr                        the tables
    python -m toy.nthr --plot toy/nthr.png    and the picture (needs matplotlib)

The policy is the small GPT-2 of train.py. Its warm start has seen worked solutions only. They are
all right, so a wrong answer is mostly a right one with a slip. A question gets G answers. Where
some are right and some are wrong, a method makes one step on these G answers alone. Delta is the
change of log pi of the right answers, on average (NTHR Fig. 1 and 4). Every method starts from the
same policy and learns from the same answers. The step is train.py's own, with its gradient clip.
The optimiser has no history. toy/README.md says what came out.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from llm.neighbours import hidden_states, nthr_scores
from toy.arithmetic import Arithmetic
from toy.figure import (
    draw_differences,
    format_interval,
    make_figure,
    parse_plot,
    print_row,
    save_picture,
)
from train import (
    Answers,
    Config,
    Policy,
    adamw,
    in_pieces,
    learn,
    load_policy,
    sample,
    score,
    warm_start,
)

METHODS = {  # name: a method and its hyperparameters
    "grpo": ("nthr", ["eta=1"]),  # the paper's: its token mean, nothing softened
    "nthr": ("nthr", []),
    "random": ("nthr-random", []),
    "nthr, self term": ("nthr", ["self_term=True"]),
    "pos-only": ("pos-only", []),
}
RATES = {"SGD": 0.02, "SGD, one length": 0.02, "AdamW": 3e-4}
SHORT = 1e-4  # no gradient is shorter: clipped to it, all have one length
STARTS, QUESTIONS = 6, 8  # policies, questions to each
LAZIEST = 10  # questions
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
    found = f"only {len(found)} of {QUESTIONS} questions got right and wrong answers"
    sys.exit(f"error: start {seed}: {found}")


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
    after, _ = in_pieces(trial, answers, config)
    moved = (after - scored.batch.logp_old).sum(1)  # (G,)
    return float(moved[answers.rewards == 1].mean())


def measure_gwhes(policy: Policy, answers: Answers) -> float:
    """(II) - (I) of NTHR's Theorem 4.4 (claim N3), the mean over the right answers.

    Both are double sums of <g, g'> <h, h'> over pairs of tokens, of which one is in a right answer.
    A token's score is its part of them. So summed over the right answers, (II) is p- times the
    scores of the wrong tokens, and (I) is p+ times those of the right ones.
    """
    config = Config()
    scores, _ = nthr_scores(
        tokens=answers.tokens,
        mask=answers.mask,
        logp=in_pieces(policy, answers, config)[0],
        rewards=answers.rewards,
        hidden=hidden_states(policy, answers, config),
        head=policy.model.get_output_embeddings().weight.detach(),
        group_size=len(answers.rewards),
        full_vocab=True,
    )
    right, p = answers.rewards == 1, answers.rewards.mean()
    total = p * scores[~right].sum() - (1 - p) * scores[right].sum()
    return float(total / (p * (1 - p)).sqrt() / right.sum())


def study() -> tuple[dict[tuple[str, str], Tensor], Tensor]:
    """(optimiser, method) -> Delta of every question; and its GWHES. (STARTS, QUESTIONS) each."""
    deltas = {(kind, name): torch.zeros(STARTS, QUESTIONS) for kind in RATES for name in METHODS}
    gwhes = torch.zeros(STARTS, QUESTIONS)
    for seed in range(STARTS):
        policy, task = make_start(seed, direct=0)
        questions = find_questions(policy, task, seed)
        gwhes[seed] = torch.tensor([measure_gwhes(policy, answers) for answers in questions])
        for (kind, name), table in deltas.items():
            values = [measure_delta(policy, answers, name, kind) for answers in questions]
            table[seed] = torch.tensor(values)
    return deltas, gwhes


def format_starts(values: Tensor, form: str = ".3f") -> str:
    """(STARTS, QUESTIONS): a start counts with its mean."""
    return format_interval(values.mean(1).tolist(), form)


def show(deltas: dict[tuple[str, str], Tensor]):
    print(f"{STARTS} starts x {QUESTIONS} questions; mean +- half its 95 % interval")
    for kind, lr in RATES.items():
        titles = ("Delta", "minus grpo's", "minus random's", "above grpo's")
        print()
        print_row(f"{kind} {lr:g}", titles)
        for name in METHODS:
            delta = deltas[kind, name]
            gain = delta - deltas[kind, "grpo"]
            cells = [format_starts(delta), format_starts(gain, "+.3f"), ""]
            if name == "nthr":
                cells[2] = format_starts(delta - deltas[kind, "random"], "+.3f")
            print_row(name, [*cells, f"{(gain > 0).float().mean():.0%}"])


def show_laziest(deltas: dict[tuple[str, str], Tensor], gwhes: Tensor):
    """Does (II) - (I), known before the step, find the questions that gain least?"""
    print(f"\nThe {LAZIEST} questions with the lowest Delta of grpo, and the {LAZIEST} with the")
    print(f"highest GWHES: how many are in both; by chance {LAZIEST**2 / gwhes.numel():.1f}\n")
    highest = set(gwhes.flatten().topk(LAZIEST).indices.tolist())
    for kind in RATES:
        laziest = deltas[kind, "grpo"].flatten().topk(LAZIEST, largest=False).indices.tolist()
        print_row(kind, [str(len(highest & set(laziest)))], 4)


def plot(deltas: dict[tuple[str, str], Tensor], path: Path):
    """What the methods add to grpo's Delta, by optimiser."""
    finding = (
        "NTHR lifts right answers more than GRPO.\n"
        "With equal steps, choosing tokens at random does as well."
    )
    figure = make_figure(finding, 2.8)
    names = [name for name in METHODS if name not in ("grpo", "nthr, self term")]
    for axis, kind in zip(figure.subplots(1, len(RATES), sharey=True), RATES, strict=True):
        grpo = deltas[kind, "grpo"]
        gains = {name: (deltas[kind, name] - grpo).mean(1).tolist() for name in names}
        draw_differences(axis, gains)
        axis.set_title(kind)
        axis.locator_params(axis="x", nbins=4)
        axis.set_xlabel("gain of right answers over GRPO (nats)", fontsize=8)
    figure.savefig(path)


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    deltas, gwhes = study()
    show(deltas)
    show_laziest(deltas, gwhes)
    save_picture(plot, deltas, path=path)


if __name__ == "__main__":
    main()
