"""Group-relative RL for a language model: one file, which reads from top to bottom.

    python train.py                        a tiny model learns to add, on a CPU, in half a minute
    python train.py --method dfpo-min      any method of losses.py
    python train.py --task gsm8k           Qwen2.5-0.5B-Instruct on GSM8K, on one GPU
    python train.py --resume runs/NAME     a run that was interrupted or killed

A policy answers prompts, several times each. Only whole answers are rewarded, and an answer is
compared with the others to its prompt. A loss of losses.py says what that means for every token.

The upper half of this file is the lecture:

    config, main
    1. sample      G answers to each prompt, and their rewards
    2. score       what stays fixed from here: how probable the answers were, how they compare
    3. learn       several updates of the weights
    diagnose, evaluate

Read toy/plain.py first, which is the same algorithm one answer at a time, then the upper half of
losses.py. Compared with toy/plain.py, this file has batches, with padding and with a cache of what
the model has read; all losses in place of one; more answers a step; AdamW, whose rate falls; and
first ratios that are 1 by construction, because batches round differently.
What the lecture calls and does not define stands below the ruled line: warm start, memory,
neighbouring papers, loading, files. A default run needs train.py, losses.py and toy/arithmetic.py
alone.

A *step* is 1, 2 and 3. It begins with a batch of sampled answers, the rollout, and makes several
*updates* of the weights from it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

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
    group_advantages,
    prefix_baseline,
    prefix_nodes,
    token_ratio,
)

# -------------------------------------------------------------------------------------------------
# config


@dataclass
class Config:
    """Every field is a flag, and its comment is the help (`parse` reads them): --group-size is
    group_size. The defaults are the toy's; --task gsm8k changes some, see GSM8K below the line.
    """

    # Which loss.
    method: Literal[tuple(METHODS)] = "grpo"  # a method of losses.py
    hyper: str = ""  # hyperparameters: 'eps_high=0.3 kl=0.04'; an unknown name prints the list
    scale: Literal[("", *SCALES)] = ""  # of A, see group_advantages; empty: the method's
    prefix_baseline: bool = False  # a leave-one-out baseline at every prefix (losses.py)

    # What one step samples: N = prompts * group_size answers.
    steps: int = 60  # rollout batches; 0: only the warm start
    prompts: int = 32  # prompts per rollout batch
    group_size: int = 8  # G, answers per prompt
    max_tokens: int = 26  # L, the most tokens that an answer may have
    temperature: float = 1.0  # sampling temperature, also inside every log-prob

    # What it learns from them.
    epochs: int = 1  # how often a rollout batch is gone through
    minibatches: int = 4  # updates per epoch, each on whole groups
    lr: float = 1e-3  # learning rate of AdamW
    schedule: Literal["constant", "linear"] = "linear"  # learning rate over the run
    grad_clip: float = 1.0  # largest gradient norm

    # Who learns what.
    task: str = "arithmetic"  # arithmetic, gsm8k, or a file of yours with a class Task
    data: str = ""  # directory with GSM8K's train.jsonl and test.jsonl; empty: the hub
    model: str = "scratch"  # scratch, or a directory or hub id of a causal LM
    layers: int = 1  # layers of the scratch model
    width: int = 64  # hidden size of the scratch model, a multiple of 8

    # The warm start: supervised steps before RL, so that there is something to reward.
    warm_steps: int = 700  # supervised steps on the task's demonstrations; 0: none
    warm_rows: int = 64  # demonstrations per supervised step
    warm_lr: float = 6e-3  # learning rate of the supervised steps

    # Evaluation, the machine, files.
    eval_every: int = 20  # steps between evaluations, each with a checkpoint
    eval_items: int = 200  # held-out problems per evaluation
    eval_samples: int = 4  # k of pass@k: samples per held-out problem
    seed: int = 0  # seed of everything random
    micro_rows: int = 64  # answers in the model at once: changes the memory, not the result
    threads: int = 1  # CPU threads, 0: all; a tiny model gains nothing from more than one
    fast: bool = False  # llm/fast.py's generate and log_probs: the same numbers, sooner
    repair_references: int = 1  # ibpo: answers shown beside a wrong one that is to be corrected
    track: Literal["", "trackio", "wandb"] = ""  # send the metrics there, too
    out: str = ""  # the run directory; empty: runs/TASK-METHOD-sSEED-TIME
    resume: str = ""  # a run directory to go on with; takes no other flag


# -------------------------------------------------------------------------------------------------
# main: one step after another


def main(argv: list[str] | None = None):
    try:
        config = parse(argv)
        torch.set_num_threads(config.threads or os.cpu_count())
        try:
            run(config)
        except KeyboardInterrupt:
            sys.exit(f"interrupted; {how_to_go_on(config)}")
    except UserError as error:
        sys.exit(f"error: {error}")


def run(config: Config):
    method, task = choose_method(config), load_task(config)
    policy = load_policy(config, task, config.model)
    optimizer = adamw(policy.model, config.lr)
    # Where every answer is wrong, all rewards are equal and RL has nothing to compare. So first
    # come supervised steps. Or, with --resume, what was saved: then some steps are done already.
    done = warm_start_or_resume(policy, optimizer, task, method, config)
    # The policy that RL started from, which a KL term compares with.
    reference = load_start(policy, task, config) if method.hyper.get("kl") else None
    batches = prompt_batches(task, config)

    todo = range(done + 1, config.steps + 1)
    for step in tqdm(todo, "RL", initial=done, total=config.steps, disable=None):
        start = time.perf_counter()
        # 1. G answers to each prompt, and a reward for each.
        answers = sample(policy, task, batches[step - 1], step, config)
        # 2. What stays fixed while the policy learns: the log-probs before it, and the advantages.
        scored = score(policy, answers, method, config, reference)
        if method.credit:  # some neighbouring papers give each token an advantage of its own
            scored = reshape_credit(policy, task, scored, method, config)
        # 3. Per minibatch: log-probs now -> loss -> gradient -> weights.
        updates = learn(policy, optimizer, scored, method, config)
        metrics = diagnose(policy, scored, updates, method, config)
        metrics["tokens_per_s"] = metrics["generated"] / (time.perf_counter() - start)

        due = step % config.eval_every == 0 or step == config.steps
        if due:
            metrics |= evaluate(policy, task, config)
        record(metrics, config)
        if due:
            save_batch(policy, scored, config)
            save(policy, optimizer, step, Path(config.out))
    write_model(policy, Path(config.out, "model"))
    summarize(Path(config.out))


# -------------------------------------------------------------------------------------------------
# 1. sample: G answers to each prompt, rewarded at their end
#
# A step makes three kinds of records, and each holds the one before it:
#
#     Answers   what was said, and what it earned
#     Scored    answers, and as a Batch what a loss knows of them: log-probs and advantages
#     Update    a minibatch, which is a Scored of fewer answers, and what was learnt from it
#
# Shapes: N answers in all, T columns, as many as the longest of them has tokens.


@dataclass
class Policy:
    """A causal LM with fp32 weights, always in eval mode: dropout would change every ratio."""

    model: torch.nn.Module
    tokenizer: object
    eos: Tensor  # (E,) the ids that end an answer, on the model's device
    sampler: Callable  # `generate` below; with --fast its twin in llm/fast.py
    scorer: Callable  # `log_probs` below; with --fast its twin in llm/fast.py
    bf16: bool = False  # whether the model computes in bf16: on a GPU that can

    def autocast(self) -> torch.autocast:
        """Compute in bf16. Weights, softmax and losses stay in fp32 everywhere."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16)


@dataclass(eq=False)  # == would compare tensors
class Answers:
    """N answers; the G answers to one prompt stand one below the other.

    Two rows as text, with . for EOS and _ for padding:

        items    prompts    tokens      mask        texts      rewards
        37+48    37+48=     so #85._    11111110    so #85     1
        37+48    37+48=     hm #104.    11111111    hm #104    0
    """

    items: list  # N problems
    texts: list[str]  # N
    prompts: Tensor  # (N, W) ids; -1 is padding, on the left, so that all answers begin in line
    tokens: Tensor  # (N, T) ids
    mask: Tensor  # (N, T) bool, True up to and including the first EOS
    logp: Tensor  # (N, T) log pi of the tokens, as the sampler computed them
    rewards: Tensor  # (N,) floats; 1 = correct
    step: int = 0


def sample(policy: Policy, task, items: list, step: int, config: Config) -> Answers:
    """The policy answers each problem G times."""
    copies = [item for item in items for _ in range(config.group_size)]
    answers = ask(policy, task, copies, config, rng(config.seed, "sample", step))
    return replace(answers, step=step)


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
    return Answers(items, texts, prompts, tokens, mask, logp=logp, rewards=rewards)


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
    if temperature:  # each row has random numbers of its own, whatever the other rows are
        uniform = torch.rand(n, max_tokens, generator=gen, dtype=torch.float64).to(device)
    # Shorter prompts are padded on the left, so that all rows continue in one column. Positions
    # are counted from a row's own first token; those of padding are never looked at:
    #     prompt ids  -1 -1  7  4      seen  0 0 1 1      position  0 0 0 1, then 2, 3, ...
    seen = prompts >= 0  # (N, W), one column more for every token
    alive = torch.ones(n, dtype=torch.bool, device=device)  # (N,) no EOS so far
    inputs, cache = prompts.clamp(min=0), None
    tokens, mask, logps = [], [], []
    for t in range(max_tokens):
        position = (seen.long().cumsum(1) - 1).clamp(min=0)
        with policy.autocast():
            out = policy.model(
                inputs,  # the prompts, and from then on only the newest token of each row
                attention_mask=seen.long(),
                position_ids=position[:, -inputs.shape[1] :],
                past_key_values=cache,  # what attention keeps of the tokens read so far
                use_cache=True,
                logits_to_keep=1,
            )
        cache = out.past_key_values
        logp = (out.logits[:, -1].float() / (temperature or 1.0)).log_softmax(-1)  # (N, V)
        token = draw(logp, uniform[:, t, None]) if temperature else logp.argmax(-1)  # (N,)
        # An EOS counts, and what follows it does not. So the mask is `alive` before its update:
        #     token  a . _      mask  1 1 0      with . for EOS and _ for what comes after it
        # A row that has ended still goes through the model, until all have, but nothing sees it.
        tokens.append(token.masked_fill(~alive, 0))
        mask.append(alive)
        logps.append(logp.gather(1, token[:, None]).squeeze(1).masked_fill(~alive, 0.0))
        inputs, seen = token[:, None], torch.cat([seen, alive[:, None]], 1)
        alive = alive & ~torch.isin(token, policy.eos)
        if not alive.any():
            break
    return torch.stack(tokens, 1), torch.stack(mask, 1), torch.stack(logps, 1)


def draw(logp: Tensor, uniform: Tensor) -> Tensor:
    """Sample: the first token whose cumulative probability exceeds a uniform number.

    By hand, because in torch.multinomial a row's numbers depend on how many rows there are.
    (n, V) log-probs, (n, 1) numbers -> (n,) tokens.
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
    batch: Batch  # its logp_old always is that of the policy that sampled
    advantages: Tensor  # (N,) A_i
    # (N, T) where in the tree of its group's answers a token is. Two answers have the same number
    # while they have said the same, this token included: that of the first cell which has it. Of
    # the answers a b and a c, cells 0 1 and 2 3, the nodes are 0 1 and 0 3.
    nodes: Tensor
    metrics: dict  # of the whole rollout, for the log: entropy, max_logp_gap

    def of(self, rows: Tensor) -> Scored:
        """These rows only, which are whole groups."""
        answers, batch = take(self.answers, rows), take(self.batch, rows)  # these rows of each
        return Scored(answers, batch, self.advantages[rows], self.nodes[rows], self.metrics)


@torch.no_grad()
def score(
    policy: Policy, answers: Answers, method: Method, config: Config, reference: Policy | None
) -> Scored:
    """Old log-probs and advantages; the reference's log-probs for a KL term."""
    G, mask = config.group_size, answers.mask
    # The sampler has computed log-probs, too. But it reads token by token, and rounds differently
    # from the trainer, so that ratios would differ from 1 before anything is learnt.
    old, entropy = log_probs_in_pieces(policy, answers, config)  # (N, T), by policy.scorer
    gap = (old - answers.logp)[mask].abs().max().item()
    check_gap(gap, answers.step, config.temperature, old.device)  # more than rounding ends the run
    ref = None
    if method.hyper.get("kl"):
        ref, _ = log_probs_in_pieces(reference, answers, config)  # (N, T)

    advantages = group_advantages(answers.rewards, G, config.scale or method.scale)  # (N,)
    batch = Batch(
        logp=old,  # nothing is learnt yet; `learn` puts the current log-probs here
        logp_old=old,
        # Only the end of an answer is rewarded, so each of its tokens gets the whole advantage.
        adv=advantages[:, None].expand_as(old),
        mask=mask,
        group_size=G,
        max_tokens=config.max_tokens,
        logp_ref=ref,
    )
    # For --prefix-baseline: tokens after the same node have the same prefix.
    nodes = prefix_nodes(answers.tokens, mask, G)  # (N, T)
    metrics = {"entropy": (entropy.sum() / mask.sum()).item(), "max_logp_gap": gap}
    if ref is not None:  # KL(policy || reference) a token, by k3: 0 in the first step
        log_q = (ref - old)[mask]
        metrics["kl"] = (log_q.exp() - log_q - 1).mean().item()
    return Scored(answers, batch, advantages, nodes, metrics)


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
# 3. learn: several updates from one rollout batch


@dataclass(eq=False)
class Update:
    """A minibatch, and what was learnt from it."""

    minibatch: Scored  # n answers; their batch.logp is that just before the update
    push: Tensor  # (n, T) how hard the loss pushed each token
    loss: float
    grad_norm: float


def minibatches(
    scored: Scored, method: Method, config: Config
) -> Iterator[tuple[Callable[[Batch], Tensor], Scored]]:
    """For each update of a step: by which loss, and from which answers.

    A minibatch has whole groups, because a loss may compare their answers.
    """
    gen = rng(config.seed, "learn", scored.answers.step)
    groups = torch.arange(len(scored.advantages)).view(-1, config.group_size)  # rows of each group
    for _ in range(config.epochs):
        order = torch.randperm(len(groups), generator=gen).view(config.minibatches, -1)
        for loss_fn in method.passes:  # one loss; only Lopti has two
            for chosen in order:
                yield loss_fn, scored.of(groups[chosen].flatten())


def learn(
    policy: Policy, optimizer, scored: Scored, method: Method, config: Config
) -> list[Update]:
    """Log-probs -> loss -> gradient -> weights, once for each minibatch.

    By default 4 times, each on another 64 of the 256 answers. From the second on the weights have
    moved, so ratios are no longer 1, although these answers are learnt from for the first time.

    toy/plain.py finds the pushes by hand, and makes a loss of them. Here a loss of losses.py is
    given, and backward finds its pushes on the way to the weights.
    """
    step, updates = scored.answers.step, []
    decay = 1 - (step - 1) / config.steps if config.schedule == "linear" else 1.0
    for parameters in optimizer.param_groups:
        parameters["lr"] = config.lr * decay

    for loss_fn, minibatch in minibatches(scored, method, config):
        logp = log_probs_now(policy, minibatch, first=not updates, config=config)  # (n, T)
        logp.retain_grad()  # backward shall leave dLoss/dlogp here
        batch = replace(minibatch.batch, logp=logp)
        loss = loss_fn(batch)
        if config.prefix_baseline:  # a loss whose pushes are this one's minus the baseline
            loss = prefix_baseline(loss, batch, minibatch.nodes)
        optimizer.zero_grad()
        loss.backward()
        if len(logp) > config.micro_rows:
            # Too many for one pass: logp came without a graph, so backward has stopped there.
            backward_in_pieces(policy, minibatch.answers, logp.grad, config)

        push = -len(logp) * logp.grad  # (n, T) c = -n dLoss/dlogp: positive makes a token likelier
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.grad_clip).item()
        check_finite(loss.item(), norm, step)
        if push.any():  # else nothing is learnt, and momentum alone must not move the weights
            optimizer.step()
        learnt = replace(minibatch, batch=replace(batch, logp=logp.detach()))
        updates.append(Update(learnt, push, loss.item(), grad_norm=norm))
    return updates


def log_probs_now(policy: Policy, minibatch: Scored, first: bool, config: Config) -> Tensor:
    """How probable the answers of a minibatch are now, to be differentiated. (n, T)."""
    old = minibatch.batch.logp_old
    if len(old) > config.micro_rows:  # too many for one pass: see below the ruled line
        return log_probs_no_graph(policy, minibatch, first, config)
    logp, _ = policy.scorer(policy, minibatch.answers, config.temperature)
    if first:
        # Nothing has been learnt since `score`, so these should be the old numbers, and r exactly
        # 1. But every pass rounds a little differently. So we take the old numbers. The bracket
        # adds 0 to them, and brings the gradient of this pass along.
        logp = old + (logp - logp.detach())
    return logp


# -------------------------------------------------------------------------------------------------
# diagnose: what is logged of a step


@torch.no_grad()
def diagnose(
    policy: Policy, scored: Scored, updates: list[Update], method: Method, config: Config
) -> dict:
    """A step's metrics: of its answers, and means over its updates. Entropy and KL are in nats."""
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
        "generated": tokens,
    }
    metrics |= scored.metrics
    metrics["loss"] = sum(u.loss for u in updates) / len(updates)
    metrics["grad_norm"] = sum(u.grad_norm for u in updates) / len(updates)
    metrics["clip_share"] = sum(far_share(u.minibatch.batch) for u in updates) / len(updates)
    return {key: x.item() if isinstance(x, Tensor) else x for key, x in metrics.items()}


# -------------------------------------------------------------------------------------------------
# evaluate: on problems that were never trained on


@torch.no_grad()
def evaluate(policy: Policy, task, config: Config) -> dict:
    """Mean reward of greedy and of sampled answers to held-out problems, and three examples.

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
    copies = [item for item in items for _ in range(k)]
    metrics |= task.shares(copies, texts)  # a task's own; the toy's: which answers begin with "so"
    return metrics | {"examples": examples(sampled[0], k)}


# =================================================================================================
# The lecture ends here. Below stand warm start, memory, neighbouring papers, flags, loading, files
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


def log_probs_no_graph(policy: Policy, minibatch: Scored, first: bool, config: Config) -> Tensor:
    """The log-probs of a minibatch that is too large for one pass: numbers without a graph. (n, T).

    A loss may compare all answers of a group, and what the model keeps of them for the backward
    pass may not fit into memory together. So the gradient stops here at first.
    """
    old = minibatch.batch.logp_old
    logp = old if first else log_probs_in_pieces(policy, minibatch.answers, config)[0]
    return logp.clone().requires_grad_()


def backward_in_pieces(policy: Policy, answers: Answers, gradient: Tensor, config: Config):
    """From dLoss/dlogp, (n, T), on to the weights, micro_rows answers at a time.

    By the chain rule the gradient is a sum over answers of dLoss/dlogp times what an answer's
    log-probs do, and dLoss/dlogp is a number by now. So each piece goes through the model again.
    """
    for piece in torch.arange(len(gradient)).split(config.micro_rows):
        logp, _ = policy.scorer(policy, take(answers, piece), config.temperature)
        logp.backward(gradient[piece])


# -------------------------------------------------------------------------------------------------
# what neighbouring papers ask for: llm/neighbours.py


def reshape_credit(policy: Policy, task, scored: Scored, method: Method, config: Config) -> Scored:
    """The same with A_{i,t} under the method's credit rule, once a rollout batch.

    Under ibpo the policy first corrects its wrong answers, and a wrong one earns a part of the
    reward if its correction is right.
    """
    from llm import neighbours

    answers, batch, step = scored.answers, scored.batch, scored.answers.step
    advantages, metrics, facts = scored.advantages, dict(scored.metrics), {}
    if method.repair:
        gen = rng(config.seed, "repair", step)

        def again(problems: list) -> Answers:
            return ask(policy, task, problems, config, gen)

        facts, more = neighbours.correct(answers, task, config, ask=again, eos=policy.eos)
        rewards = method.repair(answers.rewards, facts["repaired"])
        advantages = group_advantages(rewards, config.group_size, config.scale or method.scale)
        wrong = (answers.rewards == 0).sum().clamp(min=1)
        metrics["repair_rate"] = facts["repaired"].sum() / wrong
        metrics["generated"] = answers.mask.sum() + more  # tokens, corrections included
    old = OldPolicy(
        tokens=answers.tokens,
        mask=answers.mask,
        logp=batch.logp_old,
        rewards=answers.rewards,
        group_size=config.group_size,
        gen=rng(config.seed, "credit", step),
        **facts,
    )
    if method.needs_scores:
        try:
            neighbours.add_scores(old, policy, answers, config)
        except ValueError as error:
            raise UserError(f"--method {config.method}: {error}") from error
    adv = method.credit(advantages[:, None].expand_as(batch.adv), old)
    return replace(scored, batch=replace(batch, adv=adv), advantages=advantages, metrics=metrics)


# -------------------------------------------------------------------------------------------------
# flags


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
    "micro_rows": 4,
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
    comments = dict(re.findall(r"(\w+): .*  # (.*)", inspect.getsource(Config)))
    for flag in parser._actions:
        flag.help = comments.get(flag.dest, flag.help)
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
        if type(value) in (int, float) and not (
            0 < value < math.inf or value == 0 and zero_is_fine
        ):
            least = "at least" if zero_is_fine else "above"
            raise UserError(f"--{name} {value}: must be {least} 0, and finite")  # a nan, too
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


def choose_method(config: Config) -> Method:
    """The method that --method names, with the hyperparameters of --hyper filled in."""
    try:
        hyper = dict(text.partition("=")[::2] for text in config.hyper.split())
        return bind(config.method, hyper)
    except ValueError as error:
        raise UserError(f"--hyper {config.hyper!r}: {error}") from error


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


def load_start(policy: Policy, task, config: Config) -> Policy:
    """The policy that RL started from: what a KL term is measured from.

    It scores as the policy does, whose model has the same shape, so --fast is not checked again.
    """
    path = f"{config.out}/start" if config.warm_steps else config.model
    return replace(load_policy(replace(config, fast=False), task, path), scorer=policy.scorer)


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


def far_share(batch: Batch) -> Tensor:
    """The share of tokens whose ratio is more than .2 from 1, which PPO's usual clip would stop."""
    far = (token_ratio(batch) - 1).abs() > 0.2
    return far.sum() / batch.mask.sum()


def examples(answers: Answers, k: int) -> list[str]:
    """The first of k answers to each of three problems, a line each."""
    lines = []
    for i in range(0, min(3 * k, len(answers.items)), k):
        line = f"{answers.items[i].prompt} -> {answers.texts[i]}  [{answers.rewards[i]:g}]"
        lines.append(" / ".join(line.splitlines()))
    return lines


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


def warm_start_or_resume(policy: Policy, optimizer, task, method: Method, config: Config) -> int:
    """The directory of a run, the warm start and the first evaluation; or what --resume goes on
    from. Returns how many steps are done."""
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    if not config.resume:
        write_aside(folder / "config.json", json.dumps(asdict(config), indent=1) + "\n")
    if config.track:
        tracker = importlib.import_module(config.track)
        tracker.init(project="token-gradient-cancellation", name=folder.name, config=asdict(config))
    size = sum(weight.numel() for weight in policy.model.parameters())
    about = f"{size:,} parameters, computed in {'bf16' if policy.bf16 else 'fp32'}"
    print(f"{config.method} on {config.task}, {about}, into {folder}", flush=True)
    if (folder / "checkpoint.pt").exists():
        return restore(policy, optimizer, folder)
    (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run killed before it saved
    warm_start(policy, task, method, config)
    if config.warm_steps:
        write_model(policy, folder / "start")
    record({"step": 0} | evaluate(policy, task, config), config)
    return 0


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


def record(metrics: dict, config: Config):
    """A line of metrics.jsonl; of an evaluation also a few words on the screen."""
    with open(Path(config.out, "metrics.jsonl"), "a") as file:
        file.write(json.dumps(metrics) + "\n")
    if config.track:
        numbers = {key: x for key, x in metrics.items() if key != "examples"}
        importlib.import_module(config.track).log(numbers, step=metrics["step"])
    if "greedy" in metrics:
        shown = ("loss", "grad_norm", "reward", "repair_rate", "entropy", "kl")
        shown += ("greedy", "sampled")
        keys = [key for key in metrics if key in shown or key.startswith("pass@")]
        tqdm.write(f"step {metrics['step']}: {'  '.join(f'{k} {metrics[k]:.3f}' for k in keys)}")
        tqdm.write(f"    {metrics['examples'][-1]}")


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
def save_batch(policy: Policy, scored: Scored, config: Config):
    """A rollout batch with the log-probs before and after its step, for those who draw it."""
    folder, answers, G = Path(config.out), scored.answers, config.group_size
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
    state = {
        "step": step,
        "model": policy.model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "metrics": (folder / "metrics.jsonl").read_text(),  # to this step
    }
    torch.save(state, folder / "unfinished.pt")
    os.replace(folder / "unfinished.pt", folder / "checkpoint.pt")


def restore(policy: Policy, optimizer, folder: Path) -> int:
    """Policy, optimiser and metrics.jsonl as they were after a step, which is returned."""
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
