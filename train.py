"""Group-relative RL for a language model, from first line to last.

config -> task -> model -> rollout -> score -> loss -> update -> evaluate -> checkpoint -> main, in this order.
`python train.py` needs no GPU and no download; `python train.py --help` lists every knob. The methods are in losses.py.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from cli import check_ranges, fail, flag, given_flags, knob
from gsm8k import GSM8K
from losses import (
    METHODS,
    Batch,
    Old,
    exchangeable,
    group_advantages,
    k3,
    learning_tax,
    prefix_nodes,
    token_coefficients,
)
from toy.arithmetic import Arithmetic

# ---------------------------------------------------------------- config


@dataclass
class Config:
    task: str = knob("arithmetic", "what to learn", choices=("arithmetic", "gsm8k"))
    method: str = knob("grpo", "which loss of losses.py", choices=tuple(METHODS))
    hyper: tuple[str, ...] = knob((), "hyperparameters of the method, name=value ..., e.g. eps_high=0.3")
    kl: float = knob(0.0, "weight of the k3 KL term to the start (methods with a kl term only)", low=0)
    model: str = knob("scratch", "scratch, or a directory or hub id of a causal LM")
    layers: int = knob(1, "layers of the scratch model", low=1)
    width: int = knob(64, "hidden size of the scratch model, a multiple of 8", low=8)
    data: str = knob("", "directory with GSM8K's train.jsonl and test.jsonl; none: the hub")
    train_items: int = knob(0, "use only the first so many training problems; 0 = all", low=0)
    threads: int = knob(1, "CPU threads, 0 = all; a tiny model gains nothing from more than one", low=0)
    device: str = knob("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    seed: int = knob(0, "seed of everything random", low=0)
    warm_steps: int = knob(700, "supervised steps on the task's demonstrations before RL", low=0)
    warm_rows: int = knob(64, "demonstrations per supervised step", low=1)
    warm_lr: float = knob(6e-3, "its learning rate", low=0)
    steps: int = knob(60, "rollout batches", low=1)
    prompts: int = knob(32, "prompts per rollout batch", low=1)
    group_size: int = knob(8, "G, answers per prompt", low=2)
    max_tokens: int = knob(26, "L, the longest answer in tokens", low=1)
    temperature: float = knob(1.0, "sampling temperature, also inside every log-prob", low=1e-3)
    epochs: int = knob(1, "passes over a rollout batch", low=1)
    minibatches: int = knob(4, "optimiser batches per pass: whole groups, off-policy after the first", low=1)
    micro_rows: int = knob(64, "rows per forward/backward: memory only, never changes the result", low=1)
    lr: float = knob(1e-3, "learning rate of AdamW", low=0)
    schedule: str = knob("linear", "learning rate over the run", choices=("constant", "linear"))
    grad_clip: float = knob(1.0, "largest gradient norm", low=1e-12)
    exchangeable: bool = knob(False, "project the loss: no reward-irrelevant part on shared tokens (ours, claim C17)")
    reference: bool = knob(True, "keep the start policy, to report the KL to it (memory: one more model)")
    eval_every: int = knob(20, "steps between evaluations", low=1)
    eval_items: int = knob(200, "held-out items per evaluation", low=1)
    eval_samples: int = knob(4, "k of pass@k: samples per held-out item", low=1)
    save_every: int = knob(50, "steps between checkpoints", low=1)
    out: str = knob("runs", "where run directories are made")
    name: str = knob("", "name of the run directory; none: task-method-seed-time")
    resume: str = knob("", "run directory to go on with; only --steps may be given beside it")


# What differs from the dataclass (which is the toy) when nothing is said on the command line.
GSM8K_HUB = dict(model="Qwen/Qwen2.5-0.5B-Instruct", threads=0, warm_steps=0, steps=200, prompts=16, max_tokens=512)
GSM8K_HUB |= dict(minibatches=1, micro_rows=8, lr=1e-6, eval_samples=1, save_every=25)
GSM8K_SCRATCH = dict(model="scratch", layers=2, width=128, train_items=256, max_tokens=128, prompts=8, eval_samples=1)
GSM8K_SCRATCH |= dict(warm_steps=400, warm_rows=16, warm_lr=3e-3, minibatches=1, micro_rows=16, lr=1e-4, eval_every=30)


def parse(argv: list[str]) -> Config:
    presets = {"gsm8k": GSM8K_HUB, "gsm8k from scratch": GSM8K_SCRATCH}
    given = given_flags(Config, __doc__.splitlines()[0], presets, argv)
    for key in ("data", "model"):  # a resumed run may start elsewhere
        if given.get(key) and Path(given[key]).exists():
            given[key] = str(Path(given[key]).resolve())
    if "resume" in given:
        config = resumed_config(given)
    else:
        scratch = given.get("model") == "scratch"
        preset = {} if given.get("task") != "gsm8k" else GSM8K_SCRATCH if scratch else GSM8K_HUB
        config = Config(**preset | given)
    check(config)
    return config


def resumed_config(given: dict) -> Config:
    if extra := set(given) - {"resume", "steps"}:
        fail(f"{flag(min(extra))} cannot be changed when resuming; only --steps can")
    try:
        saved = Config(**json.loads((Path(given["resume"]) / "config.json").read_text())["config"])
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"--resume {given['resume']}: no config.json of a run there; accepted: a run directory, such as runs/NAME")
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
    if config.exchangeable and (config.kl or any(text.startswith("kl=") for text in config.hyper)):
        fail("--exchangeable would average the KL term away with the rest; it goes without --kl")
    if config.data and config.task != "gsm8k":
        fail(f"--data {config.data}: only --task gsm8k reads data")
    if config.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no CUDA device; accepted: auto, cpu")
    if config.name and not config.resume and (Path(config.out) / config.name).exists():
        fail(f"--name {config.name}: {Path(config.out) / config.name} exists; choose another, or --resume it")
    hyperparameters(config)


def hyperparameters(config: Config) -> dict:
    """--hyper and --kl as keyword arguments of the method, tried on a small batch before a model is loaded."""
    method, accepted, zeros = METHODS[config.method], {}, torch.zeros(2, 1)
    for function in filter(None, (method.credit, *method.passes)):
        parameters = inspect.signature(function).parameters.values()
        accepted |= {p.name: p.default for p in parameters if p.default is not p.empty}
    for text in config.hyper:
        if "=" not in text:
            fail(f"--hyper {text}: NAME=VALUE is expected, such as eps_high=0.3")
    chosen = ({"kl": config.kl} if config.kl else {}) | dict(text.partition("=")[::2] for text in config.hyper)
    try:
        for key, value in chosen.items():
            if key not in accepted:
                names = ", ".join(f"{k}={v}" for k, v in accepted.items()) or "none"
                fail(f"method {config.method} has no hyperparameter {key!r}; accepted, with defaults: {names}")
            kind = type(accepted[key])
            if kind is bool and value not in ("True", "False"):
                raise ValueError("must be True or False")
            chosen[key] = value == "True" if kind is bool else kind(value)
            if kind is float and not 0 <= chosen[key] < math.inf:
                raise ValueError("must be a finite number, at least 0")
        for loss_fn in method.passes:
            batch = Batch(zeros, zeros, zeros, zeros == 0, 2, 1, zeros if config.reference else None)
            loss_fn(batch, **pick(chosen, loss_fn))
    except ValueError as error:
        fail(f"--hyper {key}={value}: {error}")
    return chosen


def pick(hyper: dict, function) -> dict:
    """The hyperparameters that this function takes: a method's credit rule and its passes share one list."""
    return {k: v for k, v in hyper.items() if k in inspect.signature(function).parameters}


def rng(*key) -> torch.Generator:
    """A fresh generator for each use and step, so that a resumed run needs no random state to be restored."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big"))


# ---------------------------------------------------------------- model


def load_model(config: Config, task, device: torch.device, path: str):
    """A causal LM with fp32 master weights, its tokenizer, its end-of-answer ids. eval() for good: no dropout."""
    if path == "scratch":
        tokenizer = task.make_tokenizer()
        ids = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
        shape = dict(
            n_layer=config.layers, n_embd=config.width, n_head=4 if config.width < 512 else 8, n_positions=1024
        )
        torch.manual_seed(config.seed)
        # The usual init of 0.02 is meant for wide models; a narrow one learns several times faster from this.
        start = dict(initializer_range=config.width**-0.5)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape, **ids, **start))
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            fail(f"--model {path} cannot be loaded ({reason}); accepted: scratch, a directory, a hub id")
    eos = model.generation_config.eos_token_id
    eos = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    if not eos:
        fail(f"--model {path}: neither its tokenizer nor its generation config names an end-of-sequence token")
    model.to(device).eval()
    eos = torch.tensor(sorted(eos), device=device)
    # Its own generation config may hold a sampler, which rollout() ignores and save_pretrained() may refuse.
    model.generation_config = GenerationConfig(eos_token_id=eos.tolist(), pad_token_id=tokenizer.pad_token_id)
    try:  # rollout() and score() apply the output layer themselves: make sure that this, and the cache, is all there is
        ids = torch.arange(min(8, model.config.vocab_size), device=device)[None]
        inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
        with torch.no_grad():
            plain, ours = model(**inputs).logits, logits_of(model, model.base_model(**inputs).last_hidden_state)
        rollout(model, ids.tolist() * 2, 2, 2, 1.0, eos, rng("try"))
    except (AttributeError, NotImplementedError, TypeError) as error:
        fail(f"--model {path}: {type(model).__name__} is not supported ({str(error).splitlines()[0]})")
    if not torch.allclose(plain, ours, atol=1e-4):
        fail(f"--model {path}: {type(model).__name__} changes its logits after the output layer; not supported")
    if METHODS[config.method].needs_hidden and getattr(model.get_output_embeddings(), "bias", None) is not None:
        fail(f"--method {config.method}: the output layer of {path} has a bias, which its token scores leave out")
    return model, tokenizer, eos


def logits_of(model, hidden: Tensor) -> Tensor:
    """The output layer in fp32, outside any autocast: bf16 logits near 20 are a tenth apart. (..., d) -> (..., V)."""
    with torch.autocast(hidden.device.type, enabled=False):
        return model.get_output_embeddings()(hidden.float())


def autocast(device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


# ---------------------------------------------------------------- rollout


@dataclass
class Rows:
    """Prompts with their answers, as ids. A row is prompt (left-padded) + answer (right-padded)."""

    prompt: Tensor  # (N, P)
    prompt_mask: Tensor  # (N, P) bool
    tokens: Tensor  # (N, T)
    mask: Tensor  # (N, T) bool, True up to and including the first EOS

    def __getitem__(self, index) -> Rows:
        return Rows(self.prompt[index], self.prompt_mask[index], self.tokens[index], self.mask[index])


def pad_left(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=device)
    return ids, mask


def make_rows(prompts: list[list[int]], answers: list[list[int]], device: torch.device) -> Rows:
    width = max(map(len, answers))
    tokens = torch.tensor([a + [0] * (width - len(a)) for a in answers], device=device)
    mask = torch.tensor([[True] * len(a) + [False] * (width - len(a)) for a in answers], device=device)
    return Rows(*pad_left(prompts, device), tokens, mask)


@torch.no_grad()
def rollout(model, prompts, copies: int, max_tokens: int, temperature: float, eos: Tensor, gen) -> tuple[Rows, Tensor]:
    """Sample `copies` answers to each prompt (list of id lists); temperature 0 is greedy. Rows, (N, T) log-probs.

    Nothing but the temperature shapes the distribution: no top-p, no top-k, no penalty, whatever the model's own
    generation config says. A prompt is read once and its key-value cache repeated; finished rows leave the batch.
    """
    device = eos.device
    ids, prompt_mask = pad_left(prompts, device)
    n = len(prompts) * copies
    uniform = torch.rand(n, max_tokens, generator=gen, dtype=torch.float64).to(device)
    tokens = torch.zeros(n, max_tokens, dtype=torch.long, device=device)
    mask = torch.zeros(n, max_tokens, dtype=torch.bool, device=device)
    logps = torch.zeros(n, max_tokens, device=device)
    with autocast(device):
        cache = DynamicCache(config=model.config)
        position = (prompt_mask.cumsum(1) - 1).clamp(min=0)
        inputs = dict(attention_mask=prompt_mask.long(), position_ids=position, past_key_values=cache, use_cache=True)
        hidden = model.base_model(ids, **inputs).last_hidden_state[:, -1].repeat_interleave(copies, 0)  # (N, d)
        cache.batch_repeat_interleave(copies)
        attention = prompt_mask.long().repeat_interleave(copies, 0)
        position = position[:, -1:].repeat_interleave(copies, 0)
        rows = torch.arange(n, device=device)  # which answers are still in the batch
        for t in range(max_tokens):
            logp = (logits_of(model, hidden) / (temperature or 1.0)).log_softmax(-1)
            if temperature:  # inverse of the distribution function: a row's draws do not depend on its neighbours
                cdf = logp.double().exp().cumsum(-1)
                token = torch.searchsorted(cdf, uniform[rows, t, None] * cdf[:, -1:], right=True).squeeze(1)
                token = token.clamp(max=logp.shape[1] - 1)
            else:
                token = logp.argmax(-1)
            tokens[rows, t], mask[rows, t] = token, True
            logps[rows, t] = logp.gather(1, token[:, None]).squeeze(1)
            alive = ~torch.isin(token, eos)
            if t + 1 == max_tokens or not alive.any():
                break
            if not alive.all():
                keep = alive.nonzero().squeeze(1)
                cache.batch_select_indices(keep)
                rows, token, attention, position = rows[keep], token[keep], attention[keep], position[keep]
            attention = torch.cat([attention, attention.new_ones(len(rows), 1)], 1)
            position = position + 1
            inputs = dict(attention_mask=attention, position_ids=position, past_key_values=cache, use_cache=True)
            hidden = model.base_model(token[:, None], **inputs).last_hidden_state[:, -1]
    ids, prompt_mask = ids.repeat_interleave(copies, 0), prompt_mask.repeat_interleave(copies, 0)
    return Rows(ids, prompt_mask, tokens[:, : t + 1], mask[:, : t + 1]), logps[:, : t + 1]


# ---------------------------------------------------------------- score

CHUNK = {"cpu": 2**22, "cuda": 2**26}  # logits held at once: 16 MB of fp32 stay near a CPU's caches; 256 MB on a GPU


def score(model, rows: Rows, temperature: float, keep_hidden: bool = False) -> tuple[Tensor, ...]:
    """Log-probs of the answers' tokens (differentiable) and entropies (detached), both (N, T) fp32, 0 on padding.

    The output layer runs on answer positions only, chunk by chunk, and again in backward: full logits never exist.
    With keep_hidden also the last hidden states that predict the tokens, (N, T, d), detached.
    """
    ids = torch.cat([rows.prompt, rows.tokens], 1)
    attention = torch.cat([rows.prompt_mask, rows.mask], 1).long()
    position = (attention.cumsum(1) - 1).clamp(min=0)
    with autocast(ids.device):
        inputs = dict(attention_mask=attention, position_ids=position, use_cache=False)
        hidden = model.base_model(ids, **inputs).last_hidden_state[:, rows.prompt.shape[1] - 1 : -1]  # predict answers
        hidden, targets = hidden[rows.mask], rows.tokens[rows.mask]  # (M, d), (M,)
        size = max(1, CHUNK[ids.device.type] // model.config.vocab_size)
        if len(targets) <= size:
            parts = [head_logps(model, hidden, targets, temperature)]
        else:
            chunks = zip(hidden.split(size), targets.split(size), strict=True)
            parts = [checkpoint(head_logps, model, h, t, temperature, use_reentrant=False) for h, t in chunks]
    flat = [torch.cat(x) for x in zip(*parts, strict=True)] + ([hidden.detach()] if keep_hidden else [])
    return tuple(x.new_zeros(*rows.mask.shape, *x.shape[1:]).index_put((rows.mask,), x) for x in flat)


def head_logps(model, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(M, d), (M,) -> log-prob of the target and entropy of the distribution, (M,) fp32 each."""
    logp = (logits_of(model, hidden) / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


def pieces(rows: Rows, size: int) -> list[slice]:
    return [slice(i, i + size) for i in range(0, len(rows.tokens), size)]


@torch.no_grad()
def score_all(model, rows: Rows, temperature: float, size: int, keep_hidden: bool = False) -> tuple[Tensor, ...]:
    parts = [score(model, rows[piece], temperature, keep_hidden) for piece in pieces(rows, size)]
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


# ---------------------------------------------------------------- update


def update(model, optimizer, loss_fn, rows: Rows, batch: Batch, config: Config) -> tuple[Tensor, Tensor, float]:
    """One optimiser step. Returns the loss, the token coefficients (N, T) and the gradient norm.

    The loss is taken on the whole batch as a function of its (N, T) log-probs, a small matrix; its gradient there is
    then carried through the model in pieces of micro_rows. So any loss, however it couples the rows, has exactly the
    gradient of the unsplit batch, and the token coefficients that the meter wants are there for free.
    """
    split = pieces(rows, config.micro_rows)
    if len(split) == 1:
        logp, _ = score(model, rows, config.temperature)
    else:
        logp, _ = score_all(model, rows, config.temperature, config.micro_rows)
    leaf = logp.detach().requires_grad_()
    loss = loss_fn(replace(batch, logp=leaf))
    coefficients = token_coefficients(loss, leaf)
    optimizer.zero_grad()
    for piece in split:
        part = logp if len(split) == 1 else score(model, rows[piece], config.temperature)[0]
        part.backward(-coefficients[piece] / len(leaf))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip).item()
    if not (math.isfinite(norm) and math.isfinite(loss.item())):
        raise FloatingPointError(f"loss {loss.item()}, gradient norm {norm}: the weights were left as they were")
    if coefficients.any():  # with nothing to learn, the optimiser's momentum must not move the weights either
        optimizer.step()
    return leaf.detach(), coefficients, norm


def learn(model, optimizer, config: Config, hyper: dict, rows: Rows, batch: Batch, advantages: Tensor, gen) -> dict:
    """All optimiser steps on one rollout batch: epochs x minibatches x passes. Returns their mean diagnostics."""
    nodes = prefix_nodes(rows.tokens, rows.mask, config.group_size)
    groups = torch.arange(len(rows.tokens), device=rows.tokens.device).view(-1, config.group_size)
    seen = []
    for _ in range(config.epochs):
        order = torch.randperm(len(groups), generator=gen).to(groups.device)
        for index in groups[order].view(config.minibatches, -1):  # whole groups
            part, adv, mask = batch[index], advantages[index], batch.mask[index]
            for method_pass in METHODS[config.method].passes:

                def loss_fn(b: Batch, method_pass=method_pass, adv=adv, index=index) -> Tensor:
                    loss = method_pass(b, **pick(hyper, method_pass))
                    return exchangeable(loss, b.logp, adv, nodes[index], b.mask) if config.exchangeable else loss

                logp, c, norm = update(model, optimizer, loss_fn, rows[index], part, config)
                if not seen:
                    off, cpu = (logp - part.logp_old)[mask].abs(), logp.device.type == "cpu"
                    on_policy = (
                        off.max() < 1e-3 if cpu else off.mean() < 0.05
                    )  # bf16 rounds differently in other shapes
                    assert on_policy, f"the first step is not on-policy: log-ratio {off.max().item()}"
                counted = mask & (part.adv != 0)
                seen.append({"grad_norm": norm})
                if counted.any():  # a batch of equal-reward groups has nothing to clip or to tax
                    seen[-1]["clip_share"] = ((counted & (c == 0)).sum() / counted.sum()).item()
                    seen[-1]["tax"] = learning_tax(c, adv, nodes[index], mask)
    found = {key: [m[key] for m in seen if key in m] for key in ("grad_norm", "clip_share", "tax")}
    return {key: sum(values) / max(1, len(values)) for key, values in found.items()}


# ---------------------------------------------------------------- evaluate


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k answers is right) from n answers: 1 - C(n-c, k) / C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def decode(tokenizer, rows: Rows, eos: Tensor) -> list[str]:
    """The answers without their EOS; any other special token stays visible, so that no verifier overlooks it."""
    keep = (rows.mask & ~torch.isin(rows.tokens, eos)).tolist()
    kept = [[i for i, k in zip(*row, strict=True) if k] for row in zip(rows.tokens.tolist(), keep, strict=True)]
    return tokenizer.batch_decode(kept)


def evaluate(model, tokenizer, eos: Tensor, task, config: Config) -> tuple[dict, list[str]]:
    """Held-out greedy accuracy, sampled accuracy and pass@k, exact prefix probabilities; and a few answers to read."""
    items, k, lines = task.test[: config.eval_items], config.eval_samples, []
    gen = rng(config.seed, "evaluate")
    greedy, sampled = [], []
    at_once = max(1, config.prompts * config.group_size // k)
    for i in range(0, len(items), at_once):
        some = items[i : i + at_once]
        prompts = [task.encode(tokenizer, item) for item in some]
        for copies, temperature, scores in ((1, 0.0, greedy), (k, config.temperature, sampled)):
            rows, _ = rollout(model, prompts, copies, config.max_tokens, temperature, eos, gen)
            texts = decode(tokenizer, rows, eos)
            rewards = [task.reward(text, some[j // copies]) for j, text in enumerate(texts)]
            scores += rewards
            if temperature and len(lines) < 3:
                shown = [(some[j].prompt, texts[j * k], rewards[j * k]) for j in range(min(3, len(some)))]
                lines = [" / ".join(f"{prompt} -> {text}  [{r:g}]".splitlines()) for prompt, text, r in shown]
    right = [sum(r == 1 for r in sampled[j : j + k]) for j in range(0, len(sampled), k)]
    metrics = {
        "greedy": sum(greedy) / len(greedy),
        "sampled": sum(sampled) / len(sampled),
        f"pass@{k}": sum(pass_at_k(k, c, k) for c in right) / len(right),
    }
    if hasattr(task, "prefixes") and config.model == "scratch":  # with another tokenizer a text has several encodings
        metrics |= prefix_probabilities(model, tokenizer, task, items[:32], config, eos.device)
    return metrics, lines


def prefix_probabilities(model, tokenizer, task, items: list, config: Config, device: torch.device) -> dict:
    """Mean over items of the policy's exact probability that an answer begins with one of a named set of prefixes."""
    names, prompts, prefixes = [], [], []
    for item in items:
        for name, texts in task.prefixes(item).items():
            for text in texts:
                names.append(name)
                prompts.append(task.encode(tokenizer, item))
                prefixes.append(tokenizer.encode(text, add_special_tokens=False))
    logp, _ = score_all(model, make_rows(prompts, prefixes, device), config.temperature, config.micro_rows)
    total = dict.fromkeys(names, 0.0)
    for name, p in zip(names, logp.sum(1).exp().tolist(), strict=True):
        total[name] += p / len(items)
    return total


# ---------------------------------------------------------------- checkpoint


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


# ---------------------------------------------------------------- main


def warm_start(model, tokenizer, task, config: Config, eos: Tensor):
    """Supervised steps on the task's demonstrations, so that RL has something to find."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warm_lr, betas=(0.9, 0.95), weight_decay=0.0)
    end = [eos[0].item() if tokenizer.eos_token_id is None else tokenizer.eos_token_id]
    for step in tqdm(range(config.warm_steps), desc="warm start", disable=None):
        for group in optimizer.param_groups:
            group["lr"] = config.warm_lr * min((step + 1) / 20, 1 - step / config.warm_steps)
        picks = torch.randint(len(task.train), (config.warm_rows,), generator=rng(config.seed, "warm", step)).tolist()
        items = [task.train[i] for i in picks]
        demos = [tokenizer.encode(item.demo, add_special_tokens=False) + end for item in items]
        rows = make_rows([task.encode(tokenizer, item) for item in items], demos, eos.device)
        logp, _ = score(model, rows, 1.0)
        loss = -logp.sum() / rows.mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def next_items(task, config: Config, step: int) -> list:
    """The prompts of a step: walk through one permutation of the training split after another."""
    n, items = len(task.train), []
    for i in range((step - 1) * config.prompts, step * config.prompts):
        if i % n == 0 or not items:
            order = torch.randperm(n, generator=rng(config.seed, "order", i // n)).tolist()
        items.append(task.train[order[i % n]])
    return items


def train_step(
    model, reference, tokenizer, optimizer, eos: Tensor, task, config: Config, hyper: dict, step: int
) -> dict:
    """Rollout, reward, score, learn. Returns the step's metrics."""
    gen, clock = rng(config.seed, "step", step), [time.perf_counter()]
    if config.schedule == "linear":
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1 - (step - 1) / config.steps)
    items = next_items(task, config, step)
    prompts = [task.encode(tokenizer, item) for item in items]
    rows, _ = rollout(model, prompts, config.group_size, config.max_tokens, config.temperature, eos, gen)
    texts = decode(tokenizer, rows, eos)
    rewards = [task.reward(text, items[i // config.group_size]) for i, text in enumerate(texts)]
    rewards = torch.tensor(rewards, device=eos.device)  # (N,)
    clock.append(time.perf_counter())

    method, scoring = METHODS[config.method], (config.temperature, config.micro_rows)
    logp_old, entropy, *hidden = score_all(model, rows, *scoring, method.needs_hidden)  # (N, T) each, [(N, T, d)]
    logp_ref = None
    if reference is not None:
        logp_ref, _ = score_all(reference, rows, *scoring)
    advantages = group_advantages(rewards, config.group_size, method.scale)  # (N,)
    adv, credited = advantages[:, None].expand_as(logp_old).masked_fill(~rows.mask, 0.0), {}
    if method.credit is not None:
        old = Old(rows.tokens, rows.mask, logp_old, rewards, config.group_size, config.temperature, gen=gen)
        if method.needs_hidden:
            old = replace(old, hidden=hidden[0], head=model.get_output_embeddings().weight.detach())
        plain, adv = adv, method.credit(adv, old, **pick(hyper, method.credit))
        left = adv.abs().sum() / plain.abs().sum().clamp(min=1e-12)
        credited = {"reshaped": ((adv != plain).sum() / rows.mask.sum()).item(), "adv_left": left.item()}
    batch = Batch(logp_old, logp_old, adv, rows.mask, config.group_size, config.max_tokens, logp_ref)
    clock.append(time.perf_counter())

    diagnostics = learn(model, optimizer, config, hyper, rows, batch, advantages, gen)
    clock.append(time.perf_counter())
    grouped, tokens = rewards.view(-1, config.group_size), rows.mask.sum()
    ended = torch.isin(rows.tokens, eos).logical_and(rows.mask).any(1)
    # Delta(x): how much likelier this step made the correct answers of its own mixed groups (32 of them, to be cheap).
    probe = ((rewards == 1) & (advantages != 0)).nonzero().squeeze(1)[:32]
    if len(probe):
        change = score_all(model, rows[probe], *scoring)[0] - logp_old[probe]
        diagnostics["delta"] = change.sum(1).mean().item()
    metrics = {
        "step": step,
        "reward": rewards.mean().item(),
        "equal_groups": (grouped.amax(1) == grouped.amin(1)).float().mean().item(),
        "length": (tokens / len(rewards)).item(),
        "truncated": 1 - ended.float().mean().item(),
        "entropy": (entropy.sum() / tokens).item(),
        **({} if reference is None else {"kl_start": (k3(batch).sum() / tokens).item()}),
        **credited,
        **diagnostics,
        "lr": optimizer.param_groups[0]["lr"],
        "tokens": tokens.item(),
        "tokens_per_s": tokens.item() / (clock[-1] - clock[0]),
    }
    times = [b - a for a, b in zip(clock, clock[1:], strict=False)]
    return metrics | dict(zip(("rollout_s", "score_s", "update_s"), times, strict=True))


def start_run(config: Config, task, device: torch.device):
    """A new run directory with a warm-started model, or the newest checkpoint of an old one."""
    run = Path(config.resume or Path(config.out) / (config.name or default_name(config)))
    found = sorted((run / "checkpoints").glob("step-*")) if config.resume else []
    if config.resume and not found:
        fail(f"--resume {run}: it holds no complete checkpoint; start it anew")
    if found and (made := int(found[-1].name.removeprefix("step-"))) >= config.steps:
        fail(f"{run} has already made {made} of {config.steps} steps; nothing is left to do")
    model, tokenizer, eos = load_model(config, task, device, str(found[-1]) if found else config.model)
    limit = getattr(model.config, "max_position_embeddings", math.inf)
    longest = max(len(task.encode(tokenizer, item)) for item in [*task.train, *task.test[: config.eval_items]])
    demo = max(len(tokenizer.encode(item.demo)) + 1 for item in task.train) if config.warm_steps and not found else 0
    if longest + max(config.max_tokens, demo) > limit:
        answer = f"--max-tokens {config.max_tokens}" if config.max_tokens >= demo else f"longest demonstration {demo}"
        fail(f"longest prompt {longest} + {answer} exceed the model's context of {limit} tokens")
    start = run / "start" if config.warm_steps else config.model  # the policy that the KL is measured from
    if not found:
        try:
            run.mkdir(parents=True)
        except OSError as error:
            fail(f"cannot make the run directory {run}: {error.strerror}")
        (run / "metrics.jsonl").touch()
        (run / "samples.txt").touch()
        print(
            f"{config.method} on {config.task}, {sum(p.numel() for p in model.parameters()):,} parameters, into {run}"
        )
        print(f"1. warm start: {config.warm_steps} supervised steps on the task's own demonstrations")
        each = f"{config.prompts} prompts x {config.group_size} answers, {config.epochs * config.minibatches} update(s)"
        print(
            f"2. reinforcement learning: {config.steps} steps of {each}; only the final answer is rewarded", flush=True
        )
        try:
            warm_start(model, tokenizer, task, config, eos)
        except KeyboardInterrupt:
            shutil.rmtree(run)  # nothing to resume: leave no dead end behind
            raise
        if config.reference and config.warm_steps:
            model.save_pretrained(start)
            tokenizer.save_pretrained(start)
    write_config(run, config, device)
    reference = load_model(config, task, device, str(start))[0] if config.reference else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    done = load_trainer(run, optimizer, found[-1]) if found else 0
    return run, model, reference, tokenizer, optimizer, eos, done


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
        shown = {k: metrics[k] for k in ("reward", "entropy", "tax") if k in metrics} | evaluated
        tqdm.write(f"step {metrics['step']}: " + "  ".join(f"{k} {v:.3f}" for k, v in shown.items()))
        for line in lines if show else ():
            tqdm.write("    " + line)


def summary(run: Path):
    """What changed: every measured quantity at its first and last evaluation, and the reward over 10 steps."""
    seen = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = [[m for m in seen if "greedy" in m][i] for i in (0, -1)]
    steps = [m for m in seen if "reward" in m]
    print(f"\n{'':18} before   after")
    for key in ("reward", "entropy", "tax", "length"):
        print(f"{key:18} {steps[0][key]:6.3f}  {sum(m[key] for m in steps[-10:]) / len(steps[-10:]):6.3f}")
    for key in (k for k in last if k in first and k != "step"):
        print(f"{key:18} {first[key]:6.3f}  {last[key]:6.3f}")


def main(argv: list[str] | None = None):
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = parse(sys.argv[1:] if argv is None else argv)
    hyper = hyperparameters(config)
    torch.set_num_threads(config.threads or os.cpu_count())
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    try:
        task = GSM8K(config.data or None) if config.task == "gsm8k" else Arithmetic()
    except ValueError as error:
        fail(str(error))
    task.train = task.train[: config.train_items or None]
    run, model, reference, tokenizer, optimizer, eos, done = start_run(config, task, device)
    if not done:
        record(run, {"step": 0}, *evaluate(model, tokenizer, eos, task, config), show=True)
    stop = []  # Ctrl-C: finish the step, save, leave; a second one leaves at once
    previous = signal.signal(signal.SIGINT, lambda *_: stop.append(1) if not stop else sys.exit(130))
    bar = tqdm(range(done + 1, config.steps + 1), initial=done, total=config.steps, desc=config.method, disable=None)
    for step in bar:
        metrics = train_step(model, reference, tokenizer, optimizer, eos, task, config, hyper, step)
        bar.set_postfix({k: f"{metrics[k]:.3g}" for k in ("reward", "entropy", "length", "tax", "tokens_per_s")})
        last, stopping = step == config.steps, bool(stop)
        due = step % config.eval_every == 0 or last
        record(run, metrics, *(evaluate(model, tokenizer, eos, task, config) if due else ()), show=last)
        if step % config.save_every == 0 or last or stopping:
            save(run, step, model, tokenizer, optimizer)
        if stopping and not last:
            break
    bar.close()
    signal.signal(signal.SIGINT, previous)
    if stopping and not last:
        return print(f"stopped after step {step}; go on with: python {os.path.relpath(__file__)} --resume {run}")
    summary(run)
    print(f"\neverything is in {run}; try next: python {os.path.relpath(__file__)} --method dfpo-min, or --help")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted before the first step of this run; nothing was changed")
