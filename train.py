"""Group-relative RL for a language model, as one script that reads from top to bottom.

config -> main -> sample -> score -> learn -> update -> diagnose -> evaluate -> warm start

(The warm start stands last because it is not RL; main makes it first.)

A policy answers prompts, several times each. Only whole answers are rewarded, and an answer is
compared with the others to its prompt. A loss of losses.py says what that means for every token.

`python train.py` needs no GPU and no download; `python train.py --help` lists every flag. To follow
the algorithm, this file and losses.py are enough. llm/policy.py loads the model and makes sampling
and scoring fast; llm/runs.py keeps the files of a run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from llm import bind, fail, given_flags
from llm.policy import (
    GAP_LIMIT,
    Policy,
    Rows,
    fill_gaps,
    length_buckets,
    list_notes,
    make_rows,
    output_logits,
    read_prompts,
    token_log_probs,
)
from llm.runs import (
    Run,
    adamw,
    keep_groups,
    open_run,
    report,
    save,
    save_start,
    saved_config,
    start_policy,
    stop_at_bad_numbers,
    stop_at_full_disk,
    stop_at_logp_gap,
)
from losses import (
    METHODS,
    Batch,
    Method,
    OldPolicy,
    group_advantages,
    k3,
    kept_tokens,
    learning_tax,
    prefix_nodes,
    project,
    token_coefficients,
)

# ---------------- config: every knob, its default (the toy) and its meaning


def knob(default, help: str, choices: tuple | None = None):
    """A field that is a flag: HfArgumentParser hands its metadata on to argparse."""
    metadata = {"help": help} | ({"choices": choices} if choices else {})
    if default == []:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Config:
    task: str = knob("arithmetic", "what to learn", ("arithmetic", "gsm8k"))
    method: str = knob("grpo", "which loss of losses.py", tuple(METHODS))
    hyper: list[str] = knob([], "hyperparameters of the method: NAME=VALUE ..., as in eps_high=0.3")
    project: bool = knob(False, "mean weights at shared tokens: no learning tax in a batch (C17)")
    model: str = knob("scratch", "scratch, or a directory or hub id of a causal LM")
    layers: int = knob(1, "layers of the scratch model")
    width: int = knob(64, "hidden size of the scratch model, a multiple of 8")
    data: str = knob("", "directory with GSM8K's train.jsonl and test.jsonl; empty: the hub")
    skip_bad_lines: bool = knob(False, "leave out malformed lines of the data, and say how many")
    train_items: int = knob(0, "train on this many problems, the shortest solutions first; 0: all")
    threads: int = knob(1, "CPU threads, 0: all; a tiny model gains nothing from more than one")
    device: str = knob("auto", "where the model lives", ("auto", "cpu", "cuda"))
    seed: int = knob(0, "seed of everything random")
    warm_steps: int = knob(700, "supervised steps on the task's demonstrations before RL")
    warm_rows: int = knob(64, "demonstrations per supervised step")
    warm_lr: float = knob(6e-3, "learning rate of the supervised steps")
    steps: int = knob(60, "rollout batches; 0: only the warm start")
    prompts: int = knob(32, "prompts per rollout batch")
    group_size: int = knob(8, "G, answers per prompt")
    max_tokens: int = knob(26, "L, the longest answer in tokens")
    temperature: float = knob(1.0, "sampling temperature, also inside every log-prob")
    epochs: int = knob(1, "passes over a rollout batch")
    minibatches: int = knob(4, "optimiser batches per epoch, of whole groups; 1: one for all")
    micro_rows: int = knob(64, "rows whose activations are held at once: memory, not results")
    lr: float = knob(1e-3, "learning rate of AdamW")
    schedule: str = knob("linear", "learning rate over the run", ("constant", "linear"))
    grad_clip: float = knob(1.0, "largest gradient norm")
    repair_references: int = knob(1, "siblings shown beside a wrong answer to be corrected (ibpo)")
    reference: bool = knob(True, "keep the start policy, for the KL to it (memory: one more model)")
    eval_every: int = knob(20, "steps between evaluations, each with a checkpoint")
    eval_items: int = knob(200, "held-out items per evaluation")
    eval_samples: int = knob(4, "k of pass@k: samples per held-out item")
    out: str = knob("", "the run directory; empty: runs/TASK-METHOD-sSEED-TIME")
    resume: str = knob(
        "", "a run directory to resume; --micro-rows may change, --steps on a constant schedule"
    )

    @cached_property
    def chosen_method(self) -> Method:
        """The method with its hyperparameters. ValueError for what it does not take."""
        if bad := [text for text in self.hyper if "=" not in text]:
            raise ValueError(f"{bad[0]}: NAME=VALUE is expected, such as eps_high=0.3")
        chosen = dict(text.split("=", 1) for text in self.hyper)
        return bind(self.method, chosen, self.reference)


# Where GSM8K's defaults differ from the toy's, above: a model of the hub, and one from scratch.
GSM8K_HUB = {
    **dict(model="Qwen/Qwen2.5-0.5B-Instruct", threads=0, warm_steps=0, steps=200, prompts=16),
    **dict(max_tokens=512, minibatches=1, micro_rows=8, lr=1e-6, eval_samples=1),
}
GSM8K_SCRATCH = {
    **dict(layers=2, width=128, train_items=32, max_tokens=48, warm_steps=45, warm_rows=16),
    **dict(warm_lr=3e-3, minibatches=1, lr=5e-4, eval_every=30, eval_samples=1),
}
# The lowest value of a number, where it is not 0.
ONE = "layers warm_rows prompts max_tokens epochs minibatches micro_rows repair_references"
ONE += " eval_every eval_items eval_samples"
LOWEST = {"group_size": 2, "temperature": 1e-3, "grad_clip": 1e-12} | dict.fromkeys(ONE.split(), 1)


def parse(argv: list[str]) -> Config:
    """Flags -> Config. A mistake ends here in one line, before anything heavy is imported."""
    presets = {"--task gsm8k": GSM8K_HUB, "--task gsm8k --model scratch": GSM8K_SCRATCH}
    given = given_flags(Config, __doc__.splitlines()[0], presets, argv)
    for key in ("data", "model"):  # a resumed run may start in another directory
        if given.get(key, "scratch") != "scratch" and Path(given[key]).exists():
            given[key] = str(Path(given[key]).resolve())
    preset = {}
    if "resume" in given:
        preset = saved_config(given, Config())
    elif given.get("task") == "gsm8k":
        preset = GSM8K_SCRATCH if given.get("model") == "scratch" else GSM8K_HUB
    config = Config(**preset | given)
    check(config)
    now = time.strftime("%Y%m%d-%H%M%S")
    config.out = config.out or f"runs/{config.task}-{config.method}-s{config.seed}-{now}"
    return config


def check(config: Config):
    """Refuse what cannot work."""
    for f in fields(config):
        value, low = getattr(config, f.name), LOWEST.get(f.name, 0)
        choices = f.metadata.get("choices", (value,))
        said = f"--{f.name.replace('_', '-')} {value}: must be"
        if isinstance(value, (int, float)) and not low <= value < math.inf:
            fail(f"{said} a finite number, at least {low}")
        if value not in choices:
            fail(f"{said} one of {', '.join(choices)}")
    try:
        assert config.chosen_method
    except ValueError as error:
        fail(f"--hyper: {error}")
    if config.prompts % config.minibatches:
        fail(f"--prompts {config.prompts} is not divisible by --minibatches {config.minibatches}")
    if config.width % 8:
        fail(f"--width {config.width}: must be a multiple of 8")
    if config.project and any(text.startswith("kl=") for text in config.hyper):
        fail("--project would average the KL term away with the rest; it goes without --hyper kl")
    if (shown := config.repair_references) >= config.group_size:
        fail(f"--repair-references {shown}: an answer has --group-size - 1 siblings")
    if config.data and config.task != "gsm8k":
        fail(f"--data {config.data}: only --task gsm8k reads data")
    if config.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no CUDA device; accepted: auto, cpu")
    if len(Path(config.out).name.encode()) > 200 or "\0" in config.out:
        fail(f"--out {config.out[:20]!r}...: a name of at most 200 bytes is accepted")
    if config.out and not config.resume and Path(config.out).exists():
        fail(f"--out {config.out} exists; choose another, or --resume it")


# ---------------- main: one step after another


def main(argv: list[str] | None = None):
    config = parse(sys.argv[1:] if argv is None else argv)
    try:
        train(config)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        less = "--micro-rows (also beside --resume), --prompts, --max-tokens, --warm-rows"
        fail(f"{reason}; what helps: less of {less}; --no-reference")


def train(config: Config):
    """A whole run, or what is left of a resumed one."""
    torch.set_num_threads(config.threads or os.cpu_count())
    task = load_task(config)
    with open_run(config, task) as run:
        if not run.steps_done:
            begin(run, task, config)
        policy, reference = run.policy, start_policy(run, task, config)
        batches = prompt_batches(task, config)
        run.finish_step_on_interrupt()
        left = range(run.steps_done + 1, config.steps + 1)
        bar = tqdm(left, "RL", initial=run.steps_done, total=config.steps, disable=None)
        for step in bar:
            clock = [time.perf_counter()]
            answers = sample(policy, task, batches[step - 1], step, config)  # 1. G to each prompt
            clock.append(time.perf_counter())
            scored = score(policy, reference, answers, config)  # 2. log-probs, advantages, credit
            clock.append(time.perf_counter())
            limit = GAP_LIMIT[policy.eos.device.type] / min(1.0, config.temperature)
            if not scored.max_logp_gap <= limit and scored.batch.logp_old.isfinite().all():
                stop_at_logp_gap(run, step, scored.max_logp_gap)  # a nan of both is for update
            try:
                updates = learn(policy, run.optimizer, scored, config)  # 3. loss -> gradient
            except FloatingPointError as error:
                stop_at_bad_numbers(run.folder, step, error)
            metrics = diagnose(policy, answers, scored, updates, config)
            clock.append(time.perf_counter())
            seconds = [end - start for start, end in zip(clock, clock[1:], strict=False)]
            metrics |= dict(zip(("rollout_s", "score_s", "update_s"), seconds, strict=True))
            metrics["tokens_per_s"] = metrics["generated"] / sum(seconds)
            metrics["max_logp_gap"] = scored.max_logp_gap
            bar.set_postfix({key: f"{metrics[key]:.3g}" for key in ("reward", "entropy", "tax")})
            last = step == config.steps
            due = last or step % config.eval_every == 0
            evaluation = evaluate(policy, task, config) if due else None
            record(run.folder, metrics, evaluation, show=last)
            if due:
                with torch.no_grad():
                    after, _, _ = log_probs(policy, scored.rows, config)
                keep_groups(run, answers, scored, after, config)
            if due or run.interrupted:
                save(run, step)  # 4. evaluate, record, save
            if run.interrupted:
                break
        print(report(run, config, f"python {os.path.relpath(__file__)}"))


def begin(run: Run, task, config: Config):
    """What a new run does before its first step: the warm start, and an evaluation."""
    size = sum(p.numel() for p in run.policy.model.parameters())
    print(f"{config.method} on {config.task}, {size:,} parameters, into {run.folder}")
    supervised = f"{config.warm_steps} supervised steps on the task's own demonstrations"
    if not config.warm_steps:
        supervised = "none, the model is taken as it is"
    print(f"1. warm start: {supervised}")
    updates = config.epochs * config.minibatches * len(config.chosen_method.passes)
    each = f"{config.prompts} prompts x {config.group_size} answers, {updates} update(s)"
    if config.steps:
        print(f"2. reinforcement learning: {config.steps} steps of {each};", end=" ")
        print("only the final answer is rewarded", flush=True)
    for note in list_notes(run.policy, config):
        print(f"note: {note}", flush=True)
    try:
        warm_start(run.policy, task, config)
    except KeyboardInterrupt:
        if not config.resume:
            shutil.rmtree(run.folder)  # there is nothing to resume
        raise
    save_start(run, config)
    record(run.folder, {"step": 0}, evaluate(run.policy, task, config), show=True)


def load_task(config: Config):
    """The task object: .train and .test items, .encode, .reward, .repair."""
    from llm.gsm8k import GSM8K
    from toy.arithmetic import Arithmetic

    try:
        if config.task == "gsm8k":
            task = GSM8K(config.data or None, config.skip_bad_lines)
        else:
            task = Arithmetic()
    except ValueError as error:
        fail(str(error))
    if config.train_items:
        task.train = sorted(task.train, key=lambda item: len(item.demo))[: config.train_items]
    return task


def rng(*key) -> torch.Generator:
    """A generator for each use and step, so that a resumed run has no random state to restore."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def prompt_batches(task, config: Config) -> list[list]:
    """The items of every step: one permutation of the training split after another."""
    items, n = [], len(task.train)
    for epoch in range(math.ceil(config.steps * config.prompts / n)):
        order = torch.randperm(n, generator=rng(config.seed, "order", epoch)).tolist()
        items += [task.train[i] for i in order]
    return [items[i : i + config.prompts] for i in range(0, len(items), config.prompts)]


# ---------------- 1. sample: G answers to each prompt, rewarded at their end


@dataclass
class Answers:
    """N answers; the G answers to one prompt stand in a row."""

    step: int
    items: list  # N, the problem of each answer
    texts: list[str]  # N
    rows: Rows  # their prompts, tokens (N, T) and mask (N, T)
    logp: Tensor  # (N, T) as the sampler saw them
    rewards: Tensor  # (N,) 1 = correct
    shaped: Tensor  # (N,) what is compared: the rewards, for repaired answers with a bonus
    generated: int  # tokens, those of corrections included
    repaired: Tensor | None = None  # (N,) bool: wrong, and its correction is right (ibpo)
    kept_mask: Tensor | None = None  # (N, T) bool: tokens that its correction kept (ibpo)


def sample(policy: Policy, task, items: list, step: int, config: Config) -> Answers:
    """The policy answers each item G times; only a whole answer is rewarded."""
    gen, copies = rng(config.seed, "sample", step), range(config.group_size)
    prompts = [ids for ids in task.encode(policy.tokenizer, items) for _ in copies]
    items = [item for item in items for _ in copies]
    rows, logp = generate(policy, prompts, config.max_tokens, config.temperature, gen)
    texts = decode(policy, rows)
    rewards = [task.reward(text, item) for text, item in zip(texts, items, strict=True)]
    rewards = torch.tensor(rewards, device=logp.device)
    answers = Answers(step, items, texts, rows, logp, rewards, rewards, int(rows.mask.sum()))
    if repair := config.chosen_method.repair:
        fixed, answers.repaired, answers.kept_mask = correct(policy, task, answers, config, gen)
        answers.shaped = repair(rewards, answers.repaired)
        answers.generated += int(fixed.mask.sum())
    return answers


@torch.no_grad()
def generate(
    policy: Policy, prompts: list[list[int]], max_tokens: int, temperature: float, gen
) -> tuple[Rows, Tensor]:
    """Sample an answer to each of N prompts, token by token; temperature 0 is greedy.

    Nothing but the temperature shapes the distribution, whatever the model's own generation config
    says: no top-p, no top-k, no penalty. Answers that have ended leave the batch.
    Returns the rows, and the log-probs of their tokens (N, T).
    """
    model, device, n = policy.model, policy.model.device, len(prompts)
    # A row's numbers are its own, whatever becomes of the others.
    uniform = torch.rand(n, max_tokens, generator=gen, dtype=torch.float64).to(device)
    tokens = torch.zeros(n, max_tokens, dtype=torch.long, device=device)
    mask = torch.zeros(n, max_tokens, dtype=torch.bool, device=device)
    logps = torch.zeros(n, max_tokens, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        alive = torch.arange(n, device=device)  # the answers that are still in the batch
        cache, hidden, before = read_prompts(model, prompts).to_sample()
        attention = torch.cat([before, before.new_ones(n, max_tokens)], 1).long()
        position = before.sum(1, keepdim=True)  # of the next token
        for t in range(max_tokens):
            logp = (output_logits(model, hidden) / (temperature or 1.0)).log_softmax(-1)
            token = draw(logp, uniform[alive, t, None]) if temperature else logp.argmax(-1)
            tokens[alive, t] = token
            mask[alive, t] = True
            logps[alive, t] = logp.gather(1, token[:, None]).squeeze(1)
            stays = ~torch.isin(token, policy.eos)
            if t + 1 == max_tokens or not stays.any():
                break
            if not stays.all():
                rows = fill_gaps(stays)
                cache.reorder_cache(rows)
                alive, token = alive[rows], token[rows]
                attention, position = attention[rows], position[rows]
            hidden = model.base_model(
                token[:, None],
                attention_mask=attention[:, : before.shape[1] + t + 1],
                position_ids=position + t,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
    return Rows(prompts, tokens[:, : t + 1], mask[:, : t + 1]), logps[:, : t + 1]


def draw(logp: Tensor, uniform: Tensor) -> Tensor:
    """Invert each row's distribution function: (n, V) log-probs, (n, 1) numbers -> (n,) tokens."""
    cdf = logp.exp().cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).squeeze(1)
    return token.clamp(max=logp.shape[1] - 1)


def decode(policy: Policy, rows: Rows) -> list[str]:
    """Texts without their EOS. Other special tokens stay visible, so no verifier overlooks them."""
    shown = (rows.mask & ~torch.isin(rows.tokens, policy.eos)).tolist()
    pairs = zip(rows.tokens.tolist(), shown, strict=True)
    ids = [[token for token, keep in zip(*pair, strict=True) if keep] for pair in pairs]
    return policy.tokenizer.batch_decode(ids)


def correct(
    policy: Policy, task, answers: Answers, config: Config, gen
) -> tuple[Rows, Tensor, Tensor]:
    """IBPO's second rollout: the policy corrects each of its wrong answers, shown beside siblings.

    Right siblings come first. Returns the corrections of the wrong answers, which of all answers
    are repaired (N,), and which tokens a correction kept (N, T).
    """
    rewards, G, problems = answers.rewards, config.group_size, []
    wrong = (rewards == 0).nonzero().flatten()
    for i in wrong.tolist():
        siblings = [i - i % G + (i + k) % G for k in range(1, G)]
        siblings.sort(key=lambda j: rewards[j].item() != 1)
        shown = [answers.texts[j] for j in siblings[: config.repair_references]]
        problems.append(task.repair(answers.items[i], answers.texts[i], shown))
    repaired = torch.zeros_like(rewards, dtype=torch.bool)
    kept_mask, first = torch.zeros_like(answers.rows.mask), answers.rows[wrong]
    if not problems:
        return first, repaired, kept_mask  # no rows
    prompts = task.encode(policy.tokenizer, problems)
    fixed, _ = generate(policy, prompts, config.max_tokens, config.temperature, gen)
    pairs = zip(decode(policy, fixed), wrong.tolist(), strict=True)
    right = [task.reward(text, answers.items[i]) == 1 for text, i in pairs]
    repaired[wrong] = torch.tensor(right, device=rewards.device)
    kept_mask[wrong] = kept_tokens(first.tokens, first.mask, fixed.tokens, fixed.mask)
    return fixed, repaired, kept_mask


# ---------------- 2. score: log-probs, advantages, credit


@dataclass
class Scored:
    """What learning needs to know about N answers."""

    step: int
    rows: Rows
    batch: Batch  # as the old policy sees it: logp is logp_old
    logp: Tensor  # (N, T) the same, differentiable where the first update takes the whole batch
    entropy: Tensor  # (N, T)
    advantages: Tensor  # (N,) A_i, before any credit rule
    nodes: Tensor  # (N, T) of the groups' prefix trees
    max_logp_gap: float  # a metric: how far a token's logp is from the sampler's, at most; nats


def score(policy: Policy, reference: Policy | None, answers: Answers, config: Config) -> Scored:
    """Compare the answers of a group, once: advantages and credit stay fixed for all updates."""
    rows, method, G = answers.rows, config.chosen_method, config.group_size
    with torch.set_grad_enabled(config.minibatches == 1):  # then learn() begins with this graph
        logp, entropy, hidden = log_probs(policy, rows, config, method.needs_hidden)  # (N, T) ...
    old, ref = logp.detach(), None
    if reference is not None:
        with torch.no_grad():
            ref = log_probs(reference, rows, config)[0]  # (N, T)
    advantages = group_advantages(answers.shaped, G, method.scale)  # (N,)
    adv = advantages[:, None].expand_as(old).masked_fill(~rows.mask, 0.0)  # (N, T)
    if method.credit:
        head = policy.model.get_output_embeddings().weight.detach() if method.needs_hidden else None
        draws = rng(config.seed, "credit", answers.step)
        facts = (rows.tokens, rows.mask, old, answers.rewards, G, config.temperature)
        model_facts = dict(hidden=hidden, head=head, gen=draws)
        repairs = dict(kept_mask=answers.kept_mask, repaired=answers.repaired)
        adv = method.credit(adv, OldPolicy(*facts, **model_facts, **repairs))
    batch = Batch(old, old, adv, rows.mask, G, config.max_tokens, ref)
    nodes = prefix_nodes(rows.tokens, rows.mask, G)
    # A GPU works on by itself. Reading a number waits for it, so score_s has all of this function.
    gap = (old - answers.logp)[rows.mask].abs().max().item()
    return Scored(answers.step, rows, batch, logp, entropy, advantages, nodes, gap)


def log_probs(
    policy: Policy, rows: Rows, config: Config, keep_hidden: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """log pi of the answers' tokens (differentiable) and entropies of pi: (N, T), 0 on padding.

    With keep_hidden also the hidden states that predict the tokens, (N, T, d). With more rows than
    micro_rows, backward makes all activations again, of micro_rows answers or prompts at a time.
    """
    model, head = policy.model, policy.model.get_output_embeddings()

    def score_bucket(prompts, bucket: Tensor) -> list[Tensor]:
        mask, tokens = rows.mask[bucket], rows.tokens[bucket]  # (n, T)
        width = int(mask.sum(1).max())
        cache, before, attention = prompts.of(bucket)
        hidden = before[:, None]  # (n, 1, d) predicts the first tokens
        if width > 1:
            attention = torch.cat([attention, mask[:, : width - 1]], 1).long()
            rest = model.base_model(
                tokens[:, : width - 1],
                attention_mask=attention,
                position_ids=(attention.cumsum(1) - 1)[:, 1 - width :],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            hidden = torch.cat([hidden, rest], 1)  # (n, width, d)
        hidden = hidden[mask[:, :width]]  # (M, d)
        flat = [*token_log_probs(hidden, head.weight, head.bias, tokens[mask], config.temperature)]
        flat += [hidden.detach()] if keep_hidden else []
        return [x.new_zeros(*mask.shape, *x.shape[1:]).index_put((mask,), x) for x in flat]

    many = len(rows.prompts) > config.micro_rows and torch.is_grad_enabled()
    if many and len({*map(tuple, rows.prompts)}) > config.micro_rows:
        halves = torch.arange(len(rows.prompts), device=model.device).chunk(2)
        parts = zip(*(log_probs(policy, rows[h], config, keep_hidden) for h in halves), strict=True)
        return tuple(None if x[0] is None else torch.cat(x) for x in parts)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    read = partial(read_prompts, model, rows.prompts)  # each different prompt once
    # No cache for many: a weight's cached bf16 copy would add up their gradients in bf16.
    with torch.autocast(model.device.type, torch.bfloat16, model.device.type == "cuda", not many):
        work = partial(score_bucket, again(read) if many else read())
        buckets = length_buckets(rows.mask, config.micro_rows)
        parts = [again(work, bucket) if many else work(bucket) for bucket in buckets]
    back = torch.cat(buckets).argsort()
    logp, entropy, *hidden = (torch.cat(part)[back] for part in zip(*parts, strict=True))
    return logp, entropy, hidden[0] if keep_hidden else None


# ---------------- 3. learn: epochs x minibatches x passes


@dataclass
class Update:
    """What an optimiser step did."""

    index: Tensor  # (n,) its rows of the rollout batch
    which_pass: int
    coefficients: Tensor  # (n, T)
    grad_norm: float
    lr: float


def learn(policy: Policy, optimizer, scored: Scored, config: Config) -> list[Update]:
    """All optimiser steps on one rollout batch. The first is on-policy, the others are not."""
    gen, updates = rng(config.seed, "learn", scored.step), []
    lr = config.lr
    if config.schedule == "linear":
        lr *= 1 - (scored.step - 1) / config.steps
    for group in optimizer.param_groups:
        group["lr"] = lr
    groups = torch.arange(len(scored.advantages)).view(-1, config.group_size)
    for _ in range(config.epochs):
        order = torch.randperm(len(groups), generator=gen)
        minibatches = groups[order].view(config.minibatches, -1)  # whole groups
        passes = enumerate(config.chosen_method.passes)  # each over all minibatches
        for (which_pass, loss_fn), minibatch in product(passes, minibatches):
            index = minibatch.to(scored.nodes.device)
            rows, batch = scored.rows[index], scored.batch[index]
            if config.project:
                loss_fn = partial(projected, loss_fn, scored.advantages[index], scored.nodes[index])
            if not updates and config.minibatches == 1:
                logp = scored.logp[index]  # its graph is at hand
            else:
                logp, _, _ = log_probs(policy, rows, config)  # (n, T)
            if updates:  # the first one keeps logp_old: its ratios are exactly 1
                batch.logp = logp.detach()
            try:
                c, norm = update(optimizer, loss_fn, batch, logp, config.grad_clip)
            except FloatingPointError as error:
                error.batch = vars(rows) | vars(batch)
                raise
            updates.append(Update(index, which_pass, c, norm, lr))
    return updates


def projected(loss_fn, advantages: Tensor, nodes: Tensor, batch: Batch) -> Tensor:
    """The loss with the node mean of its weights (--project)."""
    return project(loss_fn(batch), batch.logp, advantages, nodes, batch.mask)


def update(
    optimizer, loss_fn, batch: Batch, logp: Tensor, grad_clip: float
) -> tuple[Tensor, float]:
    """One optimiser step. Returns the token coefficients (n, T) and the norm of the gradient.

    The loss is a function of the (n, T) log-probs, a small matrix. Its coefficients
    c = -n dLoss/dlogp say what it does to every token, and are then carried back through the model.
    So any loss, however it couples the answers of a group, has its exact gradient.
    """
    loss, c = effect(loss_fn, batch)
    optimizer.zero_grad()
    logp.backward(-c / len(c))
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(weights, grad_clip).item()
    if not math.isfinite(norm) or not math.isfinite(loss):
        raise FloatingPointError(f"loss {loss}, gradient norm {norm}")
    if c.any():  # without a signal, the optimiser's momentum must not move the weights either
        optimizer.step()
    return c, norm


def effect(loss_fn, batch: Batch) -> tuple[float, Tensor]:
    """A loss at batch.logp, and the coefficient that it gives to every token (n, T)."""
    leaf = batch.logp.clone().requires_grad_()
    loss = loss_fn(replace(batch, logp=leaf))
    return loss.item(), token_coefficients(loss, leaf)


# ---------------- diagnose: what is logged of a step, beside the algorithm


def diagnose(
    policy: Policy, answers: Answers, scored: Scored, updates: list[Update], config: Config
) -> dict[str, float]:
    """A step's metrics, in nats, tokens and shares of 1. A KL term or cispo leave clip_share 0."""
    batch, rewards, mask = scored.batch, answers.rewards, scored.rows.mask
    groups, tokens = answers.shaped.view(-1, config.group_size), mask.sum()
    ended = (torch.isin(scored.rows.tokens, policy.eos) & mask).any(1)  # (N,)
    metrics = {
        "step": answers.step,
        "reward": rewards.mean(),
        "equal_groups": (groups.amax(1) == groups.amin(1)).float().mean(),
        "length": tokens / len(rewards),
        "truncated": 1 - ended.float().mean(),
        "entropy": scored.entropy.sum() / tokens,
        "tokens": tokens,
        "generated": answers.generated,
        "lr": updates[-1].lr,
    }
    if batch.logp_ref is not None:
        metrics["kl_start"] = k3(batch).sum() / tokens
    if answers.repaired is not None:
        metrics["shaped_reward"] = answers.shaped.mean()
        metrics["repair_rate"] = answers.repaired.sum() / (rewards == 0).sum().clamp(min=1)
    plain = scored.advantages[:, None] * mask  # (N, T)
    if config.chosen_method.credit and plain.any():
        metrics["reshaped"] = (batch.adv != plain).sum() / (plain != 0).sum()
        metrics["adv_left"] = batch.adv.abs().sum() / plain.abs().sum()
    probe = ((rewards == 1) & (scored.advantages != 0)).nonzero().squeeze(1)[:32]
    if len(probe):  # NTHR's Delta(x), over a step: how much likelier correct answers became
        with torch.no_grad():
            now, _, _ = log_probs(policy, scored.rows[probe], config)
        metrics["delta"] = (now - batch.logp_old[probe]).sum(1).mean()
    # By pass: the tokens that have a gradient at ratio 1, where scored.batch stands.
    live = [effect(loss_fn, batch)[1] != 0 for loss_fn in config.chosen_method.passes]
    clipped, tax = [], []
    for made in updates:
        i, c = made.index, made.coefficients
        counted = live[made.which_pass][i] & (batch.adv[i] != 0)
        if counted.any():  # a batch of equal-reward groups has nothing to clip or to tax
            clipped.append(((c == 0) & counted).sum() / counted.sum())
            tax.append(learning_tax(c, scored.advantages[i], scored.nodes[i], mask[i]))
    metrics["clip_share"] = sum(clipped) / max(1, len(clipped))
    metrics["tax"] = sum(tax) / max(1, len(tax))
    metrics["grad_norm"] = sum(made.grad_norm for made in updates) / len(updates)
    return {k: v.item() if isinstance(v, Tensor) else v for k, v in metrics.items()}


def record(folder: Path, metrics: dict, evaluation: tuple | None = None, show: bool = False):
    """A line of metrics.jsonl; of an evaluation also a line on the screen, and answers to read."""
    evaluated, lines = evaluation or ({}, [])
    try:
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics | evaluated) + "\n")
        if evaluated:
            with open(folder / "samples.txt", "a") as file:
                file.write("\n  ".join([f"step {metrics['step']}", *lines]) + "\n")
    except OSError as error:
        stop_at_full_disk(folder, error)
    if evaluated:
        keys = ("reward", "repair_rate", "entropy", "tax")
        shown = {key: metrics[key] for key in keys if key in metrics} | evaluated
        text = "  ".join(f"{key} {value:.3f}" for key, value in shown.items())
        tqdm.write(f"step {metrics['step']}: {text}")
        for line in lines if show else ():
            tqdm.write("    " + line)


# ---------------- evaluate


@torch.no_grad()
def evaluate(policy: Policy, task, config: Config) -> tuple[dict[str, float], list[str]]:
    """Held-out greedy accuracy, sampled accuracy and pass@k; and three answers to read."""
    items, k = task.test[: config.eval_items], config.eval_samples
    gen, lines = rng(config.seed, "evaluate"), []
    greedy, sampled = [], []  # rewards
    at_once = max(1, config.prompts * config.group_size // k)
    for start in range(0, len(items), at_once):
        some = items[start : start + at_once]
        prompts = task.encode(policy.tokenizer, some)
        for copies, temperature, rewards in ((1, 0.0, greedy), (k, config.temperature, sampled)):
            asked = [item for item in some for _ in range(copies)]
            repeated = [prompt for prompt in prompts for _ in range(copies)]
            rows, _ = generate(policy, repeated, config.max_tokens, temperature, gen)
            texts = decode(policy, rows)
            new = [task.reward(text, item) for text, item in zip(texts, asked, strict=True)]
            rewards += new
            if temperature and not lines:
                for j in range(0, min(3, len(some)) * k, k):
                    line = f"{asked[j].prompt} -> {texts[j]}  [{new[j]:g}]"
                    lines.append(" / ".join(line.splitlines()))
    right = [sum(r == 1 for r in sampled[j : j + k]) for j in range(0, len(sampled), k)]
    metrics = {
        "greedy": sum(greedy) / len(greedy),
        "sampled": sum(sampled) / len(sampled),
        f"pass@{k}": sum(pass_at_k(k, c, k) for c in right) / len(right),
    }
    return metrics | prefix_probabilities(policy, task, items[:32], config), lines


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate from n answers of P(one of k is right): 1 - C(n-correct, k) / C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def prefix_probabilities(policy: Policy, task, items: list, config: Config) -> dict[str, float]:
    """The policy's exact probability, mean over items, that an answer has one of some beginnings.

    Only for a task that names such beginnings, and its own tokenizer: elsewhere a text has several
    encodings, and the probability of one of them is not that of the text.
    """
    if not hasattr(task, "prefixes"):
        return {}
    if policy.tokenizer.get_vocab() != task.make_tokenizer().get_vocab():
        return {}
    asked = [
        (name, item, text)
        for item in items
        for name, texts in task.prefixes(item).items()
        for text in texts
    ]
    names, owners, texts = zip(*asked, strict=True)
    answers = policy.tokenizer([*texts], add_special_tokens=False)["input_ids"]
    prompts = task.encode(policy.tokenizer, owners)
    rows = make_rows(prompts, answers, policy.model.device)
    logp, _, _ = log_probs(policy, rows, config)
    total = dict.fromkeys(names, 0.0)
    for name, p in zip(names, logp.sum(1).exp().tolist(), strict=True):
        total[name] += p / len(items)
    return total


# ---------------- warm start


def warm_start(policy: Policy, task, config: Config):
    """Supervised steps on the task's demonstrations, so that RL has something to find.

    Where the method corrects wrong answers, 30 % of the demonstrations are corrections, if the task
    has any: a policy that never saw a correction makes none.
    """
    model, tokenizer, device = policy.model, policy.tokenizer, policy.model.device
    optimizer, head = adamw(model, config.warm_lr), model.get_output_embeddings()
    end = int(policy.eos[0]) if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    repairs = 0
    if config.chosen_method.repair and hasattr(task, "correction"):
        repairs = round(0.3 * config.warm_rows)
    for step in tqdm(range(config.warm_steps), "warm start", disable=None):
        for group in optimizer.param_groups:
            group["lr"] = config.warm_lr * min((step + 1) / 20, 1 - step / config.warm_steps)
        gen = rng(config.seed, "warm", step)
        picks = torch.randint(len(task.train), (config.warm_rows,), generator=gen).tolist()
        items = [task.train[i] for i in picks]
        for j in range(repairs):
            items[j] = task.correction(items[j], config.repair_references)
        demos = tokenizer([item.demo for item in items], add_special_tokens=False)["input_ids"]
        prompts = task.encode(tokenizer, items)
        texts = [p + d + [end] for p, d in zip(prompts, demos, strict=True)]
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        learnt = torch.zeros_like(ids, dtype=torch.bool)  # the demonstrations and their ends
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            ids[row, : len(text)] = torch.tensor(text)
            learnt[row, len(prompt) : len(text)] = True
        ids, learnt = ids.to(device), learnt.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            # Padding stands behind a text, where a causal model does not look.
            hidden = model.base_model(ids).last_hidden_state[:, :-1]
        hidden = hidden[learnt[:, 1:]]  # (M, d) predict the M demonstrated tokens
        logp, _ = token_log_probs(hidden, head.weight, head.bias, ids[learnt], 1.0)
        loss = -logp.mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not math.isfinite(norm):
            fail(
                f"--warm-lr {config.warm_lr}: the warm start diverged at its step {step + 1} "
                f"(gradient norm {norm})"
            )
        optimizer.step()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted before the first step; there is nothing to resume, start again")
