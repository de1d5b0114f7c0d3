"""Read runs back: what they come to, and a comparison over seeds.

    python -m experiments.curves RUN ...    run directories, or directories that hold some

Runs that differ only in the seed are one row: their mean, +- half its 95 % interval (Student's t).
"(n)" marks a cell to which only n seeds contribute. The second table holds the differences to the
first row. They are paired by seed, with the 95 % interval of a paired t test. A star marks an
interval without 0, from 5 pairs on. One star in twenty is chance.

    reward        mean over the whole run
    final         mean over its last 10 steps
    greedy        held-out accuracy of greedy answers, at the end
    Steps(0.8)    first step at which the mean of 5 steps is at least 0.8; if no step is, the number
                  of steps + 1
    jitter        mean size of the second difference of the reward curve (our definition, because
                  that of DFPO's paper is not public)
    entropy       of the next token in nats, mean over the last 10 steps
    drift opener  how far the shares of the openers have moved from the start: half the sum of their
    drift form    changes' sizes. 0.3: 30 % of the answers open otherwise (are of another form)
    tax           learning tax, mean over the run
    clipped       share of tokens whose gradient the clip removes, mean over the run
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

from toy.figure import interval

KAPPA, TAIL, SMOOTH = 0.8, 10, 5
# Settings that do not make a run another experiment.
INCIDENTAL = ("seed", "out", "resume", "threads", "micro_rows", "fast")


# ---------------- runs


@dataclass
class Run:
    folder: str
    config: dict
    lines: list[dict]  # of metrics.jsonl: step 0 is an evaluation only

    @property
    def steps(self) -> list[dict]:
        return [line for line in self.lines if "reward" in line]

    @property
    def evaluations(self) -> list[dict]:
        return [line for line in self.lines if "greedy" in line]

    @property
    def finished(self) -> bool:
        return bool(self.lines) and self.lines[-1]["step"] == self.config["steps"]

    @property
    def name(self) -> str:
        return self.config["method"] + ("+proj" if self.config["project"] else "")


def read_run(folder: str | Path) -> Run:
    """A run, with the drift since its first evaluation added to each evaluation.

    A last line that was cut off is left out. A run that is still in its warm start has no line.
    Raises ValueError where the folder holds no run.
    """
    metrics = Path(folder) / "metrics.jsonl"
    try:
        config = json.loads((Path(folder) / "config.json").read_text())["config"]
        texts = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        lines = [json.loads(text) for text in texts if text.endswith("\n")]
        run = Run(str(folder), config, lines)
        for line in run.evaluations:
            for kind in ("opener", "form"):
                if kind + " other" in line:
                    line[f"drift {kind}"] = drift(run.evaluations[0], line, kind)
    except (OSError, ValueError, LookupError, TypeError):
        raise ValueError(f"{folder} is not a run; accepted: runs/NAME, runs/*") from None
    return run


def drift(before: dict, after: dict, kind: str) -> float:
    """Total variation between the shares of the openers (forms) in two evaluations, 0 to 1."""
    keys = [key for key in after if key.startswith(kind + " ")]
    return sum(abs(after[key] - before[key]) for key in keys) / 2


def read_runs(paths: Iterable[str]) -> list[Run]:
    """Runs, and all runs in directories of runs. Raises ValueError.

    A warm start that several runs share (--steps 0) is no run to be compared.
    """
    folders = []
    for path in map(Path, paths):
        inside = sorted(file.parent for file in path.glob("*/config.json"))
        folders += inside if inside and not (path / "config.json").exists() else [path]
    return [run for run in map(read_run, folders) if run.config["steps"]]


def group_runs(runs: list[Run]) -> dict[str, dict[int, Run]]:
    """label -> seed -> run. A label is the method, and every other setting in which the groups
    differ. Raises ValueError."""
    if not runs:
        raise ValueError("there is no run to show among these")
    settings = sorted(set(runs[0].config) - {*INCIDENTAL, "method", "project"})
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
    value = run.config.get(key, "")
    if key == "model" and Path(value).name == "start":
        start = Path(value).parent
        return start.parent.name + "/" + start.name.removesuffix(f"-s{run.config['seed']}")
    if isinstance(value, list):
        return " ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---------------- what a run comes to


def mean(values: Iterable) -> float:
    """Of the finite ones; nan if there is none."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
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


def outcome(run: Run) -> dict[str, float]:
    """Column -> value; nan for what was not measured. Raises ValueError for an unfinished run."""
    if not run.finished:
        raise ValueError(f"{run.folder} is unfinished")
    last, rewards = run.lines[-1], [line["reward"] for line in run.steps]
    return {
        "reward": mean(rewards),
        "final": mean(rewards[-TAIL:]),
        "greedy": last["greedy"],
        f"Steps({KAPPA})": steps_to(rewards, KAPPA),
        "jitter": jitter(rewards),
        "entropy": mean(line["entropy"] for line in run.steps[-TAIL:]),
        "drift opener": last.get("drift opener", math.nan),
        "drift form": last.get("drift form", math.nan),
        "tax": mean(line["tax"] for line in run.steps),
        "clipped": mean(line["clip_share"] for line in run.steps),
        "k tokens": sum(line["generated"] for line in run.steps) / 1000,
    }


# ---------------- statistics over seeds


def format_cell(values: list[float], places: int, paired: bool = False) -> str:
    """Mean and interval of one value per seed, or of one difference per seed if they are paired."""
    numbers = [value for value in values if math.isfinite(value)]
    note = f" ({len(numbers)})" if len(numbers) < len(values) else ""
    middle, half = interval(numbers)
    if paired:
        shown, low, high = (f"{x:+.{places}f}" for x in (middle, middle - half, middle + half))
        star = "*" if len(numbers) >= 5 and (float(low) > 0 or float(high) < 0) else ""
        return "" if math.isnan(half) else f"{shown} [{low}, {high}]{star}{note}"
    spread = "" if math.isnan(half) else f" +- {half:.{places}f}"
    return f"{middle:.{places}f}{spread}{note}" if numbers else ""


def format_table(groups: dict[str, dict[int, Run]]) -> str:
    """Both tables in Markdown. Raises ValueError for an unfinished run."""
    outcomes = {
        label: {seed: outcome(run) for seed, run in runs.items()} for label, runs in groups.items()
    }
    everything = [o for by_seed in outcomes.values() for o in by_seed.values()]
    columns = [c for c in everything[0] if any(math.isfinite(o[c]) for o in everything)]
    places = {c: 1 if c.startswith("Steps") else 0 if c == "k tokens" else 3 for c in columns}

    def row(*cells) -> str:
        return f"| {' | '.join(map(str, cells))} |"

    def rows(first: str, by_label: dict[str, list[dict]], paired: bool) -> list[str]:
        lines = [row(first, "seeds", *columns), "|---|" + "---:|" * (len(columns) + 1)]
        for label, values in by_label.items():
            cells = [format_cell([v[c] for v in values], places[c], paired) for c in columns]
            lines.append(row(label, len(values), *cells))
        return lines

    first, *others = outcomes
    differences = {}
    for label in others:
        both = sorted(outcomes[label].keys() & outcomes[first].keys())
        pairs = [(outcomes[label][seed], outcomes[first][seed]) for seed in both]
        if len(pairs) > 1:
            gaps = [{c: a[c] - b[c] for c in columns} for a, b in pairs]
            differences[f"{label} minus {first}"] = gaps
    lines = rows("method", {label: [*runs.values()] for label, runs in outcomes.items()}, False)
    if differences:
        lines += ["", *rows("paired by seed", differences, True)]
    return "\n".join(lines)


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    except ValueError as error:
        sys.exit(f"error: {error}")
    if options.base is not None and options.base not in groups:
        sys.exit(f"error: --base {options.base}: no such row; accepted: {', '.join(groups)}")
    print(format_table(dict(sorted(groups.items(), key=lambda item: item[0] != options.base))))


if __name__ == "__main__":
    main()
