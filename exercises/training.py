"""Exercise 4 after a PASS: train with the student's file, and compare with the prediction."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from statistics import fmean

METHODS, SEEDS = ("grpo", "dr-grpo"), (0, 1, 2)
BLOCK = 80  # steps, whose mean reward is one number
PICTURE = Path("runs") / "training.png"
COLORS = {"grpo": "#D55E00", "dr-grpo": "#009E73"}  # as in toy/


def show_training(student: dict) -> None:
    """student: what the file defines. One without `train`, such as solutions.py, has nothing to
    show."""
    if "train" not in student:
        return
    runs = {}
    print(f"  mean reward of every {BLOCK} steps, from first to last:\n")
    for method, seed in product(METHODS, SEEDS):
        rewards = student["train"](method, seed)
        blocks = [fmean(rewards[k : k + BLOCK]) for k in range(0, len(rewards), BLOCK)]
        print(f"  {method:8} seed {seed}  ", *(f"{mean:.2f}" for mean in blocks), flush=True)
        runs[method, seed] = blocks
    print()
    for method, guess in zip(METHODS, student["prediction"](), strict=True):
        end = fmean(runs[method, seed][-1] for seed in SEEDS)
        print(f"  {method:8} you predicted {guess:.2f}, the seeds end at {end:.2f} on average")
    draw(runs)


def draw(runs: dict[tuple[str, int], list[float]]) -> None:
    """Into a file, and in a notebook; where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axis = figure.subplots()
    for (method, seed), blocks in runs.items():
        steps = [BLOCK * (k + 0.5) for k in range(len(blocks))]  # the middle of each
        axis.plot(steps, blocks, color=COLORS[method], label=None if seed else method)
    axis.set(title="Exercise 4: three seeds of each method", xlabel="step", ylabel="mean reward")
    axis.set_ylim(0)
    axis.legend(frameon=False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=120)
    print(f"\n  picture: {PICTURE}\n")
    if "ipykernel" in sys.modules:
        from IPython.display import Image, display

        display(Image(PICTURE))
