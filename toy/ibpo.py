"""IBPO on groups in which all answers are wrong: what corrections teach, and when they pay.

    python -m toy.ibpo                        the tables
    python -m toy.ibpo --plot toy/ibpo.png    and the picture (needs matplotlib)

A word of K letters is decoded. Each letter has a digit, which is secret, and one slip spoils the
answer. The policy is a table: the chance of each digit, given the letter. So the chance of a right
answer is known exactly; at the start it is 0.63^K. It is trained by SGD, through losses.py.

The policy corrects each wrong answer of its own beside a sibling, a right one where there is one.
It draws every digit from its table once more, but with 6 times the odds for each of the two answers
that shows the digit. If that is right, the answer is repaired. The readings of losses.ibpo say
which of its tokens get credit. toy/README.md says what came out.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from losses import Batch, OldPolicy, group_advantages, grpo, ibpo, shaped_rewards
from toy.figure import interval, make_figure, parse_plot, save_picture

LETTERS, DIGITS, PROMPTS, G = 26, 10, 4, 8
LETTER = torch.arange(LETTERS)
DIGIT = LETTER % DIGITS  # of each letter
RIGHT = 0.63  # chance of the right digit at the start
GOAL = 0.5  # chance of a right answer, to be reached
SHOWN = 6  # what a correction multiplies the odds by, for each answer with that digit
STEP_LENGTH, STEP_GROUPS, STEP_RATE = 8, 32, 50  # of the single step; its length is K
LENGTHS = (4, 8, 12, 16, 20)  # K of the second table
RATES = (400, 800, 1600, 3200)  # at 800 one right answer settles its letters
LIMIT = 1_000_000  # tokens after which a run is stopped
SEEDS, TUNING_SEEDS = range(24), range(100, 108)
CURVES = {  # name: a reading, the temperature of the samples, matplotlib's style
    "grpo": ("grpo", 1.0, dict(color="#000000")),
    "ibpo": ("sign", 1.0, dict(color="#0072B2")),
    "grpo at 0.7": ("grpo", 0.7, dict(color="#000000", linestyle="--", marker="s")),
    "ibpo at 0.7": ("sign", 0.7, dict(color="#0072B2", linestyle="--", marker="s")),
}


def start_table() -> Tensor:
    """Logits of every digit for every letter. (LETTERS, DIGITS)."""
    odds = RIGHT / (1 - RIGHT) * (DIGITS - 1)
    return (math.log(odds) * one_hot(DIGIT, DIGITS).double()).requires_grad_()


def draw(logits: Tensor, gen) -> Tensor:
    """A digit for each place. (N, K, DIGITS) -> (N, K)."""
    chances = logits.softmax(2).flatten(0, 1)
    return torch.multinomial(chances, 1, generator=gen).view(logits.shape[:2])


def sample(table: Tensor, groups: int, K: int, temperature: float, gen) -> tuple[Tensor, ...]:
    """Words, G answers to each, and a correction of every answer. (N, K) each."""
    words = torch.randint(LETTERS, (groups, K), generator=gen).repeat_interleave(G, 0)
    logits = table.detach()[words]  # (N, K, DIGITS)
    answers = draw(logits / temperature, gen)
    solved = (answers == DIGIT[words]).all(1).view(-1, G).any(1).repeat_interleave(G)  # (N,)
    neighbours = answers.view(-1, G, K).roll(-1, 1).view_as(answers)
    siblings = torch.where(solved[:, None], DIGIT[words], neighbours)
    shown = one_hot(answers, DIGITS) + one_hot(siblings, DIGITS)  # (N, K, DIGITS)
    fixed = draw((logits + math.log(SHOWN) * shown) / temperature, gen)
    return words, answers, fixed


def loss(logits: Tensor, words: Tensor, answers: Tensor, fixed: Tensor, reading: str) -> Tensor:
    """GRPO's loss, with the rewards and the credit of a reading; "grpo" takes no corrections."""
    right = DIGIT[words]
    mask = torch.ones_like(words, dtype=torch.bool)
    rewards = (answers == right).all(1).double()
    repaired = (rewards == 0) & (fixed == right).all(1) & (reading != "grpo")
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
    words, answers, fixed = sample(table, 2 * STEP_GROUPS, STEP_LENGTH, 1.0, gen)
    all_wrong = (answers != DIGIT[words]).any(1).view(-1, G).all(1).repeat_interleave(G)  # (N,)
    words, answers, fixed = (x[all_wrong][: STEP_GROUPS * G] for x in (words, answers, fixed))
    before = table.detach().log_softmax(1)
    loss(table, words, answers, fixed, reading).backward()
    torch.optim.SGD([table], lr=STEP_RATE).step()
    moved = table.detach().log_softmax(1) - before  # (LETTERS, DIGITS)
    slips = (answers != DIGIT[words]) & (fixed == DIGIT[words]).all(1, keepdim=True)
    moved_right = moved[LETTER, DIGIT].mean() * STEP_LENGTH
    return float(moved_right), float(moved[words[slips], answers[slips]].mean())


def tokens_to_goal(reading: str, K: int, temperature: float, rate: float, seed: int) -> int:
    """Tokens generated until the chance of a right answer, at temperature 1, is GOAL."""
    table = start_table()
    gen = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD([table], lr=rate)
    tokens = 0
    while table.detach().softmax(1)[LETTER, DIGIT].mean() ** K < GOAL and tokens < LIMIT:
        words, answers, fixed = sample(table, PROMPTS, K, temperature, gen)
        optimizer.zero_grad()
        loss(table / temperature, words, answers, fixed, reading).backward()
        optimizer.step()
        tokens += answers.numel()
        if reading != "grpo":
            tokens += K * int((answers != DIGIT[words]).any(1).sum())
    return tokens


def measure_cost(reading: str, K: int, temperature: float) -> list[float]:
    """Thousands of tokens to GOAL for each seed, at the rate that is best on other seeds."""

    def run(rate: float, seeds: range) -> list[float]:
        return [tokens_to_goal(reading, K, temperature, rate, seed) / 1000 for seed in seeds]

    return run(min(RATES, key=lambda rate: sum(run(rate, TUNING_SEEDS))), SEEDS)


def plot(steps: dict, costs: dict, path: Path):
    """Two panels: the single step, and tokens against K."""
    figure = make_figure(
        "IBPO pays where right answers are rare. A lower temperature pays more.", 3.4
    )
    left, right = figure.subplots(1, 2)
    for i, label in enumerate(("right answers", "mistakes of repaired answers")):
        means, halves = zip(*(cells[i] for cells in steps.values()), strict=True)
        places = [place + 0.4 * i for place in range(len(steps))]
        left.bar(places, means, 0.4, yerr=halves, color=("#009E73", "#E69F00")[i], label=label)
    names = [name if name == "grpo" else f"ibpo,\n{name}" for name in steps]
    left.set_xticks([place + 0.2 for place in range(len(steps))], names)
    left.axhline(0, color="black", linewidth=0.8)
    left.set_title("one step where all answers are wrong")
    left.set_ylabel("change of log pi")
    left.legend()
    for name, cells in costs.items():
        means, halves = zip(*cells, strict=True)
        style = dict(marker="o") | CURVES[name][2]
        right.errorbar(LENGTHS, means, halves, **style)
        side = "top" if CURVES[name][0] == "grpo" else "bottom"
        right.annotate(name, (LENGTHS[-1] + 0.6, means[-1]), va=side, color=style["color"])
    right.set(yscale="log", xticks=LENGTHS, xlabel="K, letters of a word")
    right.set_title(f"thousands of tokens to a reward of {GOAL}")
    figure.savefig(path)


def show(name: str, cells: list[tuple[float, float]]):
    print(f"{name:12}" + "".join(f"{mean:9.2f} +- {half:.2f}" for mean, half in cells), flush=True)


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    print(f"mean of {len(SEEDS)} seeds +- half the 95 % interval\n")
    print(f"one step on {STEP_GROUPS} all-wrong groups, K = {STEP_LENGTH}: change of log pi")
    print("of right answers and of repaired slips\n")
    steps = {}
    for reading in ("grpo", "sign", "none", "changed"):
        moved = [one_step(reading, seed) for seed in SEEDS]
        steps[reading] = [interval(values) for values in zip(*moved, strict=True)]
        show(reading, steps[reading])
    print(f"\nthousands of tokens to a reward of {GOAL}, corrections included, for K = {LENGTHS}\n")
    costs = {}
    for name, (reading, temperature, _) in CURVES.items():
        costs[name] = [interval(measure_cost(reading, K, temperature)) for K in LENGTHS]
        show(name, costs[name])
    save_picture(plot, steps, costs, path=path)


if __name__ == "__main__":
    main()
