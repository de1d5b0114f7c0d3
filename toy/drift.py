"""A token that earns nothing: pushed by one batch that is used again and again, or by fresh ones.

    python -m toy.drift                        the tables
    python -m toy.drift --plot toy/drift.png   and the picture (needs matplotlib)

One batch, used 32 times. The policy has logits of its own for every history. Every answer of a
group begins with the same opener, which earns nothing. Then it takes one of two solutions of equal
reward and different length, in which it may still slip, or it guesses:

    opener, 1, right or slip, EOS        solution A
    opener, 2, work, right or slip, EOS  solution B
    opener, 3, EOS                       a guess, never right

Only the groups are sampled: drift is the change of the opener's log-odds, and entropy and reward
are sums over the policy's own probabilities.

Fresh batches. There are two openers, and whatever follows is alike after both. Each of 100 batches
is a new group. Only the openers' logit is learnt, so the law of claim C23 says how far it wanders.
toy/README.md says what came out.
"""

from __future__ import annotations

import functools
import math
import random
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

import losses
from losses import Batch
from toy import policy as small
from toy.figure import format_interval, line_style, make_figure, parse_plot, print_table, save
from toy.policy import EOS, Policy
from toy.tax import CANCELLED, EXACT, ROWS, Row, compute_push

G = 8

# ---------------- one batch, used again and again

PROMPT, OPENER, HORIZON, VOCABULARY = (0,), 1, 5, 4
AFTER = (*PROMPT, OPENER)
SEEDS, GROUPS, STEPS = 5, 8, 32  # start policies; groups of a batch; steps on it
SIZE = 0.6  # the length of the first step
METHODS = {
    "reinforce": Row(losses.reinforce),
    "grpo": ROWS["grpo"],
    "grpo, cancel": ROWS["grpo, cancel"],
    "grpo-symmetric": Row(losses.grpo_symmetric),
    "dr-grpo": ROWS["dr-grpo"],
    "dapo": Row(losses.dapo),
    "cispo": ROWS["cispo"],
    # Its own clip range is made for long answers.
    "gspo": Row(functools.partial(losses.gspo, eps_low=0.2, eps_high=0.28)),
    "dfpo-min": ROWS["dfpo-min"],
    "dfpo-min, eps 0.2": Row(functools.partial(losses.dfpo_min, eps=0.2)),  # this clip is ours
    "dfpo-orthogonal": Row(losses.dfpo_orthogonal),
    "recentred": ROWS["recentred"],
    "pos-only": Row(losses.pos_only),
}
LINES = ("grpo", "grpo, cancel", "gspo", "dfpo-min")  # of the picture
MEASURES = ("drift of the opener's log-odds", "entropy of A and B (nats)", "expected reward")


def start_policy(rng: random.Random) -> Policy:
    histories = small.all_histories(PROMPT, VOCABULARY, HORIZON)
    rows = [[rng.gauss(0, 0.3) for _ in histories] for _ in range(VOCABULARY)]
    W = torch.tensor(rows, dtype=torch.float64)
    for i, h in enumerate(histories):  # an answer ends when its branch is through, and not before
        through = len(h) == {1: 4, 2: 5, 3: 3}[h[2]] if len(h) > 2 else False
        W[EOS, i] = 20.0 if through else -20.0
    return Policy(W, small.tabular(histories), HORIZON)


def rest(policy: Policy) -> Policy:
    """The same policy, for what comes after the opener."""
    return Policy(policy.W, policy.phi, HORIZON - 1)


def reward(y: tuple[int, ...]) -> float:
    """1 for a solution whose last token before EOS is 1. The opener does not matter."""
    body = [a for a in y[1:] if a != EOS]
    return float(len(body) > 1 and body[-1] == 1)


def measure(policy: Policy, start: Policy) -> list[float]:
    """MEASURES, from the probabilities of all answers that begin with the opener."""
    right = dict.fromkeys(range(VOCABULARY), 0.0)  # by the branch
    for y, p in rest(policy).answers(AFTER):
        right[y[0]] += p * reward((OPENER, *y))
    p, q = (float(x.probs(PROMPT)[OPENER]) for x in (policy, start))
    drift = abs(math.log(p / (1 - p)) - math.log(q / (1 - q)))
    shares = [right[branch] / sum(right.values()) for branch in (1, 2)]
    return [drift, -sum(x * math.log(x) for x in shares), sum(right.values())]


def draw(seed: int) -> tuple[Policy, list[tuple[int, ...]]]:
    """A start policy, and mixed groups of answers that all begin with the opener."""
    start, answers = start_policy(random.Random(seed)), []
    generator = torch.Generator().manual_seed(seed)
    while len(answers) < GROUPS * G:
        group = [(OPENER, *y) for y in rest(start).sample(AFTER, G, generator)]
        if 0 < sum(map(reward, group)) < G:
            answers += group
    return start, answers


def repeat(row: Row, start: Policy, answers: list[tuple[int, ...]]) -> list[list[float]]:
    """What is measured after 0, 1, ..., STEPS gradient steps on the same answers."""
    tokens, mask = small.pad(answers)
    rewards = torch.tensor([reward(y) for y in answers], dtype=torch.float64)
    A = losses.group_advantages(rewards, G, row.scale)[:, None].expand(mask.shape)
    nodes = losses.prefix_nodes(tokens, mask, G)

    def forward(W: Tensor) -> Tensor:
        return Policy(W, start.phi, HORIZON).log_probs([PROMPT] * len(answers), answers)[0]

    old, policy, size = forward(start.W), start, None
    curve = [measure(start, start)]
    for _ in range(STEPS):
        g, _ = compute_push(row, Batch(old, old, A, mask, G, HORIZON), nodes, policy.W, forward)
        size = size or SIZE / g.norm()  # the first step is equally long for all methods
        policy = policy.step(g, size)
        curve.append(measure(policy, start))
    return curve


def study() -> dict[str, Tensor]:
    """name -> MEASURES after every step, the mean over start policies. (STEPS + 1, 3)."""
    starts = [draw(seed) for seed in range(SEEDS)]
    return {
        name: torch.tensor([repeat(row, *start) for start in starts], dtype=torch.float64).mean(0)
        for name, row in METHODS.items()
    }


# ---------------- fresh batches

BATCHES, RUNS, RATE = 100, 1000, 2.0
WORLDS = {  # the chance to be right; the lengths of right and of wrong answers
    "right 24 tokens, wrong 4": (0.6, (24, 4)),
    "right 10, wrong 14": (0.5, (10, 14)),
}


def predict_width(right: float, lengths: tuple[int, int], cancels: bool) -> tuple[float, float]:
    """Deviation of the log-odds after one batch, from 0, for coefficients A/T; and t (C23)."""
    chances = torch.tensor([right, 1 - right])
    c = torch.tensor([1 - right, -right]) / torch.tensor(lengths)
    m, square = float(chances @ c), float(chances @ c**2)  # square: m^2 + v
    t = m**2 / square
    factor = (1 - t) * G / (G - 1) if cancels else 1.0
    return RATE * (0.25 * square * factor / G) ** 0.5, t


def wander(row: Row, right: float, lengths: tuple[int, int]) -> Tensor:
    """The log-odds of the first opener before each batch and after the last, (BATCHES + 1, RUNS).

    All runs stand in one batch of the loss: a group for each, at log-odds of its own. The baseline
    is exact: what the policy expects is `right` whatever the opener.
    """
    generator, n = torch.Generator().manual_seed(0), RUNS * G
    path = [torch.zeros(RUNS, dtype=torch.float64)]
    place = torch.arange(max(lengths))
    for _ in range(BATCHES):
        draws = torch.rand(2, n, generator=generator, dtype=torch.float64)
        first = draws[0] < path[-1].sigmoid().repeat_interleave(G)
        is_right = draws[1] < right
        mask = place < torch.where(is_right, *lengths)[:, None]
        # After its opener, which is token 0 or 1, an answer shares nothing.
        tokens = torch.where(place == 0, first.long()[:, None], 2 + torch.arange(n)[:, None])
        nodes = losses.prefix_nodes(tokens, mask, G)

        def forward(odds: Tensor, sign=2 * first - 1.0) -> Tensor:
            logp = logsigmoid(sign * odds.repeat_interleave(G))
            return pad(logp[:, None], (0, len(place) - 1))

        old, A = forward(path[-1]), (is_right.double() - right)[:, None].expand(mask.shape)
        batch = Batch(old, old, A, mask, G, len(place))
        push, _ = compute_push(row, batch, nodes, path[-1], forward)
        path.append(path[-1] + RATE * RUNS * push)  # the loss takes the mean over runs
    return torch.stack(path)


# ---------------- tables and picture


def plot(curves: dict[str, Tensor], walks: dict[tuple[str, str], Tensor], path: Path):
    figure = make_figure(
        "One batch used 32 times: GRPO and GSPO push a token that earns nothing.\n"
        "Fresh batches: it only wanders, and cancelling hardly changes how far.",
        6.4,
        "Upper row: all answers begin with one opener, which earns nothing. Then comes solution "
        "A or B, or a guess.\nLower row: two openers, alike; one group of 8 a batch. Lines are "
        "predicted, dots measured in 1,000 runs.\nBaseline J: the expected reward. t: the squared "
        "mean of a coefficient over its mean square. Cancelling pays if t > 1/8.",
    )
    above, below = figure.subplots(2, 3)
    for k, axis in enumerate(above):
        for name in LINES:
            axis.plot(curves[name][:, k], label=name, **line_style(name))
        axis.set_title(MEASURES[k])
        axis.set_xlabel("steps on the same batch")
    above[1].legend()
    batches, dots = torch.arange(BATCHES + 1), slice(10, None, 10)
    width, _ = predict_width(*next(iter(WORLDS.values())), cancels=False)
    below[0].plot(walks[next(iter(WORLDS)), EXACT][:, :20], color="#BBBBBB", lw=0.8, marker="")
    for side in (-2, 2):
        below[0].plot(batches, side * width * batches**0.5, **line_style(EXACT))
    below[0].set_title("grpo: 20 runs, ± 2 deviations")
    below[0].set_ylabel("log-odds of the opener")
    for axis, (world, facts) in zip(below[1:], WORLDS.items(), strict=True):
        for name in (EXACT, CANCELLED):
            style, walk = line_style(name), walks[world, name]
            width, t = predict_width(*facts, ROWS[name].cancels)
            axis.plot(batches, width * batches**0.5, label=name, **style)
            axis.plot(batches[dots], walk.std(1)[dots], "o", color=style["color"])
        axis.set_title(f"{world}: t = {t:.2f}")
        axis.set_ylabel("deviation of the log-odds")
        axis.set_ylim(0, 0.4)
    below[2].legend()
    for axis in below:
        axis.set_xlabel("fresh batches")
    save(figure, path)


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    curves = study()
    print(f"{STEPS} steps on {GROUPS} groups of {G}, mean of {SEEDS} start policies\n")
    ends = {"start": curves["grpo"][0]} | {name: curve[-1] for name, curve in curves.items()}
    print_table({name: [f"{abs(x):.4f}" for x in end] for name, end in ends.items()}, MEASURES)
    print(f"\n{BATCHES} fresh batches of one group of {G}, {RUNS} runs: log-odds of the opener\n")
    walks, rows = {}, {}
    for world, facts in WORLDS.items():
        for name in (EXACT, CANCELLED):
            walks[world, name] = walk = wander(ROWS[name], *facts)
            width, t = predict_width(*facts, ROWS[name].cancels)
            cells = [t, width * BATCHES**0.5, float(walk[-1].std())]
            mean = format_interval(walk[-1].tolist())
            rows[f"{world}: {name}"] = [*(f"{x:.3f}" for x in cells), mean]
    print_table(rows, ["t", "deviation, predicted", "measured", "mean"])
    if path:
        plot(curves, walks, path)


if __name__ == "__main__":
    main()
