"""A run directory: config.json, metrics.jsonl, samples.txt, checkpoints/ with all that a resumed run needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from cli import fail
from config import Config


def default_name(config: Config) -> str:
    return f"{config.task}-{config.method}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def write_config(run: Path, config: Config, device: torch.device):
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
        commit = git.stdout.strip() or None
    except OSError:
        commit = None
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
    about = {"versions": versions, "git_commit": commit, "device": str(device)}
    part = run / "config.json.part"
    part.write_text(json.dumps({"config": asdict(replace(config, resume="")), **about}, indent=1) + "\n")
    part.rename(run / "config.json")


def record(run: Path, metrics: dict, evaluated: dict | None = None, lines: tuple[str, ...] = (), show: bool = False):
    """One line of metrics.jsonl; at an evaluation also a line on the screen and some answers in samples.txt."""
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics | (evaluated or {})) + "\n")
    if evaluated:
        with open(run / "samples.txt", "a") as file:
            file.write(f"step {metrics['step']}\n" + "".join(f"  {line}\n" for line in lines))
        shown = {k: metrics[k] for k in ("reward", "repair_rate", "entropy", "tax") if k in metrics} | evaluated
        tqdm.write(f"step {metrics['step']}: " + "  ".join(f"{k} {v:.3f}" for k, v in shown.items()))
        for line in lines if show else ():
            tqdm.write("    " + line)


def summary(run: Path):
    """What changed: every measured quantity at its first and last evaluation, and the reward over 10 steps."""
    seen = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = [[m for m in seen if "greedy" in m][i] for i in (0, -1)]
    steps = [m for m in seen if "reward" in m]
    print(f"\n{'':18} before   after")
    for key in ("reward", "entropy", "tax", "length", *(["repair_rate"] if "repair_rate" in steps[0] else [])):
        print(f"{key:18} {steps[0][key]:6.3f}  {sum(m[key] for m in steps[-10:]) / len(steps[-10:]):6.3f}")
    for key in (k for k in last if k in first and k != "step"):
        print(f"{key:18} {first[key]:6.3f}  {last[key]:6.3f}")


def save(run: Path, step: int, model, tokenizer, optimizer):
    """runs/NAME/checkpoints/step-000050: the model in transformers' format, and what the trainer needs to go on."""
    final = run / "checkpoints" / f"step-{step:06d}"
    part = final.with_name(f"unfinished-{step:06d}")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    sizes = {name: (run / name).stat().st_size for name in ("metrics.jsonl", "samples.txt")}
    torch.save({"step": step, "optimizer": optimizer.state_dict(), "sizes": sizes}, part / "trainer.pt")
    for path in [*part.iterdir(), *(run / name for name in sizes)]:
        if path.is_file():
            with open(path, "r+b") as file:
                os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)  # the name appears only when everything is on disk
    for old in sorted((run / "checkpoints").glob("step-*"))[:-2]:
        shutil.rmtree(old)


def load_trainer(run: Path, optimizer, folder: Path) -> int:
    """Restore the optimiser and cut the logs back to the checkpoint's step, which is returned."""
    state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    for name, size in state["sizes"].items():
        if not (run / name).is_file() or (run / name).stat().st_size < size:
            fail(f"--resume {run}: {name} is shorter than it was at step {state['step']}; it was changed")
        os.truncate(run / name, size)
    return state["step"]
