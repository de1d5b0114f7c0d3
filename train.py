"""Group-relative RL for a language model, in one file that reads from top to bottom.

    python train.py                        a tiny model learns to add, on a CPU, in half a minute
    python train.py --method dfpo-min      any method of losses.py
    python train.py --task sums            SmolLM2-135M-Instruct learns sums, on a CPU
    python train.py --task gsm8k           Qwen2.5-0.5B-Instruct on GSM8K, on one GPU
    python train.py --resume runs/NAME     a run that was interrupted or killed

A policy answers each prompt several times. Only whole answers are rewarded, and every answer is
compared with the others to its prompt. A loss of losses.py says what that means for each token. A
*step* samples a batch of answers, the rollout, and makes several *updates* of the weights from it.
By default the loss is grpo, and a step has 32 prompts, G = 8 answers to each, and 4 updates, each
from another 64 of the 256 answers.

toy/plain.py is the same algorithm, one answer at a time. Read it first, and then the upper half of
losses.py. What this file adds:

- Many answers go through the model together. That takes padding, a mask, and a cache of what the
  model has read.
- Any loss can take the place of GRPO's.
- The backward pass takes micro_rows answers at a time, so that they fit into memory.
- Runs have flags, checkpoints and evaluations. These stand below the double line, where the lecture
  ends.

Wherever they occur: policy is a Policy, rollout a Rollout, task a toy.arithmetic.BaseTask. config
has the flags, so config.group_size is --group-size. method is a losses.Method: its losses (passes,
mostly one), the scale of its advantages, its hyperparameters, and perhaps a rule that changes the
advantages of single tokens (credit).

A default run needs train.py, losses.py and toy/arithmetic.py alone.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import torch
import transformers
from filelock import FileLock, Timeout
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import losses

# -------------------------------------------------------------------------------------------------
# a run: one step after another


def run(config):
    method, task = choose_method(config), load_task(config)
    policy = load_policy(config, task, config.model)
    items = task.train + task.test  # so that a bad prompt fails here, and not in step 50
    check_prompts(policy, task.encode(policy.tokenizer, items), items, config.max_tokens)
    with own_folder(config):  # of this run, in which nobody else writes
        train(policy, task, method, config)


def train(policy, task, method, config):
    optimizer = adamw(policy.model, config.lr)
    # Where every answer is wrong, all rewards are equal and there is nothing to compare. So a model
    # from scratch first makes some supervised steps. A resumed run begins with what was saved, and
    # has done some of its steps.
    done = warm_start_or_resume(policy, optimizer, task, method, config)
    reference = None
    if method.hyper.get("kl"):  # a KL term compares with the policy that RL started from
        reference = load_policy(config, task, path_of_start(config))
    batches = prompt_batches(task, config)

    todo = range(done + 1, config.steps + 1)
    for step in tqdm(todo, "RL", initial=done, total=config.steps, disable=None):
        began = time.perf_counter()
        # 1. G answers to each prompt, and a reward for each.
        rollout = sample(policy, task, batches[step - 1], step, config)
        # 2. What stays fixed while the policy learns: how the answers compare with one another, and
        # how probable they were.
        score(policy, reference, rollout, method, config)
        more = {}
        if method.credit:  # NTHR, AR and IBPO give each token an advantage of its own
            more = reshape_credit(policy, task, rollout, method, step, config)
        # 3. Several updates, each from a part of the rollout: current log-probs -> loss -> push of
        # each token -> gradient -> weights.
        updates = learn(policy, optimizer, rollout, method, step, config)
        metrics = diagnose(policy, rollout, updates, step, config) | more
        metrics["tokens_per_s"] = metrics["generated"] / (time.perf_counter() - began)

        due = step % config.eval_every == 0 or step == config.steps
        if due:
            metrics |= evaluate(policy, task, config)
        record(metrics, config)
        if due:
            save_rollout(policy, rollout, step, config)
            save(policy, optimizer, step, Path(config.out))
    write_model(policy, Path(config.out, "model"))
    summarize(Path(config.out))


# -------------------------------------------------------------------------------------------------
# 1. sample: G answers to each prompt, rewarded at their end


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
class Rollout:
    """N answers, in T columns. The G answers to one prompt stand one below the other.

    Two rows as text, with . for EOS and _ for padding:

        items    prompts    tokens      mask        texts      rewards
        37+48    37+48=     so #85._    11111110    so #85     1
        37+48    37+48=     hm #104.    11111111    hm #104    0
    """

    items: list  # N problems
    texts: list[str]  # N
    prompts: Tensor  # (N, W) ids; -1 is padding, on the left, so that all answers begin in line
    tokens: Tensor  # (N, T) ids; 0 is padding, too, so look at the mask
    mask: Tensor  # (N, T) bool, True up to and including the first EOS, or to the end
    sampled: Tensor  # (N, T) log pi of the tokens, as the sampler computed them; 0 on padding
    entropy: Tensor  # (N, T) of what a token was drawn from, in nats; only logged
    rewards: Tensor  # (N,) floats; 1 = correct
    # What `score` adds:
    adv: Tensor | None = None  # (N, T) the advantage of each token
    old: Tensor | None = None  # (N, T) log pi of the tokens before anything is learnt from them
    ref: Tensor | None = None  # (N, T) log pi_ref of the tokens; only for a KL term

    def of(self, rows: Tensor) -> Rollout:
        """Some of the answers, such as those of a minibatch."""
        picked = {}
        for name, x in vars(self).items():
            if isinstance(x, Tensor):
                picked[name] = x[rows.to(x.device)]
            elif x is not None:
                picked[name] = [x[i] for i in rows]
        return Rollout(**picked)

    def split(self, size: int) -> list[Rollout]:
        """All of the answers, `size` at a time."""
        rows = torch.arange(len(self.items))
        return [self.of(rows[i : i + size]) for i in range(0, len(rows), size)]


def sample(policy, task, items: list, step, config) -> Rollout:
    """The policy answers each problem G times."""
    copies = [item for item in items for _ in range(config.group_size)]
    gen = rng(config.seed, "sample", step)
    return ask(policy, task, copies, config, config.temperature, gen)


def ask(policy, task, items: list, config, temperature, gen) -> Rollout:
    """One answer to each problem, and its reward. A temperature of 0 is greedy."""
    prompts = encode(policy, task, items, config)  # (N, W)
    # All at once: sampling keeps no graph, and logits of one column only.
    drawn = policy.sampler(policy, prompts, config.max_tokens, temperature, gen)
    tokens, mask, logp, entropy = drawn  # (N, T) each
    # The reward is that of the text without its EOS.
    shown = (mask & ~torch.isin(tokens, policy.eos)).cpu()
    ids = [row[keep].tolist() for row, keep in zip(tokens.cpu(), shown, strict=True)]
    texts = policy.tokenizer.batch_decode(ids)
    # task.reward judges whole answers, no token by itself; `reward_of` checks that it is a number.
    rewards = [reward_of(task, text, item) for text, item in zip(texts, items, strict=True)]
    rewards = torch.tensor(rewards, device=prompts.device)  # (N,)
    return Rollout(items, texts, prompts, tokens, mask, logp, entropy, rewards)


@torch.no_grad()
def generate(
    policy, prompts: Tensor, max_tokens, temperature, gen
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample an answer to each of N prompts (N, W), token by token; temperature 0 is greedy.

    Nothing but the temperature shapes the distribution, whatever the model's own generation config
    says: no top-k, no top-p, no penalty. Returns tokens, mask, log-probs and entropies, (N, T)
    each. Log-probs and entropies of a greedy answer are those at temperature 1.
    """
    n, device = len(prompts), prompts.device
    # Each row has random numbers of its own, whatever the other rows are.
    uniform = torch.rand(n, max_tokens, generator=gen, dtype=torch.float64).to(device)
    # Shorter prompts are padded on the left, so that all rows continue in one column. Positions
    # are counted from a row's own first token; those of padding are never looked at:
    #     prompt ids  -1 -1  7  4      seen  0 0 1 1      position  0 0 0 1, then 2, 3, ...
    seen = prompts >= 0  # (N, W), one column more for every token
    alive = torch.ones(n, dtype=torch.bool, device=device)  # (N,) no EOS so far
    inputs, cache, columns = prompts.clamp(min=0), None, []
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
        taken = logp.gather(1, token[:, None]).squeeze(1)  # (N,)
        entropy = -(logp.exp() * logp).sum(1)  # (N,)
        # An EOS counts, and what follows it does not. So the mask is `alive` before its update:
        #     token  a . _      mask  1 1 0      with . for EOS and _ for what comes after it
        # A row that has ended still goes through the model, until all have, but nobody reads it.
        columns.append((token, alive, taken, entropy))
        inputs, seen = token[:, None], torch.cat([seen, alive[:, None]], 1)
        alive = alive & ~torch.isin(token, policy.eos)
        if not alive.any():
            break
    # From T columns of four things to four tensors of T columns.
    tokens, mask, logps, entropies = (torch.stack(x, 1) for x in zip(*columns, strict=True))
    return tokens * mask, mask, logps.masked_fill(~mask, 0.0), entropies.masked_fill(~mask, 0.0)


def draw(logp: Tensor, uniform: Tensor) -> Tensor:
    """Sample: the first token whose cumulative probability exceeds a uniform number.

    By hand, because in torch.multinomial a row's numbers depend on how many rows there are.
    (n, V) log-probs, (n, 1) numbers -> (n,) tokens.
    """
    cdf = logp.double().exp().cumsum(-1)  # (n, V); fp32 sums of a large vocabulary are too coarse
    token = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).squeeze(1)
    return token.clamp(max=logp.shape[1] - 1)  # rounding may lead past the last one


# -------------------------------------------------------------------------------------------------
# 2. score: how the answers compare, and how probable they were. Fixed from here on


@torch.no_grad()
def score(policy, reference, rollout, method, config):
    """Add to a rollout the advantages and the old log-probs; for a KL term the reference's, too."""
    scale = config.scale or method.scale
    advantages = losses.group_advantages(rollout.rewards, config.group_size, scale)  # (N,)
    # The reward comes at the end, and every token has led there, so each gets the whole advantage.
    rollout.adv = advantages[:, None].expand_as(rollout.mask)  # (N, T)
    # A ratio divides how probable a token is now by how probable it was. The sampler knows the
    # latter. But it reads token by token and rounds a little differently from `log_probs`, so with
    # its numbers ratios would differ from 1 before anything is learnt. So the answers are read once
    # more, by `log_probs`. There is one exception. In the first update of a step, `learn` takes the
    # old log-probs for the current ones, because nothing has changed yet. If there is no other
    # update, and no reference to compare with, the sampler's numbers do as well.
    n_updates = config.epochs * config.minibatches * len(method.passes)
    once = n_updates == 1 and reference is None
    rollout.old = rollout.sampled if once else log_probs_in_pieces(policy, rollout, config)
    if reference:
        rollout.ref = log_probs_in_pieces(reference, rollout, config)


def log_probs(policy, rollout, temperature) -> Tensor:
    """log pi of the answers' tokens, all read at once; differentiable, 0 on padding. (N, T)."""
    ids = torch.cat([rollout.prompts.clamp(min=0), rollout.tokens], 1)  # (N, W + T)
    seen = torch.cat([rollout.prompts >= 0, rollout.mask], 1).long()
    position = (seen.cumsum(1) - 1).clamp(min=0)
    with policy.autocast():
        logits = policy.model(
            ids[:, :-1],  # the output at a token predicts the next one, and the last has none
            attention_mask=seen[:, :-1],
            position_ids=position[:, :-1],
            use_cache=False,
            logits_to_keep=rollout.tokens.shape[1],  # those that predict the answers
        ).logits  # (N, T, V)
    # The temperature belongs in here: the policy that is trained is the one that was sampled. It
    # divides in place, because with a large vocabulary each copy takes gigabytes. Nobody needs the
    # logits themselves again, so that is safe.
    logp = logits.float().div_(temperature).log_softmax(-1)
    return logp.gather(2, rollout.tokens[..., None]).squeeze(2).masked_fill(~rollout.mask, 0.0)


@torch.no_grad()
def log_probs_in_pieces(policy, rollout, config) -> Tensor:
    """The same as plain numbers, without a graph. The model gets micro_rows answers at a time."""
    pieces = rollout.split(config.micro_rows)
    return torch.cat([policy.scorer(policy, piece, config.temperature) for piece in pieces])


# -------------------------------------------------------------------------------------------------
# 3. learn: several updates from one rollout


def minibatches(rollout, method, step, config) -> Iterator[tuple[Callable, Rollout]]:
    """For each update of a step: by which loss, and from which answers.

    A minibatch has whole groups, because a loss may compare the answers of a group.
    """
    gen = rng(config.seed, "learn", step)
    groups = torch.arange(len(rollout.items)).view(-1, config.group_size)  # rows of each group
    for _ in range(config.epochs):
        order = torch.randperm(len(groups), generator=gen).view(config.minibatches, -1)
        for loss_fn in method.passes:  # one loss; the paper Lopti has two
            for chosen in order:
                yield loss_fn, rollout.of(groups[chosen].flatten())


def learn(policy, optimizer, rollout, method, step, config) -> list[dict[str, float]]:
    """Log-probs -> loss -> pushes -> gradient -> weights, once for each minibatch.

    The graph of a minibatch, 64 answers by default, need not fit into memory. So each update has
    three parts: (a) the log-probs, without a graph; (b) the loss of these numbers, and dLoss/dlogp;
    (c) the model again, with a graph, a few answers at a time. One forward pass more is the price.

    In all but the first update the weights have moved since the answers were sampled: other answers
    have moved them. So ratios are no longer 1, although by default each answer is learnt from once.
    Returns what is to be logged of each update.
    """
    decay = 1 - (step - 1) / config.steps if config.schedule == "linear" else 1.0
    for parameters in optimizer.param_groups:
        parameters["lr"] = config.lr * decay

    updates = []
    for loss_fn, part in minibatches(rollout, method, step, config):
        # (a) How probable the n answers of the minibatch are now. Before the first update they are
        # as probable as they were, so the old numbers are taken, and all ratios are exactly 1. (As
        # a copy, because only the log-probs of now get a gradient.)
        first = not updates
        logp = part.old.clone() if first else log_probs_in_pieces(policy, part, config)  # (n, T)
        batch = losses.Batch(
            logp=logp.requires_grad_(),
            logp_old=part.old,
            adv=part.adv,
            mask=part.mask,
            group_size=config.group_size,
            max_tokens=config.max_tokens,
            logp_ref=part.ref,
        )
        # (b) A loss sees nothing of the model but the log-probs. So backward stops there and leaves
        # dLoss/dlogp in logp.grad, (n, T). Times -n that is the push of toy/plain.py: how hard a
        # token is lifted.
        loss = loss_fn(batch)
        if config.prefix_baseline:
            # toy/plain.py's subtract_baseline for any loss: it finds the pushes of this loss, takes
            # from each the mean push of the answers that share the prefix, which `nodes` tells, and
            # returns a scalar that has the new pushes.
            nodes = losses.prefix_nodes(part.tokens, part.mask, config.group_size)  # (n, T)
            loss = losses.prefix_baseline(loss, batch, nodes)
        loss.backward()
        # (c) By the chain rule the gradient of the weights is a sum over all tokens: dLoss/dlogp
        # times the gradient of the token's log-prob. A loss may compare answers, but by now
        # dLoss/dlogp is a plain number for each token, so every answer adds a part of its own.
        # Answers without any push add nothing, and are left out. (Without a KL term, the answers of
        # a group with equal rewards are among them.)
        pushed = logp.grad.any(1).nonzero().squeeze(1)  # the rows that have a push
        optimizer.zero_grad()
        gaps = []
        for i in range(0, len(pushed), config.micro_rows):
            rows = pushed[i : i + config.micro_rows]
            piece = part.of(rows)
            now = policy.scorer(policy, piece, config.temperature)  # (rows, T) with a graph
            # The gradient of (logp.grad[rows] * now).sum(), which is toy/plain.py's push @ logp
            # divided by -n. It is added to that of the pieces before.
            now.backward(logp.grad[rows])
            if first:  # nothing is learnt yet. If the sampler differs by more than rounding, stop
                gaps.append(check_gap(now.detach() - piece.sampled, step, config.temperature))
        norm = clip_grad_norm_(policy.model.parameters(), config.grad_clip).item()
        check_finite(f"step {step}", loss.item(), norm)
        # If nothing is pushed there is no gradient, not even one of 0, so momentum moves nothing.
        optimizer.step()

        # What is logged. clip_share is the share of ratios beyond PPO's usual clip, 1 +- .2.
        far = ((logp - part.old).exp() - 1).abs() > 0.2  # (n, T)
        updates.append(
            {
                "loss": loss.item(),
                "grad_norm": norm,
                "clip_share": (far.sum() / part.mask.sum()).item(),
                "max_logp_gap": max(gaps, default=0.0),
            }
        )
    return updates


# =================================================================================================
# The lecture ends here. Below stand the flags, what is logged, the warm start, checks, neighbouring
# papers, the task, the policy, and the files of a run
# =================================================================================================


# -------------------------------------------------------------------------------------------------
# flags


def flag(default, help: str, **more):
    return field(default=default, metadata={"help": help, **more})


@dataclass
class Config:
    """Every field is a flag: --group-size is group_size. The defaults are the toy's. PRESETS has
    what differs for other tasks."""

    # Which loss.
    method: str = flag("grpo", "a method of losses.py", choices=losses.METHODS)
    hyper: str = flag("", "'eps_high=0.3 kl=0.04'; an unknown name prints what the method has")
    scale: str = flag("", "of A; empty: the method's own", choices=("", *losses.SCALES))
    prefix_baseline: bool = flag(False, "a leave-one-out baseline at every prefix (losses.py)")
    repair_references: int = flag(1, "ibpo: answers shown beside a wrong one to be corrected")

    # What one step samples: N = prompts * group_size answers.
    steps: int = flag(60, "rollout batches; 0: only the warm start")
    prompts: int = flag(32, "prompts per rollout batch")
    group_size: int = flag(8, "G, answers per prompt")
    max_tokens: int = flag(26, "L, the most tokens that an answer may have")
    temperature: float = flag(1.0, "sampling temperature, also inside every log-prob")

    # What it learns from them.
    epochs: int = flag(1, "how often a rollout batch is gone through")
    minibatches: int = flag(4, "updates per epoch, each on whole groups")
    lr: float = flag(1e-3, "learning rate of AdamW")
    schedule: str = flag("linear", "learning rate over the run", choices=("constant", "linear"))
    grad_clip: float = flag(1.0, "largest gradient norm")

    # Who learns what.
    task: str = flag("arithmetic", "arithmetic, sums, gsm8k, or a file of yours with a class Task")
    data: str = flag("", "directory with GSM8K's train.jsonl and test.jsonl; empty: the hub")
    model: str = flag("scratch", "scratch, or a directory or hub id of a causal LM")
    layers: int = flag(1, "layers of the scratch model")
    width: int = flag(64, "hidden size of the scratch model, a multiple of 8")

    # The warm start: supervised steps before RL, so that there is something to reward.
    warm_steps: int = flag(700, "supervised steps on the task's demonstrations; 0: none")
    warm_rows: int = flag(64, "demonstrations per supervised step")
    warm_lr: float = flag(6e-3, "learning rate of the supervised steps")

    # Evaluation, the machine, files.
    eval_every: int = flag(20, "steps between evaluations, each with a checkpoint")
    eval_items: int = flag(200, "held-out problems per evaluation")
    eval_samples: int = flag(4, "k of pass@k: samples per held-out problem")
    seed: int = flag(0, "seed of everything random")
    micro_rows: int = flag(64, "answers in the model at once: changes the memory, not the result")
    threads: int = flag(1, "CPU threads, 0: all; a tiny model gains nothing from more than one")
    fast: bool = flag(False, "llm/fast.py's generate and log_probs: the same numbers, sooner")
    track: str = flag("", "send the metrics there, too", choices=("", "trackio", "wandb"))
    out: str = flag("", "the run directory; empty: runs/TASK-METHOD-sSEED-TIME")
    resume: str | None = flag(None, "a run directory to go on with; takes no other flag")


# Where the defaults of other tasks differ. Their models are trained already.
CHAT = {"warm_steps": 0, "minibatches": 1, "threads": 0, "fast": True}
SUMS = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "steps": 30,
    "prompts": 8,
    "max_tokens": 24,
    "micro_rows": 16,
    "lr": 1e-5,
    "schedule": "constant",
    "eval_every": 10,
    "eval_items": 100,
    "eval_samples": 2,
}
GSM8K = {
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "steps": 200,
    "prompts": 16,
    "max_tokens": 512,
    "micro_rows": 4,
    "lr": 1e-6,
    "eval_samples": 1,
}
PRESETS = {"sums": CHAT | SUMS, "gsm8k": CHAT | GSM8K}


class UserError(ValueError):
    """What a user can mend. `main` says it in one line."""


@contextmanager
def blame(flags: str, kinds: type | tuple = (OSError, ValueError)):
    """What is refused in here is the mistake of these flags."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(f"{flags}: {first_line or type(error).__name__}") from error


def main(argv: list[str] | None = None):
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a console may lack letters that a model writes
            stream.reconfigure(errors="backslashreplace")
    try:
        config = parse(argv)
        torch.set_num_threads(config.threads or os.cpu_count())
        try:
            run(config)
        except KeyboardInterrupt:
            sys.exit(f"interrupted; {how_to_go_on(config)}")
    except UserError as error:
        sys.exit(f"error: {error}")


def parse(argv: list[str] | None = None) -> Config:
    """Flags -> Config. A flag beats the preset of its task, and both beat the toy's defaults."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("train.py is one process, and a launcher has started several; see engines/")
    transformers.logging.set_verbosity_error()  # a run has lines and bars of its own
    transformers.logging.disable_progress_bar()
    usage = "python train.py [--FLAG VALUE ...]"
    parser = transformers.HfArgumentParser(Config, usage=usage, allow_abbrev=False)
    given = parser.parse_args(argv)  # read twice: --task and --resume decide about the defaults
    if given.resume is not None:
        if given != parser.parse_args(["--resume", given.resume]):
            saved = f"{given.resume}/config.json has them"
            raise UserError(f"--resume takes no other flag; {saved}")
        return Config(**read_config(given.resume))
    trained = {"warm_steps": 0} if given.model != "scratch" else {}
    parser.set_defaults(**trained | PRESETS.get(given.task, {}))
    config = Config(**vars(parser.parse_args(argv)))
    check(config)
    return config


def check(config):
    """Refuse what a run would find out late, or not at all."""
    for name, x in vars(config).items():
        zero_is_fine = name in ("warm_steps", "steps", "seed", "threads")
        if type(x) in (int, float) and not (0 < x < math.inf or x == 0 and zero_is_fine):  # a nan
            least = "at least" if zero_is_fine else "above"
            raise UserError(f"--{name.replace('_', '-')} {x}: must be {least} 0, and finite")
    if config.group_size < 2:
        raise UserError("--group-size must be at least 2: an answer is compared with others")
    if config.prompts % config.minibatches:
        sizes = f"--prompts {config.prompts}", f"--minibatches {config.minibatches}"
        raise UserError(f"{sizes[0]} is not divisible by {sizes[1]}")
    if config.method == "ibpo" and config.repair_references >= config.group_size:
        raise UserError("--repair-references: an answer has only --group-size - 1 siblings")
    if config.data and config.task != "gsm8k":
        raise UserError("--data is GSM8K's: it needs --task gsm8k")
    if config.track and not importlib.util.find_spec(config.track):
        raise UserError(f"--track {config.track} is not installed: pip install {config.track}")
    if config.out and Path(config.out).exists():
        raise UserError(f"--out {config.out} exists; choose another, or --resume it")


def choose_method(config) -> losses.Method:
    """The method that --method names, with the hyperparameters of --hyper filled in."""
    with blame(f"--hyper {config.hyper!r}"):
        return losses.bind(config.method, dict(x.partition("=")[::2] for x in config.hyper.split()))


def rng(*key) -> torch.Generator:
    """A generator for each use and step, so that a resumed run has no random state to restore."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


# -------------------------------------------------------------------------------------------------
# what is logged of a step


@torch.no_grad()
def diagnose(policy, rollout, updates: list[dict], step, config):
    """A step's metrics: of its answers, and means over its updates. Entropy and KL are in nats."""
    tokens = rollout.mask.sum()
    equal = (rollout.adv == 0).reshape(config.prompts, -1).all(1)  # (prompts,) nothing to learn
    ended = torch.isin(rollout.tokens, policy.eos).any(1)  # (N,); only they have padding
    metrics = {
        "step": step,
        "reward": rollout.rewards.mean(),
        "equal_groups": equal.float().mean(),
        "length": tokens / len(ended),
        "truncated": 1 - ended.float().mean(),
        "generated": tokens,
        "entropy": rollout.entropy.sum() / tokens,
        "max_logp_gap": updates[0]["max_logp_gap"],  # of sampler and scorer, before any learning
    }
    for key in ("loss", "grad_norm", "clip_share"):  # clipped: a ratio further than .2 from 1
        metrics[key] = fmean(update[key] for update in updates)
    if rollout.ref is not None:  # KL(policy || reference) a token, by k3
        log_q = rollout.ref - rollout.old  # (N, T), 0 on padding
        metrics["kl"] = (log_q.exp() - log_q - 1).sum() / tokens
    return {key: x.item() if isinstance(x, Tensor) else x for key, x in metrics.items()}


# -------------------------------------------------------------------------------------------------
# evaluation: on problems that were never trained on


@torch.no_grad()
def evaluate(policy, task, config) -> dict:
    """Mean reward of greedy and of sampled answers to held-out problems, and three examples.

    pass@k is the share of problems with a sample of reward 1. Every evaluation has the same random
    numbers, so a policy that does not move scores the same.
    """
    k, items = config.eval_samples, task.test[: config.eval_items]
    at_once = max(1, config.prompts * config.group_size // k)  # as many answers as in training
    gen, greedy, sampled, texts = rng(config.seed, "evaluate"), [], [], []
    for i in range(0, len(items), at_once):
        some = items[i : i + at_once]
        greedy.append(ask(policy, task, some, config, 0.0, rng()).rewards)
        copies = [item for item in some for _ in range(k)]
        answers = ask(policy, task, copies, config, config.temperature, gen)
        sampled.append(answers.rewards)
        texts += answers.texts
    greedy, sampled = torch.cat(greedy), torch.cat(sampled).view(-1, k)  # (items,), (items, k)
    return {
        "greedy": greedy.mean().item(),
        "greedy_se": (greedy.std(correction=0) / len(greedy) ** 0.5).item(),  # its standard error
        "sampled": sampled.mean().item(),
        f"pass@{k}": (sampled == 1).any(1).float().mean().item(),
        "examples": [
            f"{item.prompt} -> {texts[i * k]}  [{sampled[i, 0]:g}]"
            for i, item in enumerate(items[:3])
        ],
        # A task's own; the toy's: which answers begin with "so".
        **task.shares([item for item in items for _ in range(k)], texts),
    }


# -------------------------------------------------------------------------------------------------
# the warm start is not RL: supervised steps on demonstrations, before it


def warm_start(policy, task, method, config):
    """Supervised steps on the task's demonstrations, so that RL has something to find.

    Where the method corrects wrong answers, 30 % of the demonstrations are corrections, if the task
    has any: a policy that never saw a correction makes none.
    """
    if not config.warm_steps:
        return
    model, tokenizer = policy.model, policy.tokenizer
    end = int(policy.eos[0]) if tokenizer.eos_token_id is None else tokenizer.eos_token_id

    def encode_demos(items: list) -> list[tuple[list[int], list[int]]]:
        demos = tokenizer([item.demo for item in items], add_special_tokens=False)["input_ids"]
        ended = [demo + [end] for demo in demos]
        return list(zip(task.encode(tokenizer, items), ended, strict=True))

    plain, corrections = encode_demos(task.train), 0
    check_prompts(policy, [prompt + demo for prompt, demo in plain], task.train, 0)
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
                # Padding stands behind a text, where a causal model does not look. A label of -100
                # is not learnt: neither prompts nor padding are.
                ids = pad([prompt + demo for prompt, demo in some], 0, "right", model.device)
                labels = [[-100] * len(prompt) + demo for prompt, demo in some]
                labels = pad(labels, -100, "right", model.device)
                with policy.autocast():
                    out = model(ids, labels=labels, num_items_in_batch=learnt, use_cache=False)
                out.loss.backward()  # the sum over these tokens, divided by those of all rows
        norm = clip_grad_norm_(model.parameters(), 1.0).item()
        check_finite(f"--warm-lr {config.warm_lr}: step {step + 1} of the warm start", norm)
        optimizer.step()


# -------------------------------------------------------------------------------------------------
# checks: where a wrong number would look right


def check_gap(difference: Tensor, step, temperature) -> float:
    """The largest difference between the sampler's and the scorer's log-probs, in nats.

    They are one policy, and differ by rounding alone. On a CPU, in fp32, that is little, and more
    ends the run. On a GPU bf16 rounds by the shape of a batch: a large gap is worth a warning, and
    only a nan is surely wrong. Log-probs at a low temperature are larger, and so is their rounding.
    """
    gap, on_cpu = difference.abs().max().item(), difference.device.type == "cpu"
    if not gap * min(1.0, temperature) <= (1e-3 if on_cpu else 3.0):  # a nan, too
        said = f"step {step}: scored and sampled log-probs differ by {gap:.3g} nats"
        if on_cpu or math.isnan(gap):
            raise UserError(f"{said}, which is more than rounding; no update was made")
        tqdm.write(f"warning: {said}")
    return gap


def check_finite(when: str, *numbers: float):
    """End before an update that would spoil the weights."""
    if not all(map(math.isfinite, numbers)):
        raise UserError(
            f"{when}: loss or gradient is not finite {numbers}; what is saved is intact"
        )


# -------------------------------------------------------------------------------------------------
# what neighbouring papers ask for: llm/neighbours.py


def reshape_credit(policy, task, rollout, method, step, config) -> dict[str, float]:
    """Change a rollout's advantages by the method's credit rule. Returns more to log."""
    from llm import neighbours

    def ask_again(problems: list) -> Rollout:
        gen = rng(config.seed, "repair", step)
        return ask(policy, task, problems, config, config.temperature, gen)

    with blame(f"--method {config.method} --hyper {config.hyper!r}"):
        gen = rng(config.seed, "credit", step)
        return neighbours.reshape_credit(policy, task, rollout, method, config, ask_again, gen)


# -------------------------------------------------------------------------------------------------
# the task


def load_task(config):
    """The task object, a toy.arithmetic.BaseTask. One reward is tried before anything runs."""
    if config.task == "arithmetic":
        from toy.arithmetic import Arithmetic

        task = Arithmetic()
    elif config.task == "sums":
        from llm.sums import Sums

        task = Sums()
    elif config.task == "gsm8k":
        from llm.gsm8k import GSM8K

        with blame("--task gsm8k"):
            task = GSM8K(config.data or None)
    elif Path(config.task).is_file():
        sys.path.append(str(Path(config.task).parent))  # for a module that stands beside it
        names = runpy.run_path(config.task)
        if "Task" not in names:
            raise UserError(f"--task {config.task}: the file has no class Task")
        task = names["Task"]()
    else:
        accepted = f"{', '.join(('arithmetic', *PRESETS))}, a Python file with a class Task"
        raise UserError(f"--task {config.task}: no such file; accepted: {accepted}")
    for split in ("train", "test"):
        if not getattr(task, split):
            raise UserError(f"--task {config.task}: its {split} split has no item")
    reward_of(task, task.train[0].demo, task.train[0])
    return task


def reward_of(task, text: str, item) -> float:
    """The task's reward, if it is a number that a tensor can hold."""
    reward = task.reward(text, item)
    try:
        number = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max:  # a nan, too
        about = f"of the answer {text!r} to {item.prompt!r}"
        accepted = "a finite number that float32 can hold"
        raise UserError(f"the task's reward {about} is {reward!r}; accepted: {accepted}")
    return number


def encode(policy, task, items: list, config) -> Tensor:
    """Prompts, padded with -1 on the left. (N, W)."""
    rows = task.encode(policy.tokenizer, items)
    check_prompts(policy, rows, items, config.max_tokens)
    return pad(rows, -1, "left", policy.model.device)


def check_prompts(policy, rows: list[list[int]], items: list, more: int):
    """Refuse what a task's `encode` may give, and a model would read in silence or not at all.

    more: how many tokens must still fit into the context behind a row.
    """
    tokenizer, model = policy.tokenizer, policy.model
    wanted = "wanted: a list of ids for each prompt, at least one, without padding"
    if not isinstance(rows, list) or len(rows) != len(items):
        kind = type(rows).__name__
        raise UserError(f"the task's encode gave a {kind} for {len(items)} prompts; {wanted}")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    size, pad_id = model.get_input_embeddings().weight.shape[0], tokenizer.pad_token_id
    if pad_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        pad_id = None  # a prompt may begin or end with it
    for row, item in zip(rows, items, strict=True):
        prompt = f"the prompt {item.prompt[:60]!r}"
        is_ids = isinstance(row, list) and row and all(type(x) is int and x >= 0 for x in row)
        if not is_ids or pad_id in (row[0], row[-1]):
            gave = f"{str(row)[:60]!r} ({type(row).__name__}) for {prompt}"
            raise UserError(f"the task's encode gave {gave}; {wanted}")
        if max(row) >= size:
            which = f"id {max(row)}, {tokenizer.convert_ids_to_tokens(max(row))!r}"
            raise UserError(f"{prompt} has {which}, and the model embeddings of {size} ids")
        if len(row) + more > limit:  # some models would read on, and be wrong in silence
            long = f"{prompt} has {len(row)} tokens" + f", and --max-tokens is {more}" * (more > 0)
            raise UserError(f"{long}: together more than the model's context of {limit}")


def pad(rows: list[list[int]], value: int, side: str, device: torch.device) -> Tensor:
    """Rows of ids as one tensor, filled up with a value on the left or on the right."""
    rows = [torch.tensor(row) for row in rows]
    return pad_sequence(rows, True, value, side).to(device)


def prompt_batches(task, config) -> list[list]:
    """The items of every step: one permutation of the training split after another."""
    items = []
    while len(items) < config.steps * config.prompts:
        gen = rng(config.seed, "order", len(items) // len(task.train))
        items += [task.train[i] for i in torch.randperm(len(task.train), generator=gen).tolist()]
    return [items[i : i + config.prompts] for i in range(0, len(items), config.prompts)]


# -------------------------------------------------------------------------------------------------
# the policy


def load_policy(config, task, path: str) -> Policy:
    """The policy at `path`: "scratch", a directory or a hub id. On a GPU, if there is one."""
    if path == "scratch":
        tokenizer = task.make_tokenizer()
        model = make_model(config, tokenizer)
    else:
        if Path(path, "adapter_config.json").exists():
            raise UserError(f"--model {path} is an adapter; merge it into its model first")
        ways = "a directory or a hub id"
        if Path(path).name == Path(SUMS["model"]).name:
            ways += "; make real builds the directory models/SmolLM2-135M-Instruct"
        with blame(f"--model {path} ({ways})", Exception):  # of many classes
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
            )
        for wrong in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            # Weights that config.json does not know are harmless, unless a layer is left out.
            keys = [x for x in map(str, info[wrong]) if wrong[0] == "m" or ".layers." in x]
            if keys:  # the model would have random weights, or half of its layers
                raise UserError(
                    f"--model {path}: weights and config.json differ: {wrong} {keys[0]}"
                )
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise UserError(f"--model {path} has no tokenizer files")
        frozen = [name for name, x in model.named_parameters() if not x.requires_grad]
        if frozen:
            raise UserError(f"--model {path}: {frozen[0]} cannot learn; is the model quantised?")
        if path == config.model and tokenizer.chat_template is None:
            print(f"--model {path} has no chat template, so prompts are plain text")
    ends = model.generation_config.eos_token_id  # one id, a list or None; the tokenizer has one
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    ends |= turn_end(tokenizer)
    if not ends:
        raise UserError(f"--model {path}: nothing says which token ends an answer (eos_token_id)")
    # A model's own generation config may hold a sampler. We ignore that, and store it as it is.
    model.generation_config.eos_token_id = sorted(ends)
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # transformers would not store it
        print(f"--model {path}: its generation config is not valid, and will not be stored")
        model.generation_config = transformers.GenerationConfig(eos_token_id=sorted(ends))
    policy = Policy(model.eval(), tokenizer, torch.tensor(sorted(ends)), generate, log_probs)
    if config.fast or path != "scratch":
        try_out(policy, task, path, config)
    if torch.cuda.is_available():
        model.to("cuda")
        policy.eos = policy.eos.to("cuda")
        # Cards before Ampere, such as the T4, only emulate bf16. They compute in fp32, as a CPU.
        policy.bf16 = torch.cuda.get_device_capability() >= (8, 0)
        # With a mask and some lengths, cuDNN's attention is reported to give nan in backward on
        # H100 and H200 (torch 2.11 to 2.13, pytorch's issue 196678). Other kernels take over.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return policy


def turn_end(tokenizer) -> set[int]:
    """The token with which the chat template closes an assistant's turn; base models have another
    EOS. Empty without a template, or without such a token."""
    if not tokenizer.chat_template:
        return set()
    chat = [{"role": "user", "content": "37+48="}, {"role": "assistant", "content": "It is 85."}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # it wants other turns than these
        return set()
    _, found, closing = text.rpartition("It is 85.")
    ids = tokenizer(closing if found else "", add_special_tokens=False)["input_ids"]
    special = tokenizer.added_tokens_decoder.keys() - {tokenizer.unk_token_id}
    return set([x for x in ids if x in special][:1])


def try_out(policy, task, path: str, config):
    """Sample and score a few tokens: what fails here would fail after an evaluation.

    Under --fast its sampler and scorer take the place of ours, if they are right for the model.
    """
    plain = replace(policy)
    if config.fast:
        from llm import fast

        policy.sampler, policy.scorer = fast.generate, fast.log_probs
    prompts = encode(policy, task, [task.train[0], task.train[-1]] * 2, config)
    try:
        compare(policy, prompts, config)
    except Exception as error:  # a model of another make fails in classes of its own
        with blame(f"--model {path}: train.py cannot train it", Exception):
            compare(plain, prompts, config)
        raise UserError(f"--fast is wrong for this model ({error}); choose --fast false") from error


@torch.no_grad()
def compare(policy, prompts: Tensor, config):
    """Raises ValueError if the policy's sampler and scorer differ from `log_probs`. On the CPU,
    where fp32 makes the limit sharp."""
    few, gen = min(8, config.max_tokens), rng("try_out")
    tokens, mask, sampled, _ = policy.sampler(policy, prompts, few, config.temperature, gen)
    rollout = SimpleNamespace(prompts=prompts, tokens=tokens, mask=mask)
    plain = log_probs(policy, rollout, config.temperature)
    scored = policy.scorer(policy, rollout, config.temperature)
    gap = torch.stack([sampled - plain, scored - plain]).abs().max().item()  # nan if one is
    # Logits are divided by the temperature, and so is their rounding.
    if not gap * min(1.0, config.temperature) < 1e-3:
        raise ValueError(f"its log-probs differ by {gap:.3g} nats from the plain ones")


def path_of_start(config) -> str:
    """Where the policy is that RL started from."""
    return f"{config.out}/start" if config.warm_steps else config.model


def make_model(config, tokenizer) -> torch.nn.Module:
    """A small GPT-2 with random weights."""
    torch.manual_seed(config.seed % 2**63)
    shape = transformers.GPT2Config(
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
    return transformers.GPT2LMHeadModel(shape)


def adamw(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    betas = (0.9, 0.95)  # usual for language models; a decay would pull at a pretrained policy
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=0.0, fused=True)


# -------------------------------------------------------------------------------------------------
# the files of a run. All randomness is made anew from (seed, use, step), so weights, optimiser and
# step are all that a run needs to go on, on a CPU bit for bit, wherever it was killed:
#
#     runs/NAME/.lock          of the process that writes here
#               config.json    flags
#               metrics.jsonl  a line a step
#               start/         the policy that RL started from
#               checkpoint.pt  of the last evaluated step: weights, optimiser, metrics
#               batches/       the rollout of each evaluated step, for toy/tree.py
#               model/         the policy at the end


def warm_start_or_resume(policy, optimizer, task, method, config) -> int:
    """The warm start and the first evaluation, or what --resume goes on from. Returns how many
    steps are done."""
    folder = Path(config.out)
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


@contextmanager
def own_folder(config):
    """The directory of a run, with its flags in it, for as long as this process writes there."""
    if not config.resume:
        claim_folder(config)
    try:
        with FileLock(Path(config.out, ".lock"), timeout=0):
            yield
    except Timeout:
        raise UserError(f"{config.out}: another process writes there") from None


def claim_folder(config):
    """Make a directory that no other run has."""
    name = (
        f"{Path(config.task).stem}-{config.method}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    names = [config.out] if config.out else [f"runs/{name}{x}" for x in ("", *range(-2, -99, -1))]
    for config.out in names:
        try:
            Path(config.out).mkdir(parents=True)
        except FileExistsError:  # another run has just claimed it
            continue
        except OSError as error:
            raise UserError(f"--out {config.out}: {error.strerror}") from error
        flags = json.dumps(asdict(config), indent=1)
        return write_aside(Path(config.out, "config.json"), flags + "\n")
    raise UserError(f"--out {config.out} exists; choose another, or --resume it")


def read_config(run: str) -> dict:
    """The flags of the run that --resume names."""
    try:
        saved = json.loads((Path(run) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        saved = {}
    if not isinstance(saved, dict) or set(saved) != {f.name for f in fields(Config)}:
        raise UserError(f"--resume {run}: no config.json of this version's runs there")
    return saved | {"resume": run, "out": run}


def how_to_go_on(config) -> str:
    if Path(config.out, "checkpoint.pt").exists():
        return f"go on from the last evaluation: python train.py --resume {config.out}"
    return "nothing is saved"


def record(metrics: dict, config):
    """A line of metrics.jsonl; of an evaluation also a few words on the screen."""
    with open(Path(config.out, "metrics.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")
    if config.track:
        numbers = {key: x for key, x in metrics.items() if key != "examples"}
        importlib.import_module(config.track).log(numbers, step=metrics["step"])
    if "greedy" in metrics:
        shown = ("loss", "grad_norm", "reward", "repair_rate", "entropy", "kl", "greedy", "sampled")
        keys = [key for key in metrics if key in shown or key.startswith("pass@")]
        tqdm.write(f"step {metrics['step']}: {'  '.join(f'{k} {metrics[k]:.3f}' for k in keys)}")
        tqdm.write(f"    {' / '.join(metrics['examples'][-1].splitlines())}")


def summarize(folder: Path):
    """Did it work? The first and the last evaluation, the speed, and on a GPU the memory."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    said = [f"{key} {first[key]:.3f} -> {last[key]:.3f}" for key in ("greedy", "sampled")]
    if torch.cuda.is_available():
        said.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most")
    print(f"held out: {', '.join(said)}")
    noise = math.hypot(first["greedy_se"], last["greedy_se"])  # the standard error of a difference
    if last["greedy"] < first["greedy"] - 2 * noise:
        print("It ends below its start by more than two standard errors: something is wrong.")
    if last.get("truncated") == 1:
        print(
            "No answer has ended: raise --max-tokens, or is the model's end of turn another token?"
        )
    elif last.get("truncated", 0.0) > 0.2:
        cut = f"{last['truncated']:.0%} of the last answers were cut off"
        print(f"{cut}. If more steps do not shorten them, raise --max-tokens.")
    print(f"everything is in {folder}; all flags: python train.py --help")
    print(f"its curves: python -m experiments.compare --runs {folder} --plot curves.png")


def save_rollout(policy, rollout, step, config):
    """A rollout with the log-probs before and after its step, for those who draw it."""
    tokens = rollout.tokens.tolist()
    batch = {
        "step": step,
        "method": config.method,
        "scale": config.scale,
        "group_size": config.group_size,
        "max_tokens": config.max_tokens,
        "prompts": [item.prompt for item in rollout.items[:: config.group_size]],
        "pieces": [[policy.tokenizer.decode([i]) for i in row] for row in tokens],  # (N, T)
        "tokens": rollout.tokens,
        "mask": rollout.mask,
        "rewards": rollout.rewards,
        "logp_old": rollout.old,
        "logp": log_probs_in_pieces(policy, rollout, config),
    }
    folder = Path(config.out, "batches")
    folder.mkdir(exist_ok=True)
    torch.save(batch, folder / f"step-{step:06d}.pt")


def save(policy, optimizer, step, folder: Path):
    """The name checkpoint.pt always stands for a whole file: the old one, or the new one."""
    if not all(weight.isfinite().all() for weight in policy.model.parameters()):
        raise UserError(f"step {step}: a weight is not finite; what is saved is intact")
    state = {
        "step": step,
        "model": policy.model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "metrics": (folder / "metrics.jsonl").read_text("utf-8"),  # to this step
    }
    torch.save(state, folder / "unfinished.pt")
    os.replace(folder / "unfinished.pt", folder / "checkpoint.pt")


def restore(policy, optimizer, folder: Path) -> int:
    """Policy, optimiser and metrics.jsonl as they were after a step, which is returned."""
    with blame(f"--resume {folder}: checkpoint.pt", Exception):
        state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    policy.model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    write_aside(folder / "metrics.jsonl", state["metrics"])
    return state["step"]


def write_model(policy, folder: Path):
    """In transformers' own format, so that AutoModelForCausalLM and AutoTokenizer read it."""
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def write_aside(path: Path, text: str):
    """A file is replaced as a whole, or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
