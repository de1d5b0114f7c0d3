"""A run directory: config.json, metrics.jsonl, samples.txt, checkpoints/ with all that a resumed
run needs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from cli import fail
from config import Config

LOGS = ("metrics.jsonl", "samples.txt")


def default_name(config: Config) -> str:
    return f"{config.task}-{config.method}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def write_config(run: Path, config: Config, device: torch.device):
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
        )
        commit = git.stdout.strip() or None
    except OSError:
        commit = None
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    about = {"versions": versions, "git_commit": commit, "device": str(device)}
    part = run / "config.json.part"
    try:
        part.write_text(
            json.dumps({"config": asdict(replace(config, resume="")), **about}, indent=1) + "\n"
        )
        part.rename(run / "config.json")
    except OSError as error:
        fail(f"cannot write to {run}: {error.strerror}")


def new_run(run: Path, config: Config, device: torch.device):
    """Make the directory of a new run. It appears under its name once its config is in it: then it
    can be resumed."""
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


def record(
    run: Path,
    metrics: dict,
    evaluated: dict | None = None,
    lines: tuple[str, ...] = (),
    show: bool = False,
):
    """One line of metrics.jsonl; at an evaluation also a line on the screen and some answers in
    samples.txt."""
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
        shown = {
            k: metrics[k] for k in ("reward", "repair_rate", "entropy", "tax") if k in metrics
        } | evaluated
        tqdm.write(
            f"step {metrics['step']}: " + "  ".join(f"{k} {v:.3f}" for k, v in shown.items())
        )
        for line in lines if show else ():
            tqdm.write("    " + line)


def summary(run: Path):
    """What changed: every measured quantity at its first and last evaluation, and the reward over
    10 steps."""
    seen = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = [[m for m in seen if "greedy" in m][i] for i in (0, -1)]
    steps = [m for m in seen if "reward" in m]
    print(f"\n{'':18} before   after")
    for key in (
        "reward",
        "entropy",
        "tax",
        "length",
        *(["repair_rate"] if "repair_rate" in steps[0] else []),
    ):
        print(
            f"{key:18} {steps[0][key]:6.3f}  {sum(m[key] for m in steps[-10:]) / len(steps[-10:]):6.3f}"
        )
    for key in (k for k in last if k in first and k != "step"):
        print(f"{key:18} {first[key]:6.3f}  {last[key]:6.3f}")


def save(run: Path, step: int, model, tokenizer, optimizer):
    """runs/NAME/checkpoints/step-000050: the model in transformers' format, and what the trainer
    needs to go on."""
    folder = run / "checkpoints"
    final, part = folder / f"step-{step:06d}", folder / f"unfinished-{step:06d}"
    before = [path for path in sorted(folder.glob("step-*")) if path < final]
    shutil.rmtree(part, ignore_errors=True)
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        sizes = {name: (run / name).stat().st_size for name in LOGS}
        torch.save(
            {"step": step, "optimizer": optimizer.state_dict(), "sizes": sizes}, part / "trainer.pt"
        )
        sums = {path.name: checksum(path) for path in part.iterdir() if path.is_file()}
        (part / "checksums.json").write_text(json.dumps(sums))
        for path in [*part.iterdir(), *(run / name for name in sizes), part]:
            sync(path)
    except Exception as error:  # a full disk: torch, safetensors and the system each have a class of their own for it
        shutil.rmtree(part, ignore_errors=True)
        kept = (
            f"{before[-1].name} is intact, go on from it with --resume {run}"
            if before
            else "there is none before"
        )
        sys.exit(
            f"error: the checkpoint of step {step} cannot be written ({str(error).splitlines()[0]}); {kept}"
        )
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)  # the name appears only when everything is on disk
    sync(folder)
    for other in {*folder.glob("step-*")} - {
        final,
        *before[-1:],
    }:  # damaged ones of later steps too
        shutil.rmtree(other)


def start_file(config: Config) -> Path | None:
    """Where --starts keeps warm-started weights: one file for all runs whose warm start is the
    same."""
    if not config.starts or not config.warm_steps:
        return None
    names = [
        "task",
        "model",
        "layers",
        "width",
        "data",
        "train_items",
        "skip_bad_lines",
        "seed",
        "threads",
        "device",
    ]
    names += [name for name in vars(config) if name.startswith(("warm_", "repair_"))]
    key = zlib.crc32(repr([(name, getattr(config, name)) for name in names]).encode())
    Path(config.starts).mkdir(parents=True, exist_ok=True)
    return Path(config.starts) / f"{config.task}-s{config.seed}-{key:08x}.pt"


def checksum(path: Path) -> int:
    with open(path, "rb") as file:
        total = 0
        while block := file.read(2**24):
            total = zlib.crc32(block, total)
    return total


def sync(path: Path):
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def newest_checkpoint(run: Path) -> tuple[Path | None, dict | None]:
    """The newest checkpoint and its trainer state; a damaged one is passed over, with a line that
    says so."""
    folders = sorted((run / "checkpoints").glob("step-*"), reverse=True)
    for folder in folders:
        try:
            for name, total in json.loads((folder / "checksums.json").read_text()).items():
                if checksum(folder / name) != total:
                    raise ValueError(f"{name} is not what was written")
            return folder, torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        except (OSError, ValueError, AttributeError) as error:
            print(f"{folder} is damaged ({error}); going back to the one before", file=sys.stderr)
    if folders:
        fail(f"--resume {run}: none of its checkpoints can be read; nothing was changed")
    return None, None


def restore(run: Path, optimizer, state: dict) -> int:
    """Restore the optimiser and cut the logs back to the checkpoint's step, which is returned."""
    optimizer.load_state_dict(state["optimizer"])
    for name, size in state["sizes"].items():
        text = (run / name).read_bytes()[:size] if (run / name).is_file() else b""
        whole = len(text) == size and text[-1:] in (b"\n", b"")
        if (
            not whole
            or name == "metrics.jsonl"
            and json.loads(text.splitlines()[-1])["step"] != state["step"]
        ):
            fail(
                f"--resume {run}: {name} is not what it was at step {state['step']}; it was changed"
            )
        os.truncate(run / name, size)
    return state["step"]


def lock(run: Path):
    """An open file that keeps other processes out of the run directory until it is closed, or the
    process ends."""
    try:
        file = open(run / "lock", "w")
    except OSError as error:
        fail(f"cannot write to {run}: {error.strerror}")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        fail(f"{run}: another process is writing to it")
    return file


def stop_at_bad_numbers(run: Path, step: int, error: FloatingPointError):
    """Save the batch that gave a loss or gradient that is not finite, for inspection, and leave."""
    path = run / f"bad-batch-{step:06d}.pt"
    torch.save(error.batch, path)
    sys.exit(
        f"error: step {step}: {error}; the update was not made; the batch that caused it is in {path}"
    )
