"""train.py's GSM8K under TRL: the same prompts, verifier and loss, on every device that accelerate
finds.

accelerate launch --multi_gpu -m engines.gsm8k_trl --method dfpo-min --model Qwen/Qwen2.5-0.5B-Instruct --output_dir out
All flags of TRL's GRPOConfig are accepted as well, such as --max_completion_length 512 (L) and --num_generations 8 (G).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets import Dataset
from transformers import AutoTokenizer, HfArgumentParser

from cli import fail
from config import Config, hyperparameters
from llm.gsm8k import GSM8K, Item
from losses import METHODS

try:
    from engines.trl import GRPOConfig, Trainer
except ImportError as error:
    fail(str(error))


@dataclass
class Options:
    method: str = field(default="grpo", metadata={"help": f"which loss: {', '.join(METHODS)}"})
    model: str = field(
        default="Qwen/Qwen2.5-0.5B-Instruct",
        metadata={"help": "directory or hub id of a causal LM"},
    )
    data: str = field(
        default="",
        metadata={"help": "directory with GSM8K's train.jsonl and test.jsonl; none: the hub"},
    )
    hyper: list[str] = field(
        default_factory=list, metadata={"help": "hyperparameters of the method, name=value ..."}
    )
    project: bool = field(default=False, metadata={"help": "the node-mean projection (claim C17)"})


def prompts(task: GSM8K, tokenizer) -> Dataset:
    """The training problems as text that TRL's tokenisation turns into train.py's own ids."""
    rows = []
    for item, ids in zip(task.train, task.encode(tokenizer, task.train), strict=True):
        text = tokenizer.decode(ids)
        if tokenizer(text)["input_ids"] != ids:
            raise ValueError(f"this tokenizer does not read its own prompts back: {text[:60]!r}")
        rows.append({"prompt": text, "answer": item.answer})
    return Dataset.from_list(rows)


def main():
    options, config = HfArgumentParser((Options, GRPOConfig)).parse_args_into_dataclasses()
    try:
        asked = Config(method=options.method, hyper=tuple(options.hyper))
        hyper = (
            hyperparameters(asked) if options.method in METHODS else {}
        )  # Trainer refuses what it does not know
        task, tokenizer = GSM8K(options.data or None), AutoTokenizer.from_pretrained(options.model)

        def reward(completion_ids, answer, **_):
            texts = (
                tokenizer.decode([i for i in ids if i != tokenizer.eos_token_id])
                for ids in completion_ids
            )
            return [
                task.reward(text, Item("", gold, ""))
                for text, gold in zip(texts, answer, strict=True)
            ]

        given = dict(method=options.method, hyper=hyper, project=options.project)
        trainer = Trainer(
            options.model,
            reward,
            config,
            prompts(task, tokenizer),
            processing_class=tokenizer,
            **given,
        )
    except (ValueError, OSError) as error:
        fail(str(error).splitlines()[0])
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
