"""The folder of a run: what train.py keeps there, and what it prints. Nothing is trained here.

    runs/NAME/.lock          of the process that writes here
              config.json    flags, and what --resume changed after which step
              task.py        a copy of the task, if it is a file; a table keeps its own ending
              method.py      a copy of the loss, if it is a file
              tracker.txt    the run's name there, with --track
              metrics.jsonl  a line a step
              samples.txt    a group of answers a step, to read
              start/         the policy after the warm start
              checkpoint.pt  of the last evaluated step: weights, optimiser, metrics, samples
              batches/       the rollout of each evaluated step, for toy/tree.py
              model-best/    the policy of the best evaluation, if one beats the first
              model/         the policy at the end

All randomness is made anew from (seed, use, step), so weights, optimiser and step are all that a
run needs to resume: on a CPU bit for bit, wherever it was killed. Whatever replaces a file or a
folder does so as a whole.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
import shutil
import time
import uuid
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import FileLock
from tqdm import tqdm

from llm import loading

LOGS = ("metrics.jsonl", "samples.txt")
say = tqdm.write  # a line above the bar, if there is one


def rng(*key) -> torch.Generator:
    """A generator for each use and step, so that a resumed run has no random state to restore."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def count_cores() -> int:
    """The cores that this process may use. A job may not have all those of its machine."""
    # macOS and Windows do not tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# ---------------- a folder that belongs to one process


@contextmanager
def own_folder(config):
    """Make the folder of a run, or take the one that --resume names, until the `with` ends.

    Raises FileExistsError if --out exists, and filelock.Timeout if another process resumes it.
    """
    if not config.resume:
        now, task = time.strftime("%Y%m%d-%H%M%S"), Path(config.task).stem
        name = f"runs/{task}-{Path(config.method).stem}-s{config.seed}-{now}"
        if not config.out and Path(name).exists():  # a run that began in the same second
            name = f"{name}-{os.getpid()}"
        config.out = config.out or name
        Path(config.out).mkdir(parents=True)
    with FileLock(Path(config.out, ".lock"), timeout=0):
        yield


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text("utf-8"))


def write_config(step: int, config):
    """config.json: the flags, and under "resumed" those that --resume changed: after which step,
    and their old and new values."""
    path, flags, resumed = Path(config.out, "config.json"), asdict(config) | {"resume": ""}, []
    if path.exists():
        before = read_config(path.parent)
        resumed = before.pop("resumed")
        changed = {key: [before[key], x] for key, x in flags.items() if before[key] != x}
        changed.pop("out", None)  # the folder may have been moved
        resumed += [{"after_step": step, **changed}] if changed else []
    write_aside(path, json.dumps(flags | {"resumed": resumed}, indent=1) + "\n")


def copy_file(file: str, copy: Path):
    """Keep what a file of the user said when the run began, and say if it says something else."""
    if Path(file).is_file():
        now = Path(file).read_bytes()
        if not copy.exists():
            with replacing(copy) as part:
                part.write_bytes(now)
        elif copy.read_bytes() != now:
            say(f"warning: {file} has changed since this run began; {copy} is the old one")


# ---------------- what a run keeps


def begin(policy, optimizer, config) -> int:
    """Open the files of a run, and put everything back to its checkpoint, if it has one. Returns
    the step of the checkpoint, or 0."""
    folder, state = Path(config.out), {"step": 0, "logs": {}}
    if (folder / "checkpoint.pt").exists():
        state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        policy.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
    if step > config.steps:
        raise ValueError(f"--steps {config.steps}: the run has already made {step}")
    for name in LOGS:
        write_aside(folder / name, state["logs"].get(name, ""))  # without the steps that were lost
    write_config(step, config)
    copy_file(config.task, folder / f"task{Path(config.task).suffix}")
    copy_file(re.sub(r"(?<=\.py):\w+$", "", config.method), folder / "method.py")
    open_tracker(config)
    if step:
        then = "goes on" if step < config.steps else "--steps adds more"
        say(f"resumes after step {step} of {config.steps}; {then}")
        for evaluation in evaluations(folder):
            show(evaluation)
        keep_best(policy, step, folder)  # the run may have been killed before it was written
    if step < config.steps:
        shutil.rmtree(folder / "model", ignore_errors=True)  # of an earlier end
    return step


def save(policy, optimizer, rollout, metrics: dict, config):
    """Keep what a step came to; weights only if it was evaluated. Step 0 has no rollout."""
    folder, step = Path(config.out), metrics["step"]
    append(folder / "metrics.jsonl", json.dumps(metrics) + "\n")
    if rollout:
        append(folder / "samples.txt", first_group(rollout, step, config))
    if rollout and "greedy" in metrics:
        if not all(weight.isfinite().all() for weight in policy.model.parameters()):
            raise ValueError(f"step {step}: a weight is not finite; no checkpoint was made of it")
        save_rollout(policy, rollout, step, config)
        state = {"step": step, "model": policy.model.state_dict()}
        state["optimizer"] = optimizer.state_dict()
        state["logs"] = {name: (folder / name).read_text("utf-8") for name in LOGS}
        with replacing(folder / "checkpoint.pt") as part:
            torch.save(state, part)
        keep_best(policy, step, folder)
    if config.track:
        numbers = {key: x for key, x in metrics.items() if key not in ("examples", "step")}
        importlib.import_module(config.track).log(numbers, step=step)
    if "greedy" in metrics:
        show(metrics)


def first_group(rollout, step: int, config) -> str:
    """All answers to the first prompt of a step, for a person to read."""
    item, pairs = rollout.items[0], zip(rollout.texts, rollout.rewards.tolist(), strict=True)
    lines = [f"=== step {step}: {item.prompt} ({item.answer})"]
    for text, reward in [*pairs][: config.group_size]:
        text = text.replace("\n", "\n    ")
        lines.append(f"[{reward:g}] {text}")
    return "\n".join(lines) + "\n\n"


def save_rollout(policy, rollout, step: int, config):
    """A rollout with the log-probs before and after its step, for toy/tree.py to draw."""
    tokens = rollout.tokens.tolist()
    batch = {
        "step": step,
        "group_size": config.group_size,
        "max_tokens": config.max_tokens,
        "prompts": [item.prompt for item in rollout.items[:: config.group_size]],
        "pieces": [[policy.tokenizer.decode([i]) for i in row] for row in tokens],  # (N, T)
        "tokens": rollout.tokens,
        "mask": rollout.mask,
        "rewards": rollout.rewards,
        "logp_old": rollout.logp_old,
        "logp": rollout.logp_after,
    }
    Path(config.out, "batches").mkdir(exist_ok=True)
    with replacing(Path(config.out, "batches", f"step-{step:06d}.pt")) as part:
        torch.save(batch, part)


def keep_best(policy, step: int, folder: Path):
    """Write model-best/ if the evaluation of this step beats all before it."""
    if best_of(evaluations(folder))["step"] == step:
        write_model(policy, folder / "model-best")


def write_model(policy, folder: Path):
    """In transformers' own format, so that AutoModelForCausalLM and AutoTokenizer read it.

    What was not trained is copied as it came: another version of transformers, or a tool that wants
    a processor beside the tokenizer, may not read what this one would write.
    """
    with replacing(folder) as part:
        policy.tokenizer.save_pretrained(part)
        for pattern in loading.BESIDE if policy.files else ():
            for file in policy.files.glob(pattern):
                if not file.name.endswith(".index.json"):  # names the shards that came
                    shutil.copy(file, part)
        came = read_config(part) if policy.files else {}
        policy.model.save_pretrained(part)  # with a config.json of its own
        # Version 5 of transformers has new names for a tokenizer's class and for keys of
        # config.json, such as rope_theta. Without the old ones, version 4 cannot read the first,
        # and computes something else, in silence, with the second.
        made = read_config(part)
        if came.get("model_type") == made["model_type"]:
            write_aside(part / "config.json", json.dumps(came | made, indent=2))
        file = part / "tokenizer_config.json"
        settings = json.loads(file.read_text("utf-8"))
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            settings["model_input_names"] = policy.tokenizer.model_input_names
            write_aside(file, json.dumps(settings, indent=2))


@contextmanager
def replacing(path: Path):
    """A file or folder that takes the place of `path` as a whole, or not at all. (A folder is away
    for a moment; if a run is killed then, --resume writes it again.)"""
    part = path.with_name(path.name + ".part")
    yield part
    if path.is_dir():
        shutil.rmtree(path)
    part.replace(path)


def write_aside(path: Path, text: str):
    with replacing(path) as part:
        part.write_text(text, "utf-8")


def append(path: Path, text: str):
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def open_tracker(config):
    """Begin a run of trackio or wandb, or go on with that of this folder."""
    if config.track:
        file = Path(config.out, "tracker.txt")
        if not file.exists():  # folders may have one name, and the runs of a tracker may not
            file.write_text(f"{file.parent.name}-{uuid.uuid4().hex[:8]}", "utf-8")
        name = file.read_text("utf-8")
        # wandb knows a run by an id, trackio by its name.
        more = {"id": name} if config.track == "wandb" else {}
        importlib.import_module(config.track).init(
            project="token-gradient-cancellation",
            name=name,
            resume="allow",
            config=asdict(config),
            **more,
        )


# ---------------- what a run says


def announce(policy, prompt_ids, config):
    """The first lines of a run: what learns, and what it reads. Also a rate that is too high, and
    files that take gigabytes. prompt_ids: (W,), of the first prompt, with -1 for padding."""
    size = sum(weight.numel() for weight in policy.model.parameters())
    kind, device = "bf16" if policy.bf16 else "fp32", next(policy.model.parameters()).device.type
    about = f"{size:,} parameters, computed in {kind} on {device}"
    say(f"{config.method} on {config.task}, {about}, lr {config.lr:g}, into {config.out}")
    ids = prompt_ids[prompt_ids >= 0].tolist()
    say(f"a prompt as the model reads it, {len(ids)} tokens: {policy.tokenizer.decode(ids)!r}")
    if config.model != "scratch" and config.lr > 1e-4:
        say(f"warning: --lr {config.lr:g} is high for a pretrained model; 1e-6 to 1e-5 is usual")
    model = 4e-9 * size  # GB, in fp32
    checkpoint = 3 * model  # and AdamW's two moments
    kept = model * (1 + bool(config.warm_steps))  # the best one, and perhaps the start
    needed = kept + 2 * checkpoint  # the old one goes when the new one is complete
    if needed > 1:
        left = kept + checkpoint + model
        say(f"needs {needed:.1f} GB of disk, and {left:.1f} GB at the end")


def show(metrics: dict):
    """Print an evaluation as a row of a table. Step 0 begins the table, and has no rollout yet."""
    held_out = ["greedy", "sampled", *(key for key in metrics if key.startswith("pass@"))]
    columns = [*held_out, "reward", "entropy", "equal_groups", "length", "truncated"]
    if metrics["step"] == 0:
        say(" " * 10 + "  ".join(columns))
    cells = [f"{metrics[key]:{len(key)}.3f}" for key in columns if key in metrics]
    say(f"step {metrics['step']}:".ljust(10) + "  ".join(cells))
    say(f"    {' / '.join(metrics['examples'][-1].splitlines())}")


def read_metrics(folder: Path) -> list[dict]:
    return [*map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())]


def evaluations(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl that have an evaluation."""
    return [line for line in read_metrics(folder) if "greedy" in line]


def best_of(found: list[dict]) -> dict:
    """The evaluation with the highest greedy reward; of equals, with the highest sampled one."""
    return max(found, key=lambda metrics: (metrics["greedy"], metrics["sampled"]))


def quote(path: Path) -> str:
    """For a shell, on Windows as well."""
    return f'"{path}"' if " " in str(path) else str(path)


def say_how_to_resume(folder: Path):
    """After Ctrl-C."""
    say("interrupted; the steps since the last evaluation after step 0 are lost")
    say(f"to resume: python train.py --resume {quote(folder)}")


def summarize(folder: Path, held_out: int):
    """Did it work? The last line has the change of the greedy reward, and where it was best.

    held_out: the number of items of an evaluation.
    """
    lines = read_metrics(folder)
    found, rollouts = evaluations(folder), [line for line in lines if "reward" in line]
    first, last, best = found[0], found[-1], best_of(found)
    say(f"everything is in {folder}; all flags: python train.py --help")
    say(f"its curves: python -m experiments.compare --runs {quote(folder)} --plot curves.png")
    if rollouts and all(line["equal_groups"] == 1 for line in rollouts):
        said = "In no step did two answers to one prompt earn different rewards"
        say(f"{said}, so there was nothing to compare. See TROUBLESHOOTING.md, It does not learn.")
    said = [f"{key} {first[key]:.3f} -> {last[key]:.3f}" for key in ("greedy", "sampled")]
    if torch.cuda.is_available():
        said.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most")
    say(f"{held_out} held-out items: {', '.join(said)}")
    change = last["greedy"] - first["greedy"]
    # The standard error of a difference between evaluations on different items. On the same items,
    # as here, the true one is mostly smaller.
    noise = math.hypot(first["greedy_se"], last["greedy_se"])
    where = f"{best['step']}: {folder}/model-best" if best["step"] else "0, before RL"
    say(f"greedy changed by {change:+.3f} (standard error {noise:.3f}); best at step {where}")
