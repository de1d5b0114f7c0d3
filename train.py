"""Group-relative RL for a language model, in one file that reads from top to bottom.

    python train.py                        a tiny model learns to add, on a CPU, in a minute
    python train.py --method dfpo-min      any method of losses.py
    python train.py --task gsm8k           Qwen2.5-0.5B-Instruct on GSM8K, on one GPU
    python train.py --resume runs/NAME     a run that was interrupted or killed

A policy answers prompts, several times each. Only whole answers are rewarded, and an answer is
compared with the others to its prompt. A loss of losses.py says what that means for every token.
The policy that sampled is called the old one. A token's ratio is its probability now over its
probability then. How hard a loss pushes a token is one number, its coefficient: c = -N dLoss/dlogp.

One step is: sample, score, learn. The order below is

    config -> main -> policy -> sample -> score -> learn -> diagnose -> evaluate -> warm start
    -> files

This file, losses.py and toy/arithmetic.py are the whole algorithm in its plainest form, and by
default they run without the rest of the repository. llm/fast.py has a quicker `generate` and
`log_probs` (--fast), and is tested to give the same numbers as the two here.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import shutil
import signal
import sys
import time
from argparse import ArgumentParser, BooleanOptionalAction
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from losses import (
    METHODS,
    Batch,
    Method,
    OldPolicy,
    cancel,
    group_advantages,
    k3,
    learning_tax,
    prefix_nodes,
    token_coefficients,
)

# -------------------------------------------------------------------------------------------------
# config: every knob, its default (the toy's) and its meaning. Each one is a flag of the same name.


def knob(default, help: str, low: float = 0, choices: tuple = ()):
    """A field that is a flag. A number must be finite and at least `low`."""
    # A factory, because a dataclass refuses a list as a default; each Config has its own list.
    metadata = {"help": help, "low": low, "choices": choices or None}
    return field(default_factory=lambda: type(default)(default), metadata=metadata)


@dataclass
class Config:
    # What to learn, and by which method.
    task: str = knob("arithmetic", "what to learn", choices=("arithmetic", "gsm8k"))
    method: str = knob("grpo", "which loss of losses.py", choices=tuple(METHODS))
    hyper: list[str] = knob([], "hyperparameters of the method: NAME=VALUE ..., as in eps_high=0.3")
    cancel: bool = knob(
        False, "compare each push with the others at its history (cancel in losses.py)"
    )

    # The model and the data.
    model: str = knob("scratch", "scratch, or a directory or hub id of a causal LM")
    layers: int = knob(1, "layers of the scratch model", low=1)
    width: int = knob(64, "hidden size of the scratch model, a multiple of 8", low=8)
    data: str = knob("", "directory with GSM8K's train.jsonl and test.jsonl; empty: the hub")
    train_items: int = knob(0, "train on this many problems, the shortest solutions first; 0: all")

    # The warm start: supervised steps before RL, so that there is something to reward.
    warm_steps: int = knob(700, "supervised steps on the task's demonstrations; 0: none")
    warm_rows: int = knob(64, "demonstrations per supervised step", low=1)
    warm_lr: float = knob(6e-3, "learning rate of the supervised steps")

    # The rollout: what one step samples.
    steps: int = knob(60, "rollout batches; 0: only the warm start")
    prompts: int = knob(32, "prompts per rollout batch", low=1)
    group_size: int = knob(8, "G, answers per prompt", low=2)
    max_tokens: int = knob(26, "L, the longest answer in tokens", low=1)
    temperature: float = knob(1.0, "sampling temperature, also inside every log-prob", low=1e-3)
    repair_references: int = knob(1, "answers shown beside a wrong one (ibpo)", low=1)

    # The optimisation: what one step learns from that batch.
    epochs: int = knob(1, "passes over a rollout batch", low=1)
    minibatches: int = knob(4, "optimiser steps per epoch, each on whole groups", low=1)
    micro_rows: int = knob(64, "answers in the model at once: memory, no result", low=1)
    lr: float = knob(1e-3, "learning rate of AdamW")
    schedule: str = knob("linear", "learning rate over the run", choices=("constant", "linear"))
    grad_clip: float = knob(1.0, "largest gradient norm", low=1e-12)
    reference: bool = knob(True, "keep the start policy, for the KL to it (memory: one more model)")

    # Evaluation, files, the machine.
    eval_every: int = knob(20, "steps between evaluations, each with a checkpoint", low=1)
    eval_items: int = knob(200, "held-out problems per evaluation", low=1)
    eval_samples: int = knob(4, "k of pass@k: samples per held-out problem", low=1)
    seed: int = knob(0, "seed of everything random")
    threads: int = knob(1, "CPU threads, 0: all; a tiny model gains nothing from more than one")
    fast: bool = knob(False, "llm/fast.py's generate and log_probs: the same numbers, sooner")
    trace: bool = knob(False, "print one group of the first step, token by token")
    out: str = knob("", "the run directory; empty: runs/TASK-METHOD-sSEED-TIME")
    resume: str = knob("", "a run directory to go on with; the other flags are those of the run")

    @cached_property
    def chosen_method(self) -> Method:
        """The method with its hyperparameters. ValueError for what it does not take."""
        if bad := [text for text in self.hyper if "=" not in text]:
            raise ValueError(f"{bad[0]}: NAME=VALUE is expected, such as eps_high=0.3")
        chosen = dict(text.split("=", 1) for text in self.hyper)  # ["kl=1"] -> {"kl": "1"}
        return bind(self.method, chosen, self.reference)


# Where the defaults of GSM8K differ: with a pretrained model, and with one from scratch.
GSM8K = {
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "warm_steps": 0,
    "steps": 200,
    "prompts": 16,
    "max_tokens": 512,
    "minibatches": 1,
    "micro_rows": 8,
    "lr": 1e-6,
    "eval_samples": 1,
    "threads": 0,
    "fast": True,
}
GSM8K_SCRATCH = {
    "layers": 2,
    "width": 128,
    "train_items": 32,
    "warm_steps": 45,
    "warm_rows": 16,
    "warm_lr": 3e-3,
    "steps": 60,
    "prompts": 32,
    "max_tokens": 48,
    "micro_rows": 64,
    "lr": 5e-4,
    "eval_every": 30,
    "threads": 1,
}


def parse(argv: list[str] | None = None) -> Config:
    """Flags -> Config. What the flags alone show to be wrong ends here, in one line."""
    epilog = f"Defaults with --task gsm8k: {GSM8K}. With --model scratch as well: {GSM8K_SCRATCH}."
    parser = ArgumentParser(usage="%(prog)s [--FLAG VALUE ...]", epilog=epilog, allow_abbrev=False)
    for f in fields(Config):
        flag, default = "--" + f.name.replace("_", "-"), f.default_factory()
        options = {"default": default, "help": f"{f.metadata['help']} (default: {default})"}
        if isinstance(default, bool):
            options["action"] = BooleanOptionalAction  # --fast and --no-fast
        elif isinstance(default, list):
            options["nargs"] = "+"
        else:
            options |= {"type": type(default), "choices": f.metadata["choices"]}
        parser.add_argument(flag, **options)
    # Parsed more than once: what was given decides which defaults hold, and a flag beats a default.
    given = parser.parse_args(argv)
    saved = read_config(given.resume) if given.resume else {}
    if saved:
        parser.set_defaults(**saved)
    elif given.task == "gsm8k":
        parser.set_defaults(**GSM8K)
        if parser.parse_args(argv).model == "scratch":
            parser.set_defaults(**GSM8K_SCRATCH)
    config = Config(**vars(parser.parse_args(argv)))
    check(config)
    for name, value in saved.items():
        free = name == "micro_rows" or (name == "steps" and config.schedule == "constant")
        if getattr(config, name) != value and not free:
            can = "--micro-rows can, and --steps of a constant schedule"
            sys.exit(f"error: --{name.replace('_', '-')} cannot change when resuming; only {can}")
    for name in ("model", "data"):  # a run may be resumed from another directory
        if Path(getattr(config, name)).is_dir() and getattr(config, name):
            setattr(config, name, str(Path(getattr(config, name)).resolve()))
    now = time.strftime("%Y%m%d-%H%M%S")
    config.out = config.out or f"runs/{config.task}-{config.method}-s{config.seed}-{now}"
    return config


def bind(name: str, chosen: dict[str, object], reference: bool = True) -> Method:
    """METHODS[name] with the chosen hyperparameters filled in.

    Values may be text, as on a command line. reference: whether there will be the log-probs of a
    frozen reference, which a KL term needs. Raises ValueError for an unknown method or name, and
    for a value that the method does not take.
    """
    if name not in METHODS:
        raise ValueError(f"method {name!r} does not exist; accepted: {', '.join(METHODS)}")
    method, defaults, values = METHODS[name], {}, {}
    for function in filter(None, (*method.passes, method.credit, method.repair)):
        parameters = inspect.signature(function).parameters.values()
        defaults |= {p.name: p.default for p in parameters if p.default is not p.empty}
    for key, value in chosen.items():
        if key not in defaults:
            accepted = ", ".join(f"{k}={v}" for k, v in defaults.items()) or "none"
            raise ValueError(f"{name} has no hyperparameter {key!r}; accepted: {accepted}")
        values[key] = _convert(key, value, defaults[key])

    def fill(function):
        taken = inspect.signature(function).parameters
        return partial(function, **{key: v for key, v in values.items() if key in taken})

    bound = replace(
        method,
        passes=tuple(fill(loss) for loss in method.passes),
        credit=method.credit and fill(method.credit),
        repair=method.repair and fill(method.repair),
    )
    # Once on zeros: what only the functions can judge is refused now, not after a warm start.
    zeros = torch.zeros(2, 1)
    yes, ref = zeros == 0, zeros if reference else None
    for loss in bound.passes:
        loss(Batch(zeros, zeros, zeros, yes, group_size=2, max_tokens=1, logp_ref=ref))
    if bound.repair:
        bound.repair(zeros[:, 0], yes[:, 0])
    if bound.credit:
        facts = dict(scores=zeros, own_scores=zeros, kept_mask=yes, repaired=yes[:, 0])
        bound.credit(zeros, OldPolicy(yes.long(), yes, zeros, zeros[:, 0], 2, **facts))
    return bound


def _convert(key: str, value: object, default: object) -> object:
    """A chosen value as one of its default's type."""
    if isinstance(default, bool):
        if str(value) not in ("True", "False"):
            raise ValueError(f"{key}={value}: accepted: True, False")
        return str(value) == "True"
    if isinstance(default, str):
        return str(value)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if number != default and not 0 <= number < math.inf:
        raise ValueError(f"{key}={value}: accepted: a finite number, at least 0")
    return number


def check(config: Config):
    """Refuse what cannot work."""
    for f in fields(config):
        value, low = getattr(config, f.name), f.metadata["low"]
        if isinstance(value, (int, float)) and not low <= value < math.inf:
            flag = f"--{f.name.replace('_', '-')}"
            sys.exit(f"error: {flag} {value}: must be a finite number, at least {low}")
    try:
        method = config.chosen_method
    except ValueError as error:
        sys.exit(f"error: --hyper: {error}")
    if method.repair and config.repair_references >= config.group_size:
        sys.exit("error: --repair-references: an answer has only --group-size - 1 siblings")
    if config.prompts % config.minibatches:
        both = f"--prompts {config.prompts} is not divisible by --minibatches {config.minibatches}"
        sys.exit(f"error: {both}")
    if config.width % 8:
        sys.exit(f"error: --width {config.width}: must be a multiple of 8")
    if config.out and not config.resume and Path(config.out).exists():
        sys.exit(f"error: --out {config.out} exists; choose another, or --resume it")


# -------------------------------------------------------------------------------------------------
# main: one step after another


def main(argv: list[str] | None = None):
    config = parse(argv)
    torch.set_num_threads(config.threads or os.cpu_count())
    task = load_task(config)
    with run_folder(config) as folder, Interrupt() as interrupt:
        checkpoint = newest_checkpoint(folder)
        policy = load_policy(config, task, str(checkpoint or config.model))
        optimizer = adamw(policy.model, config.lr)
        size = sum(weight.numel() for weight in policy.model.parameters())
        about = f"{size:,} parameters, computed in {'bf16' if policy.bf16 else 'fp32'}"
        print(f"{config.method} on {config.task}, {about}, into {folder}", flush=True)
        if checkpoint:
            done = restore(optimizer, checkpoint, folder)  # so many steps
        else:
            done = 0
            (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run killed before it saved
            longest = max(map(len, task.encode(policy.tokenizer, [*task.train, *task.test])))
            check_context(policy, longest + config.max_tokens)
            warm_start(policy, task, config)
            if config.warm_steps:
                with complaints(folder):
                    write_model(policy, folder / "start")
            record({"step": 0} | evaluate(policy, task, config), folder)
        # The policy that RL started from. A KL term, and the metric kl_start, are measured from it.
        start = str(folder / "start") if config.warm_steps else config.model
        reference = load_policy(config, task, start) if config.reference else None
        batches = prompt_batches(task, config)

        interrupt.finish_step = True  # from here on, Ctrl-C ends after a saved step
        todo = range(done + 1, config.steps + 1)
        for step in tqdm(todo, "RL", initial=done, total=config.steps, disable=None):
            t0 = time.perf_counter()
            answers = sample(policy, task, batches[step - 1], step, config)  # 1. G to each prompt
            t1 = time.perf_counter()
            scored = score(policy, reference, answers, config)  # 2. log-probs, advantages
            t2 = time.perf_counter()
            updates = learn(policy, optimizer, scored, config)  # 3. loss -> coefficients -> weights
            t3 = time.perf_counter()
            if config.trace and step == 1:
                from llm.trace import show_group

                show_group(policy, scored, updates[0], in_pieces(policy, answers, config)[0])

            metrics = diagnose(policy, scored, updates, config)
            metrics |= {"rollout_s": t1 - t0, "score_s": t2 - t1, "update_s": t3 - t2}
            metrics["tokens_per_s"] = metrics["generated"] / (t3 - t0)
            due = step % config.eval_every == 0 or step == config.steps
            if due:
                metrics |= evaluate(policy, task, config)
                save_batch(policy, scored, config, folder)
            record(metrics, folder)
            if due or interrupt.seen:
                save(policy, optimizer, step, folder)
            if interrupt.seen:
                print(f"stopped after step {step}; go on with: --resume {folder}")
                return
        summarize(folder)


def load_task(config: Config):
    """The task object: .train and .test items, .encode, .reward, .make_tokenizer, .repair.

    The toy has .correction and .shares as well.
    """
    if config.task == "gsm8k":
        from llm.gsm8k import GSM8K

        try:
            task = GSM8K(config.data or None)
        except ValueError as error:
            sys.exit(f"error: {error}")
    else:
        from toy.arithmetic import Arithmetic

        task = Arithmetic()
    if config.train_items:
        task.train = sorted(task.train, key=lambda item: len(item.demo))[: config.train_items]
    return task


def prompt_batches(task, config: Config) -> list[list]:
    """The items of every step: one permutation of the training split after another."""
    items = []
    while len(items) < config.steps * config.prompts:
        gen = rng(config.seed, "order", len(items) // len(task.train))
        items += [task.train[i] for i in torch.randperm(len(task.train), generator=gen).tolist()]
    return [items[i : i + config.prompts] for i in range(0, len(items), config.prompts)]


def rng(*key) -> torch.Generator:
    """A generator for each use and step, so that a resumed run has no random state to restore."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))  # fits 63 bits


# -------------------------------------------------------------------------------------------------
# the policy: a causal LM of transformers, and what sampling and scoring ask of it


@dataclass
class Policy:
    """A causal LM with fp32 weights, in eval mode for good: dropout would change every ratio."""

    model: torch.nn.Module
    tokenizer: object
    eos: Tensor  # (E,) the ids that end an answer, on the model's device
    fast: bool = False  # whether llm/fast.py samples and scores
    bf16: bool = False  # whether the model computes in bf16


def load_policy(config: Config, task, path: str) -> Policy:
    """The policy at `path`: "scratch", a directory or a hub id."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if path == "scratch":
        tokenizer = task.make_tokenizer()
        model = make_model(config, tokenizer)
    else:
        if not Path(path).is_dir():
            from llm.gsm8k import use_cache_without_hub

            use_cache_without_hub()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:  # whatever may be wrong with its files, or with the network
            reason = (str(error) or repr(error)).splitlines()[0]
            accepted = "accepted: scratch, a directory, a hub id"
            sys.exit(f"error: --model {path} cannot be loaded ({reason}); {accepted}")
        if info["missing_keys"]:
            missing = min(info["missing_keys"])
            sys.exit(f"error: --model {path} has no {missing}: it would begin with random weights")
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        sys.exit(f"error: --model {path} keeps no past_key_values, with which answers are sampled")
    ends = model.generation_config.eos_token_id  # one id, a list or None; the tokenizer has one
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    if not ends:
        sys.exit(f"error: --model {path}: nothing says which token ends an answer (eos_token_id)")
    # Its own generation config may hold a sampler, which we ignore and save_pretrained may refuse.
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=sorted(ends), pad_token_id=tokenizer.pad_token_id
    )
    policy = Policy(model.eval(), tokenizer, torch.tensor(sorted(ends)), config.fast)
    if config.fast:
        from llm.fast import trial

        trial(policy, task, config, ask, log_probs)  # are both ways the same for this model?
    if torch.cuda.is_available():
        policy.model.to("cuda")
        policy.eos = policy.eos.to("cuda")
        policy.bf16 = has_bf16(policy.model.device)
        # With a mask and some lengths, cuDNN's attention gives nan in backward on H100 and H200
        # (torch 2.11 to 2.13: pytorch's issue 196678). Others of torch's kernels take over.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return policy


def make_model(config: Config, tokenizer) -> torch.nn.Module:
    """A small GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(config.seed % 2**63)
    shape = GPT2Config(
        vocab_size=len(tokenizer),
        n_layer=config.layers,
        n_embd=config.width,
        n_head=4 if config.width < 512 else 8,
        n_positions=1024,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own GELU, one kernel instead of eight
        initializer_range=config.width**-0.5,  # the usual 0.02 is meant for wide models
    )
    return GPT2LMHeadModel(shape)


def adamw(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    betas = (0.9, 0.95)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=0.0, fused=True)


def has_bf16(device: torch.device) -> bool:
    """Whether to compute in bf16. Cards before Ampere, such as the T4, can only emulate it: they
    compute in fp32, as a CPU does."""
    return device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 0)


def bf16(policy: Policy) -> torch.autocast:
    """On a GPU the model computes in bf16. Weights, softmax and losses stay in fp32 everywhere."""
    return torch.autocast(policy.model.device.type, torch.bfloat16, enabled=policy.bf16)


def check_context(policy: Policy, width: int):
    """Refuse a text that is longer than what the model can read."""
    limit = getattr(policy.model.config, "max_position_embeddings", math.inf)
    if width > limit:
        text = f"a text of {width} tokens (the longest prompt, and --max-tokens or a demonstration)"
        sys.exit(f"error: {text} exceeds the model's context of {limit}")


# -------------------------------------------------------------------------------------------------
# 1. sample: G answers to each prompt, rewarded at their end. N answers in all, T = the longest one


@dataclass
class Prompts:
    ids: Tensor  # (N, P) padded on the left, so that all answers begin in one column
    seen: Tensor  # (N, P) bool, False on that padding


@dataclass
class Answers:
    """N answers; the G answers to one prompt stand in a row."""

    items: list  # N problems
    prompts: Prompts
    texts: list[str]  # N
    tokens: Tensor  # (N, T) ids
    mask: Tensor  # (N, T) bool, True up to and including the first EOS
    logp: Tensor  # (N, T) log pi of the tokens, as the sampler saw them
    rewards: Tensor  # (N,) 1 = correct
    generated: int  # tokens, those of IBPO's corrections included
    step: int = 0
    kept_mask: Tensor | None = None  # (N, T) bool, tokens that a correction kept (IBPO)
    repaired: Tensor | None = None  # (N,) bool: wrong, and its correction is right (IBPO)


def sample(policy: Policy, task, items: list, step: int, config: Config) -> Answers:
    """The policy answers each problem G times; only a whole answer is rewarded."""
    gen = rng(config.seed, "sample", step)
    copies = [item for item in items for _ in range(config.group_size)]
    answers = ask(policy, task, copies, config, gen)
    answers.step = step
    if config.chosen_method.repair:  # IBPO has the policy correct its wrong answers
        from llm.neighbours import correct

        again = partial(ask, policy, task, config=config, gen=gen)
        correct(answers, task, config, ask=again, eos=policy.eos)
    return answers


def ask(policy: Policy, task, items: list, config: Config, gen) -> Answers:
    """One answer to each problem, and its reward. gen: None is greedy."""
    rows, device = task.encode(policy.tokenizer, items), policy.model.device
    width = max(map(len, rows))
    check_context(policy, width + config.max_tokens)
    padded = torch.tensor([[-1] * (width - len(row)) + row for row in rows], device=device)
    prompts = Prompts(ids=padded.clamp(min=0), seen=padded >= 0)  # -1 marked the padding
    temperature = config.temperature if gen else 0.0
    tokens, mask, logp = generate(policy, prompts, config.max_tokens, temperature, gen)
    # The verifier reads the text without its EOS. Other special tokens stay visible to it.
    shown = (mask & ~torch.isin(tokens, policy.eos)).cpu()
    ids = [row[keep].tolist() for row, keep in zip(tokens.cpu(), shown, strict=True)]
    texts = policy.tokenizer.batch_decode(ids)
    rewards = [task.reward(text, item) for text, item in zip(texts, items, strict=True)]
    return Answers(
        items=items,
        prompts=prompts,
        texts=texts,
        tokens=tokens,
        mask=mask,
        logp=logp,
        rewards=torch.tensor(rewards, device=device),
        generated=int(mask.sum()),
    )


@torch.no_grad()
def generate(
    policy: Policy, prompts: Prompts, max_tokens: int, temperature: float, gen
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample an answer to each of N prompts, token by token; temperature 0 is greedy.

    Nothing but the temperature shapes the distribution, whatever the model's own generation config
    says: no top-k, no top-p, no penalty. Returns tokens, mask and their log-probs, (N, T) each.
    Greedy answers have log-probs at temperature 1.
    """
    if policy.fast:
        from llm import fast

        return fast.generate(policy, prompts, max_tokens, temperature, gen)
    n, device = len(prompts.ids), prompts.ids.device
    if temperature:  # a row's random numbers are its own, whatever becomes of the others
        uniform = torch.rand(n, max_tokens, generator=gen, dtype=torch.float64).to(device)
    alive = torch.ones(n, dtype=torch.bool, device=device)  # no EOS so far
    inputs, cache, attention = prompts.ids, None, prompts.seen
    tokens, mask, logps = [], [], []
    for t in range(max_tokens):
        position = (attention.long().cumsum(1) - 1).clamp(min=0)  # padding has none
        with bf16(policy):
            out = policy.model(
                inputs,
                attention_mask=attention.long(),
                position_ids=position[:, -inputs.shape[1] :],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        cache = out.past_key_values  # from now on only the newest token is read
        logp = (out.logits[:, -1].float() / (temperature or 1.0)).log_softmax(-1)  # (N, V)
        token = draw(logp, uniform[:, t, None]) if temperature else logp.argmax(-1)  # (N,)
        # The mask is made before EOS is looked for: an EOS counts, what follows it does not. Rows
        # that have ended are computed on, behind the mask, until all have.
        tokens.append(token.masked_fill(~alive, 0))
        mask.append(alive)
        logps.append(logp.gather(1, token[:, None]).squeeze(1).masked_fill(~alive, 0.0))
        alive = alive & ~torch.isin(token, policy.eos)
        if not alive.any():
            break
        inputs = token[:, None]
        attention = torch.cat([attention, mask[-1][:, None]], 1)
    return torch.stack(tokens, 1), torch.stack(mask, 1), torch.stack(logps, 1)


def draw(logp: Tensor, uniform: Tensor) -> Tensor:
    """Invert each row's distribution function: (n, V) log-probs, (n, 1) numbers -> (n,) tokens.

    By hand, so that a row draws the same token whatever else is in the batch.
    """
    cdf = logp.double().exp().cumsum(-1)  # fp32 sums of a large vocabulary are too coarse
    token = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).squeeze(1)
    return token.clamp(max=logp.shape[1] - 1)


# -------------------------------------------------------------------------------------------------
# 2. score: how probable the answers were before learning, and how they compare. Fixed from here on


@dataclass
class Scored:
    """What learning needs to know about N answers."""

    answers: Answers
    batch: Batch  # as the old policy sees it: its logp is logp_old
    entropy: Tensor  # (N, T)
    advantages: Tensor  # (N,) A_i, before any credit rule
    nodes: Tensor  # (N, T) equal where two answers of a group agree so far
    max_logp_gap: float  # how far a token's logp is from the sampler's, at most; nats


@torch.no_grad()
def score(policy: Policy, reference: Policy | None, answers: Answers, config: Config) -> Scored:
    """Old and reference log-probs, advantages, and the credit of each token."""
    method, G, mask = config.chosen_method, config.group_size, answers.mask
    # Not the sampler's log-probs: they differ by rounding, and the first ratios are exactly 1.
    old, entropy = in_pieces(policy, answers, config)  # (N, T)
    gap = (old - answers.logp)[mask].abs().max().item()
    check_gap(gap, answers.step, config.temperature, old.device)
    ref = in_pieces(reference, answers, config)[0] if reference else None  # (N, T)

    rewards = answers.rewards
    if method.repair:  # near misses count
        rewards = method.repair(rewards, answers.repaired)
    advantages = group_advantages(rewards, G, method.scale)  # (N,)
    adv = advantages[:, None].expand_as(old).masked_fill(~mask, 0.0)  # (N, T)
    if method.credit:  # reshape A token by token, by what the old policy knew
        facts = OldPolicy(
            tokens=answers.tokens,
            mask=mask,
            logp=old,
            rewards=answers.rewards,
            group_size=G,
            gen=rng(config.seed, "credit", answers.step),
            kept_mask=answers.kept_mask,
            repaired=answers.repaired,
        )
        if method.needs_scores:
            from llm.neighbours import add_scores

            add_scores(facts, policy, answers, config)
        adv = method.credit(adv, facts)
    return Scored(
        answers=answers,
        batch=Batch(
            logp=old,  # until learn() puts those of a later policy here
            logp_old=old,
            adv=adv,
            mask=mask,
            group_size=G,
            max_tokens=config.max_tokens,
            logp_ref=ref,
        ),
        entropy=entropy,
        advantages=advantages,
        nodes=prefix_nodes(answers.tokens, mask, G),
        max_logp_gap=gap,
    )


def log_probs(policy: Policy, answers: Answers, config: Config) -> tuple[Tensor, Tensor]:
    """log pi of the answers' tokens (differentiable) and entropies of pi: (N, T), 0 on padding."""
    if policy.fast:
        from llm import fast

        return fast.log_probs(policy, answers, config)
    ids = torch.cat([answers.prompts.ids, answers.tokens], 1)  # (N, P + T)
    attention = torch.cat([answers.prompts.seen, answers.mask], 1).long()
    position = (attention.cumsum(1) - 1).clamp(min=0)
    keep = answers.tokens.shape[1] + 1  # each position predicts the next: begin one before
    with bf16(policy):
        out = policy.model(
            ids, attention_mask=attention, position_ids=position, logits_to_keep=keep
        )
    # The temperature belongs in here: the policy that is trained is the one that was sampled.
    logp = (out.logits[:, :-1].float() / config.temperature).log_softmax(-1)  # (N, T, V)
    taken = logp.gather(2, answers.tokens[..., None]).squeeze(2)
    entropy = -(logp.detach().exp() * logp.detach()).sum(2)
    return taken.masked_fill(~answers.mask, 0.0), entropy.masked_fill(~answers.mask, 0.0)


@torch.no_grad()
def in_pieces(policy: Policy, answers: Answers, config: Config) -> tuple[Tensor, Tensor]:
    """log_probs without a gradient, of micro_rows answers at a time."""
    logps, entropies = [], []
    for piece in torch.arange(len(answers.tokens)).split(config.micro_rows):
        logp, entropy = log_probs(policy, take(answers, piece), config)
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies)


def check_gap(gap: float, step: int, temperature: float, device: torch.device):
    """End where sampler and scorer disagree: they are one policy, and differ by rounding alone.

    On a GPU bf16 rounds by the shape of a batch, so there only what is gross can be told apart. In
    bf16 on a CPU, random models of 2 to 24 layers had 0.01 to 0.5 nats, and 2 to 58 with another
    prompt's cache.
    """
    limit = (1e-3 if device.type == "cpu" else 3.0) / min(1.0, temperature)
    if not gap <= limit:  # a nan, too
        more = f"differ by {gap:.3g} nats, which is more than rounding"
        sys.exit(f"error: step {step}: scored and sampled log-probs {more}; no update was made")


def take(record, rows: Tensor):
    """Some rows of a dataclass: of its tensors, its lists and the dataclasses in it. Its numbers
    stay those of the whole."""
    part = {}
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, Tensor):
            part[f.name] = value[rows.to(value.device)]
        elif isinstance(value, list):
            part[f.name] = [value[i] for i in rows.tolist()]
        elif is_dataclass(value):
            part[f.name] = take(value, rows)
    return replace(record, **part)


# -------------------------------------------------------------------------------------------------
# 3. learn: epochs x passes x minibatches


@dataclass
class Update:
    """What an optimiser step did."""

    rows: Tensor  # (n,) of the rollout batch
    coefficients: Tensor  # (n, T) how hard it pushed each token
    live: Tensor  # (n, T) bool, c is not 0 where all ratios are 1: if it is now, the clip did it
    loss: float
    grad_norm: float


def learn(policy: Policy, optimizer, scored: Scored, config: Config) -> list[Update]:
    """All optimiser steps on one rollout batch. The first is on-policy, the others are not."""
    step, updates = scored.answers.step, []
    lr = config.lr
    if config.schedule == "linear":
        lr *= 1 - (step - 1) / config.steps
    for group in optimizer.param_groups:
        group["lr"] = lr
    gen = rng(config.seed, "learn", step)
    groups = torch.arange(len(scored.advantages)).view(-1, config.group_size)  # (P, G) row numbers
    for _ in range(config.epochs):
        minibatches = torch.randperm(len(groups), generator=gen).view(config.minibatches, -1)
        for loss_fn in config.chosen_method.passes:  # one, for all methods but Lopti
            for chosen in minibatches:
                rows = groups[chosen].flatten()  # whole groups: a loss may look across one
                part = take(scored, rows)
                if updates:  # the policy has moved: its log-probs anew. Before, ratios are 1
                    part.batch.logp, _ = in_pieces(policy, part.answers, config)
                used_fn = cancelled(loss_fn, part) if config.cancel else loss_fn
                loss, c, norm = update(policy, optimizer, used_fn, part, config)
                at_old = replace(part.batch, logp=part.batch.logp_old)
                live = coefficients(used_fn, at_old)[1] != 0
                updates.append(Update(rows, c, live, loss=loss, grad_norm=norm))
    return updates


def update(policy: Policy, optimizer, loss_fn, part: Scored, config: Config):
    """One optimiser step. Returns the loss, the token coefficients (n, T) and the gradient's norm.

    A loss may couple all answers of a group, and their activations may not fit into memory
    together. So the gradient is made in two moves. The loss is a function of the (n, T) log-probs
    alone, a small matrix: its coefficients c = -n dLoss/dlogp say how hard it pushes every token.
    Then c, now a constant, is carried back through the model, micro_rows answers at a time. By the
    chain rule the pieces add up to the exact gradient, whatever the loss is.
    """
    loss, c = coefficients(loss_fn, part.batch)
    optimizer.zero_grad()
    for piece in torch.arange(len(c)).split(config.micro_rows):
        logp, _ = log_probs(policy, take(part.answers, piece), config)  # (micro_rows, T)
        # As dLoss/dlogp = -c / n, this sum has the loss's own gradient.
        (-(c[piece] * logp).sum() / len(c)).backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.grad_clip).item()
    if not math.isfinite(loss) or not math.isfinite(norm):
        what = f"loss {loss}, gradient norm {norm}; the update was not made"
        sys.exit(f"error: step {part.answers.step}: {what}; what is saved is intact")
    if c.any():  # without a signal, the optimiser's momentum must not move the weights either
        optimizer.step()
    return loss, c, norm


def coefficients(loss_fn, batch: Batch) -> tuple[float, Tensor]:
    """A loss at batch.logp, and the coefficient that it gives to every token (n, T)."""
    logp = batch.logp.clone().requires_grad_()
    loss = loss_fn(replace(batch, logp=logp))
    return loss.item(), token_coefficients(loss, logp)


def cancelled(loss_fn, part: Scored):
    """The loss with its cancelled gradient (--cancel)."""
    return lambda batch: cancel(loss_fn(batch), batch, part.nodes)


# -------------------------------------------------------------------------------------------------
# diagnose: what is logged of a step, beside the algorithm


@torch.no_grad()
def diagnose(policy: Policy, scored: Scored, updates: list[Update], config: Config) -> dict:
    """A step's metrics; log-probs, entropy and KL in nats.

    clip_share counts tokens whose c the clip has set to 0. Beside a KL term, and with cispo, a
    clipped token keeps some c, and is not counted.
    """
    answers, batch = scored.answers, scored.batch
    mask, rewards, tokens = answers.mask, answers.rewards, answers.mask.sum()
    equal = (scored.advantages == 0).view(-1, config.group_size).all(1)  # (P,) groups: no signal
    ended = (torch.isin(answers.tokens, policy.eos) & mask).any(1)  # (N,)
    metrics = {
        "step": answers.step,
        "reward": rewards.mean(),
        "equal_groups": equal.float().mean(),
        "length": tokens / len(rewards),
        "truncated": 1 - ended.float().mean(),
        "entropy": scored.entropy.sum() / tokens,
        "generated": answers.generated,
        "max_logp_gap": scored.max_logp_gap,
    }
    if batch.logp_ref is not None:
        metrics["kl_start"] = k3(batch).sum() / tokens
    if config.chosen_method.repair:
        metrics["repair_rate"] = answers.repaired.sum() / (rewards == 0).sum().clamp(min=1)
    clip_shares, taxes = [], []
    for made in updates:
        rows, c = made.rows, made.coefficients
        counted = made.live & (batch.adv[rows] != 0)
        if counted.any():  # a minibatch of equal-reward groups has nothing to clip or to tax
            clip_shares.append(((c == 0) & counted).sum() / counted.sum())
            taxes.append(learning_tax(c, scored.advantages[rows], scored.nodes[rows], mask[rows]))
    metrics["clip_share"] = sum(clip_shares) / max(1, len(clip_shares))
    metrics["tax"] = sum(taxes) / max(1, len(taxes))
    metrics["loss"] = sum(made.loss for made in updates) / len(updates)
    metrics["grad_norm"] = sum(made.grad_norm for made in updates) / len(updates)
    return {key: x.item() if isinstance(x, Tensor) else x for key, x in metrics.items()}


# -------------------------------------------------------------------------------------------------
# evaluate: on problems that were never trained on


@torch.no_grad()
def evaluate(policy: Policy, task, config: Config) -> dict:
    """Held-out greedy accuracy, sampled accuracy, pass@k, and up to three answers to read.

    Every evaluation has the same random numbers, so a policy that does not move has the same ones.
    """
    items, k = task.test[: config.eval_items], config.eval_samples
    gen, greedy, sampled = rng(config.seed, "evaluate"), [], []
    at_once = max(1, config.prompts * config.group_size // k)
    for start in range(0, len(items), at_once):
        some = items[start : start + at_once]
        greedy.append(ask(policy, task, some, config, gen=None))
        copies = [item for item in some for _ in range(k)]
        sampled.append(ask(policy, task, copies, config, gen))
    rewards = torch.cat([answers.rewards for answers in sampled]).view(-1, k)  # (items, k)
    metrics = {
        "greedy": torch.cat([answers.rewards for answers in greedy]).mean().item(),
        "sampled": rewards.mean().item(),
        f"pass@{k}": (rewards == 1).any(1).float().mean().item(),
    }
    if hasattr(task, "shares"):  # the toy knows in which ways it can be answered
        texts = [text for answers in sampled for text in answers.texts]
        metrics |= task.shares([item for item in items for _ in range(k)], texts)
    first, lines = sampled[0], []
    for i in range(0, min(3 * k, len(first.items)), k):
        line = f"{first.items[i].prompt} -> {first.texts[i]}  [{first.rewards[i]:g}]"
        lines.append(" / ".join(line.splitlines()))
    return metrics | {"examples": lines}


# -------------------------------------------------------------------------------------------------
# the warm start is not RL: supervised steps on demonstrations, before it


def warm_start(policy: Policy, task, config: Config):
    """Supervised steps on the task's demonstrations, so that RL has something to find.

    Where the method corrects wrong answers, 30 % of the demonstrations are corrections, if the task
    has any: a policy that never saw a correction makes none.
    """
    model, tokenizer = policy.model, policy.tokenizer
    end = int(policy.eos[0]) if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    corrections = 0
    if config.chosen_method.repair and hasattr(task, "correction"):
        corrections = round(0.3 * config.warm_rows)
    optimizer = adamw(model, config.warm_lr)
    for step in tqdm(range(config.warm_steps), "warm start", disable=None):
        for group in optimizer.param_groups:  # 20 steps of warm-up, linear decay
            group["lr"] = config.warm_lr * min((step + 1) / 20, 1 - step / config.warm_steps)
        gen = rng(config.seed, "warm", step)
        picks = torch.randint(len(task.train), (config.warm_rows,), generator=gen).tolist()
        items = [task.train[i] for i in picks]
        for i in range(corrections):
            items[i] = task.correction(items[i], config.repair_references)
        prompts = task.encode(tokenizer, items)
        demos = tokenizer([item.demo for item in items], add_special_tokens=False)["input_ids"]
        rows = [p + d + [end] for p, d in zip(prompts, demos, strict=True)]
        width = max(map(len, rows))
        check_context(policy, width)
        # Padding stands behind a text, where a causal model does not look. A label of -100 is not
        # learnt: neither prompts nor padding are, only the demonstrations and their ends.
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
        for label, prompt in zip(labels, prompts, strict=True):
            label[: len(prompt)] = -100
        with bf16(policy):
            loss = model(ids.to(model.device), labels=labels.to(model.device)).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not math.isfinite(norm):
            diverged = f"the warm start diverged at its step {step + 1} (gradient norm {norm})"
            sys.exit(f"error: --warm-lr {config.warm_lr}: {diverged}")
        optimizer.step()


# -------------------------------------------------------------------------------------------------
# the files of a run. All randomness is made anew from (seed, use, step), so weights, optimiser and
# step are all that a run needs to go on, on a CPU bit for bit:
#
#     runs/NAME/config.json    flags and versions
#               metrics.jsonl  a line a step
#               start/         the policy that RL started from
#               checkpoints/   the newest one: model, tokenizer, optimiser
#               batches/       the rollout batch of each evaluated step
#               lock           held by the process that writes here


@contextmanager
def run_folder(config: Config):
    """A new run directory, or the one of --resume. It belongs to this process until the end."""
    from filelock import FileLock, Timeout

    folder = Path(config.resume or config.out)
    lock = FileLock(folder / "lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
        about = {"config": asdict(replace(config, resume="")), "versions": versions}
        write_aside(folder / "config.json", json.dumps(about, indent=1) + "\n")
    except Timeout:
        sys.exit(f"error: {folder}: another process is writing to it")
    except OSError as error:
        sys.exit(f"error: cannot write to {folder}: {error.strerror}")
    try:
        yield folder
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        less = "less of --micro-rows (also beside --resume), --prompts, --max-tokens, --warm-rows"
        sys.exit(f"error: {reason}; what helps: {less}; --no-reference")
    finally:
        lock.release()
        if not config.resume and not (folder / "metrics.jsonl").exists():
            shutil.rmtree(folder)  # new, and ended before its first evaluation: nothing to keep


class Interrupt:
    """Ctrl-C. Once finish_step is set, it is only noted, so that the step can be finished and
    saved; a second one ends the process at once."""

    seen = finish_step = False

    def __enter__(self) -> Interrupt:
        self.before = signal.signal(signal.SIGINT, self.note)
        return self

    def note(self, *_):
        if self.seen or not self.finish_step:
            sys.exit("interrupted")
        self.seen = True

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.before)


def read_config(run: str) -> dict:
    """The flags of the run that --resume names."""
    try:
        saved = dict(json.loads((Path(run) / "config.json").read_text())["config"])
    except (OSError, ValueError, KeyError, TypeError):
        saved = {}
    if set(saved) != {f.name for f in fields(Config)}:
        sys.exit(f"error: --resume {run}: no config.json of this version's runs there")
    return saved | {"resume": run}


def record(metrics: dict, folder: Path):
    """A line of metrics.jsonl; of an evaluation also a few words on the screen."""
    with complaints(folder), open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics) + "\n")
    if "greedy" in metrics:
        shown = ("loss", "grad_norm", "reward", "repair_rate", "entropy", "tax")
        shown += ("greedy", "sampled")
        keys = [key for key in metrics if key in shown or key.startswith("pass@")]
        tqdm.write(f"step {metrics['step']}: {'  '.join(f'{k} {metrics[k]:.3f}' for k in keys)}")
        tqdm.write(f"    {metrics['examples'][0]}")


def summarize(folder: Path):
    """What the first and the last training batch, and evaluation, say."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The evaluation before step 1 (line 0) and the training batch of step 1 (line 1) side by side.
    before, after = lines[min(1, len(lines) - 1)] | lines[0], lines[-1]
    n = after["step"]
    print(f"\ntraining batches 1 and {n}; evaluations after steps 0 and {n}")
    ways = [key for key in after if key.startswith(("pass@", "opener ", "form "))]
    for key in ("reward", "entropy", "tax", "length", "repair_rate", "greedy", "sampled", *ways):
        if key in before and key in after:
            print(f"{key:18} {before[key]:6.3f}  {after[key]:6.3f}")
    print(f"\neverything is in {folder}; all flags: python train.py --help")


@torch.no_grad()
def save_batch(policy: Policy, scored: Scored, config: Config, folder: Path):
    """A rollout batch with the log-probs before and after its step, for those who draw it."""
    answers, G = scored.answers, config.group_size
    logp, _ = in_pieces(policy, answers, config)
    pieces = [[policy.tokenizer.decode([i]) for i in row] for row in answers.tokens.tolist()]
    batch = {
        "step": answers.step,
        "method": config.method,
        "group_size": G,
        "max_tokens": config.max_tokens,
        "prompts": [item.prompt for item in answers.items[::G]],
        "texts": answers.texts,
        "pieces": pieces,  # (N, T) texts of single tokens
        "tokens": answers.tokens,
        "mask": answers.mask,
        "rewards": answers.rewards,
        "advantages": scored.advantages,
        "logp_old": scored.batch.logp_old,
        "logp": logp,
    }
    with complaints(folder):
        (folder / "batches").mkdir(exist_ok=True)
        torch.save(batch, folder / "batches" / f"step-{answers.step:06d}.pt")


def save(policy: Policy, optimizer, step: int, folder: Path):
    """checkpoints/step-000020. Its name appears when all of it is on disk, and then the one before
    goes: a kill at any moment leaves a whole checkpoint."""
    if not all(weight.isfinite().all() for weight in policy.model.parameters()):
        sys.exit(f"error: step {step}: a weight is not finite; what is saved is intact")
    checkpoints = folder / "checkpoints"
    part, final = checkpoints / "unfinished", checkpoints / f"step-{step:06d}"
    with complaints(folder):
        shutil.rmtree(part, ignore_errors=True)
        write_model(policy, part)
        torch.save({"step": step, "optimizer": optimizer.state_dict()}, part / "trainer.pt")
        for path in (*part.iterdir(), part, folder / "metrics.jsonl"):
            sync(path)
        part.rename(final)
        sync(checkpoints)
        for other in set(checkpoints.glob("step-*")) - {final}:
            shutil.rmtree(other)


def restore(optimizer, checkpoint: Path, folder: Path) -> int:
    """The optimiser as it was, and metrics.jsonl cut back to the checkpoint's step: returned."""
    state = torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    with complaints(folder):
        write_aside(folder / "metrics.jsonl", "".join(lines[: state["step"] + 1]))  # from step 0
    return state["step"]


def newest_checkpoint(folder: Path) -> Path | None:
    return max((folder / "checkpoints").glob("step-*"), default=None)


def write_model(policy: Policy, folder: Path):
    """In transformers' own format, so that AutoModelForCausalLM and AutoTokenizer read it."""
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def write_aside(path: Path, text: str):
    """A file is replaced as a whole, or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    sync(part)
    part.rename(path)


def sync(path: Path):
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@contextmanager
def complaints(folder: Path):
    """A full disk ends in one line. It has one name in Python, others in torch and safetensors."""
    try:
        yield
    except Exception as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        left = "nothing is saved"
        if newest_checkpoint(folder):
            left = "what is saved is intact: make room, then --resume"
        sys.exit(f"error: {folder} cannot be written ({reason}); {left}")


if __name__ == "__main__":
    main()
