"""A whole training step, ours against TRL's GRPOTrainer.

    python -m experiments.bench.trl_step [--cases a b] [--steps 50] [--warm-up 5] [--runs 3]

Needs TRL. Both sides have the same model, tokenizer, prompts, reward, loss (grpo, no KL) and batch:
32 prompts x 8 answers (a), or 8 x 8 in GSM8K's shape on a CPU (b), as in rollout.py. The learning
rate is 0, so both stay at one policy, whose answers have geometric lengths. So the numbers of
tokens agree up to sampling, and are printed.

TRL's trainer runs its own loop; our step is made at the end of each of TRL's. The first --warm-up
pairs are left out. Memory: rise of the peak of a process that has one side only, its model
included, the libraries apart.
"""

import logging
import tempfile
import warnings
from statistics import mean, median

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from experiments.bench.rollout import CASES, EOS, GROUP, Case, build
from experiments.bench.step import make_config, make_policy, make_step, with_ends
from experiments.bench.timing import child, make_parser, now, rise_mb, show_ratio

SIDES = ("ours", "trl")


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Token i is the word "i"."""
    words = {str(i): i for i in range(vocab)}
    core = Tokenizer(models.WordLevel(words, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="0", eos_token=str(EOS), padding_side="left"
    )


class Words:
    """Prompts as text, and a reward that half of the answers get."""

    def __init__(self, case: Case):
        self.train = [" ".join(map(str, prompt)) for prompt in build(case, "cpu")[1]]

    def encode(self, tokenizer, items: list[str]) -> list[list[int]]:
        return tokenizer(items, add_special_tokens=False)["input_ids"]

    def reward(self, text: str, item: str = "") -> float:
        return float(sum(map(int, text.split())) % 2)


def make_trainer(case: Case, steps: int, out: str, callback: TrainerCallback):
    """TRL's trainer. The numbers of tokens that it generates go into callback.tokens["trl"]."""
    task = Words(case)

    def reward_fn(completions, completion_ids, **_) -> list[float]:
        callback.tokens["trl"].append(sum(map(len, completion_ids)))
        return [task.reward(text) for text in completions]

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
    return GRPOTrainer(
        with_ends(case),
        reward_fn,
        config,
        Dataset.from_dict({"prompt": task.train * (steps + 1)}),
        processing_class=make_tokenizer(case.vocab),
        callbacks=[callback],
    )


class Interleave(TrainerCallback):
    """Times TRL's steps, each from the end of our last one; makes and times ours in between."""

    def __init__(self, our_step=None):
        self.our_step = our_step
        self.seconds = {side: [] for side in SIDES}
        self.tokens = {side: [] for side in SIDES}
        self.start = 0.0

    def on_train_begin(self, *_, **__):
        self.start = now("cpu")

    def on_step_end(self, args, state, control, **_):
        middle = now("cpu")
        self.seconds["trl"].append(middle - self.start)
        if self.our_step:
            self.tokens["ours"].append(self.our_step(state.global_step))
        self.start = now("cpu")
        self.seconds["ours"].append(self.start - middle)


def make_our_step(case: Case):
    """A function that makes our step of some number, and returns how many tokens it generated."""
    task = Words(case)
    policy = make_policy(with_ends(case), make_tokenizer(case.vocab))
    step = make_step(policy, task, task.train)
    config = make_config(case)
    return lambda number: step(config, number)["tokens"]


def run_both(case: Case, steps: int) -> Interleave:
    """Interleaved steps of both sides: their .seconds and .tokens."""
    callback = Interleave(make_our_step(case))
    with tempfile.TemporaryDirectory() as out:
        make_trainer(case, steps, out, callback).train()
    return callback


def run_one(side: str, case: Case, steps: int):
    if side == "ours":
        our_step = make_our_step(case)
        for number in range(1, steps + 1):
            our_step(number)
        return
    with tempfile.TemporaryDirectory() as out:
        make_trainer(case, steps, out, Interleave()).train()


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=("a", "b"), default=["a", "b"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3)
    help = "only this side's peak over 2 steps, in MB"
    parser.add_argument("--memory", choices=SIDES, help=help)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.memory:
        print(f"{rise_mb(lambda: run_one(args.memory, CASES[args.cases[0]], 2)):.0f}")
        return
    for name in args.cases:
        seconds = {side: [] for side in SIDES}
        tokens = {side: [] for side in SIDES}
        for _ in range(args.runs):
            pairs = run_both(CASES[name], args.warm_up + args.steps)
            for side in SIDES:
                seconds[side] += pairs.seconds[side][args.warm_up :]
                tokens[side] += pairs.tokens[side][args.warm_up :]
        module = ("-m", "experiments.bench.trl_step")
        for side in SIDES:
            megabytes = child(*module, "--cases", name, "--memory", side)[0]
            step = f"{median(seconds[side]):7.3f} s a step"
            print(f"{name} {side:4} {step}, {mean(tokens[side]):6.0f} tokens, {megabytes:5.0f} MB")
        print(f"{name} trl / ours {show_ratio(seconds['trl'], seconds['ours'])}, {args.runs} runs")


if __name__ == "__main__":
    main()
