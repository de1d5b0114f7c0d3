"""What exactness costs under TRL: seconds of an optimiser step, with TRL's own loss and with ours.

    python -m experiments.bench.trl_cost [--rounds 9]

A Qwen2 with random weights (4 layers, width 256, vocabulary 8192) gets 32 answers of up to 64
tokens an optimiser step, in 1 or 4 micro-batches, on one process and one thread. Generation is not
timed. The four variants are interleaved.
"""

import copy
import tempfile
from functools import partial
from statistics import median
from types import SimpleNamespace

from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from engines.trl import Trainer
from experiments.bench.timing import make_parser, show_ratio, turns
from llm.gsm8k import GSM8K, Item

ROWS = 32  # answers of an optimiser step


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


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    task = SimpleNamespace(train=[Item("1 + 1 =", "2", "#### 2")])
    tokenizer = GSM8K.make_tokenizer(task)
    model = make_model()
    sides = {}
    for accumulate in (1, 4):
        for name, ours in (("trl", False), ("ours", True)):
            trainer = make_trainer(copy.deepcopy(model), tokenizer, ours, accumulate)
            sides[accumulate, name] = partial(optimiser_step, trainer)
    seconds = turns(sides, args.rounds)
    for accumulate in (1, 4):
        trl, ours = seconds[accumulate, "trl"], seconds[accumulate, "ours"]
        print(
            f"{accumulate} accumulation steps: TRL's own loss {median(trl):.3f} s, "
            f"ours {median(ours):.3f} s, ours / TRL's {show_ratio(ours, trl)}"
        )


if __name__ == "__main__":
    main()
