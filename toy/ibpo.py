"""IBPO, which learns from corrections where all answers are wrong: when does it pay?

    python -m toy.ibpo                        the table
    python -m toy.ibpo --plot toy/ibpo.png    and the picture (needs matplotlib)

A word of K letters is decoded. Each letter has a digit, which is secret, and one slip spoils the
answer. The policy is a table: the chance of each digit, given the letter. So the chance of a right
answer is known exactly; at the start it is 0.63^K. It is trained by SGD, through losses.py.

The policy corrects each wrong answer of its own beside siblings, right ones first. It draws every
digit from its table once more, but with 6 times the odds for each of the answers that shows the
digit. If that is right, the answer is repaired, and losses.ibpo says which of its tokens get
credit. toy/README.md says what came out.
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
    """A row of the tables."""

    corrects: bool
    temperature: float = 1.0  # of answers and corrections
    siblings: int = 1  # shown beside an answer that is corrected, right ones first


METHODS = {
    "grpo": Method(False),
    "ibpo": Method(True),
    "ibpo, 3 siblings": Method(True, siblings=3),
    "ibpo, 7 siblings": Method(True, siblings=7),
    "grpo at 0.7": Method(False, temperature=0.7),
    "ibpo at 0.7": Method(True, temperature=0.7),
}
LINES = ("grpo", "ibpo", "ibpo at 0.7", "grpo at 0.7")  # of the picture


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
    """Words, G answers to each, and corrections; without them the answers again. (N, K) each."""
    words = torch.randint(LETTERS, (groups, K), generator=gen).repeat_interleave(G, 0)
    logits = table.detach()[words]  # (N, K, DIGITS)
    answers = draw(logits / method.temperature, gen)
    digits = one_hot(answers, DIGITS)  # (N, K, DIGITS)
    siblings = first_siblings((answers == DIGIT[words]).all(1), method.siblings)
    shown = digits + digits[siblings].sum(1)
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
    """Tokens against K."""
    figure = make_figure(
        "IBPO costs less than GRPO where right answers are rare. A lower temperature saves more:\n"
        "from K = 8 on, GRPO at temperature 0.7 costs least.",
        4.0,
        "A word of K letters is decoded with a secret table, a digit for each letter; one slip "
        "spoils it. At the start an answer is right with\nchance 0.63^K. The right digit is the "
        "likeliest one from the start, so a low temperature helps. ibpo corrects wrong answers, "
        "each\nbeside one other answer to the word. The tokens of corrections count. 0.5: the "
        "chance of a right answer at temperature 1.\n"
        "Means and 95 % intervals of 24 seeds, each method at its best learning rate.",
    )
    axis = figure.subplots()
    axis.set(yscale="log", xticks=LENGTHS, xlabel="K, letters of a word")
    axis.set_ylabel(f"cost: thousands of tokens\nto a reward of {GOAL}")
    for name in LINES:
        columns = [interval(values) for values in costs[name]]
        style = line_style(name) | {"linestyle": "--" if "0.7" in name else "-"}
        label = name.replace("at", "at temperature")
        axis.errorbar(LENGTHS, *zip(*columns, strict=True), label=label, **style)
    axis.legend()
    return figure


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
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
