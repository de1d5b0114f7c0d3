"""IBPO, which learns from corrections where all answers are wrong: when does it pay?

    python -m toy.ibpo                        the table
    python -m toy.ibpo --plot toy/ibpo.png    and the picture (needs matplotlib)

A word of K letters is decoded. Each letter has a digit, which is secret, and one slip spoils the
answer. The policy is a table: the chance of each digit, given the letter. So the chance of a right
answer is known exactly; at the start it is 0.63^K. It is trained by SGD, through losses.py.

The policy corrects each wrong answer of its own beside one sibling, a right one if there is one. It
draws every digit from its table once more, but with 6 times the odds for each of the two answers
that shows the digit. If that is right, the answer is repaired, and losses.ibpo says which of its
tokens get credit. NEIGHBOURS.md says what came out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from losses import Batch, OldPolicy, group_advantages, grpo, ibpo, shaped_rewards
from toy.figure import (
    format_interval,
    interval,
    line_style,
    make_figure,
    parse_plot,
    print_table,
    save,
)

LETTERS, DIGITS, PROMPTS, G = 26, 10, 4, 8
LETTER = torch.arange(LETTERS)
DIGIT = LETTER % DIGITS  # of each letter
RIGHT = 0.63  # chance of the right digit at the start
ODDS = 6  # a correction multiplies a digit's odds by it for each answer that shows it
GOAL = 0.5  # chance of a right answer, to be reached
LENGTHS = (4, 8, 12, 16, 20)  # K, of a word
RATES = (400, 800, 1600, 3200)  # at 800 one right answer settles its letters
LIMIT = 1_000_000  # tokens after which a run is stopped
SEEDS, TUNING_SEEDS = range(24), range(100, 108)


class Method(NamedTuple):
    """A row of the table."""

    corrects: bool
    temperature: float = 1.0  # of answers and corrections


METHODS = {
    "grpo": Method(False),
    "ibpo": Method(True),
    "grpo at 0.7": Method(False, 0.7),
    "ibpo at 0.7": Method(True, 0.7),
}


def start_table() -> Tensor:
    """Logits of every digit for every letter. (LETTERS, DIGITS)."""
    odds = RIGHT / (1 - RIGHT) * (DIGITS - 1)
    return (math.log(odds) * one_hot(DIGIT, DIGITS).double()).requires_grad_()


def draw(logits: Tensor, gen) -> Tensor:
    """A digit for each place. (N, K, DIGITS) -> (N, K)."""
    chances = logits.softmax(2).flatten(0, 1)
    return torch.multinomial(chances, 1, generator=gen).view(logits.shape[:2])


def pick_siblings(words: Tensor, answers: Tensor) -> Tensor:
    """The answer beside which each is corrected: a right one if its group has one, or the next.

    (N, K), (N, K) -> (N, K).
    """
    right, groups = DIGIT[words], answers.view(-1, G, answers.shape[1])
    solved = (answers == right).all(1).view(-1, G).any(1).repeat_interleave(G)
    return torch.where(solved[:, None], right, groups.roll(-1, 1).flatten(0, 1))


def sample(table: Tensor, groups: int, K: int, method: Method, gen) -> tuple[Tensor, ...]:
    """Words, G answers to each, and corrections; without them the answers again. (N, K) each."""
    words = torch.randint(LETTERS, (groups, K), generator=gen).repeat_interleave(G, 0)
    logits = table.detach()[words]  # (N, K, DIGITS)
    answers = draw(logits / method.temperature, gen)
    shown = one_hot(answers, DIGITS) + one_hot(pick_siblings(words, answers), DIGITS)
    fixed = draw((logits + math.log(ODDS) * shown) / method.temperature, gen)
    return words, answers, fixed if method.corrects else answers


def loss(logits: Tensor, words: Tensor, answers: Tensor, fixed: Tensor) -> Tensor:
    """IBPO's loss; that of GRPO where corrections change nothing."""
    mask = torch.ones_like(words, dtype=torch.bool)
    wrong = (answers != DIGIT[words]).any(1)
    repaired = wrong & (fixed == DIGIT[words]).all(1)
    rewards = (~wrong).double()
    A = group_advantages(shaped_rewards(rewards, repaired), G)
    logp = logits.log_softmax(1)[words, answers]
    old = OldPolicy(answers, mask, logp.detach(), rewards, G, repaired=repaired)
    old.kept_mask = answers == fixed  # place by place: each stands for one letter
    adv = ibpo(A[:, None].expand(mask.shape), old)
    return grpo(Batch(logp, logp.detach(), adv, mask, G, words.shape[1]))


def tokens_to_goal(method: Method, K: int, rate: float, seed: int) -> int:
    """Tokens generated until the chance of a right answer, at temperature 1, is GOAL."""
    table = start_table()
    gen = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD([table], lr=rate)
    tokens = 0
    while table.detach().softmax(1)[LETTER, DIGIT].mean() ** K < GOAL and tokens < LIMIT:
        words, answers, fixed = sample(table, PROMPTS, K, method, gen)
        optimizer.zero_grad()
        loss(table / method.temperature, words, answers, fixed).backward()
        optimizer.step()
        tokens += answers.numel()
        if method.corrects:
            tokens += K * int((answers != DIGIT[words]).any(1).sum())
    return tokens


def measure_cost(method: Method, K: int) -> list[float]:
    """Thousands of tokens to GOAL for each seed, at the rate that is best on other seeds."""

    def run(rate: float, seeds: range) -> list[float]:
        return [tokens_to_goal(method, K, rate, seed) / 1000 for seed in seeds]

    return run(min(RATES, key=lambda rate: sum(run(rate, TUNING_SEEDS))), SEEDS)


def plot(costs: dict[str, list[list[float]]]):
    figure = make_figure(
        "IBPO costs less than GRPO where right answers are rare. A lower temperature saves more.",
        3.8,
    )
    axis = figure.subplots()
    for name, columns in costs.items():
        means, halves = zip(*map(interval, columns), strict=True)
        style = line_style(name) | {"linestyle": "--" if "0.7" in name else "-"}
        axis.errorbar(LENGTHS, means, halves, label=name, **style)
    axis.set(yscale="log", xticks=LENGTHS, xlabel="K, letters of a word")
    axis.set_ylabel(f"thousands of tokens to a reward of {GOAL}")
    axis.legend(title="method, temperature")
    return figure


def main():
    path = parse_plot(__doc__)
    torch.set_num_threads(1)
    costs = {name: [measure_cost(method, K) for K in LENGTHS] for name, method in METHODS.items()}
    print(f"thousands of tokens to a reward of {GOAL}, corrections included: mean of {len(SEEDS)}")
    print("seeds +- half the 95 % interval\n")
    rows = {name: [format_interval(v, ".2f") for v in values] for name, values in costs.items()}
    print_table(rows, [f"K = {K}" for K in LENGTHS])
    if path:
        save(plot(costs), path)


if __name__ == "__main__":
    main()
