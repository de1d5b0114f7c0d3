"""train.py's GSM8K under TRL: the same prompts, verifier and loss, on all devices of accelerate.

accelerate launch --multi_gpu -m engines.gsm8k_trl --method dfpo-min --output_dir out

All flags of TRL's GRPOConfig are accepted as well, such as --num_generations 8 (G) and
--max_completion_length 512 (L).
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field, fields

from datasets import Dataset
from transformers import AutoTokenizer

from engines.trl_settings import bind_method
from llm import fail, given_flags
from llm.gsm8k import GSM8K, Item
from losses import METHODS

try:
    from engines.trl import GRPOConfig, Trainer
except ImportError as error:
    fail(str(error))


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


@dataclass
class Flags(Options, GRPOConfig):
    """What the command line accepts; there is no object of this class."""

    output_dir: str = knob("where the trained model is saved", kw_only=True)


def parse(argv: list[str]) -> tuple[Options, GRPOConfig]:
    """A mistake ends here in one line."""
    given = given_flags(Flags, __doc__.splitlines()[0], {}, argv)
    names = given.keys() & {f.name for f in fields(Options)}
    options = Options(**{name: given.pop(name) for name in names})
    # TRL's own default is deprecated in transformers.
    warnings.filterwarnings("ignore", "`gradient_checkpointing`", FutureWarning)
    try:
        return options, GRPOConfig(**given)
    except Exception as error:  # TRL, transformers and accelerate refuse with many classes
        fail(f"TRL refuses these flags: {first_line(error)}")


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


def load_tokenizer(path: str):
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        fail(f"--model {path} cannot be loaded ({reason}); accepted: a directory, a hub id")


def make_trainer(options: Options, config: GRPOConfig) -> Trainer:
    """Raises ValueError or OSError for what cannot be honoured, found or read."""
    hyper = hyperparameters(options.hyper)
    # The Trainer binds once more. Here mistakes are refused before anything is loaded.
    bind_method(options.method, hyper, config, options.projection)
    task = GSM8K(options.data or None)
    tokenizer = load_tokenizer(options.model)

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
        fail(first_line(error))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
