"""A whole training step, ours against TRL's GRPOTrainer: python experiments/bench/trl_step.py
[--cases a b] [--steps 50] ...

Needs TRL. Same model, tokenizer, prompts, reward, loss (grpo, no KL) and batch: 32 prompts x 8 answers (a),
8 x 8 (b, GSM8K's shape on a CPU), see experiments/bench/rollout.py. The learning rate is 0 so that both stay at one policy, whose
answers have geometric lengths: tokens agree up to sampling, and are printed. TRL's trainer runs its own loop; ours
makes its step at the end of each of TRL's. The first --warm-up pairs are left out. Memory: rise of the peak of a
process that has one side only, its model included.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback

import train
from experiments.bench.meter import make_config, with_ends
from experiments.bench.rollout import CASES, EOS, GROUP, Case, build
from experiments.bench.timing import child, now, rise_mb


def tokenizer_of(vocab: int) -> PreTrainedTokenizerFast:
    """Token i is the word "i"."""
    words = {str(i): i for i in range(vocab)}
    core = Tokenizer(models.WordLevel(words, unk_token="0"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="0", eos_token=str(EOS), padding_side="left"
    )


def reward(text: str, item: str = "") -> float:
    return float(sum(map(int, text.split())) % 2)


class Task:
    def __init__(self, prompts: list[str]):
        self.train, self.reward = prompts, reward

    def encode(self, tokenizer, items: list[str]) -> list[list[int]]:
        return train.encode(tokenizer, items)


def our_step(case: Case, tokenizer, prompts: list[str]):
    model, config = with_ends(case), make_config(case)
    optimizer = train.adamw(model, 0.0)

    def step(number: int) -> int:
        rest = (optimizer, torch.tensor([EOS]), Task(prompts), config, {}, number)
        return train.train_step(model, None, tokenizer, *rest)["tokens"]

    return step


def trl_trainer(
    case: Case, tokenizer, prompts: list[str], steps: int, out: str, callback, tokens: list[int]
):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward_fn(completions, completion_ids, **_) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [reward(text) for text in completions]

    quiet = dict(report_to=[], logging_strategy="no", save_strategy="no", disable_tqdm=True)
    plain = dict(
        bf16=False, use_cpu=True, gradient_checkpointing=False, dataloader_pin_memory=False
    )  # as ours
    batch = dict(
        per_device_train_batch_size=case.prompts * GROUP, num_generations=GROUP, max_steps=steps
    )
    same = dict(
        max_completion_length=case.cap,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="grpo",
    )
    config = GRPOConfig(out, learning_rate=0.0, weight_decay=0.0, **quiet, **plain, **batch, **same)
    data = Dataset.from_dict({"prompt": prompts * (steps + 1)})
    model = with_ends(case)
    return GRPOTrainer(
        model, reward_fn, config, data, processing_class=tokenizer, callbacks=[callback]
    )


class Turns(TrainerCallback):
    """Times TRL's steps, from the end of our last one, and makes and times ours in between."""

    def __init__(self, ours=None):
        self.ours, self.seconds, self.tokens, self.start = ours, {"ours": [], "trl": []}, [], 0.0

    def on_train_begin(self, *_, **__):
        self.start = now("cpu")

    def on_step_end(self, args, state, control, **_):
        middle = now("cpu")
        self.seconds["trl"].append(middle - self.start)
        if self.ours:
            self.tokens.append(self.ours(state.global_step))
        self.start = now("cpu")
        self.seconds["ours"].append(self.start - middle)


def run(case: Case, steps: int, sides: tuple[str, ...] = ("ours", "trl")) -> tuple[dict, dict]:
    """Seconds and tokens of each side's steps, warm-up left out."""
    tokenizer, tokens = tokenizer_of(case.vocab), []
    prompts = [" ".join(map(str, prompt)) for prompt in build(case, "cpu")[1]]
    turns = Turns(our_step(case, tokenizer, prompts) if "ours" in sides else None)
    if "trl" not in sides:
        for i in range(steps):
            turns.ours(i + 1)
        return turns.seconds, {}
    with tempfile.TemporaryDirectory() as out:
        trl_trainer(case, tokenizer, prompts, steps, out, turns, tokens).train()
    return turns.seconds, {"ours": turns.tokens, "trl": tokens}


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=("a", "b"), default=["a", "b"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--memory", choices=("ours", "trl"), help="only this side's peak over 2 steps, in MB"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.memory:
        return print(f"{rise_mb(lambda: run(CASES[args.cases[0]], 2, (args.memory,))):.0f}")
    for name in args.cases:
        medians, tokens = {"ours": [], "trl": []}, {"ours": 0, "trl": 0}
        for _ in range(args.runs):
            seconds, counts = run(CASES[name], args.warm_up + args.steps)
            for side in medians:
                medians[side].append(median(seconds[side][args.warm_up :]))
                tokens[side] += sum(counts[side][args.warm_up :]) / (args.runs * args.steps)
        for side in medians:
            megabytes = child(__file__, "--cases", name, "--memory", side)[0]
            step = median(medians[side])
            print(
                f"{name} {side:4} {step:7.3f} s a step, {tokens[side]:6.0f} tokens, {megabytes:5.0f} MB"
            )
        speed = median(t / o for o, t in zip(medians["ours"], medians["trl"], strict=True))
        print(
            f"{name} trl / ours {speed:.2f} ({args.steps} steps after {args.warm_up}, median of {args.runs} runs)"
        )


if __name__ == "__main__":
    main()
