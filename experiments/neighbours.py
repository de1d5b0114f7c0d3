"""Three neighbouring papers, a figure of each in miniature. README.md says what came out.

    python -m experiments.neighbours nthr     does a step make right answers more likely?
    python -m experiments.neighbours lopti    whose gradient is it, and does the order help?
    python -m experiments.neighbours ibpo     when does it pay to learn from corrections?

Each takes less than a minute. For nthr and lopti the policy is the small GPT-2 of train.py after a
short warm start. All steps begin with the same policy, and their optimisers have no history. ibpo
has a world of its own, which is described below. Intervals are 95 %, over start policies or seeds.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pandas as pd
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import one_hot

import losses
import train
from losses import METHODS, Batch, Method, OldPolicy, group_advantages, token_grpo
from toy.arithmetic import Arithmetic
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
    train.warm_start(policy, task, METHODS["grpo"], config)
    return policy, task


def step(policy, task, answers, method: Method, config, number: int = 1) -> tuple[Tensor, float]:
    """A step of train.py on a copy of the policy, by AdamW without a history.

    Returns how far the tokens' log pi moves, (N, T), and the norm of the first gradient. number: of
    the random draws of a credit rule.
    """
    trial = replace(policy, model=copy.deepcopy(policy.model))
    train.assess(policy, None, answers, method, config)
    if method.credit:
        train.reshape_credit(policy, task, answers, method, number, config)
    optimizer = train.adamw(trial.model, config.lr)
    updates = train.learn(trial, optimizer, answers, method, 1, config)
    with torch.no_grad():
        before, after = (train.log_probs(x, answers, config.temperature) for x in (policy, trial))
    return after - before, updates[0]["grad_norm"]


# ---------------- NTHR, Fig. 1 and 4

# grpo stands for NTHR's loss with nothing softened.
SOFTENED = {
    "grpo": Method((losses.nthr_grpo,)),
    "nthr": METHODS["nthr"],
    "random": METHODS["nthr-random"],
    "pos-only": METHODS["pos-only"],
}


def find_questions(policy, task: Arithmetic, config) -> Iterator:
    """The unseen questions that get right and wrong answers: their numbers and answers."""
    for number, item in enumerate(task.test):
        answers = train.sample(policy, task, [item], number, config)
        if 0 < answers.rewards.mean() < 1:
            yield number, answers


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
        for number, answers in islice(find_questions(policy, task, config), QUESTIONS):
            row = {"start": seed}
            for name, method in SOFTENED.items():
                moved, _ = step(policy, task, answers, method, config, number)
                row[name] = moved.sum(1)[answers.rewards == 1].mean().item()
            rows.append(row)
    return pd.DataFrame(rows).groupby("start").mean()


def nthr():
    deltas = measure_deltas()
    for other in ("grpo", "random"):
        gaps = deltas.sub(deltas[other], axis="index")
        print(f"\nDelta minus {other}'s, {STARTS} starts")
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


# ---------------- IBPO
#
# A word of K letters is decoded. Each letter has a digit, which is secret, and one slip spoils the
# answer. The policy is a table: the probability of each digit, given the letter. So the probability
# of a right answer is known exactly; at the start it is 0.63^K. It is trained by SGD, through
# losses.py.
#
# The policy corrects each wrong answer of its own beside one sibling, a right one if there is one.
# It draws every digit from its table once more, but with 6 times the odds for each of the two
# answers that shows the digit. If that is right, the answer is repaired, and losses.ibpo says which
# of its tokens get credit.

LETTERS, DIGITS, PROMPTS, G = 26, 10, 4, 8
DIGIT = torch.arange(LETTERS) % DIGITS  # of each letter
RIGHT = 0.63  # probability of the right digit at the start
ODDS = 6  # a correction multiplies a digit's odds by it for each answer that shows it
GOAL = 0.5  # probability of a right answer, to be reached
LENGTHS = (4, 8, 12, 16, 20)  # K, of a word
RATES = (400, 800, 1600, 3200)  # at 800 one right answer settles its letters
LIMIT = 1_000_000  # tokens after which a run is stopped
SEEDS, TUNING_SEEDS = range(24), range(100, 108)
# Whether wrong answers are corrected, and the temperature of answers.
SETTINGS = {"grpo": (False, 1.0), "ibpo": (True, 1.0), "grpo at 0.7": (False, 0.7)}


def pick_siblings(right: Tensor, answers: Tensor) -> Tensor:
    """The answer beside which each is corrected: a right one if its group has one, or the next.

    (N, K), (N, K) -> (N, K).
    """
    solved = (answers == right).all(1).view(-1, G).any(1).repeat_interleave(G)
    groups = answers.view(-1, G, answers.shape[1])
    return torch.where(solved[:, None], right, groups.roll(-1, 1).flatten(0, 1))


def word_loss(logits: Tensor, right: Tensor, answers: Tensor, fixed: Tensor) -> Tensor:
    """IBPO's loss; that of GRPO where corrections change nothing. (N, K, DIGITS), then (N, K)."""
    rewards = (answers == right).all(1).double()  # (N,)
    repaired = (rewards == 0) & (fixed == right).all(1)
    A = group_advantages(losses.shaped_rewards(rewards, repaired), G)
    mask, kept = answers >= 0, answers == fixed  # place by place: each is one letter's
    logp = logits.log_softmax(2).gather(2, answers[..., None]).squeeze(2)
    old = OldPolicy(answers, mask, logp.detach(), rewards, G, kept_mask=kept, repaired=repaired)
    adv = losses.ibpo(A[:, None].expand(mask.shape), old)
    return losses.grpo(Batch(logp, logp.detach(), adv, mask, G, answers.shape[1]))


def count_tokens(name: str, K: int, rate: float, seed: int) -> int:
    """Tokens generated until the probability of a right answer, at temperature 1, is GOAL."""
    torch.manual_seed(seed)
    corrects, temperature = SETTINGS[name]
    odds = RIGHT / (1 - RIGHT) * (DIGITS - 1)
    table = (math.log(odds) * one_hot(DIGIT, DIGITS).double()).requires_grad_()  # logits
    optimizer, tokens = torch.optim.SGD([table], lr=rate), 0
    while table.softmax(1).gather(1, DIGIT[:, None]).mean() ** K < GOAL and tokens < LIMIT:
        words = torch.randint(LETTERS, (PROMPTS, K)).repeat_interleave(G, 0)  # (N, K)
        right, logits = DIGIT[words], table[words] / temperature
        answers = Categorical(logits=logits).sample()
        shown = one_hot(answers, DIGITS) + one_hot(pick_siblings(right, answers), DIGITS)
        fixed = Categorical(logits=logits + math.log(ODDS) * shown).sample()
        tokens += answers.numel()
        if corrects:
            tokens += K * int((answers != right).any(1).sum())
        optimizer.zero_grad()
        word_loss(logits, right, answers, fixed if corrects else answers).backward()
        optimizer.step()
    return tokens


def measure_cost(name: str, K: int) -> list[float]:
    """Thousands of tokens to GOAL for each seed, at the rate that is best on other seeds."""

    def run(rate: float, seeds: range) -> list[float]:
        return [count_tokens(name, K, rate, seed) / 1000 for seed in seeds]

    return run(min(RATES, key=lambda rate: sum(run(rate, TUNING_SEEDS))), SEEDS)


def ibpo():
    costs = {name: [measure_cost(name, K) for K in LENGTHS] for name in SETTINGS}
    costs = pd.DataFrame(costs, index=LENGTHS).map(format_interval, form=".2f")
    print(f"thousands of tokens to a reward of {GOAL}, by the letters of a word")
    print(f"{len(SEEDS)} seeds\n{costs.T.to_string()}")


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    figures = {"nthr": nthr, "lopti": lopti, "ibpo": ibpo}
    parser.add_argument("figure", choices=figures)
    torch.set_num_threads(1)
    figures[parser.parse_args().figure]()


if __name__ == "__main__":
    main()
