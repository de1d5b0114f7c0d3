"""A run directory, and all that makes a killed run resumable bit for bit.

runs/NAME/config.json    flags, versions, commit
          metrics.jsonl  a line a step
          samples.txt    a few answers of each evaluation
          start/         the policy that the KL is measured from
          checkpoints/   the newest two: model, tokenizer, optimiser state, checksums
          lock           held by the process that writes here
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from llm import fail
from llm.policy import Policy, check_context, load_policy

LOGS = ("metrics.jsonl", "samples.txt", "groups.jsonl")


@dataclass
class Run:
    """An open run directory and what training goes on with."""

    folder: Path
    policy: Policy
    optimizer: torch.optim.Optimizer
    steps_done: int  # 0: the warm start is still to come
    interrupted: bool = False

    def finish_step_on_interrupt(self):
        """From now on Ctrl-C sets `interrupted`; a second one ends the process at once."""

        def handler(*_):
            if self.interrupted:
                sys.exit(130)
            self.interrupted = True

        signal.signal(signal.SIGINT, handler)


@contextmanager
def open_run(config, task) -> Iterator[Run]:
    """A new run directory, or the one that --resume names as its newest checkpoint left it.

    It belongs to this process until the context ends. What cannot work is refused in one line, and
    nothing in an old directory is changed before all is known to fit.
    """
    folder = Path(config.resume or config.out)
    lock = FileLock(folder / "lock")
    checkpoint = state = None
    if config.resume:
        acquire(lock, folder)
        checkpoint, state = newest_checkpoint(folder)
        if not checkpoint:
            print(f"{folder} holds no complete checkpoint: it begins anew")
    if state and state["step"] >= config.steps:
        done = f"{state['step']} of {config.steps} steps"
        fail(f"{folder} has already made {done}; nothing is left to do")
    policy = load_policy(config, task, str(checkpoint or config.model))
    check_context(policy, task, config, warm=config.warm_steps > 0 and not checkpoint)
    start = start_path(folder, config)
    if checkpoint and config.reference and config.warm_steps and not Path(start).is_dir():
        fail(f"--resume {folder}: start/, the policy that the KL is measured from, is missing")
    if not config.resume:
        make_directory(folder, config, policy.model.device)
        acquire(lock, folder)
    run = Run(folder, policy, adamw(policy.model, config.lr), 0)
    if state:
        run.steps_done = restore(run, state)
    if config.resume:
        write_config(folder, config, policy.model.device)  # --steps may be new
    if not state:
        for name in LOGS:
            (folder / name).write_text("")
    previous = signal.getsignal(signal.SIGINT)
    try:
        yield run
    finally:
        signal.signal(signal.SIGINT, previous)
        lock.release()


def adamw(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    betas = (0.9, 0.95)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=0.0, fused=True)


def acquire(lock: FileLock, folder: Path):
    """Keep other processes out of the run directory until the lock is released or we end."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        fail(f"{folder}: another process is writing to it")
    except OSError as error:
        fail(f"cannot write to {folder}: {error.strerror}")


def make_directory(folder: Path, config, device: torch.device):
    """A new run appears under its name once its config is in it: from then on it can be resumed."""
    part = folder.with_name(f".{folder.name}.starting")
    shutil.rmtree(part, ignore_errors=True)
    try:
        if folder.exists():
            raise FileExistsError(None, "it exists")
        part.mkdir(parents=True)
        write_config(part, config, device)
        part.rename(folder)
    except OSError as error:
        fail(f"cannot make the run directory {folder}: {error.strerror}")


def write_config(folder: Path, config, device: torch.device):
    """config.json, replaced as a whole."""
    import transformers

    try:
        command = ["git", "rev-parse", "HEAD"]
        git = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
        commit = git.stdout.strip() or None
    except OSError:
        commit = None
    about = {
        "config": asdict(replace(config, resume="")),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "git_commit": commit,
        "device": str(device),
    }
    part = folder / "config.json.part"
    try:
        part.write_text(json.dumps(about, indent=1) + "\n")
        part.rename(folder / "config.json")
    except OSError as error:
        fail(f"cannot write to {folder}: {error.strerror}")


def saved_config(given: dict, default) -> dict:
    """The fields of the run that --resume names. Refuses other flags beside it, in one line."""
    run = given["resume"]
    if extra := set(given) - {"resume", "steps", "micro_rows"}:
        flag = "--" + min(extra).replace("_", "-")
        accepted = "--micro-rows can, and --steps of a constant schedule"
        fail(f"{flag} cannot be changed when resuming; only {accepted}")
    try:
        saved = json.loads((Path(run) / "config.json").read_text())["config"]
        kinds = {key: type(value) for key, value in vars(default).items()}
        if kinds != {key: type(value) for key, value in saved.items()}:
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        fail(f"--resume {run}: no config.json of a run there; accepted: a run, such as runs/NAME")
    steps = given.get("steps", saved["steps"])
    if saved["schedule"] == "linear" and steps != saved["steps"]:
        laid_out = f"the linear schedule was laid out for {saved['steps']} steps"
        fail(f"--steps {steps}: {laid_out}; --steps cannot change")
    return saved


# ---------------- the start policy


def start_path(folder: Path, config) -> str:
    """Where the policy lies that reinforcement learning started from."""
    return str(folder / "start") if config.warm_steps else config.model


def save_start(run: Run, config):
    """Keep the warm-started policy: the KL is measured from it, and other runs may share it."""
    if not config.warm_steps:
        return
    try:
        run.policy.model.save_pretrained(run.folder / "start")
        run.policy.tokenizer.save_pretrained(run.folder / "start")
    except Exception as error:  # a full disk, see save()
        reason = str(error).splitlines()[0]
        sys.exit(f"error: the start policy cannot be written ({reason}); make room, start anew")


def start_policy(run: Run, task, config) -> Policy | None:
    """The frozen reference, or None without --reference."""
    if not config.reference:
        return None
    return load_policy(config, task, start_path(run.folder, config))


# ---------------- checkpoints


def save(run: Run, step: int):
    """checkpoints/step-000050: the model in transformers' format, and what the trainer needs."""
    folder = run.folder / "checkpoints"
    final, part = folder / f"step-{step:06d}", folder / f"unfinished-{step:06d}"
    before = [path for path in sorted(folder.glob("step-*")) if path < final]
    shutil.rmtree(part, ignore_errors=True)
    try:
        run.policy.model.save_pretrained(part)
        run.policy.tokenizer.save_pretrained(part)
        sizes = {name: (run.folder / name).stat().st_size for name in LOGS}
        state = {"step": step, "optimizer": run.optimizer.state_dict(), "sizes": sizes}
        torch.save(state, part / "trainer.pt")
        sums = {path.name: checksum(path) for path in part.iterdir() if path.is_file()}
        (part / "checksums.json").write_text(json.dumps(sums))
        for path in [*part.iterdir(), *(run.folder / name for name in sizes), part]:
            sync(path)
    except Exception as error:  # a full disk has one name in torch, another in safetensors
        shutil.rmtree(part, ignore_errors=True)
        reason, left = str(error).splitlines()[0], "there is none before"
        if before:
            left = f"{before[-1].name} is intact, resume from it with --resume {run.folder}"
        sys.exit(f"error: the checkpoint of step {step} cannot be written ({reason}); {left}")
    run.steps_done = step
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)  # the name appears only when everything is on disk
    sync(folder)
    for other in {*folder.glob("step-*")} - {final, *before[-1:]}:  # damaged later ones too
        shutil.rmtree(other)


def checksum(path: Path) -> int:
    total = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            total = zlib.crc32(block, total)
    return total


def sync(path: Path):
    """Wait until a file, or the names in a directory, are on disk. Windows syncs no directories."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def newest_checkpoint(run: Path) -> tuple[Path | None, dict | None]:
    """The newest checkpoint and its trainer state; a damaged one is passed over, and said to be."""
    folders = sorted((run / "checkpoints").glob("step-*"), reverse=True)
    for folder in folders:
        try:
            for name, total in json.loads((folder / "checksums.json").read_text()).items():
                if checksum(folder / name) != total:
                    raise ValueError(f"{name} is not what was written")
            state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
            return folder, state
        except (OSError, ValueError, AttributeError) as error:
            print(f"{folder} is damaged ({error}); going back to the one before", file=sys.stderr)
    if folders:
        fail(f"--resume {run}: none of its checkpoints can be read; nothing was changed")
    return None, None


def restore(run: Run, state: dict) -> int:
    """Restore the optimiser and cut the logs back to the checkpoint's step, which is returned."""
    run.optimizer.load_state_dict(state["optimizer"])
    for name, size in state["sizes"].items():
        path = run.folder / name
        text = path.read_bytes()[:size] if path.is_file() else b""
        intact = len(text) == size and text[-1:] in (b"\n", b"")
        if intact and name == "metrics.jsonl":
            intact = json.loads(text.splitlines()[-1])["step"] == state["step"]
        if not intact:
            was = f"{name} is not what it was at step {state['step']}"
            fail(f"--resume {run.folder}: {was}; it was changed")
    for name, size in state["sizes"].items():  # only now is anything changed
        os.truncate(run.folder / name, size)
    return state["step"]


def stop_at_full_disk(folder: Path, error: OSError):
    resume = f"resume from its last checkpoint with --resume {folder}"
    sys.exit(f"error: {folder} cannot be written ({error.strerror}); {resume}")


def stop_at_bad_numbers(folder: Path, step: int, error: FloatingPointError):
    """Keep the batch that gave a loss or gradient that is not finite, for inspection, and end."""
    path = folder / f"bad-batch-{step:06d}.pt"
    torch.save(error.batch, path)
    sys.exit(
        f"error: step {step}: {error}; the update was not made; "
        f"the batch that caused it is in {path}"
    )


def stop_at_logp_gap(run: Run, step: int, gap: float):
    """End where sampler and scorer disagree; the run is saved as the step before left it."""
    left = "no step was made"
    if step > 1:
        left = f"the run is saved up to step {step - 1} in {run.folder}"
    if run.steps_done < step - 1:
        save(run, step - 1)
    sys.exit(
        f"error: step {step}: scored and sampled log-probs differ by {gap:.3g} nats, which is more "
        f"than rounding; {left}"
    )


def keep_groups(run: Run, answers, scored, after: torch.Tensor, config):
    """Up to three groups of a step in groups.jsonl, a line each: of train.py's Answers and Scored.

    Those in which most tokens are shared by answers that differ in reward, with the log-probs of
    their tokens before the step (logp_old) and after it (logp). after: (N, T) log-probs.
    """
    groups = torch.arange(len(answers.rewards)).view(-1, config.group_size)
    shared = []  # by group: how many tokens of answers lead where one with another reward leads
    for rows in groups:
        nodes, R = scored.nodes[rows], answers.rewards[rows]
        same = (nodes[:, None] == nodes) & (nodes >= 0) & (R[:, None] != R)[..., None]  # (G, G, T)
        shared.append(int(same.any(1).sum()))
    mixed = [group for group in range(len(groups)) if shared[group]]
    best = sorted(mixed, key=lambda group: -shared[group])
    lines = []
    for group in best[:3]:
        line = {
            "step": answers.step,
            "prompt": answers.items[group * config.group_size].prompt,
            "method": config.method,
            "max_tokens": config.max_tokens,
            "answers": [],
        }
        for i in groups[group].tolist():
            mask = scored.rows.mask[i]
            ids = scored.rows.tokens[i][mask].tolist()
            answer = {
                "text": answers.texts[i],
                "tokens": [run.policy.tokenizer.decode([token]) for token in ids],
                "ids": ids,
                "reward": answers.rewards[i].item(),
                "advantage": scored.advantages[i].item(),
                "logp_old": scored.batch.logp_old[i][mask].tolist(),
                "logp": after[i][mask].tolist(),
            }
            line["answers"].append(answer)
        lines.append(json.dumps(line) + "\n")
    try:
        with open(run.folder / "groups.jsonl", "a") as file:
            file.writelines(lines)
    except OSError as error:
        stop_at_full_disk(run.folder, error)


def report(run: Run, config, command: str) -> str:
    """What to say at the end of a run, or where it was interrupted."""
    if run.steps_done < config.steps:
        return f"stopped after step {run.steps_done}; resume with: {command} --resume {run.folder}"
    if not config.steps:
        return f"the warm-started policy is in {run.folder / 'start'}"
    text = (run.folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    evaluations = [line for line in lines if "greedy" in line]
    made = [line for line in lines if "reward" in line]
    rows = ["", f"{'':18} before   after"]
    for key in ("reward", "entropy", "tax", "length", "repair_rate"):
        if key in made[0]:
            late = [line[key] for line in made[-10:]]
            rows.append(f"{key:18} {made[0][key]:6.3f}  {sum(late) / len(late):6.3f}")
    first, last = evaluations[0], evaluations[-1]
    both = [key for key in last if key in first and key != "step"]
    for key in both:
        rows.append(f"{key:18} {first[key]:6.3f}  {last[key]:6.3f}")
    for kind in dict.fromkeys(key.split()[0] for key in both if " " in key):  # opener, form
        named = [key for key in both if key.startswith(f"{kind} ")]
        before, after = (1 - sum(line[key] for key in named) for line in (first, last))
        rows.append(f"{f'{kind} other':18} {before:6.3f}  {after:6.3f}")
    rows += ["", f"everything is in {run.folder}; all options: {command} --help"]
    if config.task == "arithmetic":
        rows.append("try next: python -m toy.tax, where methods end at different rewards")
    return "\n".join(rows)
