"""train.py's GSM8K under TRL: the same prompts, verifier and loss, on all devices of accelerate.

accelerate launch --multi_gpu -m engines.gsm8k_trl --method dfpo-min --output_dir out

All flags of TRL's GRPOConfig are accepted as well, such as --num_generations 8 (G) and
--max_completion_length 512 (L).
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import AutoTokenizer, HfArgumentParser

from llm.gsm8k import GSM8K, Item
from losses import METHODS

try:
    from engines.trl import GRPOConfig, Trainer, method_for
except ImportError as error:
    sys.exit(f"error: {error}")

USAGE = "python -m engines.gsm8k_trl"


def knob(help: str, **default):
    return field(metadata={"help": help}, **default)


@dataclass
class Options:
    method: str = knob(f"which loss: {', '.join(METHODS)}", default="grpo")
    model: str = knob("directory or hub id of a causal LM", default="Qwen/Qwen2.5-0.5B-Instruct")
    data: str = knob("directory with GSM8K's train.jsonl and test.jsonl; none: the hub", default="")
    hyper: list[str] = knob("hyperparameters of the method: NAME=VALUE ...", default_factory=list)
    # train.py's flag is --project. Here TRL has one of that name, for Trackio.
    projection: bool = knob("the projection (claim C17)", default=False)


def parse(argv: list[str]) -> tuple[Options, GRPOConfig]:
    # TRL's own default is deprecated in transformers.
    warnings.filterwarnings("ignore", "`gradient_checkpointing`", FutureWarning)
    parser = HfArgumentParser(
        (Options, GRPOConfig), prog=USAGE, usage=f"{USAGE} [--FLAG VALUE ...]", allow_abbrev=False
    )
    try:
        options, config, unknown = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
    except Exception as error:  # TRL, transformers and accelerate refuse with many classes
        sys.exit(f"error: TRL refuses these flags: {first_line(error)}")
    if unknown:
        sys.exit(f"error: {unknown[0]} is no flag; all flags: {USAGE} --help")
    return options, config


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def hyperparameters(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ValueError(f"--hyper {text}: NAME=VALUE is expected, such as eps_high=0.3")
    return dict(text.split("=", 1) for text in texts)


def prompts(task: GSM8K, tokenizer) -> Dataset:
    """The training problems as text that TRL's tokenisation turns into train.py's own ids."""
    rows = []
    for item, ids in zip(task.train, task.encode(tokenizer, task.train), strict=True):
        text = tokenizer.decode(ids)
        if tokenizer(text)["input_ids"] != ids:
            raise ValueError(f"this tokenizer does not read its own prompts back: {text[:60]!r}")
        rows.append({"prompt": text, "answer": item.answer})
    return Dataset.from_list(rows)


def make_trainer(options: Options, config: GRPOConfig) -> Trainer:
    """Raises ValueError or OSError for what cannot be honoured, found or read."""
    hyper = hyperparameters(options.hyper)
    # The Trainer does this once more. Here mistakes are refused before anything is loaded.
    method_for(config, options.method, hyper, options.projection)
    task = GSM8K(options.data or None)
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def reward(completion_ids, answer, **_):
        rewards = []
        for ids, gold in zip(completion_ids, answer, strict=True):
            text = tokenizer.decode([i for i in ids if i != tokenizer.eos_token_id])
            rewards.append(task.reward(text, Item("", gold, "")))
        return rewards

    return Trainer(
        options.model,
        reward,
        config,
        prompts(task, tokenizer),
        processing_class=tokenizer,
        method=options.method,
        hyper=hyper,
        project=options.projection,
    )


def main(argv: list[str] | None = None):
    options, config = parse(sys.argv[1:] if argv is None else argv)
    try:
        trainer = make_trainer(options, config)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {first_line(error)}")
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
