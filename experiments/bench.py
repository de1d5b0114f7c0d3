"""Time a training step beside TRL's, on a CPU or on a GPU.

    python -m experiments.bench [--shapes toy gsm8k] [--rounds 5]        (make gpu)

A whole training step of GRPO: rollout, reward, learning. *plain* is train.py alone, *fast* is
--fast, TRL is its GRPOTrainer. All have the same model (random weights), prompts, reward, loss
(grpo, no KL) and batch. A learning rate of 0 in effect keeps the lengths of answers as they are.
Every side draws answers of its own, and the table shows that their tokens are about as many.

All sides ask one task for their rewards, and the task notes when: a step lasts from the last reward
of one rollout to that of the next. The sides take turns in one process, so that what slows the
machine for a while slows all of them. On a CPU there is one thread, and CPU seconds are counted. A
figure is the median over rounds, a ratio the median of the rounds' quotients.

On a GPU there is the shape of Qwen2.5-0.5B with the GSM8K preset, too, and the peak of memory of
each side. Nobody has run that yet. Needs TRL.
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
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

import train
from toy.arithmetic import BaseTask, Item

CUDA = torch.cuda.is_available()
SIDES = ("plain", "fast", "TRL")
PAD, EOS, G = 0, 1, 8


class Shape(NamedTuple):
    prompts: int  # of a step
    prompt: int  # tokens of a prompt
    mean: int  # tokens of an answer, if it could be as long as it liked
    max_tokens: int
    micro_rows: int
    vocab: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int


SHAPES = {
    "toy": Shape(32, 6, 16, 26, 64, 32, 64, 256, 1, 4, 4),
    "gsm8k": Shape(8, 120, 70, 256, 64, 2048, 256, 1024, 4, 4, 4),
    # Qwen2.5-0.5B, under the preset of GSM8K. Hardly an answer ends.
    "0.5B": Shape(16, 120, 151_936, 512, 4, 151_936, 896, 4864, 24, 14, 2),
}


def now() -> float:
    """Seconds. On a CPU those of this process, so that other programs count less."""
    if not CUDA:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Clocked(BaseTask):
    """Random prompts, and a reward that half of the answers get. A token is a character."""

    def __init__(self, shape: Shape):
        # With the padding, the end and the symbols of BaseTask these are the whole vocabulary.
        letters = [chr(0x20000 + i) for i in range(shape.vocab - 22)]
        gen = torch.Generator().manual_seed(0)
        picks = torch.randint(len(letters), (shape.prompts, shape.prompt), generator=gen)
        prompts = ["".join(letters[i] for i in row) for row in picks]
        self.train = [Item(prompt, "", demo="".join(letters)) for prompt in prompts]
        self.test = [Item(prompts[0], "test", "")]
        self.seen = []  # of each answer: when its reward was asked for, and its tokens

    def reward(self, text: str, item: Item | None = None) -> float:
        if item not in self.test:
            self.seen.append((now(), len(text) + 1))
        return len(text) % 2 * 1.0


def write_model(shape: Shape, folder: Path):
    """Random weights under which an answer ends with chance 1 / mean at each token."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True,
        initializer_range=1e-3,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    # The first number of every embedding is 1, and the others are tiny. So after the last norm it
    # is about sqrt(width) in all hidden states, and there it adds to a token's logit what we like.
    first = model.get_input_embeddings().weight.data[:, 0].fill_(1.0)
    first[EOS] += math.log((shape.vocab - 1) / (shape.mean - 1)) / shape.width**0.5
    first[PAD] = -1.0  # never said
    model.save_pretrained(folder)
    Clocked(shape).make_tokenizer().save_pretrained(folder)


def run_train(shape: Shape, model: Path, out: str, task: Clocked, fast: bool):
    train.load_task = lambda config: task
    flags = f"--model {model} --out {out}/run --fast {fast} --steps 2 --warm-steps 0 --lr 1e-30"
    flags += f" --prompts {shape.prompts} --group-size {G} --max-tokens {shape.max_tokens}"
    flags += f" --micro-rows {shape.micro_rows} --minibatches 1 --eval-items 1"
    train.main(flags.split())


def run_trl(shape: Shape, model: Path, out: str, task: Clocked):
    config = GRPOConfig(
        out,
        max_steps=2,
        per_device_train_batch_size=shape.micro_rows,
        gradient_accumulation_steps=shape.prompts * G // shape.micro_rows,
        num_generations=G,
        max_completion_length=shape.max_tokens,
        loss_type="grpo",
        learning_rate=1e-30,
        # As train.py:
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

    prompts = Dataset.from_dict({"prompt": [item.prompt for item in task.train] * 3})
    tokenizer = task.make_tokenizer()
    GRPOTrainer(str(model), reward, config, prompts, processing_class=tokenizer).train()


def time_step(side: str, shape: Shape, model: Path) -> dict[str, float]:
    """Seconds and tokens of one step, and on a GPU the most memory that the run has held."""
    task, answers = Clocked(shape), shape.prompts * G
    gc.collect()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as out, redirect_stdout(StringIO()):
        if side == "TRL":
            run_trl(shape, model, out, task)
        else:
            run_train(shape, model, out, task, fast=side == "fast")
    seconds = task.seen[-1][0] - task.seen[-1 - answers][0]
    found = {"seconds": seconds, "tokens": sum(tokens for _, tokens in task.seen[-answers:])}
    return found | ({"GB": torch.cuda.max_memory_allocated() / 1e9} if CUDA else {})


def main(argv: list[str] | None = None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    shapes = list(SHAPES) if CUDA else ["toy", "gsm8k"]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in options.shapes:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            write_model(SHAPES[name], Path(folder))
            for number, side in itertools.product(range(options.rounds), SIDES):
                row = time_step(side, SHAPES[name], Path(folder))
                rows.append({"round": number, "side": side} | row)
        table = pd.DataFrame(rows).set_index(["round", "side"])
        print(f"\n{name}\n{table.groupby('side', sort=False).median().round(3)}")
        seconds = table["seconds"].unstack()
        for side in ("plain", "fast"):
            print(f"TRL / {side}: {(seconds['TRL'] / seconds[side]).median():.2f}", flush=True)


if __name__ == "__main__":
    main()
