"""IBPO on groups in which all answers are wrong: what corrections teach, and when they pay.

    python -m toy.ibpo                        the tables
    python -m toy.ibpo --plot toy/ibpo.png    and the picture (needs matplotlib)

A word of K letters is decoded. Each letter has a digit, which is secret, and one slip spoils the
answer. The policy is a table: the chance of each digit, given the letter. So the chance of a right
answer is known exactly; at the start it is 0.63^K. It is trained by SGD, through losses.py.

The policy corrects each wrong answer of its own beside siblings, right ones first. It draws every
digit from its table once more, but with 6 times the odds for each of the answers that shows the
digit. If that is right, the answer is repaired. The readings of losses.ibpo say
which of its tokens get credit. toy/README.md says what came out.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from losses import Batch, OldPolicy, group_advantages, grpo, ibpo, shaped_rewards
from toy.figure import (
    draw_lines,
    format_interval,
    interval,
    make_figure,
    parse_plot,
    print_row,
    save_picture,
)

LETTERS, DIGITS, PROMPTS, G = 26, 10, 4, 8
LETTER = torch.arange(LETTERS)
DIGIT = LETTER % DIGITS  # of each letter
RIGHT = 0.63  # chance of the right digit at the start
GOAL = 0.5  # chance of a right answer, to be reached
STEP_LENGTH, STEP_GROUPS, STEP_RATE = 8, 32, 50  # of the single step; its length is K
LENGTHS = (4, 8, 12, 16, 20)  # K of the second table
RATES = (400, 800, 1600, 3200)  # at 800 one right answer settles its letters
LIMIT = 1_000_000  # tokens after which a run is stopped
START_GROUPS = 2000  # of the third table
SEEDS, TUNING_SEEDS = range(24), range(100, 108)


class Method(NamedTuple):
    """A row of the second table."""

    reading: str  # of losses.ibpo; "grpo" takes no corrections
    temperature: float = 1.0  # of answers and corrections
    siblings: int = 1  # shown beside an answer that is corrected, right ones first
    odds: int = 6  # a correction multiplies a digit's odds by it for each answer that shows it


METHODS = {
    "grpo": Method("grpo"),
    "ibpo": Method("sign"),
    "ibpo, 3 siblings": Method("sign", siblings=3),
    "ibpo, 7 siblings": Method("sign", siblings=7),
    "ibpo, 7, odds 2": Method("sign", siblings=7, odds=2),
    "grpo at 0.7": Method("grpo", temperature=0.7),
    "ibpo at 0.7": Method("sign", temperature=0.7),
}
LINES = ("grpo", "ibpo", "ibpo, 3 siblings", "grpo at 0.7")  # of the picture


def start_table() -> Tensor:
    """Logits of every digit for every letter. (LETTERS, DIGITS)."""
    odds = RIGHT / (1 - RIGHT) * (DIGITS - 1)
    return (math.log(odds) * one_hot(DIGIT, DIGITS).double()).requires_grad_()


def draw(logits: Tensor, gen) -> Tensor:
    """A digit for each place. (N, K, DIGITS) -> (N, K)."""
    chances = logits.softmax(2).flatten(0, 1)
    return torch.multinomial(chances, 1, generator=gen).view(logits.shape[:2])


def first_siblings(right: Tensor, count: int) -> Tensor:
    """Of each answer, `count` others in its group, right ones first. (N,) -> (N, count)."""
    turn = (torch.arange(G)[:, None] + torch.arange(1, G + 1)) % G  # (G, G): itself is last
    order = right.view(-1, G)[:, turn].long().argsort(dim=2, descending=True, stable=True)
    first = turn.expand_as(order).gather(2, order)[:, :, :count]  # (N / G, G, count)
    return (first + G * torch.arange(len(first))[:, None, None]).flatten(0, 1)


def sample(table: Tensor, groups: int, K: int, method: Method, gen) -> tuple[Tensor, ...]:
    """Words, G answers to each, and a correction of every answer. (N, K) each."""
    words = torch.randint(LETTERS, (groups, K), generator=gen).repeat_interleave(G, 0)
    logits = table.detach()[words]  # (N, K, DIGITS)
    answers = draw(logits / method.temperature, gen)
    digits = one_hot(answers, DIGITS)  # (N, K, DIGITS)
    siblings = first_siblings((answers == DIGIT[words]).all(1), method.siblings)
    shown = digits + digits[siblings].sum(1)
    fixed = draw((logits + math.log(method.odds) * shown) / method.temperature, gen)
    return words, answers, fixed


def grade(words: Tensor, answers: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards, and which answers are wrong while their correction is right. (N,) both."""
    rewards = (answers == DIGIT[words]).all(1).double()
    return rewards, (rewards == 0) & (fixed == DIGIT[words]).all(1)


def loss(logits: Tensor, words: Tensor, answers: Tensor, fixed: Tensor, reading: str) -> Tensor:
    """GRPO's loss, with the rewards and the credit of a reading; "grpo" takes no corrections."""
    mask = torch.ones_like(words, dtype=torch.bool)
    rewards, repaired = grade(words, answers, fixed)
    repaired &= reading != "grpo"
    A = group_advantages(shaped_rewards(rewards, repaired), G)
    adv = A[:, None].expand(mask.shape)
    logp = logits.log_softmax(1)[words, answers]
    if reading != "grpo":
        old = OldPolicy(answers, mask, logp.detach(), rewards, G, repaired=repaired)
        old.kept_mask = answers == fixed  # place by place: each stands for one letter
        adv = ibpo(adv, old, reading)
    return grpo(Batch(logp, logp.detach(), adv, mask, G, words.shape[1]))


def one_step(reading: str, seed: int) -> tuple[float, float]:
    """How much log pi moves: of the right answer to a word (mean of all), of a repaired slip."""
    table = start_table()
    gen = torch.Generator().manual_seed(seed)
    words, answers, fixed = sample(table, 2 * STEP_GROUPS, STEP_LENGTH, Method(reading), gen)
    all_wrong = (answers != DIGIT[words]).any(1).view(-1, G).all(1).repeat_interleave(G)  # (N,)
    words, answers, fixed = (x[all_wrong][: STEP_GROUPS * G] for x in (words, answers, fixed))
    before = table.detach().log_softmax(1)
    loss(table, words, answers, fixed, reading).backward()
    torch.optim.SGD([table], lr=STEP_RATE).step()
    moved = table.detach().log_softmax(1) - before  # (LETTERS, DIGITS)
    slips = (answers != DIGIT[words]) & (fixed == DIGIT[words]).all(1, keepdim=True)
    moved_right = moved[LETTER, DIGIT].mean() * STEP_LENGTH
    return float(moved_right), float(moved[words[slips], answers[slips]].mean())


def tokens_to_goal(method: Method, K: int, rate: float, seed: int) -> int:
    """Tokens generated until the chance of a right answer, at temperature 1, is GOAL."""
    table = start_table()
    gen = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD([table], lr=rate)
    tokens = 0
    while table.detach().softmax(1)[LETTER, DIGIT].mean() ** K < GOAL and tokens < LIMIT:
        words, answers, fixed = sample(table, PROMPTS, K, method, gen)
        optimizer.zero_grad()
        loss(table / method.temperature, words, answers, fixed, method.reading).backward()
        optimizer.step()
        tokens += answers.numel()
        if method.reading != "grpo":
            tokens += K * int((answers != DIGIT[words]).any(1).sum())
    return tokens


def measure_cost(method: Method, K: int) -> list[float]:
    """Thousands of tokens to GOAL for each seed, at the rate that is best on other seeds."""

    def run(rate: float, seeds: range) -> list[float]:
        return [tokens_to_goal(method, K, rate, seed) / 1000 for seed in seeds]

    return run(min(RATES, key=lambda rate: sum(run(rate, TUNING_SEEDS))), SEEDS)


def measure_start(method: Method, K: int) -> tuple[float, float]:
    """Before training: the share of wrong answers that are repaired, and that of groups whose
    shaped rewards are all equal."""
    gen = torch.Generator().manual_seed(0)
    rewards, repaired = grade(*sample(start_table(), START_GROUPS, K, method, gen))
    shaped = shaped_rewards(rewards, repaired).view(-1, G)
    equal = (shaped == shaped[:, :1]).all(1)
    return float(repaired.sum() / (rewards == 0).sum()), float(equal.double().mean())


def plot(steps: dict, costs: dict, path: Path):
    """Two panels: the single step, and tokens against K."""
    figure = make_figure(
        "IBPO pays where right answers are rare. A lower temperature pays more.", 3.4
    )
    left, right = figure.subplots(1, 2)
    for i, label in enumerate(("right answers", "mistakes of repaired answers")):
        means, halves = zip(*(interval(cells[i]) for cells in steps.values()), strict=True)
        places = [place + 0.4 * i for place in range(len(steps))]
        left.bar(places, means, 0.4, yerr=halves, color=("#009E73", "#E69F00")[i], label=label)
    names = [name if name == "grpo" else f"ibpo,\n{name}" for name in steps]
    left.set_xticks([place + 0.2 for place in range(len(steps))], names)
    left.axhline(0, color="black", linewidth=0.8)
    left.set_title("one step where all answers are wrong")
    left.set_ylabel("change of log pi")
    left.legend()
    right.set(yscale="log", xticks=LENGTHS, xlabel="K, letters of a word")
    right.set_title(f"thousands of tokens to a reward of {GOAL}")
    intervals = {name: [interval(values) for values in costs[name]] for name in LINES}
    means, halves = ({name: [x[i] for x in intervals[name]] for name in LINES} for i in (0, 1))
    draw_lines(right, means, LENGTHS, halves)
    figure.savefig(path)


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    print(f"mean of {len(SEEDS)} seeds +- half the 95 % interval\n")
    print(f"one step on {STEP_GROUPS} all-wrong groups, K = {STEP_LENGTH}: change of log pi")
    print("of right answers and of repaired slips\n")
    steps = {}
    for reading in ("grpo", "sign", "none", "changed"):
        steps[reading] = [*zip(*(one_step(reading, seed) for seed in SEEDS), strict=True)]
        print_row(reading, [format_interval(values, ".2f") for values in steps[reading]])
    print(f"\nthousands of tokens to a reward of {GOAL}, corrections included, for K = {LENGTHS}\n")
    costs = {}
    for name, method in METHODS.items():
        costs[name] = [measure_cost(method, K) for K in LENGTHS]
        print_row(name, [format_interval(values, ".2f") for values in costs[name]])
    print("\nbefore training: the share of wrong answers that are repaired, and of groups whose")
    print("shaped rewards are all equal\n")
    for name, method in METHODS.items():
        if method.reading != "grpo":
            shares = [measure_start(method, K) for K in LENGTHS]
            print_row(name, [f"{repaired:.3f}, {equal:.3f}" for repaired, equal in shares])
    save_picture(plot, steps, costs, path=path)


if __name__ == "__main__":
    main()
