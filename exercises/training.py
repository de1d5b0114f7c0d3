"""Exercise 4 after a PASS: train with the student's file, and compare with the prediction."""

from __future__ import annotations

from itertools import product
from statistics import fmean

METHODS, SEEDS = ("grpo", "dr-grpo"), (0, 1, 2)
BLOCK = 80  # steps, whose mean reward is one number


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
