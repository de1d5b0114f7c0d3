"""A run directory: config.json, metrics.jsonl, samples.txt, checkpoints/ with all that a resumed run needs."""

from __future__ import annotations

import fcntl
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
from safetensors import safe_open
from tqdm import tqdm

from cli import fail
from config import Config

LOGS = ("metrics.jsonl", "samples.txt")


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


def new_run(run: Path, config: Config, device: torch.device):
    """Make the directory of a new run. It appears under its name once its config is in it: then it can be resumed."""
    part = run.with_name(f".{run.name}.starting")
    shutil.rmtree(part, ignore_errors=True)
    try:
        if run.exists():
            raise FileExistsError(None, "it exists")
        part.mkdir(parents=True)
        write_config(part, config, device)
        part.rename(run)
    except OSError as error:
        fail(f"cannot make the run directory {run}: {error.strerror}")


def record(run: Path, metrics: dict, evaluated: dict | None = None, lines: tuple[str, ...] = (), show: bool = False):
    """One line of metrics.jsonl; at an evaluation also a line on the screen and some answers in samples.txt."""
    try:
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics | (evaluated or {})) + "\n")
        if evaluated:
            with open(run / "samples.txt", "a") as file:
                file.write(f"step {metrics['step']}\n" + "".join(f"  {line}\n" for line in lines))
    except OSError as error:
        sys.exit(
            f"error: {run} cannot be written ({error.strerror}); go on from its last checkpoint with --resume {run}"
        )
    if evaluated:
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
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        sizes = {name: (run / name).stat().st_size for name in LOGS}
        torch.save({"step": step, "optimizer": optimizer.state_dict(), "sizes": sizes}, part / "trainer.pt")
        for path in [*part.iterdir(), *(run / name for name in sizes)]:
            if path.is_file():
                with open(path, "r+b") as file:
                    os.fsync(file.fileno())
    except Exception as error:  # a full disk: torch, safetensors and the system each have a class of their own for it
        shutil.rmtree(part, ignore_errors=True)
        last = max((run / "checkpoints").glob("step-*"), default=None)
        kept = f"{last.name} is intact, go on from it with --resume {run}" if last else "there is no earlier one"
        sys.exit(f"error: the checkpoint of step {step} cannot be written ({str(error).splitlines()[0]}); {kept}")
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)  # the name appears only when everything is on disk
    for old in sorted((run / "checkpoints").glob("step-*"))[:-2]:
        shutil.rmtree(old)


def newest_checkpoint(run: Path) -> tuple[Path | None, dict | None]:
    """The newest checkpoint and its trainer state; a damaged one is passed over, with a line that says so."""
    for folder in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        try:
            state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
            for name in [path.name for path in folder.glob("*.safetensors")] or ["model.safetensors"]:
                with safe_open(folder / name, "pt") as file:  # refuses a file that is shorter than its header says
                    file.keys()
            json.loads((folder / "config.json").read_text())
            return folder, state
        except Exception as error:  # torn by a crash of the machine: every library fails in classes of its own
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"{folder} is damaged ({reason}); going back to the one before", file=sys.stderr)
    return None, None


def restore(run: Path, optimizer, state: dict) -> int:
    """Restore the optimiser and cut the logs back to the checkpoint's step, which is returned."""
    optimizer.load_state_dict(state["optimizer"])
    for name, size in state["sizes"].items():
        if not (run / name).is_file() or (run / name).stat().st_size < size:
            fail(f"--resume {run}: {name} is shorter than it was at step {state['step']}; it was changed")
        os.truncate(run / name, size)
    return state["step"]


def lock(run: Path):
    """An open file that keeps other processes out of the run directory until it is closed, or the process ends."""
    file = open(run / "lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        fail(f"{run}: another process is writing to it")
    return file


def stop_at_bad_numbers(run: Path, step: int, error: FloatingPointError):
    """Save the batch that gave a loss or gradient that is not finite, for inspection, and leave."""
    path = run / f"bad-batch-{step:06d}.pt"
    torch.save(error.batch, path)
    sys.exit(f"error: step {step}: {error}; the update was not made; the batch that caused it is in {path}")
