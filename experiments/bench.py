"""Time a training step beside TRL's, on a CPU or on a GPU.

    python -m experiments.bench [--shapes toy gsm8k] [--rounds 9]        (make gpu)

A whole training step of GRPO: rollout, reward, learning. TRL's is its GRPOTrainer's. *Plain* is
train.py alone, *fast* is --fast. All sides have the same model (random weights), prompts, reward,
loss (grpo, no KL) and batch. A bias on EOS makes answers end, and the learning rate is 0, so
lengths stay as they are. Every side draws answers of its own, and the table shows that their tokens
are about as many.

The sides take turns in one process. A round runs each of them once, so that what slows the machine
for a while slows all of them. The first round is left out. A figure is the median over rounds, a
ratio the median of the rounds' quotients. On a CPU there is one thread, and its CPU seconds are
counted.

On a GPU there is the shape of Qwen2.5-0.5B with the GSM8K preset, too, and the peak of memory of a
step. Nobody has run that yet. Needs TRL.
"""

import argparse
import gc
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

import losses
import train
from llm import fast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EOS = 1


# ---------------- what is timed


@dataclass
class Shape(train.Config):
    """A run's Config, and what its prompts and answers are like."""

    prompt: int = 120  # tokens
    mean: float = math.inf  # length of answers before the cap; inf: hardly one ends
    vocab: int = 151_936
    minibatches: int = 1
    lr: float = 0.0
    schedule: str = "constant"


SHAPES = {
    "toy": Shape(prompts=32, max_tokens=16, micro_rows=256, layers=2, prompt=6, mean=12, vocab=22),
    "gsm8k": Shape(
        prompts=8, max_tokens=256, micro_rows=64, layers=4, width=256, mean=70, vocab=2048
    ),
    "0.5B": Shape(prompts=16, max_tokens=512, micro_rows=8),
}
# Qwen2.5-0.5B's architecture; its weights are random here.
QWEN = Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
WAYS = {"plain": train, "fast": fast}


class Words:
    """A task of random prompts, and a reward that half of the answers get. Token 12 is "<12>"."""

    def __init__(self, shape: Shape):
        gen = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, shape.vocab, (shape.prompts, shape.prompt), generator=gen)
        self.train = [" ".join(f"<{i}>" for i in prompt) for prompt in self.ids.tolist()]
        words = {f"<{i}>": i for i in range(shape.vocab)}
        core = Tokenizer(models.WordLevel(words, unk_token="<0>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        core.decoder = decoders.WordPiece()
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<0>", eos_token=f"<{EOS}>", padding_side="left"
        )

    def encode(self, tokenizer, items: list[str]) -> list[list[int]]:
        return tokenizer(items, add_special_tokens=False)["input_ids"]

    def reward(self, text: str, item=None) -> float:
        return float(sum(int(word[1:-1]) for word in text.split()) % 2)


def make_policy(shape: Shape, way=train) -> train.Policy:
    """The way is train, or fast: whose generate and log_probs the policy has."""
    words = Words(shape)
    if shape.mean == math.inf:
        model = Qwen2ForCausalLM(QWEN)
    else:
        model = train.make_model(shape, words.tokenizer)
        # An output layer that ends an answer with chance 1 / mean.
        head = torch.nn.Linear(shape.width, shape.vocab)
        head.weight.data /= 100
        head.bias.data = torch.zeros(shape.vocab)
        head.bias.data[EOS] = math.log((shape.vocab - 1) / (shape.mean - 1))
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(head)
    model.generation_config.update(eos_token_id=EOS, pad_token_id=0)
    ways = way.generate, way.log_probs
    policy = train.Policy(model.eval(), words.tokenizer, torch.tensor([EOS]), *ways)
    train.move_to_gpu(policy)
    return policy


def step(policy: train.Policy, shape: Shape, number: int) -> int:
    """A training step as train.main makes it. Returns its number of tokens."""
    task, method = Words(shape), losses.bind("grpo", {})
    optimizer = train.adamw(policy.model, shape.lr)
    answers = train.sample(policy, task, task.train, number, shape)
    scored = train.score(policy, answers, method, shape, reference=None)
    updates = train.learn(policy, optimizer, scored, method, shape)
    return train.diagnose(policy, scored, updates, method, shape)["generated"]


# ---------------- rounds, which TRL's own loop drives


def now() -> float:
    """Seconds. On a CPU those of this process, so that other programs count less."""
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Rounds(TrainerCallback):
    """After each step of TRL's, runs the other sides. Notes the seconds and tokens of all."""

    def __init__(self, sides: dict[str, Callable]):
        self.sides, self.seconds, self.tokens = sides, [], []

    def on_train_begin(self, *_, **__):
        self.start = now()

    def on_step_end(self, args, state, control, **_):
        number = state.global_step
        self.seconds.append({"TRL": now() - self.start})
        for name, side in self.sides.items():
            start = now()
            self.tokens[-1][name] = side(number)
            self.seconds[-1][name] = now() - start
        self.start = now()


def run_rounds(shape: Shape, rounds: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Seconds and tokens of all sides: a row for each round, the first left out."""
    plain, task = make_policy(shape), Words(shape)
    policies = {
        name: replace(plain, sampler=way.generate, scorer=way.log_probs)
        for name, way in WAYS.items()
    }
    sides = Rounds({name: partial(step, policy, shape) for name, policy in policies.items()})

    def reward(completions, completion_ids, **_) -> list[float]:
        sides.tokens.append({"TRL": sum(map(len, completion_ids))})
        return [task.reward(text) for text in completions]

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            out,
            max_steps=rounds + 1,
            per_device_train_batch_size=shape.micro_rows,
            gradient_accumulation_steps=shape.prompts * shape.group_size // shape.micro_rows,
            num_generations=shape.group_size,
            max_completion_length=shape.max_tokens,
            loss_type="grpo",
            learning_rate=0.0,
            # As ours:
            bf16=plain.bf16,
            use_cpu=DEVICE == "cpu",
            disable_dropout=True,
            gradient_checkpointing=False,
            # Quiet:
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            make_policy(shape).model,
            reward,
            config,
            Dataset.from_dict({"prompt": task.train * (rounds + 2)}),
            processing_class=task.tokenizer,
            callbacks=[sides],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return pd.DataFrame(sides.seconds[1:]), pd.DataFrame(sides.tokens[1:])


# ---------------- memory, and the table


def peak_gb(shape: Shape, way) -> float:
    """GPU memory at the peak of a step: all that a run holds, but not the start policy."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(make_policy(shape, way), shape, 1)
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    shapes = ["toy", "gsm8k"] if DEVICE == "cpu" else list(SHAPES)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in options.shapes:
        shape = SHAPES[name]
        print(f"\n{name}")
        if DEVICE == "cuda":
            for way, module in WAYS.items():
                print(f"{way}: {peak_gb(shape, module):.1f} GB at the peak", flush=True)
        seconds, tokens = run_rounds(shape, options.rounds)
        print(pd.DataFrame({"median seconds": seconds.median(), "tokens": tokens.mean()}).round(3))
        for way in WAYS:
            print(f"TRL / {way}: {(seconds['TRL'] / seconds[way]).median():.2f}")


if __name__ == "__main__":
    main()
