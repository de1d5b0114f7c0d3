"""What runs leave, read back: curves, what they come to, and honest statistics over seeds. Standard
library only.

    python curves.py RUN ...   the table of run directories, or of all in a directory of them, such as runs/compare

Runs that differ only in the seed are one row.

reward: mean of the whole run; final: of its last 10 steps. Steps(k): the first step at which the mean of 5 steps was at
least k; a run that never got there counts as one step more than it made. Jitter: mean size of the second difference of
the reward curve (our definition; the DFPO paper's is not public). Drift: KL(now || start) in nats between the policy's
exact opener (form) probabilities after and before RL. Lazy: share of steps that made correct answers less likely.
Cells are means over seeds +- half the 95 % interval (Student's t). Then the differences to the first row, paired by
seed, with the 95 % interval of 10,000 bootstrap samples of the pairs; * marks one that leaves out 0 (from 5 pairs on):
of many stars, one in twenty is chance. "(n)": only n seeds have the quantity.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from argparse import RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path

from cli import Parser, fail

KAPPA, TAIL, SMOOTH = 0.8, 10, 5
# Fields of a config that do not make it another experiment.
APART = ("seed", "name", "out", "resume", "starts", "threads", "device", "micro_rows", "save_every")
# A colour per method in every picture: Okabe and Ito's, safe for the colour-blind, and a grey.
# Shared by methods that are seldom drawn together; line style and marker tell those apart.
PALETTE = {
    "#000000": "reinforce ar-lopti",
    "#E69F00": "grpo",
    "#56B4E9": "grpo-symmetric advantage-reweighting",
    "#009E73": "dr-grpo nthr",
    "#F0E442": "dapo",
    "#D55E00": "gspo lopti",
    "#0072B2": "dfpo-min ibpo",
    "#CC79A7": "dfpo-orthogonal nthr-random",
    "#999999": "pos-only",
}
COLOURS = {method: colour for colour, methods in PALETTE.items() for method in methods.split()}
MARKERS = "osv^D<>pX"
T_975 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)


@dataclass
class Run:
    folder: str
    config: dict
    lines: list[dict]  # of metrics.jsonl: step 0 is an evaluation only

    @property
    def steps(self) -> list[dict]:
        return [line for line in self.lines if line.get("step") and "reward" in line]

    @property
    def finished(self) -> bool:
        return bool(self.lines) and self.lines[-1]["step"] == self.config.get(
            "steps", self.lines[-1]["step"]
        )

    @property
    def evaluations(self) -> list[dict]:
        return [line for line in self.lines if "greedy" in line]

    @property
    def name(self) -> str:
        """The method, with +proj or +projK where it is projected."""
        config = self.config
        return config["method"] + (
            f"+proj{config.get('context') or ''}" if config.get("project") else ""
        )


def read_run(folder: str | Path) -> Run:
    """Raises ValueError, saying what is wrong, where the folder holds no run. A cut-off last line
    is left out."""
    lines, metrics = [], Path(folder) / "metrics.jsonl"
    try:
        config = json.loads((Path(folder) / "config.json").read_text())["config"]
        texts = (
            metrics.read_text().splitlines() if metrics.exists() else []
        )  # a run in its warm start has none yet
        config["method"], config["seed"]
    except (OSError, ValueError, LookupError, TypeError):
        raise ValueError(
            f"{folder} is not a run; expected run directories, such as runs/*"
        ) from None
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


def read_runs(paths: list[str]) -> list[Run]:
    """Runs, and all runs of the directories that hold some. Raises ValueError."""
    found = []
    for path in map(Path, paths):
        inside = sorted(file.parent for file in path.glob("*/config.json")) if path.is_dir() else []
        found += [path] if (path / "config.json").exists() or not inside else inside
    return [read_run(folder) for folder in found]


def grouped(runs: list[Run]) -> dict[str, dict[int, Run]]:
    """label -> seed -> run. A label is the method, and whatever else the groups differ in. Raises
    ValueError."""
    if not runs:
        raise ValueError("there is no finished run among these")
    shared = set.intersection(*(set(run.config) for run in runs)) - {
        *APART,
        "method",
        "project",
        "context",
    }
    differ = [k for k in sorted(shared) if len({json.dumps(run.config[k]) for run in runs}) > 1]
    groups: dict[str, dict[int, Run]] = {}
    for run in runs:
        others = [(k, plain(run.config[k])) for k in differ]
        label = ", ".join([run.name, *(f"{k} {value}" for k, value in others if value)])
        seed = run.config["seed"]
        if seed in groups.setdefault(label, {}):
            raise ValueError(f"{run.folder} is a second run of {label} with seed {seed}")
        groups[label][seed] = run
    return groups


def plain(value) -> str:
    return (
        f"{value:g}"
        if isinstance(value, float)
        else " ".join(value)
        if isinstance(value, list)
        else str(value)
    )


# ---------------- what a run comes to


def mean(values) -> float:
    """Of the finite ones; nan if there is none."""
    found = [v for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
    return sum(found) / len(found) if found else math.nan


def steps_to(rewards: list[float], kappa: float) -> int:
    """First step (1 ...) whose mean with the 4 before it reaches kappa; one more than there are if
    none does."""
    for t in range(SMOOTH, len(rewards) + 1):
        if sum(rewards[t - SMOOTH : t]) / SMOOTH >= kappa:
            return t
    return len(rewards) + 1


def jitter(rewards: list[float]) -> float:
    return mean(
        abs(c - 2 * b + a) for a, b, c in zip(rewards, rewards[1:], rewards[2:], strict=False)
    )


def shares(line: dict, kind: str) -> dict[str, float]:
    """The probabilities of the openers (forms), made to add up to 1; empty where one is not a
    number."""
    found = {k: v for k, v in line.items() if k.startswith(kind + " ")}
    total = sum(found.values())
    return {k: v / total for k, v in found.items()} if total > 0 else {}


def moved(first: dict, now: dict, kind: str) -> float:
    """KL(now || first) between two evaluations, in nats; nan where one of them lacks an opener
    (form)."""
    p, q = shares(now, kind), shares(first, kind)
    if not p or p.keys() != q.keys():
        return math.nan
    return sum(p[k] * math.log(p[k] / q[k]) if q[k] > 0 else math.inf for k in p if p[k] > 0)


def drift(run: Run, kind: str) -> float:
    return moved(run.evaluations[0], run.evaluations[-1], kind)


def outcome(run: Run, kappa: float = KAPPA) -> dict[str, float]:
    """Column -> value. Raises ValueError for a run without a step or an evaluation."""
    steps, evaluations = run.steps, run.evaluations
    if not steps or not evaluations:
        raise ValueError(f"{run.folder} has no finished step yet")
    rewards = [m["reward"] for m in steps]
    forms = shares(evaluations[-1], "form").values()

    def late(key: str) -> float:
        return mean(m.get(key) for m in steps[-TAIL:])

    return {
        "reward": mean(rewards),
        "final": late("reward"),
        "greedy": evaluations[-1]["greedy"],
        f"Steps({kappa:g})": steps_to(rewards, kappa),
        "jitter": jitter(rewards),
        "entropy": late("entropy"),
        "form entropy": -sum(p * math.log(p) for p in forms if p > 0) if forms else math.nan,
        "opener drift": drift(run, "opener"),
        "form drift": drift(run, "form"),
        "tax": mean(m.get("tax") for m in steps),
        "clipped": mean(m.get("clip_share") for m in steps),
        "lazy": mean(m["delta"] < 0 for m in steps if "delta" in m),
        "k tokens": sum(m.get("generated", 0) for m in steps) / 1000,
    }


# ---------------- statistics over seeds


def quantile(n: int) -> float:
    """97.5 % quantile of Student's t with n-1 degrees of freedom."""
    return T_975[n - 2] if n - 2 < len(T_975) else 1.96 + 2.56 / (n - 1)


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the 95 % interval of Student's t; nan for the half of a single value."""
    values = [v for v in values if not math.isnan(v)]
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return sum(values) / len(values) if values else math.nan, math.nan
    return mean(values), quantile(len(values)) * statistics.stdev(values) / len(values) ** 0.5


def bootstrap(differences: list[float], draws: int = 10_000) -> tuple[float, float, float]:
    """Mean of the pairs' differences, and the 95 % interval of that mean over resampled pairs.

    Plain percentiles of so few pairs would cover 85 % (5 pairs) or 90 % (10): they are taken
    further out, as Student's t and the factor n/(n-1) ask for (Hesterberg 2015, the expanded
    percentile interval).
    """
    values, rng = [v for v in differences if math.isfinite(v)], random.Random(0)
    n = len(values)
    if n < 2:
        return mean(values), math.nan, math.nan
    share = statistics.NormalDist().cdf(-quantile(n) * (n / (n - 1)) ** 0.5)
    means = sorted(sum(rng.choices(values, k=n)) / n for _ in range(draws))
    return mean(values), means[int(share * draws)], means[-1 - int(share * draws)]


def digits(name: str) -> int:
    return 1 if name.startswith("Steps") else 0 if name == "k tokens" else 3


def table(
    groups: dict[str, dict[int, Run]], kappa: float = KAPPA, only=(), pairs: tuple | None = None
) -> str:
    """Both tables, in Markdown, of all columns or `only` those named; pairs: (label, base) of the
    differences to show.

    Raises ValueError for a run without a step.
    """
    found = {
        label: {seed: outcome(run, kappa) for seed, run in runs.items()}
        for label, runs in groups.items()
    }
    everything = [o for runs in found.values() for o in runs.values()]
    columns = [
        c
        for c in everything[0]
        if (c in only or not only) and any(math.isfinite(o[c]) for o in everything)
    ]

    def row(first: str, seeds, cells) -> str:
        return f"| {first} | {seeds} | {' | '.join('' if 'nan' in x else x for x in cells)} |"

    def means(c: str, outcomes) -> str:
        values = [o[c] for o in outcomes if not math.isnan(o[c])]
        middle, half = interval(values)
        some = f" ({len(values)})" if len(values) < len(outcomes) else ""
        return (
            f"{middle:.{digits(c)}f}"
            + (f" +- {half:.{digits(c)}f}" if math.isfinite(half) else "")
            + some
        )

    def less(c: str, label: str, base: str, seeds: list[int]) -> str:
        pairs = [found[label][s][c] - found[base][s][c] for s in seeds]
        pairs = [x for x in pairs if math.isfinite(x)]
        middle, low, high = (f"{x:+.{digits(c)}f}" for x in bootstrap(pairs))
        star = "*" if len(pairs) >= 5 and (float(low) > 0 or float(high) < 0) else ""
        return f"{middle} [{low}, {high}]{star}" + (
            f" ({len(pairs)})" if len(pairs) < len(seeds) else ""
        )

    rule = "|---|" + "---:|" * (len(columns) + 1)
    lines = [row("method", "seeds", columns), rule]
    lines += [
        row(label, len(runs), [means(c, runs.values()) for c in columns])
        for label, runs in found.items()
    ]
    base, *others = found
    rows = []
    for label, base in pairs if pairs is not None else [(label, base) for label in others]:
        seeds = sorted(found.get(label, {}).keys() & found.get(base, {}).keys())
        if len(seeds) > 1:
            rows.append(
                row(
                    f"{label} less {base}",
                    len(seeds),
                    [less(c, label, base, seeds) for c in columns],
                )
            )
    return "\n".join(
        lines + ["", row("paired by seed", "seeds", columns), rule] * bool(rows) + rows
    )


def main(argv: list[str] | None = None):
    parser = Parser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs, or directories of runs")
    parser.add_argument(
        "--base",
        metavar="ROW",
        help="the row that the others are compared with (default: the first)",
    )
    options = parser.parse_args(argv)
    try:
        runs = read_runs(options.runs)
        for run in runs:
            if not run.finished:
                print(f"left out: {run.folder} is unfinished", file=sys.stderr)
        groups = grouped([run for run in runs if run.finished])
        if options.base is not None and options.base not in groups:
            fail(f"--base {options.base}: there is no such row; there are {', '.join(groups)}")
        print(table(dict(sorted(groups.items(), key=lambda item: item[0] != options.base))))
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
