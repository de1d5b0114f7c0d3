"""Group-relative RL for a language model: one file, which reads from top to bottom.

    python train.py                        a tiny model learns to add, on a CPU, in half a minute
    python train.py --method dfpo-min      any method of losses.py
    python train.py --task gsm8k           Qwen2.5-0.5B-Instruct on GSM8K, on one GPU
    python train.py --resume runs/NAME     a run that was interrupted or killed

A policy answers prompts, several times each. Only whole answers are rewarded, and an answer is
compared with the others to its prompt. A loss of losses.py says what that means for every token.

One step is: sample, score, learn. The upper half of this file is the lecture, in the order in which
a step happens:

    config -> main -> 1. sample -> 2. score -> 3. learn -> diagnose -> evaluate

What the upper half calls and does not define stands below the ruled line: the warm start, memory,
flags, loading, files. Read toy/plain.py first, the same algorithm one answer at a time, then the
upper half of losses.py, then that of this file. A default run needs train.py, losses.py and
toy/arithmetic.py alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from losses import (
    METHODS,
    SCALES,
    Batch,
    Method,
    OldPolicy,
    bind,
    decided,
    group_advantages,
    k3,
    prefix_baseline,
    prefix_nodes,
    token_coefficients,
)

# -------------------------------------------------------------------------------------------------
# config: what the algorithm needs to know


def knob(default, help: str, **more):
    """A field that is also a flag, --max-tokens of max_tokens, with a line for --help."""
    return field(default=default, metadata={"help": help, **more})


@dataclass
class Knobs:
    """The flags of the algorithm; Config, below the ruled line, adds all others. Toy's defaults."""

    # By which method.
    method: str = knob("grpo", "which method of losses.py", choices=[*METHODS])
    hyper: str = knob("", "hyperparameters: 'eps_high=0.3 kl=0.04'; a wrong name lists all")
    scale: str = knob("", "of A, see group_advantages; empty: the method's", choices=["", *SCALES])
    prefix_baseline: bool = knob(False, "a leave-one-out baseline at every history (losses.py)")

    # What one step samples: N = prompts * group_size answers.
    steps: int = knob(60, "rollout batches; 0: only the warm start")
    prompts: int = knob(32, "prompts per rollout batch")
    group_size: int = knob(8, "G, answers per prompt")
    max_tokens: int = knob(26, "L, the longest answer in tokens")
    temperature: float = knob(1.0, "sampling temperature, also inside every log-prob")

    # What it learns from them.
    epochs: int = knob(1, "how often a rollout batch is gone through")
    minibatches: int = knob(4, "optimiser steps per epoch, each on whole groups")
    lr: float = knob(1e-3, "learning rate of AdamW")
    schedule: str = knob("linear", "learning rate over the run", choices=["constant", "linear"])
    grad_clip: float = knob(1.0, "largest gradient norm")


# -------------------------------------------------------------------------------------------------
# main: one step after another


def main(argv: list[str] | None = None):
    try:
        config = parse(argv)
        try:
            run(config)
        except KeyboardInterrupt:
            sys.exit(f"interrupted; {how_to_go_on(config)}")
    except UserError as error:
        sys.exit(f"error: {error}")


def run(config: Config):
    torch.set_num_threads(config.threads or os.cpu_count())
    method, task, folder = bind_flags(config), load_task(config), Path(config.out)
    policy = load_policy(config, task, config.model)
    optimizer = adamw(policy.model, config.lr)
    begin(config, policy, folder)
    done = restore(policy, optimizer, folder)  # the steps of a run that was cut off, or 0
    if not done:
        # Where every answer is wrong all rewards are equal, and RL has nothing to compare.
        warm_start(policy, task, method, config)
        if config.warm_steps:
            write_model(policy, folder / "start")
        record({"step": 0} | evaluate(policy, task, config), folder, config)
    # The policy that RL started from. A KL term (which needs it) and kl_start are measured from it.
    start = str(folder / "start") if config.warm_steps else config.model
    reference = load_policy(config, task, start) if config.reference else None
    batches = prompt_batches(task, config)

    todo = range(done + 1, config.steps + 1)
    for step in tqdm(todo, "RL", initial=done, total=config.steps, disable=None):
        t0 = time.perf_counter()
        # 1. G answers to each prompt. The policy acts; what follows looks back at it.
        answers = sample(policy, task, batches[step - 1], step, config)
        if method.repair:  # only ibpo: the policy answers again where it was wrong
            repair_answers(policy, task, answers, method, config)
        # 2. What stays fixed while the policy learns: its log-probs now, and the advantages.
        scored = score(policy, answers, method, config, reference)
        # 3. Per minibatch: loss -> how hard it pushes each token -> gradient -> weights.
        updates = learn(policy, optimizer, scored, method, config)
        metrics = diagnose(policy, scored, updates, method, config)
        metrics["tokens_per_s"] = metrics["generated"] / (time.perf_counter() - t0)

        if config.trace:
            trace(policy, updates, config)
        due = step % config.eval_every == 0 or step == config.steps
        if due:
            metrics |= evaluate(policy, task, config) | divergence(reference, scored, config)
        record(metrics, folder, config)
        if due:
            save_batch(policy, scored, config, folder)
            save(policy, optimizer, step, folder)
    write_model(policy, folder / "model")
    summarize(folder)


# -------------------------------------------------------------------------------------------------
# 1. sample: G answers to each prompt, rewarded at their end. N answers in all, T = the longest one


@dataclass
class Policy:
    """A causal LM with fp32 weights, in eval mode for good: dropout would change every ratio."""

    model: torch.nn.Module
    tokenizer: object
    eos: Tensor  # (E,) the ids that end an answer, on the model's device
    sampler: Callable  # `generate` below, or with --fast the one of llm/fast.py
    scorer: Callable  # `log_probs` below, or with --fast the one of llm/fast.py
    bf16: bool = False  # whether the model computes in bf16: on a GPU that can

    def autocast(self) -> torch.autocast:
        """Compute in bf16. Weights, softmax and losses stay in fp32 everywhere."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16)


@dataclass(eq=False)
class Answers:
    """N answers; the G answers to one prompt stand one below the other.

    Two rows as text, with . for EOS and _ for padding:

        items    prompts    tokens      mask        texts      rewards
        37+48    37+48=     so #85._    11111110    so #85     1
        37+48    37+48=     hm #104.    11111111    hm #104    0

    (On the toy an answer begins with so, ok or hm, which mean nothing.)
    """

    items: list  # N problems
    texts: list[str]  # N
    prompts: Tensor  # (N, W) ids; -1 is padding, on the left, so that all answers begin in line
    tokens: Tensor  # (N, T) ids
    mask: Tensor  # (N, T) bool, True up to and including the first EOS
    logp: Tensor  # (N, T) log pi of the tokens, as the sampler saw them
    rewards: Tensor  # (N,) floats; 1 = correct
    compared: Tensor  # (N,) the rewards; under ibpo a wrong answer that it corrected counts more
    generated: int  # tokens
    step: int = 0
    facts: dict[str, Tensor] = field(default_factory=dict)  # of the corrections (ibpo)


def sample(policy: Policy, task, items: list, step: int, config: Config) -> Answers:
    """The policy answers each problem G times."""
    copies = [item for item in items for _ in range(config.group_size)]
    answers = ask(policy, task, copies, config, rng(config.seed, "sample", step))
    answers.step = step
    return answers


def ask(policy: Policy, task, items: list, config: Config, gen: torch.Generator) -> Answers:
    """One answer to each problem, and its reward. A temperature of 0 is greedy."""
    prompts = encode(policy, task, items, config)  # (N, W)
    tokens, mask, logp = policy.sampler(policy, prompts, config.max_tokens, config.temperature, gen)
    # task.reward reads the text without its EOS. Other special tokens stay visible to it.
    shown = (mask & ~torch.isin(tokens, policy.eos)).cpu()
    ids = [row[keep].tolist() for row, keep in zip(tokens.cpu(), shown, strict=True)]
    texts = policy.tokenizer.batch_decode(ids)
    # A reward stands at the end of an answer; no token in between is judged by itself.
    rewards = [reward_of(task, text, item) for text, item in zip(texts, items, strict=True)]
    rewards = torch.tensor(rewards, device=prompts.device)
    return Answers(
        items=items,
        texts=texts,
        prompts=prompts,
        tokens=tokens,
        mask=mask,
        logp=logp,
        rewards=rewards,
        compared=rewards,
        generated=int(mask.sum()),
    )


@torch.no_grad()
def generate(
    policy: Policy, prompts: Tensor, max_tokens: int, temperature: float, gen: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample an answer to each of N prompts (N, W), token by token; temperature 0 is greedy.

    Nothing but the temperature shapes the distribution, whatever the model's own generation config
    says: no top-k, no top-p, no penalty. Returns tokens, mask and their log-probs, (N, T) each.
    Greedy answers have log-probs at temperature 1.
    """
    n, device = len(prompts), prompts.device
    if temperature:  # a row's random numbers are its own, whatever becomes of the others
        uniform = torch.rand(n, max_tokens, generator=gen, dtype=torch.float64).to(device)
    # Prompts of unlike length are padded on the left, so that all rows continue in one column:
    #     prompt ids  -1 -1  7  4      seen  0 0 1 1      position  0 0 0 1, and then 2, 3, ...
    alive = torch.ones(n, dtype=torch.bool, device=device)  # (N,) no EOS so far
    seen = prompts >= 0  # (N, W), one column more for every token
    inputs, cache = prompts.clamp(min=0), None
    tokens, mask, logps = [], [], []
    for t in range(max_tokens):
        position = (seen.long().cumsum(1) - 1).clamp(min=0)  # padding has none
        with policy.autocast():
            out = policy.model(
                inputs,
                attention_mask=seen.long(),
                position_ids=position[:, -inputs.shape[1] :],  # of the prompt, then of one token
                past_key_values=cache,  # what attention keeps of the tokens read so far
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
        seen = torch.cat([seen, mask[-1][:, None]], 1)  # the rows that were alive for this token
    return torch.stack(tokens, 1), torch.stack(mask, 1), torch.stack(logps, 1)


def draw(logp: Tensor, uniform: Tensor) -> Tensor:
    """Invert each row's distribution function: (n, V) log-probs, (n, 1) numbers -> (n,) tokens.

    By hand, so that a row draws the same token whatever else is in the batch.
    """
    cdf = logp.double().exp().cumsum(-1)  # (n, V); fp32 sums of a large vocabulary are too coarse
    token = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).squeeze(1)
    return token.clamp(max=logp.shape[1] - 1)


# -------------------------------------------------------------------------------------------------
# 2. score: how probable the answers were before learning, and how they compare. Fixed from here on


@dataclass(eq=False)
class Scored:
    """What learning needs to know about N answers, or about the n answers of a minibatch."""

    answers: Answers
    batch: Batch  # at the old policy, the one that sampled: its logp is its logp_old
    entropy: Tensor  # (N, T)
    advantages: Tensor  # (N,) A_i, before any credit rule
    nodes: Tensor  # (N, T) equal where two answers of a group agree up to and including a token
    max_logp_gap: float  # how far a token's logp is from the sampler's, at most; nats

    def of(self, rows: Tensor) -> Scored:
        """The same of some rows, which are whole groups."""
        # take: these rows of every tensor and list that a dataclass holds
        answers, batch = take(self.answers, rows), take(self.batch, rows)
        return take(replace(self, answers=answers, batch=batch), rows)


@torch.no_grad()
def score(
    policy: Policy, answers: Answers, method: Method, config: Config, reference: Policy | None
) -> Scored:
    """Old log-probs, advantages, the credit of each token; the reference's log-probs for a KL."""
    G, mask = config.group_size, answers.mask
    # The sampler has computed log-probs, too. But it reads token by token, and rounds differently
    # from the trainer, so that ratios would differ from 1 before anything is learnt.
    old, entropy = log_probs_in_pieces(policy, answers, config)  # (N, T): by log_probs below
    gap = (old - answers.logp)[mask].abs().max().item()
    check_gap(gap, answers.step, config.temperature, old.device)
    ref = None
    if method.hyper.get("kl"):
        ref, _ = log_probs_in_pieces(reference, answers, config)  # (N, T)

    advantages = group_advantages(answers.compared, G, config.scale or method.scale)  # (N,)
    # Only the end of an answer is rewarded, so each of its tokens gets the whole advantage.
    adv = advantages[:, None].expand_as(old)  # (N, T)
    batch = Batch(
        logp=old,  # nothing is learnt yet; `learn` puts the current log-probs here
        logp_old=old,
        adv=adv,
        mask=mask,
        group_size=G,
        max_tokens=config.max_tokens,
        logp_ref=ref,
    )
    if method.credit:  # some papers give the tokens of an answer advantages of their own
        batch = replace(batch, adv=reshape_credit(policy, answers, batch, method, config))
    # Where answers agree so far, for --prefix-baseline and for the metric `decided`.
    nodes = prefix_nodes(answers.tokens, mask, G)  # (N, T)
    return Scored(answers, batch, entropy, advantages, nodes, max_logp_gap=gap)


def log_probs(policy: Policy, answers: Answers, temperature: float) -> tuple[Tensor, Tensor]:
    """log pi of the answers' tokens (differentiable) and entropies of pi: (N, T), 0 on padding."""
    ids = torch.cat([answers.prompts.clamp(min=0), answers.tokens], 1)  # (N, W + T)
    seen = torch.cat([answers.prompts >= 0, answers.mask], 1).long()
    position = (seen.cumsum(1) - 1).clamp(min=0)
    with policy.autocast():
        logits = policy.model(
            ids[:, :-1],  # a position predicts the next token; after the last one there is none
            attention_mask=seen[:, :-1],
            position_ids=position[:, :-1],
            use_cache=False,
            logits_to_keep=answers.tokens.shape[1],
        ).logits  # (N, T, V)
    # The temperature belongs in here: the policy that is trained is the one that was sampled. It
    # divides in place, because with a large vocabulary each copy takes gigabytes.
    logp = logits.float().div_(temperature).log_softmax(-1)
    del logits
    taken = logp.gather(2, answers.tokens[..., None]).squeeze(2)
    with torch.no_grad():
        entropy = -logp.exp().mul_(logp).sum(2)
    return taken.masked_fill(~answers.mask, 0.0), entropy.masked_fill(~answers.mask, 0.0)


# -------------------------------------------------------------------------------------------------
# 3. learn: several optimiser steps on one rollout batch


@dataclass(eq=False)
class Update:
    """What an optimiser step did."""

    part: Scored  # the n answers that it learnt from
    batch: Batch  # the same as the loss saw them: its logp is that just before this step
    coefficients: Tensor  # (n, T) how hard it pushed each token
    loss: float
    grad_norm: float


def minibatches(
    scored: Scored, method: Method, config: Config
) -> Iterator[tuple[Callable[[Batch], Tensor], Scored]]:
    """Epochs times passes times minibatches: which loss, and on which answers.

    A minibatch has whole groups, because a loss may compare their answers. A pass is one way over
    all minibatches with one loss; only Lopti has two losses.
    """
    gen = rng(config.seed, "learn", scored.answers.step)
    rows = torch.arange(len(scored.advantages)).view(-1, config.group_size)  # (groups, G)
    for _ in range(config.epochs):
        order = torch.randperm(len(rows), generator=gen).view(config.minibatches, -1)
        for loss_fn in method.passes:
            for chosen in order:
                yield loss_fn, scored.of(rows[chosen].flatten())


def learn(
    policy: Policy, optimizer, scored: Scored, method: Method, config: Config
) -> list[Update]:
    """Log-probs -> loss -> gradient -> weights, once for each minibatch.

    By default 4 times, on 64 of 256 answers each. From the second on the weights have moved, so
    ratios are no longer 1, although these answers are learnt from for the first time.
    """
    step, updates = scored.answers.step, []
    decay = 1 - (step - 1) / config.steps if config.schedule == "linear" else 1.0
    for weights in optimizer.param_groups:
        weights["lr"] = config.lr * decay

    for loss_fn, part in minibatches(scored, method, config):
        logp = log_probs_now(policy, part, first=not updates, config=config)  # (n, T)

        # The loss is a function of the (n, T) log-probs. Its derivative by each of them says how
        # hard it pushes that token: c = -n dLoss/dlogp. A positive push makes a token likelier.
        batch = replace(part.batch, logp=logp)
        loss = loss_fn(batch)
        if config.prefix_baseline:
            loss = prefix_baseline(loss, batch, part.nodes)
        c = token_coefficients(loss, logp)  # (n, T); autograd's backward makes the same push

        optimizer.zero_grad()
        if len(c) <= config.micro_rows:
            loss.backward()
        else:  # the exception, for memory: the same gradient, some answers at a time
            backward_in_pieces(policy, part.answers, c, config)
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.grad_clip).item()
        check_finite(loss.item(), norm, step)
        if c.any():  # else nothing is pushed, and momentum alone must not move the weights
            optimizer.step()
        batch = replace(batch, logp=logp.detach())
        updates.append(Update(part, batch, c, loss.item(), grad_norm=norm))
    return updates


def log_probs_now(policy: Policy, part: Scored, first: bool, config: Config) -> Tensor:
    """How probable the answers of a minibatch are now, to be differentiated. (n, T)."""
    old = part.batch.logp_old
    if len(old) > config.micro_rows:  # see backward_in_pieces
        logp = old if first else log_probs_in_pieces(policy, part.answers, config)[0]
        return logp.clone().requires_grad_()
    logp, _ = policy.scorer(policy, part.answers, config.temperature)
    # The first update is on-policy: nothing has been learnt since `score`. But this pass rounds
    # differently, because other rows are beside these. We reuse the old numbers, so that r is
    # exactly 1. The bracket is 0, and brings the gradient of the new pass.
    return old + (logp - logp.detach()) if first else logp


# -------------------------------------------------------------------------------------------------
# diagnose: what is logged of a step, beside the algorithm


@torch.no_grad()
def diagnose(
    policy: Policy, scored: Scored, updates: list[Update], method: Method, config: Config
) -> dict:
    """A step's metrics: of its answers, and means over its updates. Entropy is in nats.

    `decided` and break_even, for --prefix-baseline, are explained in losses.py.
    """
    answers, mask, G = scored.answers, scored.answers.mask, config.group_size
    rewards, tokens = answers.rewards, mask.sum()
    equal = (scored.advantages == 0).view(-1, G).all(1)  # (groups,) nothing to learn from
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
        "loss": sum(u.loss for u in updates) / len(updates),
        "grad_norm": sum(u.grad_norm for u in updates) / len(updates),
    }
    metrics |= decided(rewards, scored.nodes, mask, G, scored.batch.logp_old)
    metrics |= of_some_methods(answers, updates, method)  # clip_share, repair_rate
    return {key: x.item() if isinstance(x, Tensor) else x for key, x in metrics.items()}


# -------------------------------------------------------------------------------------------------
# evaluate: on problems that were never trained on


@torch.no_grad()
def evaluate(policy: Policy, task, config: Config) -> dict:
    """Mean reward of greedy and of sampled answers to held-out problems, and three to read.

    pass@k is the share of problems with a sample of reward 1. Every evaluation has the same random
    numbers, so a policy that does not move scores the same.
    """
    items, k = task.test[: config.eval_items], config.eval_samples
    gen, greedy, sampled = rng(config.seed, "evaluate"), [], []
    at_once = max(1, config.prompts * config.group_size // k)  # as many answers as in training
    for start in range(0, len(items), at_once):
        some = items[start : start + at_once]
        greedy.append(ask(policy, task, some, replace(config, temperature=0.0), gen))
        copies = [item for item in some for _ in range(k)]
        sampled.append(ask(policy, task, copies, config, gen))
    rewards = torch.cat([answers.rewards for answers in sampled]).view(-1, k)  # (items, k)
    metrics = {
        "greedy": torch.cat([answers.rewards for answers in greedy]).mean().item(),
        "sampled": rewards.mean().item(),
        f"pass@{k}": (rewards == 1).any(1).float().mean().item(),
    }
    texts = [text for answers in sampled for text in answers.texts]
    metrics |= task.shares([item for item in items for _ in range(k)], texts)  # the toy's, of forms
    first, lines = sampled[0], []
    for i in range(0, min(3 * k, len(first.items)), k):
        line = f"{first.items[i].prompt} -> {first.texts[i]}  [{first.rewards[i]:g}]"
        lines.append(" / ".join(line.splitlines()))
    return metrics | {"examples": lines}


# =================================================================================================
# The lecture ends here. Below stands the housekeeping: warm start, memory, flags, loading, files
# =================================================================================================


# -------------------------------------------------------------------------------------------------
# the warm start is not RL: supervised steps on demonstrations, before it


def warm_start(policy: Policy, task, method: Method, config: Config):
    """Supervised steps on the task's demonstrations, so that RL has something to find.

    Where the method corrects wrong answers, 30 % of the demonstrations are corrections, if the task
    has any: a policy that never saw a correction makes none.
    """
    model, tokenizer = policy.model, policy.tokenizer
    end = int(policy.eos[0]) if tokenizer.eos_token_id is None else tokenizer.eos_token_id

    def encode_demos(items: list) -> list[tuple[list[int], list[int]]]:
        demos = tokenizer([item.demo for item in items], add_special_tokens=False)["input_ids"]
        ended = [demo + [end] for demo in demos]
        return list(zip(task.encode(tokenizer, items), ended, strict=True))

    plain, corrections = encode_demos(task.train), 0
    if method.repair:
        corrections = round(0.3 * config.warm_rows)
        mended = [task.correction(item, config.repair_references) for item in task.train]
        mended = encode_demos(mended)
    optimizer = adamw(model, config.warm_lr)
    for step in tqdm(range(config.warm_steps), "warm start", disable=None):
        for group in optimizer.param_groups:  # 20 steps of warm-up, linear decay
            group["lr"] = config.warm_lr * min((step + 1) / 20, 1 - step / config.warm_steps)
        gen = rng(config.seed, "warm", step)
        picks = torch.randint(len(plain), (config.warm_rows,), generator=gen).tolist()
        rows = [(mended if i < corrections else plain)[k] for i, k in enumerate(picks)]
        optimizer.zero_grad()
        # Long texts go through the model apart, because the short ones would be mostly padding.
        average = sum(len(prompt + demo) for prompt, demo in rows) / len(rows)
        learnt = sum(len(demo) for _, demo in rows)
        for long in (False, True):
            some = [row for row in rows if (len(row[0] + row[1]) > average) == long]
            if some:
                ids, labels = pad_demos(some, model.device)
                with policy.autocast():
                    out = model(ids, labels=labels, num_items_in_batch=learnt, use_cache=False)
                out.loss.backward()  # the sum over these tokens, divided by those of all rows
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not math.isfinite(norm):
            diverged = f"the warm start diverged at its step {step + 1} (gradient norm {norm})"
            raise UserError(f"--warm-lr {config.warm_lr}: {diverged}")
        optimizer.step()


def pad_demos(rows: list[tuple[list[int], list[int]]], device) -> tuple[Tensor, Tensor]:
    """Prompts with their demonstrations: ids and labels, (n, width) both.

    Padding stands behind a text, where a causal model does not look. A label of -100 is not learnt:
    neither prompts nor padding are, only the demonstrations and their ends.
    """
    width = max(len(prompt + demo) for prompt, demo in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, (prompt, demo) in enumerate(rows):
        ids[i, : len(prompt + demo)] = torch.tensor(prompt + demo)
        labels[i, len(prompt) : len(prompt + demo)] = torch.tensor(demo)
    return ids.to(device), labels.to(device)


# -------------------------------------------------------------------------------------------------
# what memory asks for: a batch goes through the model micro_rows answers at a time


@torch.no_grad()
def log_probs_in_pieces(policy: Policy, answers: Answers, config: Config) -> tuple[Tensor, Tensor]:
    """log_probs without a gradient, of micro_rows answers at a time."""
    pieces = torch.arange(len(answers.tokens)).split(config.micro_rows)
    parts = [policy.scorer(policy, take(answers, p), config.temperature) for p in pieces]
    logps, entropies = zip(*parts, strict=True)
    return torch.cat(logps), torch.cat(entropies)


def take(record, rows: Tensor):
    """A dataclass with its tensors and lists at some rows; all else stays."""
    taken = {}
    for f in fields(record):
        x = getattr(record, f.name)
        if isinstance(x, Tensor):
            taken[f.name] = x[rows.to(x.device)]
        elif isinstance(x, list):
            taken[f.name] = [x[i] for i in rows]
    return replace(record, **taken)


def backward_in_pieces(policy: Policy, answers: Answers, c: Tensor, config: Config):
    """The gradient of the loss whose pushes are c, micro_rows answers at a time.

    A loss may compare all answers of a group, and what the model keeps of them for the backward
    pass may not fit into memory together. But once the pushes are known they are constants: by the
    chain rule the gradient is a sum over answers of dLoss/dlogp = -c / n, times what each answer's
    log-probs do.
    """
    for piece in torch.arange(len(c)).split(config.micro_rows):
        logp, _ = policy.scorer(policy, take(answers, piece), config.temperature)
        logp.backward(-c[piece] / len(c))


# -------------------------------------------------------------------------------------------------
# what neighbouring papers ask for: llm/neighbours.py


def repair_answers(policy: Policy, task, answers: Answers, method: Method, config: Config):
    """IBPO: the policy corrects its wrong answers. A wrong one earns a part if that is right.

    Fills in answers.compared and answers.facts, and counts the new tokens.
    """
    from llm import neighbours

    gen = rng(config.seed, "repair", answers.step)

    def again(problems: list) -> Answers:
        return ask(policy, task, problems, config, gen)

    neighbours.correct(answers, task, config, ask=again, eos=policy.eos)
    answers.compared = method.repair(answers.rewards, answers.facts["repaired"])


def reshape_credit(
    policy: Policy, answers: Answers, batch: Batch, method: Method, config: Config
) -> Tensor:
    """A_{i,t} under the method's credit rule. (N, T)."""
    old = OldPolicy(
        tokens=answers.tokens,
        mask=answers.mask,
        logp=batch.logp_old,
        rewards=answers.rewards,
        group_size=config.group_size,
        gen=rng(config.seed, "credit", answers.step),
        **answers.facts,
    )
    if method.needs_scores:
        from llm.neighbours import add_scores

        try:
            add_scores(old, policy, answers, config)
        except ValueError as error:
            raise UserError(f"--method {config.method}: {error}") from error
    return method.credit(batch.adv, old)


# -------------------------------------------------------------------------------------------------
# flags


@dataclass
class Config(Knobs):
    """All flags: those of the algorithm, and these."""

    # What to learn, and what learns it.
    task: str = knob("arithmetic", "arithmetic, gsm8k, or a file of yours with a class Task")
    data: str = knob("", "directory with GSM8K's train.jsonl and test.jsonl; empty: the hub")
    model: str = knob("scratch", "scratch, or a directory or hub id of a causal LM")
    layers: int = knob(1, "layers of the scratch model")
    width: int = knob(64, "hidden size of the scratch model, a multiple of 8")
    reference: bool = knob(True, "keep the start policy, too: for a KL term and kl_start")
    repair_references: int = knob(1, "answers shown beside a wrong one (ibpo)")

    # The warm start: supervised steps before RL, so that there is something to reward.
    warm_steps: int = knob(700, "supervised steps on the task's demonstrations; 0: none")
    warm_rows: int = knob(64, "demonstrations per supervised step")
    warm_lr: float = knob(6e-3, "learning rate of the supervised steps")

    # Evaluation, the machine, files.
    eval_every: int = knob(20, "steps between evaluations, each with a checkpoint")
    eval_items: int = knob(200, "held-out problems per evaluation")
    eval_samples: int = knob(4, "k of pass@k: samples per held-out problem")
    seed: int = knob(0, "seed of everything random")
    micro_rows: int = knob(64, "answers in the model at once: changes the memory, not the result")
    threads: int = knob(1, "CPU threads, 0: all; a tiny model gains nothing from more than one")
    fast: bool = knob(False, "llm/fast.py's generate and log_probs: the same numbers, sooner")
    trace: bool = knob(False, "print the first group that can learn, token by token")
    track: str = knob("", "send the metrics to it, too", choices=["", "trackio", "wandb"])
    out: str = knob("", "the run directory; empty: runs/TASK-METHOD-sSEED-TIME")
    resume: str = knob("", "a run directory to go on with; takes no other flag")


class UserError(ValueError):
    """What a user can mend. `main` says it in one line."""


# Where the defaults of GSM8K differ.
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


def parse(argv: list[str] | None = None) -> Config:
    """Flags -> Config. A flag beats the preset of GSM8K, and both beat the toy's defaults."""
    from transformers import HfArgumentParser
    from transformers.utils import logging

    logging.set_verbosity_error()  # a run has lines and bars of its own
    logging.disable_progress_bar()
    usage = "python train.py [--FLAG VALUE ...]"
    parser = HfArgumentParser(Config, usage=usage, allow_abbrev=False)
    given = parser.parse_args(argv)  # read twice: --task and --resume decide about the defaults
    if given.resume:
        if given != parser.parse_args(["--resume", given.resume]):
            saved = f"{given.resume}/config.json has them"
            raise UserError(f"--resume takes no other flag; {saved}")
        return Config(**read_config(given.resume))
    if given.task == "gsm8k":
        parser.set_defaults(**GSM8K)
    config = Config(**vars(parser.parse_args(argv)))
    check(config)
    name = f"{Path(config.task).stem}-{config.method}-s{config.seed}"
    config.out = config.out or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return config


def check(config: Config):
    """Refuse what a run would find out late, or not at all."""
    for name, value in vars(config).items():
        zero_is_fine = name in ("warm_steps", "steps", "seed", "threads")
        if type(value) in (int, float) and not (value > 0 or value == 0 and zero_is_fine):
            least = "at least" if zero_is_fine else "above"
            raise UserError(f"--{name} {value}: must be {least} 0")  # a nan, too
    if config.group_size < 2:
        raise UserError("--group-size must be at least 2: an answer is compared with others")
    if config.prompts % config.minibatches:
        sizes = f"--prompts {config.prompts}", f"--minibatches {config.minibatches}"
        raise UserError(f"{sizes[0]} is not divisible by {sizes[1]}")
    if config.method == "ibpo" and config.repair_references >= config.group_size:
        raise UserError("--repair-references: an answer has only --group-size - 1 siblings")
    if config.task not in ("arithmetic", "gsm8k") and not Path(config.task).is_file():
        tasks = "arithmetic, gsm8k, a Python file with a class Task"
        raise UserError(f"--task {config.task}: no such file; accepted: {tasks}")
    if config.data and config.task != "gsm8k":
        raise UserError("--data is GSM8K's: it needs --task gsm8k")
    if config.track and not importlib.util.find_spec(config.track):
        raise UserError(f"--track {config.track} is not installed: pip install {config.track}")
    if config.out and Path(config.out).exists():
        raise UserError(f"--out {config.out} exists; choose another, or --resume it")


def bind_flags(config: Config) -> Method:
    """The method that --method and --hyper name."""
    try:
        hyper = dict(text.partition("=")[::2] for text in config.hyper.split())
        method = bind(config.method, hyper)
    except ValueError as error:
        raise UserError(f"--hyper {config.hyper!r}: {error}") from error
    if method.hyper.get("kl") and not config.reference:
        raise UserError("--hyper kl needs the start policy: leave out --no-reference")
    return method


def rng(*key) -> torch.Generator:
    """A generator for each use and step, so that a resumed run has no random state to restore."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


# -------------------------------------------------------------------------------------------------
# the task


def load_task(config: Config):
    """The task object, a toy.arithmetic.BaseTask. One reward is tried before anything runs."""
    if config.task == "arithmetic":
        from toy.arithmetic import Arithmetic

        task = Arithmetic()
    elif config.task == "gsm8k":
        from llm.gsm8k import GSM8K

        try:
            task = GSM8K(config.data or None)
        except ValueError as error:
            raise UserError(f"{error}") from error
    else:
        names = runpy.run_path(config.task)
        if "Task" not in names:
            raise UserError(f"--task {config.task}: the file has no class Task")
        task = names["Task"]()
    for split in ("train", "test"):
        if not getattr(task, split):
            raise UserError(f"--task {config.task}: its {split} split has no item")
    reward_of(task, task.train[0].demo, task.train[0])
    return task


def reward_of(task, text: str, item) -> float:
    """The task's reward, if it is a finite number."""
    reward = task.reward(text, item)
    try:
        number = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        about = f"of the answer {text!r} to {item.prompt!r}"
        raise UserError(f"the task's reward {about} is {reward!r}; accepted: a finite number")
    return number


def encode(policy: Policy, task, items: list, config: Config) -> Tensor:
    """Prompts, padded with -1 on the left. (N, W)."""
    rows = task.encode(policy.tokenizer, items)
    width = max(map(len, rows))
    limit = getattr(policy.model.config, "max_position_embeddings", math.inf)
    if width + config.max_tokens > limit:  # some models would read on, and be wrong in silence
        too_long = f"a prompt of {width} tokens and --max-tokens {config.max_tokens}"
        raise UserError(f"{too_long} exceed the model's context of {limit}")
    rows = [[-1] * (width - len(row)) + row for row in rows]
    return torch.tensor(rows, device=policy.model.device)


def prompt_batches(task, config: Config) -> list[list]:
    """The items of every step: one permutation of the training split after another."""
    items = []
    while len(items) < config.steps * config.prompts:
        gen = rng(config.seed, "order", len(items) // len(task.train))
        items += [task.train[i] for i in torch.randperm(len(task.train), generator=gen).tolist()]
    return [items[i : i + config.prompts] for i in range(0, len(items), config.prompts)]


# -------------------------------------------------------------------------------------------------
# the policy


def load_policy(config: Config, task, path: str) -> Policy:
    """The policy at `path`: "scratch", a directory or a hub id."""
    import transformers

    if path == "scratch":
        tokenizer = task.make_tokenizer()
        model = make_model(config, tokenizer)
    else:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            where = "" if Path(path).is_dir() else "no such directory, and not from the hub: "
            raise UserError(f"--model {path}: {where}{str(error).splitlines()[0]}") from error
        if info["missing_keys"]:
            missing = min(info["missing_keys"])
            raise UserError(f"--model {path} has no {missing}: it would begin with random weights")
    ends = model.generation_config.eos_token_id  # one id, a list or None; the tokenizer has one
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    if not ends:
        raise UserError(f"--model {path}: nothing says which token ends an answer (eos_token_id)")
    # Its own generation config may hold a sampler, which we ignore and save_pretrained may refuse.
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=sorted(ends), pad_token_id=tokenizer.pad_token_id
    )
    policy = Policy(model.eval(), tokenizer, torch.tensor(sorted(ends)), generate, log_probs)
    if config.fast:
        use_fast(policy, task, config)
    move_to_gpu(policy)
    return policy


def use_fast(policy: Policy, task, config: Config):
    """llm/fast.py's sampler and scorer, if they are right for the model at hand."""
    from llm import fast

    policy.sampler, policy.scorer = fast.generate, fast.log_probs
    short = replace(config, max_tokens=min(8, config.max_tokens))
    with torch.no_grad():
        items = [task.train[0], task.train[-1]] * 2
        answers = ask(policy, task, items, short, rng("check_fast"))
    try:
        fast.check(policy, answers, config.temperature, log_probs)
    except ValueError as error:
        raise UserError(f"--fast {error}; choose --fast false") from error


def move_to_gpu(policy: Policy):
    """If there is one."""
    if torch.cuda.is_available():
        policy.model.to("cuda")
        policy.eos = policy.eos.to("cuda")
        # Cards before Ampere, such as the T4, only emulate bf16. They compute in fp32, as a CPU.
        policy.bf16 = torch.cuda.get_device_capability() >= (8, 0)
        # With a mask and some lengths, cuDNN's attention is reported to give nan in backward on
        # H100 and H200 (torch 2.11 to 2.13, pytorch's issue 196678). Other kernels take over.
        torch.backends.cuda.enable_cudnn_sdp(False)


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
    betas = (0.9, 0.95)  # usual for language models; a decay would pull at a pretrained policy
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=0.0, fused=True)


# -------------------------------------------------------------------------------------------------
# more to log, and to print


def divergence(reference: Policy | None, scored: Scored, config: Config) -> dict[str, float]:
    """kl_start: KL(policy || reference) a token, in nats, by k3; of the policy before its step."""
    if not reference:
        return {}
    ref, _ = log_probs_in_pieces(reference, scored.answers, config)
    kl = k3(replace(scored.batch, logp_ref=ref)).sum() / scored.batch.mask.sum()
    return {"kl_start": kl.item()}


def of_some_methods(answers: Answers, updates: list[Update], method: Method) -> dict[str, Tensor]:
    """clip_share: the share of tokens outside the clip range, as PPO implementations log it; 0 in a
    first update, whose ratios are 1. repair_rate (ibpo): of the wrong answers, those corrected."""
    metrics = {}
    if "repaired" in answers.facts:
        wrong = (answers.rewards == 0).sum().clamp(min=1)
        metrics["repair_rate"] = answers.facts["repaired"].sum() / wrong
    if "eps_low" in method.hyper:
        low, high = 1 - method.hyper["eps_low"], 1 + method.hyper["eps_high"]
        shares = []
        for u in updates:
            ratio = method.clips(u.batch)  # (n, T or 1)
            outside = ((ratio < low) | (ratio > high)) & u.batch.mask
            shares.append(outside.sum() / u.batch.mask.sum())
        metrics["clip_share"] = sum(shares) / len(shares)
    return metrics


def trace(policy: Policy, updates: list[Update], config: Config):
    """Print a group that can learn, token by token, in the first step that has one."""
    from llm.trace import show_group

    config.trace = not show_group(policy, updates, config)


# -------------------------------------------------------------------------------------------------
# checks: where a wrong number would look right


def check_gap(gap: float, step: int, temperature: float, device: torch.device):
    """End where sampler and scorer disagree: they are one policy, and differ by rounding alone.

    On a GPU bf16 rounds by the shape of a batch, so there only what is gross can be told apart.
    Log-probs at a low temperature are larger, and so is their rounding.
    """
    limit = (1e-3 if device.type == "cpu" else 3.0) / min(1.0, temperature)
    if not gap <= limit:  # a nan, too
        more = f"differ by {gap:.3g} nats, which is more than rounding"
        raise UserError(f"step {step}: scored and sampled log-probs {more}; no update was made")


def check_finite(loss: float, norm: float, step: int):
    """End before an update that would spoil the weights."""
    if not math.isfinite(loss) or not math.isfinite(norm):
        what = f"loss {loss}, gradient norm {norm}; the update was not made"
        raise UserError(f"step {step}: {what}; what is saved is intact")


# -------------------------------------------------------------------------------------------------
# the files of a run. All randomness is made anew from (seed, use, step), so weights, optimiser and
# step are all that a run needs to go on, on a CPU bit for bit, wherever it was killed:
#
#     runs/NAME/config.json    flags
#               metrics.jsonl  a line a step
#               start/         the policy that RL started from
#               checkpoint.pt  of the last evaluated step: weights, optimiser, metrics
#               batches/       the rollout batch of each evaluated step
#               model/         the policy at the end


def begin(config: Config, policy: Policy, folder: Path):
    """The directory of a run, and what the run says of itself."""
    folder.mkdir(parents=True, exist_ok=True)
    if not config.resume:
        write_aside(folder / "config.json", json.dumps(asdict(config), indent=1) + "\n")
    if not (folder / "checkpoint.pt").exists():
        (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run killed before it saved
    if config.track:
        tracker = importlib.import_module(config.track)
        tracker.init(project="token-gradient-cancellation", name=folder.name, config=asdict(config))
    size = sum(weight.numel() for weight in policy.model.parameters())
    about = f"{size:,} parameters, computed in {'bf16' if policy.bf16 else 'fp32'}"
    print(f"{config.method} on {config.task}, {about}, into {folder}", flush=True)


def read_config(run: str) -> dict:
    """The flags of the run that --resume names."""
    try:
        saved = json.loads((Path(run) / "config.json").read_text())
    except (OSError, ValueError):
        saved = {}
    if set(saved) != {f.name for f in fields(Config)}:
        raise UserError(f"--resume {run}: no config.json of this version's runs there")
    return saved | {"resume": run, "out": run}


def how_to_go_on(config: Config) -> str:
    if Path(config.out, "checkpoint.pt").exists():
        return f"go on from the last evaluation: python train.py --resume {config.out}"
    return "nothing is saved"


def record(metrics: dict, folder: Path, config: Config):
    """A line of metrics.jsonl; of an evaluation also a few words on the screen."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics) + "\n")
    if config.track:
        numbers = {key: x for key, x in metrics.items() if key != "examples"}
        importlib.import_module(config.track).log(numbers, step=metrics["step"])
    if "greedy" in metrics:
        shown = ("loss", "grad_norm", "reward", "repair_rate", "entropy", "decided")
        shown += ("greedy", "sampled")
        keys = [key for key in metrics if key in shown or key.startswith("pass@")]
        tqdm.write(f"step {metrics['step']}: {'  '.join(f'{k} {metrics[k]:.3f}' for k in keys)}")
        tqdm.write(f"    {metrics['examples'][0]}")


def summarize(folder: Path):
    """Did it work? The first and the last evaluation, the speed, and on a GPU the memory."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    said = [f"{key} {first[key]:.3f} -> {last[key]:.3f}" for key in ("greedy", "sampled")]
    if "tokens_per_s" in last:
        said.append(f"{last['tokens_per_s']:,.0f} tokens a second in the last step")
    if torch.cuda.is_available():
        said.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most")
    print(f"held out: {', '.join(said)}")
    if last["greedy"] < first["greedy"]:
        print("It ends below its start: something is wrong.")
    if last.get("truncated", 0.0) > 0.2:
        print(f"{last['truncated']:.0%} of the last answers were cut off: raise --max-tokens.")
    print(f"everything is in {folder}; all flags: python train.py --help")
    print(f"its curves: python -m experiments.compare --runs {folder} --plot curves.png")


@torch.no_grad()
def save_batch(policy: Policy, scored: Scored, config: Config, folder: Path):
    """A rollout batch with the log-probs before and after its step, for those who draw it."""
    answers, G = scored.answers, config.group_size
    logp, _ = log_probs_in_pieces(policy, answers, config)
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
    (folder / "batches").mkdir(exist_ok=True)
    torch.save(batch, folder / "batches" / f"step-{answers.step:06d}.pt")


def save(policy: Policy, optimizer, step: int, folder: Path):
    """The name checkpoint.pt always stands for a whole file: the old one, or the new one."""
    if not all(weight.isfinite().all() for weight in policy.model.parameters()):
        raise UserError(f"step {step}: a weight is not finite; what is saved is intact")
    state = {"step": step, "model": policy.model.state_dict(), "optimizer": optimizer.state_dict()}
    state["metrics"] = (folder / "metrics.jsonl").read_text()  # to this step
    torch.save(state, folder / "unfinished.pt")
    os.replace(folder / "unfinished.pt", folder / "checkpoint.pt")


def restore(policy: Policy, optimizer, folder: Path) -> int:
    """Policy, optimiser and metrics.jsonl as they were after a step, which is returned; or 0."""
    if not (folder / "checkpoint.pt").exists():
        return 0
    state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    policy.model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    write_aside(folder / "metrics.jsonl", state["metrics"])
    return state["step"]


def write_model(policy: Policy, folder: Path):
    """In transformers' own format, so that AutoModelForCausalLM and AutoTokenizer read it."""
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def write_aside(path: Path, text: str):
    """A file is replaced as a whole, or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    main()
