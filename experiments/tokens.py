"""Training reward at equal numbers of generated tokens: python experiments/tokens.py BUDGETS RUN
...

BUDGETS: thousands of tokens, with commas, such as 50,100,200. Corrections count like any other token. A run's reward at
a budget is the mean of the 5 steps around it. One row a method and learning rate: mean over its seeds +- half the 95 %
interval (Student's t). Then each method's difference to the first, paired by seed, where they have the same seeds.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.curves import Run, interval, read_runs  # noqa: E402


def rewards_at(run: Run, budgets: list[float]) -> tuple[str, int, list[float]]:
    steps, config, spent, cost = run.steps, run.config, 0, []
    for m in steps:
        generated = m.get("generated", m.get("tokens", 0))
        cost.append(spent + generated / 2)  # the middle of the step
        spent += generated
    if max(budgets) * 1000 > spent:
        raise ValueError(
            f"{run.folder} generated {spent} tokens, fewer than {max(budgets):g} thousand"
        )
    found = []
    for budget in budgets:
        at = min(range(len(steps)), key=lambda i: abs(cost[i] - 1000 * budget))
        around = steps[max(0, at - 2) : at + 3]
        found.append(sum(m["reward"] for m in around) / len(around))
    demos = f", repair_demos {config['repair_demos']:g}" if config.get("repair_demos") else ""
    return f"{config['method']}, lr {config['lr']:g}{demos}", config["seed"], found


def line(name: str, runs: list[list[float]]) -> str:
    columns = [*zip(*runs, strict=True), [statistics.mean(run) for run in runs]]
    cells = [
        "{:.3f} +- {:.3f}".format(*interval(list(column))).replace(" +- nan", "")
        for column in columns
    ]
    return f"| {name} | {len(runs)} | " + " | ".join(cells) + " |"


def main(budgets: str, *folders: str):
    rows = defaultdict(dict)
    try:
        budgets = [float(x) for x in budgets.split(",")]
    except ValueError:
        sys.exit(f"error: budgets {budgets}: expected thousands of tokens, such as 50,100,200")
    try:
        for run in read_runs(folders):
            name, seed, values = rewards_at(run, budgets)
            if seed in rows[name]:
                raise ValueError(f"{run.folder} is a second run of {name} with seed {seed}")
            rows[name][seed] = values
    except ValueError as error:
        sys.exit(f"error: {error}")
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
