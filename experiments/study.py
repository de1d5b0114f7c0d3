"""The study behind experiments/study.md: which methods cancel, what that buys, and what it costs.
Resumable.

    python experiments/study.py tune      learning rates: one per method and regime, on seeds of their own
    python experiments/study.py main      the main table: 10 seeds, 1, 4 and 16 updates per rollout batch
    python experiments/study.py hot       16 updates at 3e-4, three times the rate that was best: who survives a bad choice?
    python experiments/study.py long      4 x longer: does the entropy collapse?
    python experiments/study.py groups    group sizes 2, 4 and 16
    python experiments/study.py between   2 and 8 updates per rollout batch
    python experiments/study.py report    the tables of what is there, as Markdown

A smaller toy than the default run's: 8 prompts x 8 answers, 32 steps, constant learning rate, no other change. Each
stage goes on where it was cut off; all runs are in runs/study, and those of one seed begin at the same weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.compare import make, runs_of  # noqa: E402
from experiments.curves import outcome, read_run, table  # noqa: E402

OUT = Path("runs/study")
WIDE = "--hyper eps_low=0.2 eps_high=0.28"  # GSPO's own clip range, 3e-4, is made for long answers
VARIANTS = {
    "grpo": "--method grpo",
    "reinforce": "--method reinforce",
    "grpo-symmetric": "--method grpo-symmetric",
    "dr-grpo": "--method dr-grpo",
    "dapo": "--method dapo",
    "gspo": f"--method gspo {WIDE}",
    "dfpo-min": "--method dfpo-min",
    "dfpo-orthogonal": "--method dfpo-orthogonal",
    "dfpo-min, eps 0.2": "--method dfpo-min --hyper eps=0.2",
    "grpo+proj": "--method grpo+proj",
    "gspo+proj": f"--method gspo+proj {WIDE}",
    "dr-grpo+proj": "--method dr-grpo+proj",
    "grpo+proj4": "--method grpo+proj4",
}
# Not run on-policy: there the first four make the same update as reinforce (C11), dr-grpo+proj that
# of dr-grpo; and, for time, grpo+proj4.
NOT_ON_POLICY = (
    "grpo-symmetric",
    "dfpo-min",
    "dfpo-orthogonal",
    "dfpo-min, eps 0.2",
    "dr-grpo+proj",
    "grpo+proj4",
)
HOT = ("grpo", "grpo-symmetric", "gspo", "dfpo-min", "dfpo-min, eps 0.2", "grpo+proj", "gspo+proj")
FEW = ("grpo", "gspo", "dfpo-min", "grpo+proj", "gspo+proj")  # the variants of the smaller tables
PAIRS = [(variant, "grpo") for variant in VARIANTS if variant != "grpo"]  # the differences shown
PAIRS += [
    ("dr-grpo+proj", "dr-grpo"),
    ("gspo+proj", "gspo"),
    ("grpo+proj4", "grpo+proj"),
    ("dfpo-min, eps 0.2", "dfpo-min"),
]
PAIRS += [
    (variant, "dfpo-min") for variant in ("grpo+proj", "dr-grpo+proj", "gspo+proj", "grpo+proj4")
]
REGIMES = {1: "", 2: "--minibatches 2", 4: "--minibatches 4", 8: "--minibatches 4 --epochs 2"}
REGIMES |= {16: "--minibatches 4 --epochs 4"}
RATES = {1: (3e-4, 1e-3, 3e-3), 4: (1e-4, 3e-4, 1e-3), 16: (5e-5, 1e-4, 3e-4, 1e-3)}
TUNED_AT = {1: 1, 2: 1, 4: 4, 8: 16, 16: 16}  # whose learning rates a regime uses
BASE = "--schedule constant --minibatches 1 --eval-items 100 --eval-samples 1 --eval-every 32 --save-every 1000"
COLUMNS = (
    "final",
    "greedy",
    "Steps(0.8)",
    "jitter",
    "entropy",
    "form entropy",
    "opener drift",
    "form drift",
    "tax",
)


def cell(
    name: str,
    variant: str,
    rate: float,
    updates: int,
    seeds: int,
    seed: int = 0,
    steps: int = 32,
    G: int = 8,
):
    """Run directory -> arguments, of one variant in one regime."""
    where = f"--out {OUT} --name {name}/{variant.replace(', ', '-').replace(' ', '')} --starts {OUT}/starts"
    what = f"{VARIANTS[variant]} --lr {rate:g} --seed {seed} --seeds {seeds} --steps {steps}"
    return runs_of(
        f"{where} {what} {BASE} {REGIMES[updates]} --group-size {G} --prompts {64 // G}".split()
    )


def tune() -> dict:
    return {
        (updates, variant, rate): cell(
            f"tune-{updates}-{rate:g}", variant, rate, updates, seeds=2, seed=100
        )
        for updates, rates in RATES.items()
        for variant in VARIANTS
        for rate in rates
    }


def chosen() -> dict[tuple[int, str], float]:
    """(updates, variant) -> the learning rate with the highest mean reward on the tuning seeds."""
    found = {}
    for (updates, variant, rate), runs in tune().items():
        if any(runs.values()):
            sys.exit(
                "error: not all learning rates are tried yet; python experiments/study.py tune goes on with it"
            )
        score = sum(outcome(read_run(run))["reward"] for run in runs) / len(runs)
        found.setdefault((updates, variant), []).append((score, rate))
    return {key: max(scores)[1] for key, scores in found.items()}


def stage(name: str) -> dict:
    """(heading, variant) -> the runs of a stage."""
    if name == "tune":
        return tune()
    best, cells = chosen(), {}
    for variant in VARIANTS:
        for updates in REGIMES:
            rate = best[TUNED_AT[updates], variant]
            if (
                name == "main"
                and updates in RATES
                and not (updates == 1 and variant in NOT_ON_POLICY)
            ):
                cells[f"{updates} updates", variant] = cell(
                    f"main-{updates}", variant, rate, updates, 10
                )
            if name == "between" and updates not in RATES and variant in FEW:
                cells[f"{updates} updates", variant] = cell(
                    f"main-{updates}", variant, rate, updates, 10
                )
        if name == "hot" and variant in HOT:
            cells["16 updates at 3e-4", variant] = cell("hot", variant, 3e-4, 16, 10)
        if name == "groups" and variant in FEW:
            for G in (2, 4, 16):
                cells[f"G = {G}", variant] = cell(
                    f"groups-{G}", variant, best[4, variant], 4, 10, G=G
                )
        if name == "long" and variant in FEW:
            cells["128 steps", variant] = cell("long", variant, best[4, variant], 4, 10, steps=128)
    return cells


def report():
    best = chosen()
    print("Learning rates chosen (* at an end of those tried):\n")
    print("| updates | " + " | ".join(VARIANTS) + " |\n|---|" + "---:|" * len(VARIANTS))
    for updates, rates in RATES.items():
        edge = {v: "*" if best[updates, v] in (min(rates), max(rates)) else "" for v in VARIANTS}
        print(
            f"| {updates} | "
            + " | ".join(f"{best[updates, v]:g}{edge[v]}" for v in VARIANTS)
            + " |"
        )
    for name in ("main", "between", "hot", "groups", "long"):
        cells = stage(name)
        for heading in dict.fromkeys(key[0] for key in cells):
            groups = {v: finished(runs) for (h, v), runs in cells.items() if h == heading}
            groups = {v: runs for v, runs in groups.items() if runs}
            if groups:
                print(f"\n### {heading}\n\n{table(groups, only=COLUMNS, pairs=PAIRS)}")


def finished(runs: dict) -> dict:
    """seed -> run, of those that are complete: compare.runs_of gives no arguments for them."""
    found = [read_run(run) for run, args in runs.items() if not args]
    return {run.config["seed"]: run for run in found}


def main(argv: list[str]):
    import train

    if argv == ["report"]:
        return report()
    if len(argv) != 1 or argv[0] not in ("tune", "main", "hot", "long", "groups", "between"):
        sys.exit(__doc__)
    runs = {run: args for cells in stage(argv[0]).values() for run, args in cells.items()}
    by_seed = sorted(
        runs, key=lambda run: int(run.name.rpartition("-s")[2])
    )  # cut off, every cell has as many seeds
    if problems := make({run: runs[run] for run in by_seed}, train.main):
        sys.exit("error: " + "\n       ".join(problems))


if __name__ == "__main__":
    main(sys.argv[1:])
