"""The papers' story where everything is exact: a token that all answers share, drifting, or not.

    python -m toy.drift                    the table
    python -m toy.drift --plot drift.png   and the picture (needs matplotlib: pip install -e '.[plot]')

A policy with logits of its own for every history. Every answer of a group begins with the same opener, which earns
nothing, then takes one of two solutions of equal reward and different length, where each may still slip, or guesses:

    opener, 1, right or slip, EOS        solution A
    opener, 2, work, right or slip, EOS  solution B
    opener, 3, EOS                       a guess, mostly wrong

The start policy gives groups of answers; every method then makes the same number of gradient steps on the same groups,
off-policy after the first. Plain gradient ascent; each method's first step is equally long. Nothing is estimated: drift
is the change of the opener's log-odds, KL and reward are sums over the policy's own probabilities.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path

import torch

from experiments.curves import COLOURS, MARKERS
from losses import (
    METHODS,
    Batch,
    group_advantages,
    learning_tax,
    prefix_nodes,
    project,
    token_coefficients,
)
from toy.policy import EOS, Policy, all_histories, kl, pad, tabular

PROMPT, OPENER, HORIZON, VOCABULARY = (0,), 1, 5, 4
AFTER = (*PROMPT, OPENER)
GROUPS, G, STEPS, SIZE = 8, 8, 32, 0.6  # SIZE: the length of the first step
NAMES = (
    "reinforce",
    "grpo",
    "grpo-symmetric",
    "dr-grpo",
    "dapo",
    "gspo",
    "dfpo-min",
    "dfpo-orthogonal",
    "pos-only",
)
NAMES += ("grpo+proj", "dr-grpo+proj", "gspo+proj")  # with the projection of claim C17
HYPER = {"gspo": {"eps_low": 0.2, "eps_high": 0.28}}  # its own clip range is made for long answers
COLUMNS = {
    "drift": "opener: change of log-odds",
    "kl": "opener: KL to the start (nats)",
    "solutions": "entropy of A and B (nats)",
    "reward": "expected reward",
    "tax": "learning tax",
}


def start_policy(rng: random.Random) -> Policy:
    histories = all_histories(PROMPT, VOCABULARY, HORIZON)
    W = torch.tensor(
        [[rng.gauss(0, 0.3) for _ in histories] for _ in range(VOCABULARY)], dtype=torch.float64
    )
    for i, h in enumerate(histories):  # an answer ends when its branch is through, and not before
        through = len(h) == {1: 4, 2: 5, 3: 3}[h[2]] if len(h) > 2 else False
        W[EOS, i] = 20.0 if through else -20.0
    phi = tabular(histories)
    return Policy(W, phi, HORIZON)


def rest(policy: Policy) -> Policy:
    """The same policy, for what comes after the opener."""
    return Policy(policy.W, policy.phi, HORIZON - 1)


def reward(y: tuple[int, ...]) -> float:
    """Solutions are right if their last token before EOS is 1; a guess is wrong. The opener does
    not matter."""
    body = [a for a in y[1:] if a != EOS]
    return float(len(body) > 1 and body[-1] == 1)


def measure(policy: Policy, start: Policy) -> dict[str, float]:
    """All from the probabilities of all answers that begin with the opener."""
    after = [((OPENER, *y), p) for y, p in rest(policy).answers(AFTER)]
    a, b = (sum(p for y, p in after if y[1] == branch and reward(y)) for branch in (1, 2))
    p, q = (float(x.probs(PROMPT)[OPENER]) for x in (policy, start))
    share = a / (a + b)
    return {
        "drift": math.log(p / (1 - p)) - math.log(q / (1 - q)),
        "kl": kl(policy, start, PROMPT),
        "solutions": -sum(x * math.log(x) for x in (share, 1 - share) if x > 0),
        "reward": sum(p for y, p in after if reward(y)),
    }


def descend(name: str, start: Policy, answers: list[tuple[int, ...]]) -> list[dict[str, float]]:
    """What is measured after 0, 1, ..., STEPS gradient steps of a method on the same answers."""
    base, _, projected = name.partition("+")
    method, hyper = METHODS[base], HYPER.get(base, {})
    tokens, mask = pad(answers)
    A = group_advantages(
        torch.tensor([reward(y) for y in answers], dtype=torch.float64), G, method.scale
    )
    nodes, adv, prompts = (
        prefix_nodes(tokens, mask, G),
        A[:, None].expand(mask.shape),
        [PROMPT] * len(answers),
    )
    old, policy, curve, size = start.log_probs(prompts, answers)[0], start, [], None
    for _ in range(STEPS + 1):
        policy.W.requires_grad_()
        logp, _ = policy.log_probs(prompts, answers)
        batch = Batch(logp, old.detach(), adv, mask, G, HORIZON)
        loss = method.passes[0](batch, **hyper)
        if projected:
            loss = project(loss, logp, A, nodes, mask)
        tax = learning_tax(token_coefficients(loss, logp), A, nodes, mask)
        curve.append(measure(policy, start) | {"tax": tax})
        g = -torch.autograd.grad(loss, policy.W)[0]
        size = size or SIZE / g.norm()
        policy = policy.step(g, size)
    return curve


def draw(seed: int) -> tuple[Policy, list[tuple[int, ...]]]:
    """A start policy, and GROUPS groups of G answers that all begin with the opener; some right,
    some wrong in each."""
    rng = random.Random(seed)
    start, generator, answers = start_policy(rng), torch.Generator().manual_seed(seed), []
    while len(answers) < GROUPS * G:
        group = [(OPENER, *y) for y in rest(start).sample(AFTER, G, generator)]
        if 0 < sum(map(reward, group)) < G:
            answers += group
    return start, answers


def study(seeds: int) -> dict[str, list[list[dict]]]:
    """name -> a curve per seed."""
    curves = {name: [] for name in NAMES}
    for seed in range(seeds):
        start, answers = draw(seed)
        for name in NAMES:
            curves[name].append(descend(name, start, answers))
    return curves


def mean(curves: list[list[dict]], key: str, step: int, size=lambda x: x) -> float:
    return sum(size(curve[step][key]) for curve in curves) / len(curves)


def show(curves: dict[str, list[list[dict]]]):
    seeds = len(next(iter(curves.values())))
    print(
        f"{STEPS} steps on {GROUPS} groups of {G}, mean of {seeds} start policies; drift: mean of its size\n"
    )
    print(f"{'':16}" + "".join(f"{title:>32}" for title in COLUMNS.values()))
    for name, runs in [("start", next(iter(curves.values()))), *curves.items()]:
        at = 0 if name == "start" else -1
        cells = [mean(runs, key, at, abs if key == "drift" else float) for key in COLUMNS]
        cells[-1] = sum(mean(runs, "tax", t) for t in range(STEPS + 1)) / (STEPS + 1)
        print(
            f"{name:16}"
            + "".join(
                f"{'0' if abs(x) < 1e-12 else f'{x:.4f}':>32}" for x in cells[: None if at else 4]
            )
        )


def plot(curves: dict[str, list[list[dict]]], path: Path):
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        sys.exit("error: --plot needs matplotlib; pip install -e '.[plot]'")
    figure, axes = pyplot.subplots(1, len(COLUMNS), figsize=(15, 3.4), layout="constrained")
    for axis, (key, title) in zip(axes, COLUMNS.items(), strict=True):
        for i, (name, runs) in enumerate(curves.items()):
            size = abs if key == "drift" else float
            line = [mean(runs, key, t, size) for t in range(STEPS + 1)]
            base, _, projected = name.partition("+")
            style = dict(
                color=COLOURS[base], linestyle="--" if projected else "-", marker=MARKERS[i % 9]
            )
            axis.plot(line, label=name, markevery=(i % 8, 8), markersize=4, linewidth=1.4, **style)
        axis.set_title(("|" + title + "|") if key == "drift" else title, fontsize=9)
        axis.set_xlabel("gradient steps on the same groups", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8
    )
    figure.savefig(path, dpi=85)
    print(f"\npicture: {path}")


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .svg or .png")
    parser.add_argument("--seeds", type=int, default=5, help="start policies (default 5)")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        sys.exit("error: --seeds must be at least 1")
    torch.set_num_threads(1)
    curves = study(options.seeds)
    show(curves)
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
