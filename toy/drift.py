"""The papers' story where everything is exact: a token that all answers share, drifting or not.

    python -m toy.drift                        the table
    python -m toy.drift --plot toy/drift.png   and the picture (needs matplotlib)

A policy has logits of its own for every history. Every answer of a group begins with the same
opener, which earns nothing. Then it takes one of two solutions of equal reward and different
length, in which it may still slip, or it guesses:

    opener, 1, right or slip, EOS        solution A
    opener, 2, work, right or slip, EOS  solution B
    opener, 3, EOS                       a guess, never right

Nothing is estimated but the step itself, which takes sampled groups: drift is the change of the
opener's log-odds, and entropy and reward are sums over the policy's own probabilities.
toy/README.md says what came out.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch

from losses import Batch, group_advantages, learning_tax, prefix_nodes, token_coefficients
from toy.figure import (
    compute_loss,
    draw_lines,
    find_method,
    make_figure,
    parse_plot,
    print_row,
    save_picture,
)
from toy.policy import EOS, Policy, all_histories, pad, tabular

PROMPT, OPENER, HORIZON, VOCABULARY = (0,), 1, 5, 4
AFTER = (*PROMPT, OPENER)
SEEDS = 5  # start policies
GROUPS, G, STEPS = 8, 8, 32
SIZE = 0.6  # the length of the first step
NAMES = (
    *("reinforce", "grpo", "grpo-symmetric", "dr-grpo", "dapo", "cispo", "gspo", "dfpo-min"),
    *("dfpo-min eps 0.2", "dfpo-orthogonal", "recentred", "pos-only"),
    *("grpo+proj", "dr-grpo+proj", "gspo+proj"),
)
# gspo's own clip range is made for long answers; eps is our clip for dfpo-min.
HYPER = {"gspo": {"eps_low": 0.2, "eps_high": 0.28}, "dfpo-min eps 0.2": {"eps": 0.2}}
COLUMNS = {
    "drift": "opener: change of log-odds",
    "solutions": "entropy of A and B (nats)",
    "reward": "expected reward",
    "tax": "learning tax",
}
# What each panel of the picture shows, by which lines.
PANELS = {
    "drift": ("|change of the opener's log-odds|", ("pos-only", "grpo", "gspo", "dfpo-min")),
    "tax": ("learning tax", ("gspo", "grpo", "dr-grpo", "dfpo-min")),
    "solutions": (
        "entropy of the two solutions (nats)",
        ("grpo", "cispo", "dfpo-min", "dfpo-min eps 0.2"),
    ),
    "reward": ("expected reward", ("grpo", "cispo", "dfpo-min", "dfpo-min eps 0.2")),
}


def start_policy(rng: random.Random) -> Policy:
    histories = all_histories(PROMPT, VOCABULARY, HORIZON)
    W = torch.tensor(
        [[rng.gauss(0, 0.3) for _ in histories] for _ in range(VOCABULARY)], dtype=torch.float64
    )
    for i, h in enumerate(histories):  # an answer ends when its branch is through, and not before
        through = len(h) == {1: 4, 2: 5, 3: 3}[h[2]] if len(h) > 2 else False
        W[EOS, i] = 20.0 if through else -20.0
    return Policy(W, tabular(histories), HORIZON)


def rest(policy: Policy) -> Policy:
    """The same policy, for what comes after the opener."""
    return Policy(policy.W, policy.phi, HORIZON - 1)


def reward(y: tuple[int, ...]) -> float:
    """1 for a solution whose last token before EOS is 1. The opener does not matter."""
    body = [a for a in y[1:] if a != EOS]
    return float(len(body) > 1 and body[-1] == 1)


def measure(policy: Policy, start: Policy) -> dict[str, float]:
    """All from the probabilities of all answers that begin with the opener."""
    after = [((OPENER, *y), p) for y, p in rest(policy).answers(AFTER)]
    a, b = (sum(p for y, p in after if y[1] == branch and reward(y)) for branch in (1, 2))
    p, q = (float(x.probs(PROMPT)[OPENER]) for x in (policy, start))
    share = a / (a + b)
    return {
        "drift": abs(math.log(p / (1 - p)) - math.log(q / (1 - q))),
        "solutions": -sum(x * math.log(x) for x in (share, 1 - share) if x > 0),
        "reward": sum(p for y, p in after if reward(y)),
    }


def draw(seed: int) -> tuple[Policy, list[tuple[int, ...]]]:
    """A start policy, and mixed groups of answers that all begin with the opener."""
    start, answers = start_policy(random.Random(seed)), []
    generator = torch.Generator().manual_seed(seed)
    while len(answers) < GROUPS * G:
        group = [(OPENER, *y) for y in rest(start).sample(AFTER, G, generator)]
        if 0 < sum(map(reward, group)) < G:
            answers += group
    return start, answers


def descend(name: str, start: Policy, answers: list[tuple[int, ...]]) -> list[dict[str, float]]:
    """What is measured after 0, 1, ..., STEPS gradient steps of a method on the same answers."""
    tokens, mask = pad(answers)
    rewards = torch.tensor([reward(y) for y in answers], dtype=torch.float64)
    A = group_advantages(rewards, G, find_method(name).scale)
    adv, nodes = A[:, None].expand(mask.shape), prefix_nodes(tokens, mask, G)
    prompts = [PROMPT] * len(answers)
    old, _ = start.log_probs(prompts, answers)
    policy, curve, size = start, [], None
    for _ in range(STEPS + 1):
        policy.W.requires_grad_()
        logp, _ = policy.log_probs(prompts, answers)
        batch = Batch(logp, old.detach(), adv, mask, G, HORIZON)
        loss = compute_loss(name, HYPER, batch, nodes)
        tax = learning_tax(token_coefficients(loss, logp), A, nodes, mask)
        curve.append(measure(policy, start) | {"tax": tax})
        g = -torch.autograd.grad(loss, policy.W)[0]
        size = size or SIZE / g.norm()  # the first step is equally long for all methods
        policy = policy.step(g, size)
    return curve


def study() -> dict[str, dict[str, list[float]]]:
    """name -> what is measured -> its value after every step, the mean over start policies."""
    starts = [draw(seed) for seed in range(SEEDS)]
    curves = {}
    for name in NAMES:
        runs = [descend(name, start, answers) for start, answers in starts]
        steps = [*zip(*runs, strict=True)]
        curves[name] = {
            key: [sum(point[key] for point in step) / SEEDS for step in steps] for key in COLUMNS
        }
    return curves


def show(curves: dict[str, dict[str, list[float]]]):
    about = f"{STEPS} steps on {GROUPS} groups of {G}, mean of {SEEDS} start policies"
    print(f"{about}; drift: mean of its size\n")
    print_row("", COLUMNS.values(), 32)
    first = next(iter(curves.values()))
    rows = {"start": [first[key][0] for key in COLUMNS if key != "tax"]}
    for name, curve in curves.items():
        ends = [curve[key][-1] for key in COLUMNS if key != "tax"]
        rows[name] = [*ends, sum(curve["tax"]) / len(curve["tax"])]
    for name, row in rows.items():
        print_row(name, ["0" if abs(x) < 1e-12 else f"{x:.4f}" for x in row], 32)


def plot(curves: dict[str, dict[str, list[float]]], path: Path):
    figure = make_figure("GRPO and GSPO move a token that earns nothing. DFPO leaves it alone.", 5)
    axes = figure.subplots(2, 2).flat
    for axis, (key, (title, names)) in zip(axes, PANELS.items(), strict=True):
        draw_lines(axis, {name: curves[name][key] for name in names})
        axis.set_title(title)
        axis.set_xlabel("gradient steps on the same groups")
    figure.savefig(path)


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    curves = study()
    show(curves)
    save_picture(plot, curves, path=path)


if __name__ == "__main__":
    main()
