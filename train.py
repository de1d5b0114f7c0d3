"""Group-relative RL for a language model: the training loop, from the first update to main.

update -> evaluate -> warm start -> training step -> main, in this order. The policy (loading, rollout, scoring) is in
model.py, the knobs in config.py, the methods in losses.py, the tasks in toy/arithmetic.py and gsm8k.py; runs.py writes
what a run leaves. `python train.py` needs no GPU and no download; `python train.py --help` lists every knob.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from cli import fail
from config import Config, hyperparameters, parse, pick
from experiments.compare import compare, wanted
from llm.gsm8k import GSM8K
from llm.policy import Rows, apart, load_model, make_rows, pieces, rng, rollout, score, score_all
from llm.runs import (
    LOGS,
    default_name,
    lock,
    new_run,
    newest_checkpoint,
    record,
    restore,
    save,
    start_file,
    stop_at_bad_numbers,
    summary,
    write_config,
)
from losses import (
    METHODS,
    Batch,
    OldPolicy,
    group_advantages,
    k3,
    kept_tokens,
    learning_tax,
    prefix_nodes,
    project,
    shaped_rewards,
    token_coefficients,
)
from toy.arithmetic import Arithmetic

# ---------------- update


def adamw(model, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )


def update(
    model, optimizer, loss_fn, rows: Rows, batch: Batch, config: Config
) -> tuple[Tensor, float]:
    """One optimiser step. Returns the token coefficients (N, T) and the gradient norm.

    The loss is taken on the whole batch as a function of its (N, T) log-probs, a small matrix; its
    gradient there is then carried through the model, in pieces of micro_rows unless the batch's
    graph is at hand. So any loss, however it couples the rows, has exactly the gradient of the
    unsplit batch, and the token coefficients that the meter wants are there for free.
    """
    leaf = batch.logp.detach().requires_grad_()
    loss = loss_fn(replace(batch, logp=leaf))
    coefficients = token_coefficients(loss, leaf)
    optimizer.zero_grad()
    if batch.logp.requires_grad:
        batch.logp.backward(-coefficients / len(leaf))
    else:
        for piece in pieces(rows, config.micro_rows):
            logp, _ = score_all(
                model, rows[piece], config.temperature, config.micro_rows, grad=True
            )
            logp.backward(-coefficients[piece] / len(leaf))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip).item()
    if not (math.isfinite(norm) and math.isfinite(loss.item())):
        bad = FloatingPointError(f"loss {loss.item()}, gradient norm {norm}")
        bad.batch = vars(rows) | vars(replace(batch, logp=leaf.detach()))
        raise bad
    if (
        coefficients.any()
    ):  # with nothing to learn, the optimiser's momentum must not move the weights either
        optimizer.step()
    return coefficients, norm


def learn(
    model, optimizer, config: Config, hyper: dict, rows: Rows, batch: Batch, advantages: Tensor, gen
) -> dict:
    """All optimiser steps on one rollout batch: epochs x minibatches x passes. Returns their mean
    diagnostics."""
    nodes = prefix_nodes(rows.tokens, rows.mask, config.group_size)
    merged = (
        prefix_nodes(rows.tokens, rows.mask, config.group_size, config.context)
        if config.context
        else nodes
    )
    groups = torch.arange(len(rows.tokens), device=rows.tokens.device).view(-1, config.group_size)
    seen = []
    for _ in range(config.epochs):
        order = torch.randperm(len(groups), generator=gen).to(groups.device)
        for index in groups[order].view(config.minibatches, -1):  # whole groups
            part, adv, mask = batch[index], advantages[index], batch.mask[index]
            for method_pass in METHODS[config.method].passes:

                def loss_fn(b: Batch, method_pass=method_pass, adv=adv, index=index) -> Tensor:
                    loss = method_pass(b, **pick(hyper, method_pass))
                    return (
                        project(loss, b.logp, adv, merged[index], b.mask)
                        if config.project
                        else loss
                    )

                if seen:  # the weights may have moved
                    fits = len(index) <= config.micro_rows
                    logp, _ = score_all(
                        model, rows[index], config.temperature, config.micro_rows, grad=fits
                    )
                    part = replace(part, logp=logp)
                c, norm = update(model, optimizer, loss_fn, rows[index], part, config)
                start = (
                    part.logp_old.clone().requires_grad_()
                )  # tokens outside this pass have c = 0 there too
                live = token_coefficients(loss_fn(replace(part, logp=start)), start) != 0
                counted = mask & (part.adv != 0) & live
                seen.append({"grad_norm": norm})
                if counted.any():  # a batch of equal-reward groups has nothing to clip or to tax
                    seen[-1]["clip_share"] = ((counted & (c == 0)).sum() / counted.sum()).item()
                    seen[-1]["tax"] = learning_tax(c, adv, nodes[index], mask)
    found = {key: [m[key] for m in seen if key in m] for key in ("grad_norm", "clip_share", "tax")}
    return {key: sum(values) / max(1, len(values)) for key, values in found.items()}


# ---------------- evaluate


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k answers is right) from n answers: 1 - C(n-c, k) /
    C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def decode(tokenizer, rows: Rows, eos: Tensor) -> list[str]:
    """The answers without their EOS; any other special token stays visible, so that no verifier
    overlooks it."""
    keep = (rows.mask & ~torch.isin(rows.tokens, eos)).tolist()
    kept = [
        [i for i, k in zip(*row, strict=True) if k]
        for row in zip(rows.tokens.tolist(), keep, strict=True)
    ]
    return tokenizer.batch_decode(kept)


def encode(tokenizer, texts: Iterable[str]) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def evaluate(model, tokenizer, eos: Tensor, task, config: Config) -> tuple[dict, list[str]]:
    """Held-out greedy accuracy, sampled accuracy and pass@k, exact prefix probabilities; and a few
    answers to read."""
    items, k, lines = task.test[: config.eval_items], config.eval_samples, []
    gen = rng(config.seed, "evaluate")
    greedy, sampled = [], []
    at_once = max(1, config.prompts * config.group_size // k)
    for i in range(0, len(items), at_once):
        some = items[i : i + at_once]
        prompts = task.encode(tokenizer, some)
        for copies, temperature, scores in ((1, 0.0, greedy), (k, config.temperature, sampled)):
            rows, _ = rollout(model, prompts, copies, config.max_tokens, temperature, eos, gen)
            texts = decode(tokenizer, rows, eos)
            rewards = [task.reward(text, some[j // copies]) for j, text in enumerate(texts)]
            scores += rewards
            if temperature and len(lines) < 3:
                shown = [
                    (some[j].prompt, texts[j * k], rewards[j * k]) for j in range(min(3, len(some)))
                ]
                lines = [
                    " / ".join(f"{prompt} -> {text}  [{r:g}]".splitlines())
                    for prompt, text, r in shown
                ]
    right = [sum(r == 1 for r in sampled[j : j + k]) for j in range(0, len(sampled), k)]
    metrics = {
        "greedy": sum(greedy) / len(greedy),
        "sampled": sum(sampled) / len(sampled),
        f"pass@{k}": sum(pass_at_k(k, c, k) for c in right) / len(right),
    }
    if (
        hasattr(task, "prefixes") and config.model == "scratch"
    ):  # with another tokenizer a text has several encodings
        metrics |= prefix_probabilities(model, tokenizer, task, items[:32], config, eos.device)
    return metrics, lines


def prefix_probabilities(
    model, tokenizer, task, items: list, config: Config, device: torch.device
) -> dict:
    """Mean over items of the policy's exact probability that an answer begins with one of a named
    set of prefixes."""
    found = [
        (name, item, text)
        for item in items
        for name, texts in task.prefixes(item).items()
        for text in texts
    ]
    names, asked, texts = zip(*found, strict=True)
    rows = make_rows(task.encode(tokenizer, asked), encode(tokenizer, texts), device)
    logp, _ = score_all(model, rows, config.temperature, config.micro_rows)
    total = dict.fromkeys(names, 0.0)
    for name, p in zip(names, logp.sum(1).exp().tolist(), strict=True):
        total[name] += p / len(items)
    return total


# ---------------- main


def warm_start(model, tokenizer, task, config: Config, eos: Tensor):
    """Supervised steps on the task's demonstrations, so that RL has something to find."""
    if (kept := start_file(config)) and kept.exists():
        try:
            return model.load_state_dict(torch.load(kept, map_location="cpu", weights_only=True))
        except Exception:  # torch, pickle and zip each have a class of their own for a damaged file
            print(f"{kept} is damaged; it is made again")
    optimizer = adamw(model, config.warm_lr)
    end = [eos[0].item() if tokenizer.eos_token_id is None else tokenizer.eos_token_id]
    for step in tqdm(range(config.warm_steps), desc="warm start", disable=None):
        for group in optimizer.param_groups:
            group["lr"] = config.warm_lr * min((step + 1) / 20, 1 - step / config.warm_steps)
        picks = torch.randint(
            len(task.train), (config.warm_rows,), generator=rng(config.seed, "warm", step)
        ).tolist()
        repairs = round(config.warm_rows * config.repair_demos)
        items = [
            task.correction(task.train[i], config.repair_references)
            if j < repairs
            else task.train[i]
            for j, i in enumerate(picks)
        ]
        demos = [demo + end for demo in encode(tokenizer, [item.demo for item in items])]
        rows = make_rows(task.encode(tokenizer, items), demos, eos.device)
        logp, _ = score(model, rows, 1.0)
        loss = -logp.sum() / rows.mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not math.isfinite(norm):
            fail(
                f"--warm-lr {config.warm_lr}: the warm start diverged at its step {step + 1} (gradient norm {norm})"
            )
        optimizer.step()
    if kept:
        torch.save(model.state_dict(), part := kept.with_suffix(f".{os.getpid()}"))
        part.rename(kept)  # another process may be making the same one


def next_items(task, config: Config, step: int) -> list:
    """The prompts of a step: walk through one permutation of the training split after another."""
    n, items = len(task.train), []
    for i in range((step - 1) * config.prompts, step * config.prompts):
        if i % n == 0 or not items:
            order = torch.randperm(n, generator=rng(config.seed, "order", i // n)).tolist()
        items.append(task.train[order[i % n]])
    return items


def correct(
    model,
    tokenizer,
    eos,
    task,
    config: Config,
    items: list,
    texts: list[str],
    rows: Rows,
    rewards,
    gen,
):
    """A second rollout: the policy corrects each of its wrong answers, shown next to siblings,
    right ones first.

    items, texts, rewards: of the N answers in rows. Returns which answers it repaired (N,) bool,
    which of their tokens the repair kept (N, T) bool, and how many tokens it generated.
    """
    G, repaired, kept = (
        config.group_size,
        torch.zeros_like(rewards, dtype=torch.bool),
        torch.zeros_like(rows.mask),
    )
    wrong, problems = (rewards == 0).nonzero().flatten().tolist(), []
    for i in wrong:
        siblings = [i - i % G + (i + k) % G for k in range(1, G)]
        chosen = sorted(siblings, key=lambda j: rewards[j].item() != 1)[: config.repair_references]
        problems.append(task.repair(items[i], texts[i], [texts[j] for j in chosen]))
    if not wrong:
        return repaired, kept, 0
    fixed, _ = rollout(
        model, task.encode(tokenizer, problems), 1, config.max_tokens, config.temperature, eos, gen
    )
    scores = [
        task.reward(text, items[i])
        for i, text in zip(wrong, decode(tokenizer, fixed, eos), strict=True)
    ]
    wrong = torch.tensor(wrong, device=rewards.device)
    repaired[wrong] = torch.tensor(scores, device=rewards.device) == 1
    stays = kept_tokens(rows.tokens[wrong], rows.mask[wrong], fixed.tokens, fixed.mask)
    kept[wrong] = stays & repaired[wrong, None]
    return repaired, kept, fixed.mask.sum().item()


def train_step(
    model,
    reference,
    tokenizer,
    optimizer,
    eos: Tensor,
    task,
    config: Config,
    hyper: dict,
    step: int,
) -> dict:
    """Rollout, reward, score, learn. Returns the step's metrics."""
    gen, clock = rng(config.seed, "step", step), [time.perf_counter()]
    if config.schedule == "linear":
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1 - (step - 1) / config.steps)
    method, scoring = METHODS[config.method], (config.temperature, config.micro_rows)
    items = next_items(task, config, step)
    prompts = task.encode(tokenizer, items)
    rows, sampled = rollout(
        model, prompts, config.group_size, config.max_tokens, config.temperature, eos, gen
    )
    texts, items = (
        decode(tokenizer, rows, eos),
        [item for item in items for _ in range(config.group_size)],
    )
    rewards = torch.tensor(
        [task.reward(*pair) for pair in zip(texts, items, strict=True)], device=eos.device
    )  # (N,)
    shaped, kept, extra, credited = rewards, None, 0, {}
    if method.repair:
        repaired, kept, extra = correct(
            model, tokenizer, eos, task, config, items, texts, rows, rewards, gen
        )
        shaped = shaped_rewards(rewards, repaired, config.repair_bonus, config.repair_weight)
        credited["shaped_reward"] = shaped.mean().item()
        credited["repair_rate"] = (repaired.sum() / (rewards == 0).sum().clamp(min=1)).item()
    clock.append(time.perf_counter())

    used_whole = (
        config.minibatches == 1 and len(rows.tokens) <= config.micro_rows
    )  # the first update has its graph
    logp, entropy, *hidden = score_all(
        model, rows, *scoring, method.needs_hidden, grad=used_whole
    )  # (N, T), (N, T, d)
    logp_old, logp_ref = logp.detach(), None
    assert not (off := apart(rows, sampled, logp)), (
        f"scored and sampled log-probs differ by {off}: not on-policy"
    )
    if reference is not None:
        logp_ref, _ = score_all(reference, rows, *scoring)
    advantages = group_advantages(shaped, config.group_size, method.scale)  # (N,)
    adv = advantages[:, None].expand_as(logp_old).masked_fill(~rows.mask, 0.0)
    if method.credit is not None:
        old = OldPolicy(
            rows.tokens,
            rows.mask,
            logp_old,
            rewards,
            config.group_size,
            config.temperature,
            gen=gen,
            kept_mask=kept,
        )
        if method.needs_hidden:
            old = replace(old, hidden=hidden[0], head=model.get_output_embeddings().weight.detach())
        plain, adv = adv, method.credit(adv, old, **pick(hyper, method.credit))
        del old, hidden
        if plain.any():
            credited["reshaped"] = ((adv != plain).sum() / (plain != 0).sum()).item()
            credited["adv_left"] = (adv.abs().sum() / plain.abs().sum()).item()
    batch = Batch(logp, logp_old, adv, rows.mask, config.group_size, config.max_tokens, logp_ref)
    clock.append(time.perf_counter())

    diagnostics = learn(model, optimizer, config, hyper, rows, batch, advantages, gen)
    grouped, tokens = shaped.view(-1, config.group_size), rows.mask.sum()
    ended = torch.isin(rows.tokens, eos).logical_and(rows.mask).any(1)
    # As NTHR's Delta(x), but over the whole step: how much likelier it made 32 of its correct
    # answers in mixed groups.
    probe = ((rewards == 1) & (advantages != 0)).nonzero().squeeze(1)[:32]
    if len(probe):
        change = score_all(model, rows[probe], *scoring)[0] - logp_old[probe]
        diagnostics["delta"] = change.sum(1).mean().item()
    clock.append(time.perf_counter())
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
        "generated": tokens.item() + extra,
        "tokens_per_s": (tokens.item() + extra) / (clock[-1] - clock[0]),
    }
    times = [b - a for a, b in zip(clock, clock[1:], strict=False)]
    return metrics | dict(zip(("rollout_s", "score_s", "update_s"), times, strict=True))


def check_context(model, tokenizer, task, config: Config, warm: bool):
    """Refuse prompts that with their answer, or before a warm start their demonstration, exceed the
    model's context."""
    limit = getattr(model.config, "max_position_embeddings", math.inf)
    longest = max(map(len, task.encode(tokenizer, [*task.train, *task.test[: config.eval_items]])))
    if METHODS[config.method].repair:  # the longest correction problem, in answers of max_tokens
        shown = config.repair_references
        around = max(
            map(
                len,
                task.encode(
                    tokenizer, [task.repair(item, "", [""] * shown) for item in task.train]
                ),
            )
        )
        longest = max(longest, around + (1 + shown) * config.max_tokens)
    demo = max(map(len, encode(tokenizer, [item.demo for item in task.train]))) + 1 if warm else 0
    if longest + max(config.max_tokens, demo) > limit:
        answer = (
            f"--max-tokens {config.max_tokens}"
            if config.max_tokens >= demo
            else f"longest demonstration {demo}"
        )
        fail(f"longest prompt {longest} + {answer} exceed the model's context of {limit} tokens")


def start_run(config: Config, task, device: torch.device):
    """A new run directory with a warm-started model, or an old one as its newest checkpoint has
    it."""
    run = Path(config.resume or Path(config.out) / (config.name or default_name(config)))
    held = found = state = None
    if config.resume:
        held = lock(run)
        found, state = newest_checkpoint(run)
        if not found:
            print(f"{run} holds no complete checkpoint: it begins anew")
    if found and state["step"] >= config.steps:
        fail(
            f"{run} has already made {state['step']} of {config.steps} steps; nothing is left to do"
        )
    model, tokenizer, eos = load_model(config, task, device, str(found or config.model))
    check_context(model, tokenizer, task, config, warm=config.warm_steps > 0 and not found)
    start = (
        run / "start" if config.warm_steps else config.model
    )  # the policy that the KL is measured from
    if not config.resume:
        new_run(run, config, device)
        held = lock(run)
    if not found:
        for name in LOGS:
            (run / name).write_text("")
        print(
            f"{config.method} on {config.task}, {sum(p.numel() for p in model.parameters()):,} parameters, into {run}"
        )
        supervised = f"{config.warm_steps} supervised steps on the task's own demonstrations"
        print(
            f"1. warm start: {supervised if config.warm_steps else 'none, the model is taken as it is'}"
        )
        updates = config.epochs * config.minibatches * len(METHODS[config.method].passes)
        each = f"{config.prompts} prompts x {config.group_size} answers, {updates} update(s)"
        print(
            f"2. reinforcement learning: {config.steps} steps of {each}; only the final answer is rewarded",
            flush=True,
        )
        try:
            warm_start(model, tokenizer, task, config, eos)
        except KeyboardInterrupt:
            if not config.resume:
                shutil.rmtree(run)  # nothing to go on from
            raise
        if config.reference and config.warm_steps:
            try:
                model.save_pretrained(start)
                tokenizer.save_pretrained(start)
            except Exception as error:  # a full disk, see runs.save
                sys.exit(
                    f"error: the start policy cannot be written ({str(error).splitlines()[0]}); make room, start anew"
                )
    elif config.reference and config.warm_steps and not start.is_dir():
        fail(f"--resume {run}: start/, the policy that the KL is measured from, is missing")
    reference = load_model(config, task, device, str(start))[0] if config.reference else None
    optimizer = adamw(model, config.lr)
    done = restore(run, optimizer, state) if found else 0
    if config.resume:
        write_config(
            run, config, device
        )  # --steps may be new; nothing is written before all is known to fit
    return run, held, model, reference, tokenizer, optimizer, eos, done


def main(argv: list[str] | None = None):
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    argv = sys.argv[1:] if argv is None else argv
    if wanted(argv):
        return compare(argv, main)
    config = parse(argv)
    try:
        make_run(config)
    except torch.OutOfMemoryError as error:
        less = "--micro-rows (also beside --resume), --prompts, --max-tokens, --warm-rows"
        fail(f"{str(error).partition('. ')[0]}; what helps: less of {less}; --no-reference")


def make_run(config: Config):
    """From the start, or a resumed run's last checkpoint, to the end."""
    hyper = hyperparameters(config)
    torch.set_num_threads(config.threads or os.cpu_count())
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    try:
        task = (
            GSM8K(config.data or None, config.skip_bad_lines)
            if config.task == "gsm8k"
            else Arithmetic()
        )
    except ValueError as error:
        fail(str(error))
    if config.train_items:
        task.train = sorted(task.train, key=lambda item: len(item.demo))[: config.train_items]
    run, held, model, reference, tokenizer, optimizer, eos, done = start_run(config, task, device)
    if not done:
        record(run, {"step": 0}, *evaluate(model, tokenizer, eos, task, config), show=True)
    stop = []  # Ctrl-C: finish the step, save, leave; a second one leaves at once
    previous = signal.signal(
        signal.SIGINT, lambda *_: stop.append(1) if not stop else sys.exit(130)
    )
    bar = tqdm(
        range(done + 1, config.steps + 1),
        initial=done,
        total=config.steps,
        desc=config.method,
        disable=None,
    )
    for step in bar:
        try:
            metrics = train_step(
                model, reference, tokenizer, optimizer, eos, task, config, hyper, step
            )
        except FloatingPointError as error:
            stop_at_bad_numbers(run, step, error)
        bar.set_postfix(
            {k: f"{metrics[k]:.3g}" for k in ("reward", "entropy", "length", "tax", "tokens_per_s")}
        )
        last, stopping = step == config.steps, bool(stop)
        due = step % config.eval_every == 0 or last
        record(
            run, metrics, *(evaluate(model, tokenizer, eos, task, config) if due else ()), show=last
        )
        if step % config.save_every == 0 or last or stopping:
            save(run, step, model, tokenizer, optimizer)
        if stopping and not last:
            break
    bar.close()
    held.close()
    signal.signal(signal.SIGINT, previous)
    if stopping and not last:
        return print(
            f"stopped after step {step}; go on with: python {os.path.relpath(__file__)} --resume {run}"
        )
    summary(run)
    other = "grpo" if config.method == "dfpo-min" else "dfpo-min"
    print(
        f"\neverything is in {run}; try next: python {os.path.relpath(__file__)} --method {other}, or --help"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted before the first step; there is nothing to go on from, start again")
