"""Exercise 4 after a PASS: train with the student's file, and compare with the prediction."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from statistics import fmean

METHODS, SEEDS = ("grpo", "dr-grpo"), (0, 1, 2)
BLOCK = 16  # steps, whose mean reward is one point
END = 200  # steps, whose mean reward is the end: the mean of fewer is noisy
PICTURE = Path("runs") / "training.png"
COLORS = {"grpo": "#D55E00", "dr-grpo": "#009E73"}  # as in toy/


def show_training(student: dict) -> None:
    """student: what the file defines. One without `train`, such as solutions.py, has nothing to
    show."""
    if "train" not in student:
        return
    points, ends = {}, {}
    print(f"  mean reward, from the first {BLOCK} steps to the last {END}:\n")
    for method, seed in product(METHODS, SEEDS):
        rewards = student["train"](method, seed)
        starts = range(0, len(rewards), BLOCK)
        points[method, seed] = line = [fmean(rewards[k : k + BLOCK]) for k in starts]
        ends[method, seed] = end = fmean(rewards[-END:])
        print(f"  {method:8} seed {seed}   {line[0]:.2f} -> {end:.2f}", flush=True)
    print()
    for method, guess in zip(METHODS, student["prediction"](), strict=True):
        end = fmean(ends[method, seed] for seed in SEEDS)
        print(f"  {method:8} you predicted {guess:.2f}, the mean of the seeds is {end:.2f}")
    print(f"\n{draw(points)}\n")
    save(points)


def draw(points: dict) -> str:
    """The points in letters: G is grpo, D is dr-grpo, * is both."""
    width = max(map(len, points.values()))
    cells = {}
    for (method, _), line in points.items():
        letter = method[0].upper()
        for column, reward in enumerate(line):
            place = round(reward / 0.05), column
            cells[place] = letter if cells.get(place, letter) == letter else "*"
    top = max(row for row, _ in cells)
    rows = [
        f"  {row * 0.05:.2f} |" + "".join(cells.get((row, column), " ") for column in range(width))
        for row in range(top, -1, -1)
    ]
    axis = f"       +{'-' * width}\n        G grpo   D dr-grpo   * both; from left to right: steps"
    return "\n".join([*rows, axis])


def save(points: dict) -> None:
    """The same as a picture, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axis = figure.subplots()
    for (method, seed), line in points.items():
        steps = [BLOCK * k for k in range(len(line))]
        axis.plot(steps, line, color=COLORS[method], label=None if seed else method)
    axis.set(title="Exercise 4: three seeds of each method", xlabel="step", ylabel="mean reward")
    axis.set_ylim(0)
    axis.legend(frameon=False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=120)
    print(f"  picture: {PICTURE}\n")
