"""Time a training step beside TRL's, on a CPU or on a GPU.

    python -m experiments.bench                           the toy
    python -m experiments.bench --task gsm8k --rounds 3   or any other flags of train.py

A whole training step of GRPO: rollout, reward, learning. *plain* is train.py alone, *fast* is
--fast, TRL is its GRPOTrainer. All have the same model, prompts from the same task, one update, and
as many answers. Every second answer is rewarded, so that each group has something to learn. A
learning rate of 0 in effect keeps the policy as it is. Every side draws answers of its own, and the
table shows that they are about as long.

The task notes when it is asked for a reward: a step lasts from the last reward of one rollout to
that of the next. The sides take turns in one process, so that what slows the machine for a while
slows all of them. On a CPU there is one thread, and CPU seconds are counted. A figure is the median
over rounds, a ratio the median of the rounds' quotients. On a GPU there is the peak of memory of
each side, too. Nobody has run that yet. Needs TRL.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import math
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from io import StringIO
from statistics import fmean

import pandas as pd
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import train

CUDA = torch.cuda.is_available()
SIDES = ("plain", "fast", "TRL")
# Two steps, of which the second is timed, and next to no evaluation.
ALWAYS = "--warm-steps 0 --steps 2 --minibatches 1 --lr 1e-30 --eval-items 1 --threads 1"


def now() -> float:
    """Seconds. On a CPU those of this process, so that other programs count less."""
    if not CUDA:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def clock(task) -> list[tuple[float, int]]:
    """Give a task a reward that notes of each answer when it is asked for, and the length."""
    seen, task.test = [], task.test[:1]

    def reward(text, item=None) -> float:
        if item not in task.test:
            seen.append((now(), len(text)))
        return len(seen) % 2 * 1.0

    task.reward = reward
    return seen


def run_trl(config: train.Config, task, out: str):
    answers = config.prompts * config.group_size
    rows = math.gcd(config.micro_rows, answers)
    settings = GRPOConfig(
        out,
        max_steps=2,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=answers // rows,
        num_generations=config.group_size,
        max_completion_length=config.max_tokens,
        temperature=config.temperature,
        loss_type="grpo",
        learning_rate=config.lr,
        # As train.py:
        model_init_kwargs={"dtype": "float32"},
        bf16=CUDA and torch.cuda.get_device_capability() >= (8, 0),
        use_cpu=not CUDA,
        disable_dropout=True,
        gradient_checkpointing=False,
        # Quiet:
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )

    def reward(completions, **_) -> list[float]:
        return [task.reward(text) for text in completions]

    tokenizer = AutoTokenizer.from_pretrained(config.model)
    prompts = tokenizer.batch_decode(task.encode(tokenizer, task.train[: 2 * config.prompts]))
    data = Dataset.from_dict({"prompt": prompts})
    GRPOTrainer(config.model, reward, settings, data, processing_class=tokenizer).train()


def time_step(side: str, flags: list[str], task, seen: list) -> dict[str, float]:
    """Seconds of one step, its answers' mean length, and on a GPU the most memory that was held."""
    gc.collect()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as out, redirect_stdout(StringIO()):
        flags = [*flags, "--fast", str(side == "fast"), "--out", f"{out}/run"]
        config, _ = train.parse(flags)
        if side == "TRL":
            run_trl(config, task, out)
        else:
            train.main(flags, task)
    answers = config.prompts * config.group_size
    times, letters = zip(*seen[-1 - answers :], strict=True)  # and the last of the step before
    found = {"seconds": times[-1] - times[0], "letters": fmean(letters[1:])}
    return found | ({"GB": torch.cuda.max_memory_allocated() / 1e9} if CUDA else {})


def main(argv: list[str] | None = None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5)
    options, flags = parser.parse_known_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    config, Task = train.parse(flags)
    task = Task(config.data) if config.data else Task()
    seen, rows = clock(task), []
    with tempfile.TemporaryDirectory() as folder:
        if config.model == "scratch":  # what it is after its warm start
            train.main([*flags, "--steps", "0", "--out", f"{folder}/run"], task)
            flags += ["--model", f"{folder}/run/model"]  # at the sizes of the scratch model
            for size in ("prompts", "max_tokens", "micro_rows"):
                flags += [f"--{size}", str(getattr(config, size))]
        flags += ALWAYS.split()
        for number, side in itertools.product(range(options.rounds), SIDES):
            row = time_step(side, flags, task, seen)
            rows.append({"round": number, "side": side} | row)
    table = pd.DataFrame(rows).set_index(["round", "side"])
    print(table.groupby("side", sort=False).median().round(3))
    seconds = table["seconds"].unstack()
    for side in ("plain", "fast"):
        print(f"TRL / {side}: {(seconds['TRL'] / seconds[side]).median():.2f}", flush=True)


if __name__ == "__main__":
    main()
