"""Markdown table of finished runs, one row a method, mean over its seeds: python bench/table.py runs/*

before = the first step's reward (sampled answers to training prompts), after = mean of the last 10 steps. Opener drift
and form drift = KL(now || start) in nats between the policy's exact opener (form) probabilities after and before RL.
"""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path


def drift(first: dict, last: dict, kind: str) -> float:
    keys = [k for k in first if k.startswith(kind)]
    p, q = ([m[k] / sum(m[j] for j in keys) for k in keys] for m in (last, first))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def row(folder: Path) -> tuple[str, list[float]]:
    config = json.loads((folder / "config.json").read_text())["config"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = ([m for m in lines if "greedy" in m][i] for i in (0, -1))
    steps = [m for m in lines if "reward" in m]
    tail = steps[-10:]

    def mean(key: str, over: list[dict]) -> float:
        return sum(m[key] for m in over) / len(over)

    values = [steps[0]["reward"], mean("reward", tail), last["greedy"]]
    values += [drift(first, last, "opener"), drift(first, last, "form")]
    values += [steps[0]["entropy"], mean("entropy", tail), mean("tax", steps), mean("clip_share", steps)]
    changes = [m["delta"] for m in steps if "delta" in m]  # absent from a step without mixed groups
    values.append(sum(change < 0 for change in changes) / max(1, len(changes)))
    name = config["method"] + ("+ex" if config.get("exchangeable") else "")
    return name, values


def main(folders: list[str]):
    rows = defaultdict(list)
    for folder in folders:
        try:
            name, values = row(Path(folder))
        except (OSError, ValueError, LookupError):
            sys.exit(f"error: {folder} is not a finished run of the toy; expected run directories, such as runs/*")
        rows[name].append(values)
    columns = ["method", "seeds", "reward before", "after", "greedy", "opener drift", "form drift"]
    columns += ["entropy before", "after", "tax", "clipped", "lazy"]
    print("| " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * 11)
    for name, values in rows.items():
        cells = [f"{sum(column) / len(column):.3f}" for column in zip(*values, strict=True)]
        spread = f" ({min(v[1] for v in values):.3f} to {max(v[1] for v in values):.3f})"
        cells[1] += spread
        print(f"| {name} | {len(values)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
