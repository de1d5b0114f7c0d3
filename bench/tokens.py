"""Training reward at equal numbers of generated tokens: python bench/tokens.py BUDGETS RUN ...

BUDGETS: thousands of tokens, with commas, such as 50,100,200. Corrections count like any other token. A run's reward at
a budget is the mean of the 5 steps around it. One row a method and learning rate: mean over its seeds +- half the 95 %
interval (Student's t). Then each method's difference to the first, paired by seed, where they have the same seeds.
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

T_975 = [
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
]  # Student's t, 1 to 9 and more degrees of freedom


def rewards_at(folder: Path, budgets: list[float]) -> tuple[str, int, list[float]]:
    config = json.loads((folder / "config.json").read_text())["config"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps, spent, cost = [m for m in lines if "reward" in m], 0, []
    for m in steps:
        cost.append(spent + m["generated"] / 2)  # the middle of the step
        spent += m["generated"]
    if max(budgets) * 1000 > spent:
        sys.exit(f"error: {folder} generated {spent} tokens, fewer than {max(budgets):g} thousand")
    found = []
    for budget in budgets:
        at = min(range(len(steps)), key=lambda i: abs(cost[i] - 1000 * budget))
        around = steps[max(0, at - 2) : at + 3]
        found.append(sum(m["reward"] for m in around) / len(around))
    demos = f", repair_demos {config['repair_demos']:g}" if config.get("repair_demos") else ""
    return f"{config['method']}, lr {config['lr']:g}{demos}", config["seed"], found


def line(name: str, runs: list[list[float]]) -> str:
    cells = []
    for column in [*zip(*runs, strict=True), [statistics.mean(run) for run in runs]]:
        half = T_975[min(len(column), 10) - 2] * statistics.stdev(column) / len(column) ** 0.5 if len(column) > 1 else 0
        cells.append(f"{statistics.mean(column):.3f} +- {half:.3f}")
    return f"| {name} | {len(runs)} | " + " | ".join(cells) + " |"


def main(budgets: str, *folders: str):
    try:
        budgets, rows = [float(x) for x in budgets.split(",")], defaultdict(dict)
    except ValueError:
        sys.exit(f"error: budgets {budgets}: expected thousands of tokens, such as 50,100,200")
    for folder in folders:
        try:
            name, seed, values = rewards_at(Path(folder), budgets)
        except (OSError, ValueError, LookupError):
            sys.exit(f"error: {folder} is not a run; expected run directories, such as runs/*")
        if seed in rows[name]:
            sys.exit(f"error: {folder} is a second run of {name} with seed {seed}")
        rows[name][seed] = values
    print("| tokens, thousands | seeds | " + " | ".join(f"{b:g}" for b in budgets) + " | mean |")
    print("|---|" + "---:|" * (len(budgets) + 2))
    for name, runs in rows.items():
        print(line(name, [*runs.values()]))
    first, *others = rows
    for name in others:
        if rows[name].keys() == rows[first].keys():
            pairs = [zip(rows[name][seed], rows[first][seed], strict=True) for seed in rows[first]]
            print(line(f"{name}, less {first}", [[a - b for a, b in pair] for pair in pairs]))


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 2 else sys.exit(__doc__)
