"""Read runs back: their curves, what they come to, and a comparison over seeds.

    python -m experiments.curves RUN ...    run directories, or directories that hold some

Runs that differ only in the seed are one row: their mean, +- half its 95 % interval (Student's t).
"(n)" marks a cell to which only n seeds contribute. The second table holds the differences to the
first row. They are paired by seed, with the 95 % interval of a paired t test. A star marks an
interval without 0, from 5 pairs on. One star in twenty is chance.

    reward        mean over the whole run
    final         mean over its last 10 steps
    greedy        held-out accuracy of greedy answers, at the end
    Steps(k)      first step at which the mean of 5 steps is at least k; if no step is, the number
                  of steps + 1
    jitter        mean size of the second difference of the reward curve (our definition, because
                  that of DFPO's paper is not public)
    entropy       of the next token in nats, mean over the last 10 steps
    form entropy  of the solution forms in nats, at the end
    drift         KL(after || before) in nats, of the exact opener (form) probabilities
    tax           learning tax, mean over the run
    clipped       share of tokens whose gradient the clip removes, mean over the run
    lazy          share of the steps that made correct answers less likely
    k tokens      thousands of tokens that were generated

This file needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from experiments import fail
from toy.figure import interval

KAPPA = 0.8
TAIL = 10
SMOOTH = 5
# Settings that do not make a run another experiment.
INCIDENTAL = ("seed", "out", "resume", "threads", "device", "micro_rows")
# A colour per method in every picture: Okabe and Ito's, safe for the colour-blind, and a grey.
# Methods that are seldom drawn together share one; line style and marker tell them apart.
PALETTE = {
    "#000000": "reinforce ar-lopti",
    "#E69F00": "grpo",
    "#56B4E9": "grpo-symmetric advantage-reweighting",
    "#009E73": "dr-grpo nthr",
    "#F0E442": "dapo",
    "#D55E00": "gspo lopti",
    "#0072B2": "dfpo-min ibpo",
    "#CC79A7": "dfpo-orthogonal nthr-random",
    "#999999": "pos-only cispo",
}
COLOURS = {method: colour for colour, methods in PALETTE.items() for method in methods.split()}
MARKERS = "osv^D<>pX"


# ---------------- runs


@dataclass
class Run:
    folder: str
    config: dict
    lines: list[dict]  # of metrics.jsonl: step 0 is an evaluation only

    @property
    def steps(self) -> list[dict]:
        return [line for line in self.lines if line["step"] and "reward" in line]

    @property
    def evaluations(self) -> list[dict]:
        return [line for line in self.lines if "greedy" in line]

    @property
    def finished(self) -> bool:
        last = self.lines[-1]["step"] if self.lines else None
        return last is not None and last == self.config.get("steps", last)

    @property
    def name(self) -> str:
        return self.config["method"] + ("+proj" if self.config.get("project") else "")


def read_run(folder: str | Path) -> Run:
    """Raises ValueError, saying what is wrong, where the folder holds no run.

    A last line that was cut off is left out. A run that is still in its warm start has no line.
    """
    metrics = Path(folder) / "metrics.jsonl"
    try:
        config = json.loads((Path(folder) / "config.json").read_text())["config"]
        texts = metrics.read_text().splitlines() if metrics.exists() else []
        config["method"], config["seed"]
    except (OSError, ValueError, LookupError, TypeError):
        raise ValueError(
            f"{folder} is not a run; expected run directories, such as runs/*"
        ) from None
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append({k: v for k, v in line.items() if isinstance(v, (int, float))})
        elif number < len(texts):
            raise ValueError(f"{folder}: line {number} of metrics.jsonl is not a step's metrics")
    return Run(str(folder), config, lines)


def read_runs(paths: Iterable[str]) -> list[Run]:
    """Runs, and all runs in directories of runs. Raises ValueError.

    A warm start that several runs share (--steps 0) is no run to be compared.
    """
    folders = []
    for path in map(Path, paths):
        inside = sorted(file.parent for file in path.glob("*/config.json"))
        folders += inside if inside and not (path / "config.json").exists() else [path]
    return [run for run in map(read_run, folders) if run.config.get("steps") != 0]


def group_runs(runs: list[Run]) -> dict[str, dict[int, Run]]:
    """label -> seed -> run. A label is the method, and every other setting in which the groups
    differ. Raises ValueError."""
    if not runs:
        raise ValueError("there is no finished run among these")
    shared = set.intersection(*(set(run.config) for run in runs))
    settings = sorted(shared - {*INCIDENTAL, "method", "project"})
    differing = [key for key in settings if len({show_setting(run, key) for run in runs}) > 1]
    groups: dict[str, dict[int, Run]] = {}
    for run in runs:
        others = [(key, show_setting(run, key)) for key in differing]
        label = ", ".join([run.name, *(f"{key} {text}" for key, text in others if text)])
        seed = run.config["seed"]
        if seed in groups.setdefault(label, {}):
            raise ValueError(f"{run.folder} is a second run of {label} with seed {seed}")
        groups[label][seed] = run
    return groups


def show_setting(run: Run, key: str) -> str:
    """A setting as text. A shared warm start is named without its seed, as compare/start."""
    value = run.config[key]
    if key == "model" and Path(value).name == "start":
        start = Path(value).parent
        return start.parent.name + "/" + start.name.removesuffix(f"-s{run.config['seed']}")
    if isinstance(value, list):
        return " ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---------------- what a run comes to


def mean(values: Iterable) -> float:
    """Of the finite ones; nan if there is none."""
    finite = [v for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def steps_to(rewards: list[float], kappa: float) -> int:
    """First step (1 ...) whose mean with the 4 before it reaches kappa; if none does, one more than
    there are."""
    for t in range(SMOOTH, len(rewards) + 1):
        if sum(rewards[t - SMOOTH : t]) / SMOOTH >= kappa:
            return t
    return len(rewards) + 1


def jitter(rewards: list[float]) -> float:
    triples = zip(rewards, rewards[1:], rewards[2:], strict=False)
    return mean(abs(c - 2 * b + a) for a, b, c in triples)


def probabilities(line: dict, kind: str) -> dict[str, float]:
    """Of the openers (forms), made to add up to 1; empty where one of them is not a number."""
    logged = {k: v for k, v in line.items() if k.startswith(kind + " ")}
    total = sum(logged.values())
    return {k: v / total for k, v in logged.items()} if total > 0 else {}


def drift(before: dict, after: dict, kind: str) -> float:
    """KL(after || before) of two evaluations, in nats; nan where one of them lacks an opener
    (form)."""
    p = probabilities(after, kind)
    q = probabilities(before, kind)
    if not p or p.keys() != q.keys():
        return math.nan
    return sum(p[k] * math.log(p[k] / q[k]) if q[k] > 0 else math.inf for k in p if p[k] > 0)


def outcome(run: Run, kappa: float = KAPPA) -> dict[str, float]:
    """Column -> value. Raises ValueError for a run without a step or an evaluation."""
    steps = run.steps
    if not steps or not run.evaluations:
        raise ValueError(f"{run.folder} has no finished step yet")
    first = run.evaluations[0]
    last = run.evaluations[-1]
    rewards = [m["reward"] for m in steps]
    forms = probabilities(last, "form").values()
    return {
        "reward": mean(rewards),
        "final": mean(rewards[-TAIL:]),
        "greedy": last["greedy"],
        f"Steps({kappa:g})": steps_to(rewards, kappa),
        "jitter": jitter(rewards),
        "entropy": mean(m.get("entropy") for m in steps[-TAIL:]),
        "form entropy": -sum(p * math.log(p) for p in forms if p > 0) if forms else math.nan,
        "opener drift": drift(first, last, "opener"),
        "form drift": drift(first, last, "form"),
        "tax": mean(m.get("tax") for m in steps),
        "clipped": mean(m.get("clip_share") for m in steps),
        "lazy": mean(m["delta"] < 0 for m in steps if "delta" in m),
        "k tokens": sum(m.get("generated", 0) for m in steps) / 1000,
    }


# ---------------- statistics over seeds


def format_cell(values: list[float], places: int, paired: bool = False) -> str:
    """Mean and interval of one value per seed, or of one difference per seed if they are paired."""
    numbers = [v for v in values if (math.isfinite(v) if paired else not math.isnan(v))]
    note = f" ({len(numbers)})" if len(numbers) < len(values) else ""
    middle, half = interval(numbers)
    if paired:
        shown, low, high = (f"{x:+.{places}f}" for x in (middle, middle - half, middle + half))
        star = "*" if len(numbers) >= 5 and (float(low) > 0 or float(high) < 0) else ""
        return "" if math.isnan(half) else f"{shown} [{low}, {high}]{star}{note}"
    spread = "" if math.isnan(half) else f" +- {half:.{places}f}"
    return f"{middle:.{places}f}{spread}{note}" if numbers else ""


def row(first: str, count: int | str, cells: Iterable[str]) -> str:
    return f"| {first} | {count} | {' | '.join(cells)} |"


def format_table(groups: dict[str, dict[int, Run]], only=(), pairs=None) -> str:
    """Both tables in Markdown, of all columns or `only` those named. Raises ValueError for a run
    without a step.

    pairs: (label, base) of the differences to show; none: each label minus the first.
    """
    outcomes = {
        label: {seed: outcome(run) for seed, run in runs.items()} for label, runs in groups.items()
    }
    everything = [o for by_seed in outcomes.values() for o in by_seed.values()]
    columns = [c for c in everything[0] if any(math.isfinite(o[c]) for o in everything)]
    columns = [c for c in columns if c in only or not only]

    places = {c: 1 if c.startswith("Steps") else 0 if c == "k tokens" else 3 for c in columns}

    def heading(first: str) -> list[str]:
        return [row(first, "seeds", columns), "|---|" + "---:|" * (len(columns) + 1)]

    lines = heading("method")
    for label, by_seed in outcomes.items():
        cells = [format_cell([o[c] for o in by_seed.values()], places[c]) for c in columns]
        lines.append(row(label, len(by_seed), cells))
    differences = []
    first, *others = outcomes
    for label, base in pairs if pairs is not None else [(other, first) for other in others]:
        ours = outcomes.get(label, {})
        theirs = outcomes.get(base, {})
        both = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        if len(both) > 1:
            cells = [format_cell([a[c] - b[c] for a, b in both], places[c], True) for c in columns]
            differences.append(row(f"{label} minus {base}", len(both), cells))
    if differences:
        lines += ["", *heading("paired by seed"), *differences]
    return "\n".join(lines)


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs, or directories of runs")
    what = "the row that the others are compared with (default: the first)"
    parser.add_argument("--base", metavar="ROW", help=what)
    options = parser.parse_args(argv)
    try:
        runs = read_runs(options.runs)
        for run in runs:
            if not run.finished:
                print(f"left out: {run.folder} is unfinished", file=sys.stderr)
        groups = group_runs([run for run in runs if run.finished])
        if options.base is not None and options.base not in groups:
            fail(f"--base {options.base}: there is no such row; there are {', '.join(groups)}")
        groups = dict(sorted(groups.items(), key=lambda item: item[0] != options.base))
        print(format_table(groups))
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
