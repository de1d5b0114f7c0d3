"""What GRPO's min costs off-policy where nothing else differs: equal lengths, one constant divisor.

    python -m toy.gate                       the table: two minutes
    python -m toy.gate --plot toy/gate.png   and the picture (needs matplotlib)

An answer is two tokens, each from a logit of its own. It is right with probability
.3 + .1 [token 1 is good] + .1 [token 2 is good]. So the best policy earns .5. At the start the good
token has the share .5 in the first place and .001 in the second, where the gradient is 250 times
smaller. Nothing is sampled: all groups of 4 answers are enumerated, and each counts with its
probability under the policy that began the batch. Training is plain gradient ascent with M updates
on each of 120 batches. What counts is the best end over a grid of learning rates. toy/README.md
says what came out, and claims C19 and C22 why.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

import losses
from losses import Batch
from toy.figure import line_style, make_figure, parse_plot, print_table, save
from toy.tax import CANCELLED, EXACT, ROWS, Row, compute_push, log_probs, start_batch, train
from toy.worlds import Groups, Outcome

G, BATCHES = 4, 120
START = (0.0, math.log(0.001 / 0.999))  # the logits of the good tokens
RATES = 10 ** torch.linspace(0, 3, 41, dtype=torch.float64)
TOO_LARGE = 30.0  # a rate to show the mechanism at
DELTAS = (0.001, 0.01, 0.05, 0.2)  # of the off-policy mask


def sign_blind_mask(batch: Batch, delta: float) -> Tensor:
    """GRPO without the answers, winners or losers, that the policy has moved away from; no min."""
    far = losses.sequence_ratio(batch).log() < -delta  # (N,)
    kept = replace(batch, adv=batch.adv.masked_fill(far[:, None], 0.0))
    return losses.grpo(kept, math.inf, math.inf)


def mask(delta: float, eps: float) -> Row:
    options = dict(delta=delta, eps_low=eps, eps_high=eps)
    return Row(functools.partial(losses.off_policy_mask, **options))


OF_TAX = ("grpo", EXACT, CANCELLED, "dr-grpo", "gspo", "cispo", "dfpo-min", "recentred")
METHODS = {name: ROWS[name] for name in OF_TAX}
METHODS |= {
    "grpo-symmetric": Row(losses.grpo_symmetric),
    "reinforce": Row(losses.reinforce),
    "dfpo-min, eps 0.2": Row(functools.partial(losses.dfpo_min, eps=0.2)),
}
METHODS |= {f"mask and grpo's min, {delta}": mask(delta, 0.2) for delta in DELTAS}
METHODS |= {f"mask alone, {delta}": mask(delta, math.inf) for delta in DELTAS}
METHODS |= {
    f"mask blind to the sign, {delta}": Row(functools.partial(sign_blind_mask, delta=delta))
    for delta in DELTAS
}
LINES = (EXACT, CANCELLED, "grpo-symmetric")  # of the picture


def make_groups() -> Groups:
    """Every group of G answers. An answer is two tokens, good (0) or bad (1), right or wrong."""
    outcomes = []
    for first, second in itertools.product((0, 1), repeat=2):
        right = 0.5 - 0.1 * (first + second)
        outcomes.append(Outcome(first, right, reward=1.0, length=2, plan=second))
        outcomes.append(Outcome(first, 1 - right, reward=0.0, length=2, plan=second))
    return Groups(outcomes, G)


def climb(row: Row, M: int, batches: int, rates: Tensor) -> Tensor:
    """The logits after every update, (batches * M + 1, rates, 2).

    A learning rate is that of a softmax, where the logit of the bad token moves as far the other
    way. Here one logit stands for both, so it moves twice as far.
    """
    return train(row, make_groups(), START, M, batches, 2 * rates)[0]


def sweep(row: Row, M: int, rates: Tensor = RATES) -> Tensor:
    """The expected reward at the end of a run at each rate."""
    return 0.3 + 0.1 * climb(row, M, BATCHES, rates)[-1].sigmoid().sum(1)


def sum_by_sign(row: Row) -> list[tuple[float, float, float]]:
    """Of the coefficients of winners, of losers and of both with the good token 1, per answer.

    At both updates of the first batch, M = 2.
    """
    path = climb(row, 2, 1, torch.tensor([TOO_LARGE], dtype=torch.float64))
    groups = make_groups()
    batch, nodes = start_batch(row, groups, path[0])
    good, winner = groups.way == 0, batch.adv[:, 0] > 0
    sums = []
    for logits in path[:2]:
        c = compute_push(row, batch, nodes, logits, functools.partial(log_probs, groups))[1]
        c = c[:, 0] / len(c)
        winners, losers = float(c[good & winner].sum()), float(c[good & ~winner].sum())
        sums.append((winners, losers, winners + losers))
    return sums


def plot(rewards: dict[str, Tensor], sums: list[tuple[float, float, float]]):
    figure = make_figure(
        "GRPO's min undoes a first update. With or without cancel, no rate teaches both tokens.\n"
        "A clip that does not look at the sign of A teaches both, at a high enough rate.",
        3.9,
        "An answer is two tokens. Each good one makes a right answer likelier; good token 2 is "
        "rare. Winners and losers: answers with A\nabove and below 0. Fixed baseline: the "
        "policy's expected reward. grpo-symmetric: its clip stops winners and losers alike.",
    )
    bars, ends = figure.subplots(1, 2, width_ratios=(3, 4))
    colors = {"winners": "#0072B2", "losers": "#D55E00", "their sum": "#000000"}  # the tree page's
    for k, (name, color) in enumerate(colors.items()):
        places = [0.25 * (k - 1), 1 + 0.25 * (k - 1)]
        bars.bar(places, [row[k] for row in sums], 0.25, label=name, color=color)
    # No winner pushes in the second update, so its bar has no height.
    bars.text(0.75, 0.002, f"{sums[1][0]:g}", ha="center")
    bars.axhline(0, color="#999999", linewidth=0.8)
    bars.set_xticks([0, 1], ["first update", "second update"])
    bars.set_title(f"grpo's push on the good token 1, rate {TOO_LARGE:g}")
    bars.set_ylabel("sum of the pushes (up: it grows)")
    bars.legend()
    ends.set_xscale("log")
    ends.axvline(TOO_LARGE, color="#999999", linewidth=0.8)
    ends.text(TOO_LARGE, 0.515, " rate of the left panel", fontsize=8)
    ends.text(1.5, 0.385, "token 1", fontsize=9)  # under GRPO's two plateaus
    why = "token 1, learnt in\none step: too near\nprobability 1 to be\npushed back"
    ends.text(135, 0.392, why, fontsize=8, va="top")
    for name in LINES:
        ends.plot(RATES, rewards[name], label=name, **line_style(name))
    ends.set_yticks([0.3, 0.4, 0.5], ["no token\nlearned: 0.3", "one: 0.4", "both: 0.5"])
    ends.set_ylim(0.29, 0.52)
    ends.set_title(f"expected reward after {BATCHES} batches of 2 updates")
    ends.set_xlabel("learning rate")
    ends.legend(loc=(0.53, 0.53), handlelength=1.3)  # where no line is
    return figure


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    rows, rewards = {}, {}
    for name, row in METHODS.items():
        ends = [sweep(row, 1), sweep(row, 2)]
        rows[name] = [f"{float(x.max()):.3f} ({int((x > 0.49).sum())})" for x in ends]
        rewards[name] = ends[1]
    print(f"The best reward of {len(RATES)} rates; in brackets, how many end above .49\n")
    print_table(rows, ["M = 1", "M = 2"])
    if path:
        save(plot(rewards, sum_by_sign(METHODS[EXACT])), path)


if __name__ == "__main__":
    main()
