"""Training reward at equal numbers of generated tokens.

    python -m experiments.tokens BUDGETS RUN ...

BUDGETS are thousands of tokens, such as 50,100,200. Corrections count like any other token. A run's
reward at a budget is the mean of the 5 steps around it. Runs that differ only in the seed are one
row: their mean, +- half its 95 % interval (Student's t). Below stand the differences to the first
row, paired by seed, of each row that has the same seeds.
"""

from __future__ import annotations

import statistics
import sys

from experiments import fail
from experiments.curves import Run, format_cell, group_runs, read_runs, row


def read_rewards(run: Run, budgets: list[float]) -> list[float]:
    """The reward at each budget. Raises ValueError for a run that generated too few tokens."""
    middles = []  # tokens spent until the middle of a step
    spent = 0
    for step in run.steps:
        generated = step.get("generated", step.get("tokens", 0))
        middles.append(spent + generated / 2)
        spent += generated
    most = max(budgets)
    if 1000 * most > spent:
        raise ValueError(f"{run.folder} generated {spent} tokens, fewer than {most:g} thousand")
    rewards = []
    for budget in budgets:
        nearest = min(range(len(middles)), key=lambda i: abs(middles[i] - 1000 * budget))
        around = run.steps[max(0, nearest - 2) : nearest + 3]
        rewards.append(statistics.mean(step["reward"] for step in around))
    return rewards


def format_line(label: str, runs: list[list[float]]) -> str:
    """runs: of each run, its values at the budgets."""
    columns = [*zip(*runs, strict=True), [statistics.mean(run) for run in runs]]
    return row(label, len(runs), [format_cell([*column], 3) for column in columns])


def main(budgets: str, *folders: str):
    try:
        sizes = [float(x) for x in budgets.split(",")]
    except ValueError:
        fail(f"budgets {budgets}: expected thousands of tokens, such as 50,100,200")
    try:
        groups = {
            label: {seed: read_rewards(run, sizes) for seed, run in runs.items()}
            for label, runs in group_runs(read_runs(folders)).items()
        }
    except ValueError as error:
        fail(str(error))
    print(row("tokens, thousands", "seeds", [*(f"{size:g}" for size in sizes), "mean"]))
    print("|---|" + "---:|" * (len(sizes) + 2))
    for label, runs in groups.items():
        print(format_line(label, [*runs.values()]))
    first, *others = groups
    for label in others:
        if groups[label].keys() == groups[first].keys():
            pairs = [zip(groups[label][s], base, strict=True) for s, base in groups[first].items()]
            print(format_line(f"{label} minus {first}", [[a - b for a, b in p] for p in pairs]))


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 2 else sys.exit(__doc__)
