"""What the toy trains: a small GPT-2 with random weights, and the supervised steps before RL.

If every answer is wrong, all rewards are equal and there is nothing to compare. So a model from
scratch first imitates demonstrations. None of this is RL, and a pretrained model needs none of it.
"""

from __future__ import annotations

import math
from statistics import fmean

import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from llm.runs import rng


def make_model(config, tokenizer) -> torch.nn.Module:
    """A small GPT-2 with random weights."""
    torch.manual_seed(config.seed)
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


def warm_start(policy, task, optimizer, method, config):
    """Supervised steps on the task's demonstrations, so that RL has something to find.

    If the method corrects wrong answers, 30% of the demonstrations are corrections: a policy that
    never saw a correction makes none. Raises ValueError if there is no demonstration, or if a
    gradient is not finite.
    """
    shown = [item for item in task.train if item.demo]
    if not shown:
        raise ValueError("no item has a demonstration to imitate: give --model NAME, or `demo`s")
    plain, corrections = encode_demos(policy, task, shown), 0
    if method.repair:
        corrections = round(0.3 * config.warm_rows)
        items = [task.correction(item, config.repair_references) for item in shown]
        fixed = encode_demos(policy, task, items)
    model = policy.model
    for step in tqdm(range(config.warm_steps), "warm start", disable=None):
        for group in optimizer.param_groups:  # 20 steps of warm-up, linear decay
            group["lr"] = config.warm_lr * min((step + 1) / 20, 1 - step / config.warm_steps)
        gen = rng(config.seed, "warm", step)
        picks = torch.randint(len(plain), (config.warm_rows,), generator=gen).tolist()
        rows = [(fixed if i < corrections else plain)[k] for i, k in enumerate(picks)]
        learned = sum(len(demo) for _, demo in rows)
        # Long texts go through the model apart, because the short ones would be mostly padding.
        average = fmean(len(prompt + demo) for prompt, demo in rows)
        short = [row for row in rows if len(row[0] + row[1]) <= average]
        long = [row for row in rows if len(row[0] + row[1]) > average]
        for some in filter(None, (short, long)):  # all may be of one length
            # Padding follows a text, where a causal model does not look. A label of -100 is not
            # learned: neither prompts nor padding are.
            ids = pad([prompt + demo for prompt, demo in some], 0, model)
            labels = pad([[-100] * len(prompt) + demo for prompt, demo in some], -100, model)
            with policy.autocast():
                out = model(ids, labels=labels, num_items_in_batch=learned, use_cache=False)
            out.loss.backward()  # the sum over these tokens, divided by those of all rows
        norm = clip_grad_norm_(model.parameters(), 1.0).item()
        if not math.isfinite(norm):
            raise ValueError(f"warm start, step {step + 1}: the gradient is not finite ({norm})")
        optimizer.step()
        model.zero_grad()


def encode_demos(policy, task, items) -> list[tuple[list[int], list[int]]]:
    """The ids of each item's prompt, and those of its demonstration with its end."""
    tokenizer = policy.tokenizer
    end = int(policy.eos[0]) if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    demos = tokenizer([item.demo for item in items], add_special_tokens=False)["input_ids"]
    prompts = task.encode(tokenizer, items)
    return [(prompt, [*demo, end]) for prompt, demo in zip(prompts, demos, strict=True)]


def pad(rows: list[list[int]], value: int, model) -> torch.Tensor:
    """Rows of ids as one tensor, filled up with a value on the right."""
    return pad_sequence([torch.tensor(row) for row in rows], True, value).to(model.device)
