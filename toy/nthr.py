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
from dataclasses import replace

import torch
from torch import Tensor

from llm.neighbours import hidden_states, nthr_scores
from toy.arithmetic import Arithmetic
from toy.figure import draw_differences, format_interval, make_figure, parse_plot, print_table, save
from train import (
    Answers,
    Config,
    Policy,
    adamw,
    bind,
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
LAZIEST = 10  # questions


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


def make_optimizer(policy: Policy, kind: str, lr: float) -> torch.optim.Optimizer:
    """One without a history."""
    if kind == "SGD":
        return torch.optim.SGD(policy.model.parameters(), lr=lr)
    return adamw(policy.model, lr)


def measure_delta(policy: Policy, answers: Answers, name: str, kind: str) -> float:
    """Delta of one step from `policy`, which stays as it is. In nats."""
    config = Config(lr=RATES[kind], minibatches=1, schedule="constant")
    trial = replace(policy, model=copy.deepcopy(policy.model))
    scored = score(trial, answers, METHODS[name], config, reference=None)
    learn(trial, make_optimizer(trial, kind, config.lr), scored, METHODS[name], config)
    after, _ = log_probs_in_pieces(trial, answers, config)
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
        logp=log_probs_in_pieces(policy, answers, config)[0],
        rewards=answers.rewards,
        hidden=hidden_states(policy, answers, config),
        head=policy.model.get_output_embeddings().weight.detach(),
        group_size=len(answers.rewards),
        full_vocab=True,
    )
    right, p = answers.rewards == 1, answers.rewards.mean()
    total = p * scores[~right].sum() - (1 - p) * scores[right].sum()
    return float(total / (p * (1 - p)).sqrt() / right.sum())


def study(starts: int = STARTS) -> tuple[dict[tuple[str, str], Tensor], Tensor]:
    """(optimiser, method) -> Delta of every question; and its GWHES. (starts, QUESTIONS) each."""
    deltas = {(kind, name): torch.zeros(starts, QUESTIONS) for kind in RATES for name in METHODS}
    gwhes = torch.zeros(starts, QUESTIONS)
    for seed in range(starts):
        policy, task = make_start(seed, direct=0)
        for k, answers in enumerate(find_questions(policy, task, seed)):
            gwhes[seed, k] = measure_gwhes(policy, answers)
            for (kind, name), table in deltas.items():
                table[seed, k] = measure_delta(policy, answers, name, kind)
    return deltas, gwhes


def show(deltas: dict[tuple[str, str], Tensor], gwhes: Tensor):
    print(f"{STARTS} starts x {QUESTIONS} questions; mean +- half its 95 % interval of the starts")
    for kind, lr in RATES.items():
        rows = {}
        for name in METHODS:
            delta = deltas[kind, name]
            gain, more = delta - deltas[kind, "grpo"], delta - deltas[kind, "random"]
            starts = [values.mean(1).tolist() for values in (delta, gain, more)]
            rows[name] = [format_interval(values, "+.3f") for values in starts]
            rows[name].append(f"{(gain > 1e-5).float().mean():.0%}")  # by more than rounding
        print(f"\n{kind} {lr:g}")
        print_table(rows, ["Delta", "minus grpo's", "minus random's", "questions above grpo"])
        # Does (II) - (I), known before the step, find the questions that gain least?
        laziest = (-deltas[kind, "grpo"]).flatten().topk(LAZIEST).indices.tolist()
        both = len({*gwhes.flatten().topk(LAZIEST).indices.tolist()} & {*laziest})
        print(
            f"of the {LAZIEST} laziest questions of grpo among the {LAZIEST} of highest GWHES:",
            both,
        )


def plot(deltas: dict[tuple[str, str], Tensor]):
    """Differences of Delta, paired, by optimiser."""
    figure = make_figure(
        "With AdamW, pos-only, which ignores wrong answers, lifts right ones most. NTHR and\n"
        "random tokens follow, alike. NTHR beats them only with SGD, where steps differ in length.",
        3.4,
        "One step on a question's 8 answers. nthr: some tokens of wrong answers are blamed less. "
        "random: as many, drawn at random.\nThe policy was trained on worked solutions only. "
        "Paired differences: means and 95 % intervals of 6 starts.",
    )
    titles = ("SGD: a step is as long as its gradient", "AdamW: all steps are about equally long")
    pairs = (("pos-only", "grpo"), ("nthr", "grpo"), ("random", "grpo"), ("nthr", "random"))
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, kind, title in zip(axes, RATES, titles, strict=True):
        shown = {
            f"{name}\nminus {other}": (deltas[kind, name] - deltas[kind, other]).mean(1).tolist()
            for name, other in pairs
        }
        draw_differences(axis, shown)
        axis.set_title(title)
        axis.set_xlabel("how much more right answers gain (log pi, nats)")
    return figure


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    deltas, gwhes = study()
    show(deltas, gwhes)
    if path:
        save(plot(deltas), path)


if __name__ == "__main__":
    main()
