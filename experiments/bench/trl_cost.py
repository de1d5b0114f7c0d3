"""What exactness costs under TRL: seconds of an optimiser step by accumulation steps, TRL's own
loss and ours.

`python experiments/bench/trl_cost.py`. A Qwen2 of random weights (4 layers, width 256, vocabulary 8192), 32 answers of up to 64
tokens an optimiser step, one process, one thread; generation is not timed. Variants take turns; medians of 9 rounds.
"""

import copy
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from engines.trl import Trainer  # noqa: E402
from llm.gsm8k import GSM8K, Item  # noqa: E402

ROUNDS, ROWS = 9, 32


def make(model, tokenizer, ours: bool, accumulate: int):
    options = dict(
        num_generations=8, max_completion_length=64, gradient_accumulation_steps=accumulate
    )
    options |= dict(
        use_cpu=True, bf16=False, report_to=[], output_dir=tempfile.gettempdir(), max_steps=1
    )
    options |= dict(per_device_train_batch_size=ROWS // accumulate, gradient_checkpointing=False)
    data = Dataset.from_list([{"prompt": "1 + 1 ="}] * 64)
    given = (
        model,
        lambda completion_ids, **_: [ids[0] % 7 / 7 for ids in completion_ids],
        GRPOConfig(**options),
        data,
    )
    kwargs = dict(processing_class=tokenizer)
    return Trainer(*given, **kwargs, method="dapo") if ours else GRPOTrainer(*given, **kwargs)


def main():
    torch.set_num_threads(1)
    item = Item("1 + 1 =", "2", "#### 2")
    tokenizer = GSM8K.make_tokenizer(type("Task", (), {"train": [item]}))
    shape = dict(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
    )
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=8192, num_key_value_heads=4, eos_token_id=1, pad_token_id=0, **shape)
    )
    trainers = {
        (ours, n): make(copy.deepcopy(model), tokenizer, ours, n)
        for n in (1, 4)
        for ours in (False, True)
    }
    batches = {}
    for key, trainer in trainers.items():
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = key[1]
        batches[key] = trainer._prepare_inputs([{"prompt": "1 + 1 ="}] * ROWS)  # generates, once
    seconds = {key: [] for key in trainers}
    for _ in range(ROUNDS):
        for key, trainer in trainers.items():
            start = time.perf_counter()
            for k in range(key[1]):
                trainer._step = k
                trainer._compute_loss(trainer.model, trainer._buffered_inputs[k]).backward()
            seconds[key].append(time.perf_counter() - start)
            trainer.model.zero_grad()
    for (ours, n), times in seconds.items():
        q = statistics.quantiles(times, n=4)
        who = "engines.trl" if ours else "TRL's own"
        print(f"{n} accumulation steps, {who}: {q[1]:.3f} s (quartiles {q[0]:.3f} to {q[2]:.3f})")


if __name__ == "__main__":
    main()
