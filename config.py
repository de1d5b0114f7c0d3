"""Every knob of train.py with its default and one line of meaning; and all that is refused before a
model is loaded."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cli import check_ranges, fail, flag, given_flags, knob
from losses import METHODS, Batch, OldPolicy


@dataclass
class Config:
    task: str = knob("arithmetic", "what to learn", choices=("arithmetic", "gsm8k"))
    method: str = knob(
        "grpo",
        "which loss of losses.py (several, and --seeds: see compare.py)",
        choices=tuple(METHODS),
    )
    hyper: tuple[str, ...] = knob(
        (), "hyperparameters of the method, name=value ..., e.g. eps_high=0.3"
    )
    kl: float = knob(
        0.0, "weight of the k3 KL term to the start (methods with a kl term only)", low=0
    )
    model: str = knob("scratch", "scratch, or a directory or hub id of a causal LM")
    layers: int = knob(1, "layers of the scratch model", low=1)
    width: int = knob(64, "hidden size of the scratch model, a multiple of 8", low=8)
    data: str = knob("", "directory with GSM8K's train.jsonl and test.jsonl; none: the hub")
    skip_bad_lines: bool = knob(
        False, "leave out malformed lines of the data files, and say how many"
    )
    train_items: int = knob(
        0, "train only on so many problems, those with the shortest solutions; 0 = all", low=0
    )
    threads: int = knob(
        1, "CPU threads, 0 = all; a tiny model gains nothing from more than one", low=0
    )
    device: str = knob("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    seed: int = knob(0, "seed of everything random", low=0)
    warm_steps: int = knob(700, "supervised steps on the task's demonstrations before RL", low=0)
    warm_rows: int = knob(64, "demonstrations per supervised step", low=1)
    warm_lr: float = knob(6e-3, "its learning rate", low=0)
    starts: str = knob(
        "", "directory of warm-started weights, for runs that share their start: read, else written"
    )
    steps: int = knob(60, "rollout batches", low=1)
    prompts: int = knob(32, "prompts per rollout batch", low=1)
    group_size: int = knob(8, "G, answers per prompt", low=2)
    max_tokens: int = knob(26, "L, the longest answer in tokens", low=1)
    temperature: float = knob(1.0, "sampling temperature, also inside every log-prob", low=1e-3)
    epochs: int = knob(1, "passes over a rollout batch", low=1)
    minibatches: int = knob(
        4, "optimiser batches per pass: whole groups, off-policy after the first", low=1
    )
    micro_rows: int = knob(
        64, "rows per forward/backward: memory only, the result is the same up to rounding", low=1
    )
    lr: float = knob(1e-3, "learning rate of AdamW", low=0)
    schedule: str = knob("linear", "learning rate over the run", choices=("constant", "linear"))
    grad_clip: float = knob(1.0, "largest gradient norm", low=1e-12)
    repair_references: int = knob(
        1, "siblings that a wrong answer is corrected by (ibpo: K-1)", low=1
    )
    repair_bonus: float = knob(
        0.5, "rho: phi of a wrong answer whose correction is right (ibpo)", low=0
    )
    repair_weight: float = knob(0.6, "lambda: weight of phi in the shaped reward (ibpo)", low=0)
    repair_demos: float = knob(
        0.0, "share of correction problems among the toy's demonstrations", low=0
    )
    project: bool = knob(
        False, "project the loss: no reward-irrelevant part on shared tokens (ours, claim C17)"
    )
    context: int = knob(
        0, "with --project: tokens are shared whose last so many agree; 0 = all before", low=0
    )
    reference: bool = knob(
        True, "keep the start policy, to report the KL to it (memory: one more model)"
    )
    eval_every: int = knob(20, "steps between evaluations", low=1)
    eval_items: int = knob(200, "held-out items per evaluation", low=1)
    eval_samples: int = knob(4, "k of pass@k: samples per held-out item", low=1)
    save_every: int = knob(50, "steps between checkpoints", low=1)
    out: str = knob("runs", "where run directories are made")
    name: str = knob("", "name of the run directory; none: task-method-seed-time")
    resume: str = knob(
        "", "run directory to go on with; only --steps and --micro-rows may be given beside it"
    )


# What differs from the dataclass (which is the toy) when nothing is said on the command line.
GSM8K_HUB = dict(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    threads=0,
    warm_steps=0,
    steps=200,
    prompts=16,
    max_tokens=512,
)
GSM8K_HUB |= dict(minibatches=1, micro_rows=8, lr=1e-6, eval_samples=1, save_every=25)
GSM8K_SCRATCH = dict(
    model="scratch", layers=2, width=128, train_items=32, max_tokens=48, prompts=32, eval_samples=1
)
GSM8K_SCRATCH |= dict(
    warm_steps=45, warm_rows=16, warm_lr=3e-3, minibatches=1, lr=5e-4, steps=60, eval_every=30
)
REPAIR = dict(repair_demos=0.3)  # a policy that never saw a correction makes none


def parse(argv: list[str]) -> Config:
    presets = {"gsm8k": GSM8K_HUB, "gsm8k from scratch": GSM8K_SCRATCH, "ibpo": REPAIR}
    given = given_flags(Config, "Group-relative RL for a language model.", presets, argv)
    for key in ("data", "model"):  # a resumed run may start elsewhere
        if given.get(key, "scratch") != "scratch" and Path(given[key]).exists():
            given[key] = str(Path(given[key]).resolve())
    if "resume" in given:
        config = resumed_config(given)
    else:
        scratch = given.get("model") == "scratch"
        preset = {} if given.get("task") != "gsm8k" else GSM8K_SCRATCH if scratch else GSM8K_HUB
        if METHODS[given.get("method", Config.method)].repair and given.get("task") != "gsm8k":
            preset = REPAIR
        config = Config(**preset | given)
    check(config)
    return config


def resumed_config(given: dict) -> Config:
    if extra := set(given) - {"resume", "steps", "micro_rows"}:
        fail(
            f"{flag(min(extra))} cannot be changed when resuming; only --steps and --micro-rows can"
        )
    try:
        saved = Config(**json.loads((Path(given["resume"]) / "config.json").read_text())["config"])
        saved.hyper = tuple(saved.hyper)
        if any(type(value) is not type(getattr(Config, key)) for key, value in vars(saved).items()):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        fail(
            f"--resume {given['resume']}: no config.json of a run there; accepted: a run directory, such as runs/NAME"
        )
    if saved.schedule == "linear" and given.get("steps", saved.steps) != saved.steps:
        fail(
            f"--steps {given['steps']}: the linear schedule was laid out for {saved.steps} steps and cannot be extended"
        )
    return replace(saved, **given)


def check(config: Config):
    """Refuse what cannot work, before anything is loaded."""
    check_ranges(config)
    if config.prompts % config.minibatches:
        fail(f"--prompts {config.prompts} is not divisible by --minibatches {config.minibatches}")
    if config.width % 8:
        fail(f"--width {config.width}: must be a multiple of 8")
    if config.kl and not config.reference:
        fail(f"--kl {config.kl} needs the start policy: it contradicts --no-reference")
    if config.project and (config.kl or any(text.startswith("kl=") for text in config.hyper)):
        fail("--project would average the KL term away with the rest; it goes without --kl")
    if config.context and not config.project:
        fail(
            f"--context {config.context} says which tokens --project takes for shared; it needs that flag"
        )
    if config.repair_references >= config.group_size:
        fail(
            f"--repair-references {config.repair_references}: an answer has --group-size - 1 siblings"
        )
    if config.repair_weight * config.repair_bonus >= 1:
        fail(
            f"--repair-weight {config.repair_weight}: times --repair-bonus it must stay below the reward of 1"
        )
    if config.repair_demos > 1 or config.repair_demos and config.task != "arithmetic":
        fail(
            f"--repair-demos {config.repair_demos}: a share of at most 1, and of the arithmetic task only"
        )
    if config.data and config.task != "gsm8k":
        fail(f"--data {config.data}: only --task gsm8k reads data")
    if file := next(
        (path for path in [Path(config.starts), *Path(config.starts).parents] if path.is_file()),
        None,
    ):
        fail(f"--starts {config.starts}: {file} is not a directory")
    if config.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no CUDA device; accepted: auto, cpu")
    if len(config.name.encode()) > 200 or "\0" in config.name:
        fail(f"--name {config.name[:20]!r}...: at most 200 bytes")
    if config.name and not config.resume and (Path(config.out) / config.name).exists():
        fail(
            f"--name {config.name}: {Path(config.out) / config.name} exists; choose another, or --resume it"
        )
    hyperparameters(config)


def hyperparameters(config: Config) -> dict:
    """--hyper and --kl as keyword arguments of the method, tried on a small batch before a model is
    loaded."""
    method, accepted, zeros = METHODS[config.method], {}, torch.zeros(2, 1)
    for function in filter(None, (method.credit, *method.passes)):
        parameters = inspect.signature(function).parameters.values()
        accepted |= {p.name: p.default for p in parameters if p.default is not p.empty}
    for text in config.hyper:
        if "=" not in text:
            fail(f"--hyper {text}: NAME=VALUE is expected, such as eps_high=0.3")
    chosen = ({"kl": config.kl} if config.kl else {}) | dict(
        text.partition("=")[::2] for text in config.hyper
    )
    try:
        for key, value in chosen.items():
            if key not in accepted:
                names = ", ".join(f"{k}={v}" for k, v in accepted.items()) or "none"
                fail(
                    f"method {config.method} has no hyperparameter {key!r}; accepted, with defaults: {names}"
                )
            kind = type(accepted[key])
            if kind is bool and value not in ("True", "False"):
                raise ValueError("must be True or False")
            chosen[key] = value == "True" if kind is bool else kind(value)
            if kind is float and chosen[key] != accepted[key] and not 0 <= chosen[key] < math.inf:
                raise ValueError("must be a finite number, at least 0")
        for loss_fn in method.passes:
            batch = Batch(
                zeros, zeros, zeros, zeros == 0, 2, 1, zeros if config.reference else None
            )
            loss_fn(batch, **pick(chosen, loss_fn))
        if method.credit is not None:
            flat, none = torch.zeros(2, 1, 1), zeros != 0
            old = OldPolicy(
                none.long(), ~none, zeros, zeros[:, 0], 2, hidden=flat, head=flat[0], kept_mask=none
            )
            method.credit(zeros, old, **pick(chosen, method.credit))
    except ValueError as error:
        fail(f"--hyper {key}={value}: {error}")
    return chosen


def pick(hyper: dict, function) -> dict:
    """The hyperparameters that this function takes: a method's credit rule and its passes share one
    list."""
    return {k: v for k, v in hyper.items() if k in inspect.signature(function).parameters}
