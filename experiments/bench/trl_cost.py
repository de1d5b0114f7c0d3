"""What exactness costs under TRL: seconds of an optimiser step, with TRL's own loss and with ours.

`python -m experiments.bench.trl_cost`. A Qwen2 with random weights (4 layers, width 256, vocabulary
8192) gets 32 answers of up to 64 tokens an optimiser step, on one process and one thread.
Generation is not timed. The variants are interleaved; medians of 9 rounds.
"""

import copy
import statistics
import tempfile
from types import SimpleNamespace

from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from engines.trl import Trainer
from experiments.bench.timing import turns
from llm.gsm8k import GSM8K, Item

ROUNDS, ROWS = 9, 32


def make_model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def make_trainer(model, tokenizer, ours: bool, accumulate: int) -> GRPOTrainer:
    """A trainer that has generated the answers of its first optimiser step."""
    config = GRPOConfig(
        num_generations=8,
        max_completion_length=64,
        gradient_accumulation_steps=accumulate,
        per_device_train_batch_size=ROWS // accumulate,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        output_dir=tempfile.gettempdir(),
        max_steps=1,
    )
    trainer = (Trainer if ours else GRPOTrainer)(
        model,
        lambda completion_ids, **_: [ids[0] % 7 / 7 for ids in completion_ids],
        config,
        Dataset.from_list([{"prompt": "1 + 1 ="}] * 64),
        processing_class=tokenizer,
        **({"method": "dapo"} if ours else {}),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = accumulate
    trainer._prepare_inputs([{"prompt": "1 + 1 ="}] * ROWS)
    return trainer


def optimiser_step(trainer: GRPOTrainer):
    for k, inputs in enumerate(trainer._buffered_inputs):
        trainer._step = k
        trainer._compute_loss(trainer.model, inputs).backward()
    trainer.model.zero_grad()


def main():
    task = SimpleNamespace(train=[Item("1 + 1 =", "2", "#### 2")])
    tokenizer = GSM8K.make_tokenizer(task)
    model = make_model()
    sides = {}
    for accumulate in (1, 4):
        for who in ("TRL's own", "engines.trl"):
            ours = who == "engines.trl"
            trainer = make_trainer(copy.deepcopy(model), tokenizer, ours, accumulate)
            sides[f"{accumulate} accumulation steps, {who}"] = lambda t=trainer: optimiser_step(t)
    for name, seconds in turns(sides, ROUNDS).items():
        low, median, high = statistics.quantiles(seconds, n=4)
        print(f"{name}: {median:.3f} s (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
