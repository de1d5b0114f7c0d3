"""The folder of a run: what train.py keeps there, and what it prints. Nothing is trained here.

    runs/NAME/config.json    the flags
              task.py        a copy of the task, if it is a file; a table keeps its own ending
              method.py      a copy of the loss, if it is a file
              held_out.json  the items of each evaluation
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
import os
import re
import shutil
import time
import uuid
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, pstdev

import torch
from tqdm import tqdm

LOGS = ("metrics.jsonl", "samples.txt")
say = tqdm.write  # a line above the bar, if there is one


def rng(*key) -> torch.Generator:
    """A generator for each use and step, so that a resumed run has no random state to restore."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


# ---------------- what a run keeps


def begin(policy, optimizer, config) -> int:
    """Make the folder of a run, or put everything back to the checkpoint of the run that --resume
    names. Returns the step of the checkpoint, or 0. Raises FileExistsError if --out exists."""
    name = f"{Path(config.task).stem}-{Path(config.method).stem}-s{config.seed}"
    config.out = config.out or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, state = Path(config.out), {"step": 0, "logs": dict.fromkeys(LOGS, "")}
    folder.mkdir(parents=True, exist_ok=bool(config.resume))
    if (folder / "checkpoint.pt").exists():
        state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        policy.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if state["step"] > config.steps:
        raise ValueError(f"--steps {config.steps}: the run has already made {state['step']}")
    if state["step"] < config.steps:
        shutil.rmtree(folder / "model", ignore_errors=True)  # of an earlier end
    for file, text in state["logs"].items():  # without the steps that were lost
        write_whole(folder / file, text)
    flags = asdict(config) | {"resume": "", "out": str(folder.resolve())}
    write_whole(folder / "config.json", json.dumps(flags, indent=1))
    method = re.sub(r"(?<=\.py):\w+$", "", config.method)
    copies = (config.task, f"task{Path(config.task).suffix}"), (method, "method.py")
    for file, copy in copies:  # what yours said when the run began
        if Path(file).is_file() and not (folder / copy).exists():
            with replacing(folder / copy) as part:
                shutil.copy(file, part)
    open_tracker(config)
    if state["step"]:
        keep_best(policy, state["step"], folder)  # a kill may have come before it was written
    return state["step"]


def keep_held_out(items, config):
    """Keep the held-out items. Say so if those of a resumed run are others than when it began."""
    file = Path(config.out, "held_out.json")
    text = json.dumps([[item.prompt, item.answer] for item in items], indent=1)
    if file.exists() and file.read_text("utf-8") != text:
        say("warning: the held-out items are others than before, and some may have been trained on")
        say("so do not compare the evaluations; a task should give the same items each time")
    write_whole(file, text)


def save(policy, optimizer, rollout, metrics: dict, config):
    """Keep what a step came to; weights only if it was evaluated. Step 0 has no rollout."""
    folder, step = Path(config.out), metrics["step"]
    append(folder / "metrics.jsonl", json.dumps(metrics) + "\n")
    if rollout:
        append(folder / "samples.txt", first_group(rollout, step, config))
    if rollout and "greedy" in metrics:
        save_rollout(policy, rollout, step, config)
        state = {"step": step, "model": policy.model.state_dict()}
        state["optimizer"] = optimizer.state_dict()
        state["logs"] = {name: (folder / name).read_text("utf-8") for name in LOGS}
        with replacing(folder / "checkpoint.pt") as part:
            torch.save(state, part)
        keep_best(policy, step, folder)
    if config.track:
        numbers = {key: x for key, x in metrics.items() if not isinstance(x, list)}
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
    if best_of(folder)["step"] == step:
        write_model(policy, folder / "model-best")


def write_model(policy, folder: Path):
    """In transformers' own format, so that AutoModelForCausalLM and AutoTokenizer read it."""
    with replacing(folder) as part:
        policy.model.save_pretrained(part)
        policy.tokenizer.save_pretrained(part)


@contextmanager
def replacing(path: Path):
    """A file or folder that takes the place of `path` as a whole, or not at all. (A folder is away
    for a moment; if a run is killed then, --resume writes it again.)"""
    part = path.with_name(path.name + ".part")
    yield part
    if path.is_dir():
        shutil.rmtree(path)
    part.replace(path)


def write_whole(path: Path, text: str):
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
        more = {"id": name} if config.track == "wandb" else {}  # wandb's names are no ids
        importlib.import_module(config.track).init(
            project="token-gradient-cancellation",
            name=name,
            resume="allow",
            config=asdict(config),
            **more,
        )


# ---------------- what a run says


def announce(policy, prompt_ids, config):
    """What learns, and what it reads: the first prompt, (W,), with -1 for padding."""
    size = sum(weight.numel() for weight in policy.model.parameters())
    kind, device = "bf16" if policy.bf16 else "fp32", next(policy.model.parameters()).device.type
    kind += " by oneDNN" if policy.quick else ""
    about = f"{size:,} parameters, computed in {kind} on {device}"
    say(f"{config.method} on {config.task}, {about}, lr {config.lr:g}")
    ids = prompt_ids[prompt_ids >= 0].tolist()
    say(f"a prompt as the model reads it, {len(ids)} tokens: {policy.tokenizer.decode(ids)!r}")


def show(metrics: dict):
    """Print an evaluation as a row of a table. Step 0 begins the table, and has no rollout yet."""
    held_out = ["greedy", "sampled", *(key for key in metrics if key.startswith("pass@"))]
    columns = [*held_out, "reward", "entropy", "equal_groups", "length", "truncated"]
    if metrics["step"] == 0:
        say(" " * 10 + "  ".join(columns))
    cells = [f"{metrics[key]:{len(key)}.3f}" for key in columns if key in metrics]
    say(f"step {metrics['step']}:".ljust(10) + "  ".join(cells))
    say(f"    {' / '.join(metrics['examples'][-1].splitlines())}")


def read_config(folder: Path) -> dict:
    """The flags of a run. A file that is gone is looked for where it was as seen from the run, in
    case both were moved; of the task and the method the run has copies."""
    flags = json.loads((folder / "config.json").read_text("utf-8"))
    for name in ("task", "method", "data", "model"):
        file = Path(re.sub(r"(?<=\.py):\w+$", "", flags[name]))
        if file.is_absolute() and not file.exists():
            places = [folder / os.path.relpath(file, flags["out"])]
            if name in ("task", "method"):
                places.append(folder / f"{name}{file.suffix}")
            found = [place for place in places if place.exists()]
            if not found:
                raise FileNotFoundError(f"{file} is gone; it is `{name}` in {folder}/config.json")
            flags[name] = flags[name].replace(str(file), str(found[0].resolve()))
    return flags


def read_metrics(folder: Path) -> list[dict]:
    return [*map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())]


def best_of(folder: Path) -> dict:
    """The evaluation with the highest greedy reward; of equals, with the highest sampled one."""
    found = [line for line in read_metrics(folder) if "greedy" in line]
    return max(found, key=lambda metrics: (metrics["greedy"], metrics["sampled"]))


def summarize(folder: Path, held_out: int):
    """Did it work? held_out: the number of items of an evaluation."""
    first, *rollouts = read_metrics(folder)
    last, best = (rollouts or [first])[-1], best_of(folder)
    say(f"everything is in {folder}; all flags: python train.py --help")
    say(f'its curves: python -m experiments.compare --runs "{folder}" --plot curves.png')
    if rollouts and all(line["equal_groups"] == 1 for line in rollouts):
        said = "In no step did two answers to one prompt earn different rewards"
        say(f"{said}, so there was nothing to compare. See TROUBLESHOOTING.md, It does not learn.")
    said = [f"{key} {first[key]:.3f} -> {last[key]:.3f}" for key in ("greedy", "sampled")]
    if torch.cuda.is_available():
        said.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB of the GPU at most")
    say(f"{held_out} held-out items: {', '.join(said)}")
    if last.get("unfinished"):
        said = f"{last['unfinished']:.0%} of the sampled answers ended inside a thought"
        say(f"{said}, without an answer: raise --max-tokens")
    pairs = zip(first["greedy_by_item"], last["greedy_by_item"], strict=True)
    changes = [after - before for before, after in pairs]
    rose, fell = sum(x > 0 for x in changes), sum(x < 0 for x in changes)
    noise = pstdev(changes) / len(changes) ** 0.5  # the standard error of their mean
    where = f"{best['step']}: {folder}/model-best" if best["step"] else "0, before RL"
    said = f"greedy changed by {fmean(changes):+.3f} (standard error {noise:.3f})"
    say(f"{said}: {rose} items rose, {fell} fell; best at step {where}")
