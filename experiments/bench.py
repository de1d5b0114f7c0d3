"""Time a training step beside TRL's: rollout, reward, learning.

    python -m experiments.bench --task sums --model models/SmolLM2-135M-Instruct
    python -m experiments.bench --task gsm8k --matmul medium

It takes all flags of train.py, and needs TRL and a pretrained model; --micro-rows must divide the
number of answers. Both sides have the same model, prompts from the same task, one update, and as
many answers. Every second answer is rewarded, so that each group has something to learn. The
learning rate is next to 0, which keeps the policy as it is. Each side samples its own answers, and
the table shows that they are about as long.

A step lasts from the reward of one rollout to that of the next. The sides take turns in one
process, so that what slows the machine for a while slows both. The table shows medians over rounds,
in seconds of the clock and of all cores together. --matmul is torch's precision of fp32 matrix
products on both sides, wherever train.py does not set its own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from statistics import fmean

import pandas as pd
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import train
from engines import example

ROUNDS = 3
# The second step is timed. An evaluation has one answer.
TWO_STEPS = "--steps 2 --minibatches 1 --lr 1e-30 --eval-items 1 --eval-samples 1".split()


def clock(task) -> list[dict]:
    """Give a task rewards that note, of each rollout, both times and the mean length of a text."""
    seen = []

    def rewards(texts, items=None) -> list[float]:
        if len(texts) > 1:  # a rollout's
            times = {"wall": time.perf_counter(), "cpu": time.process_time()}
            seen.append(times | {"letters": fmean(map(len, texts))})
        return [i % 2 * 1.0 for i in range(len(texts))]

    task.rewards = rewards
    return seen


def run_trl(config: train.Config, task, out: str):
    settings = GRPOConfig(
        out,
        max_steps=config.steps,
        per_device_train_batch_size=config.micro_rows,
        gradient_accumulation_steps=config.prompts * config.group_size // config.micro_rows,
        num_generations=config.group_size,
        max_completion_length=config.max_tokens,
        temperature=config.temperature,
        loss_type="grpo",
        learning_rate=config.lr,
        # As train.py:
        model_init_kwargs={"dtype": "float32"},
        disable_dropout=True,
        gradient_checkpointing=False,
        **example.ALWAYS | ({} if torch.cuda.is_available() else example.CPU),
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    prompts = tokenizer.batch_decode(task.encode(tokenizer, task.train[: 2 * config.prompts]))
    data = Dataset.from_dict({"prompt": prompts})
    reward = lambda completions, **_: task.rewards(completions)  # noqa: E731
    GRPOTrainer(config.model, reward, settings, data, processing_class=tokenizer).train()


def main(argv: list[str] | None = None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--matmul", default="highest", choices=("highest", "high", "medium"))
    options, flags = parser.parse_known_args(argv)
    config, Task = train.parse([*flags, *TWO_STEPS])
    task, rows = Task(config.data) if config.data else Task(), []
    seen = clock(task)
    for side in ["ours", "TRL"] * ROUNDS:
        torch.set_float32_matmul_precision(options.matmul)
        with tempfile.TemporaryDirectory() as out, redirect_stdout(StringIO()):
            if side == "TRL":
                run_trl(config, task, out)
            else:
                train.main([*flags, *TWO_STEPS, "--out", f"{out}/run"], task)
        before, after = seen[-2:]
        took = {name: after[name] - before[name] for name in ("wall", "cpu")}
        rows.append(after | took | {"side": side})
    print(pd.DataFrame(rows).groupby("side").median().round(3), flush=True)


if __name__ == "__main__":
    main()
