"""A whole training step: train.py plain, with --fast, and TRL's GRPOTrainer.

    python -m experiments.bench.trl_step [--cases toy gsm8k] [--steps 30]

Needs TRL. All sides have the same model, prompts, reward, loss (grpo, no KL) and batch. The
learning rate is 0, so all stay at one policy, whose answers have geometric lengths. So their
numbers of tokens agree up to sampling, and are printed. TRL's trainer runs its own loop; our two
steps are made at the end of each of TRL's. The first round is left out.
"""

import argparse
import logging
import tempfile
import warnings
from dataclasses import replace
from statistics import mean, median

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from experiments.bench.cases import (
    CASES,
    EOS,
    GROUP,
    Case,
    Task,
    make_config,
    make_policy,
    step,
)
from experiments.bench.timing import now, show_ratio

WARM_UP = 1


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Token i is the word "i"."""
    words = {str(i): i for i in range(vocab)}
    core = Tokenizer(models.WordLevel(words, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="0", eos_token=str(EOS), padding_side="left"
    )


class Words(Task):
    """The same prompts and reward, as text."""

    def __init__(self, case: Case):
        super().__init__(case)
        self.train = [" ".join(map(str, prompt)) for prompt in self.train]

    def encode(self, tokenizer, items: list[str]) -> list[list[int]]:
        return tokenizer(items, add_special_tokens=False)["input_ids"]

    def reward(self, text: str, item=None) -> float:
        return super().reward(map(int, text.split()))


class Sides(TrainerCallback):
    """At the end of TRL's step, makes ours. Notes the seconds and tokens of all."""

    def __init__(self, case: Case):
        plain = make_policy(case, make_tokenizer(case.vocab))
        self.policies = {"plain": plain, "fast": replace(plain, fast=True)}
        self.task, self.config = Words(case), make_config(case)
        self.seconds = {side: [] for side in ("plain", "fast", "trl")}
        self.tokens = {side: [] for side in self.seconds}
        self.start = 0.0

    def on_train_begin(self, *_, **__):
        self.start = now()

    def on_step_end(self, args, state, control, **_):
        self.seconds["trl"].append(now() - self.start)
        for side in list(self.policies)[:: -1 if state.global_step % 2 else 1]:
            start = now()
            metrics = step(self.policies[side], self.task, self.config, state.global_step)
            self.seconds[side].append(now() - start)
            self.tokens[side].append(metrics["generated"])
        self.start = now()


def run(case: Case, steps: int) -> Sides:
    """Steps of the three sides, in turns."""
    sides, task = Sides(case), Words(case)

    def reward_fn(completions, completion_ids, **_) -> list[float]:
        sides.tokens["trl"].append(sum(map(len, completion_ids)))
        return [task.reward(text) for text in completions]

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            out,
            max_steps=steps,
            per_device_train_batch_size=case.prompts * GROUP,
            num_generations=GROUP,
            max_completion_length=case.cap,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            loss_type="grpo",
            learning_rate=0.0,
            weight_decay=0.0,
            # As ours is on a CPU:
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            # Quiet:
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            make_policy(case).model,
            reward_fn,
            config,
            Dataset.from_dict({"prompt": task.train * (steps + 1)}),
            processing_class=make_tokenizer(case.vocab),
            callbacks=[sides],
        )
        trainer.train()
    return sides


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", nargs="+", choices=("toy", "gsm8k"), default=["toy", "gsm8k"])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in options.cases:
        sides = run(CASES[name], WARM_UP + options.steps)
        seconds = {side: x[WARM_UP:] for side, x in sides.seconds.items()}
        for side, x in seconds.items():
            tokens = mean(sides.tokens[side])
            print(f"{name:6} {side:5} {median(x):7.3f} s a step, {tokens:6.0f} tokens")
        for over, under in (("trl", "plain"), ("trl", "fast"), ("plain", "fast")):
            print(f"{name:6} {over} / {under}: {show_ratio(seconds[over], seconds[under])}")


if __name__ == "__main__":
    main()
