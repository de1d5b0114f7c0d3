"""The study behind experiments/study.md: which methods cancel, what that buys, and what it costs.

    python -m experiments.study tune       a learning rate per method and regime, on other seeds
    python -m experiments.study main       the main table: 1, 4 and 16 updates per rollout batch
    python -m experiments.study hot        16 updates at three times the rate that was best
    python -m experiments.study long       4 times as many steps: does the entropy collapse?
    python -m experiments.study groups     group sizes 2, 4 and 16
    python -m experiments.study between    2 and 8 updates per rollout batch
    python -m experiments.study report     tables of what is there, in Markdown

The toy is smaller than the default run's: 8 prompts x 8 answers, 32 steps, constant learning rate.
Nothing else differs. All but the tuning has 10 seeds. All runs are in runs/study, and those of one
seed share their warm start. A stage that was cut off is resumed by the same command.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments import fail
from experiments.compare import Job, make, plan
from experiments.curves import Run, format_table, outcome, read_run

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
}
# Not run on-policy: there the first four make the same update as reinforce (C11), and dr-grpo+proj
# that of dr-grpo.
OFF_POLICY = "grpo-symmetric", "dfpo-min", "dfpo-orthogonal", "dfpo-min, eps 0.2", "dr-grpo+proj"
HOT = "grpo", "grpo-symmetric", "gspo", "dfpo-min", "dfpo-min, eps 0.2", "grpo+proj", "gspo+proj"
FEW = "grpo", "gspo", "dfpo-min", "grpo+proj", "gspo+proj"  # the variants of the smaller tables
# The differences that are shown.
PAIRS = [(variant, "grpo") for variant in VARIANTS if variant != "grpo"]
PAIRS += [("dr-grpo+proj", "dr-grpo"), ("gspo+proj", "gspo"), ("dfpo-min, eps 0.2", "dfpo-min")]
PAIRS += [(variant, "dfpo-min") for variant in ("grpo+proj", "dr-grpo+proj", "gspo+proj")]
REGIMES = {
    1: "--minibatches 1",
    2: "--minibatches 2",
    4: "--minibatches 4",
    8: "--minibatches 4 --epochs 2",
    16: "--minibatches 4 --epochs 4",
}
RATES = {1: (3e-4, 1e-3, 3e-3), 4: (1e-4, 3e-4, 1e-3), 16: (5e-5, 1e-4, 3e-4, 1e-3)}
TUNED_AT = {1: 1, 2: 1, 4: 4, 8: 16, 16: 16}  # whose learning rates a regime uses
BASE = "--schedule constant --eval-items 100 --eval-samples 1 --eval-every 32"
COLUMNS = ("final", "greedy", "Steps(0.8)", "jitter", "entropy", "form entropy")
COLUMNS += ("opener drift", "form drift", "tax")
STAGES = ("main", "between", "hot", "groups", "long")
Jobs = dict[Path, Job]


def plan_cell(name: str, variant: str, updates: int, rate: float, others: str) -> Jobs:
    """The runs of one variant in one regime, and their warm starts."""
    folder = OUT / name / variant.replace(", ", "-").replace(" ", "")
    what = f"{VARIANTS[variant]} --lr {rate:g} {BASE} {REGIMES[updates]} {others}"
    return plan([*what.split(), "--out", str(folder)], starts=str(OUT))


def plan_tuning() -> dict[tuple[int, str, float], Jobs]:
    others = "--seed 100 --seeds 2 --steps 32 --group-size 8 --prompts 8"
    return {
        (updates, variant, rate): plan_cell(
            f"tune-{updates}-{rate:g}", variant, updates, rate, others
        )
        for updates, rates in RATES.items()
        for variant in VARIANTS
        for rate in rates
    }


def choose_rates() -> dict[tuple[int, str], float]:
    """(updates, variant) -> the learning rate with the highest mean reward on the tuning seeds."""
    scores: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for (updates, variant, rate), jobs in plan_tuning().items():
        runs = read_finished(jobs)
        if len(runs) < 2:
            fail("not all learning rates are tried yet; python -m experiments.study tune does it")
        score = sum(outcome(run)["reward"] for run in runs.values()) / len(runs)
        scores.setdefault((updates, variant), []).append((score, rate))
    return {key: max(pairs)[1] for key, pairs in scores.items()}


def plan_stage(name: str, best: dict[tuple[int, str], float]) -> dict[tuple[str, str], Jobs]:
    """(heading, variant) -> the runs of a stage, at the best learning rates."""
    cells = {}

    def add(heading: str, folder: str, variant: str, updates: int, **changes):
        rate = changes.get("rate", best[TUNED_AT[updates], variant])
        G = changes.get("G", 8)
        others = f"--seeds 10 --steps {changes.get('steps', 32)}"
        others += f" --group-size {G} --prompts {64 // G}"
        cells[heading, variant] = plan_cell(folder, variant, updates, rate, others)

    for variant in VARIANTS:
        for updates in REGIMES:
            tuned = updates in RATES and not (updates == 1 and variant in OFF_POLICY)
            between = updates not in RATES and variant in FEW
            if name == "main" and tuned or name == "between" and between:
                add(f"{updates} updates", f"main-{updates}", variant, updates)
        if name == "hot" and variant in HOT:
            add("16 updates at 3e-4", "hot", variant, 16, rate=3e-4)
        if name == "long" and variant in FEW:
            add("128 steps", "long", variant, 4, steps=128)
        if name == "groups" and variant in FEW:
            for G in (2, 4, 16):
                add(f"G = {G}", f"groups-{G}", variant, 4, G=G)
    return cells


def read_finished(jobs: Jobs) -> dict[int, Run]:
    """seed -> run, of those that are complete."""
    done = [job for job in jobs.values() if job.config.steps and not job.args]
    return {job.config.seed: read_run(job.folder) for job in done}


def report():
    best = choose_rates()
    print("Learning rates chosen (* at an end of those tried):\n")
    print("| updates | " + " | ".join(VARIANTS) + " |\n|---|" + "---:|" * len(VARIANTS))
    for updates, rates in RATES.items():
        cells = []
        for variant in VARIANTS:
            rate = best[updates, variant]
            cells.append(f"{rate:g}" + ("*" if rate in (min(rates), max(rates)) else ""))
        print(f"| {updates} | " + " | ".join(cells) + " |")
    for name in STAGES:
        cells = plan_stage(name, best)
        for heading in dict.fromkeys(heading for heading, _ in cells):
            groups = {v: read_finished(jobs) for (h, v), jobs in cells.items() if h == heading}
            groups = {variant: runs for variant, runs in groups.items() if runs}
            if groups:
                print(f"\n### {heading}\n\n{format_table(groups, only=COLUMNS, pairs=PAIRS)}")


def main(argv: list[str]):
    if argv == ["report"]:
        return report()
    if len(argv) != 1 or argv[0] not in ("tune", *STAGES):
        sys.exit(__doc__)
    cells = plan_tuning() if argv == ["tune"] else plan_stage(argv[0], choose_rates())
    jobs = {folder: job for cell in cells.values() for folder, job in cell.items()}
    # Seed by seed, so that every cell has about as many of them when the stage is cut off.
    if failures := make(sorted(jobs.values(), key=lambda job: job.config.seed)):
        sys.exit("error: " + "\n       ".join(failures))


if __name__ == "__main__":
    main(sys.argv[1:])
