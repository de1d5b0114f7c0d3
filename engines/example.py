"""Group-relative RL with TRL, on data of your own: copy this file, and change ROWS and reward.

    python -m engines.example                  # a tiny random model, on a CPU: half a minute
    python -m engines.example --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --learning_rate 1e-6

--method is a method of losses.py, --hyper "eps_low=0.1 eps_high=0.3" its hyperparameters,
--prefix_baseline gives it a baseline at every prefix. All flags of TRL's GRPOConfig and ModelConfig
are accepted. --num_generations is G, --max_completion_length is L. --use_peft trains LoRA, with ten
times the learning rate.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from datasets import Dataset
from transformers import HfArgumentParser, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, ModelConfig, get_peft_config, get_quantization_config

from engines.trainer import Trainer
from tasks.arithmetic import Arithmetic

# TRL hands every column but the prompt to the reward function.
ROWS = [{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a in (1, 2) for b in range(5)]


def reward(completions: list, answer: list[str], **_) -> list[float]:
    """One number for each answer: half for the right start, half for stopping there."""
    # To a prompt of chat messages the answer is a list of one message.
    texts = [x if isinstance(x, str) else x[0]["content"] for x in completions]
    return [0.5 * (x.startswith(y) + (x == y)) for x, y in zip(texts, answer, strict=True)]


@dataclass
class Options:
    method: str = "grpo"  # of losses.METHODS
    hyper: str = ""  # of the method: eps_low=0.1 eps_high=0.3
    prefix_baseline: bool = False  # a baseline at every prefix (losses.py)


CPU = {"use_cpu": True, "bf16": False}
ALWAYS = {"report_to": "none", "save_strategy": "no", "logging_steps": 5, "disable_tqdm": True}
TINY = {"max_steps": 60, "learning_rate": 3e-3, "max_completion_length": 6}
TINY |= {"per_device_train_batch_size": 80, "gradient_checkpointing": False}


def parse(argv: list[str] | None = None) -> tuple[Options, GRPOConfig, ModelConfig]:
    parser = HfArgumentParser((Options, GRPOConfig, ModelConfig), allow_abbrev=False)
    parser.set_defaults(output_dir="out", **ALWAYS, **({} if torch.cuda.is_available() else CPU))
    if not parser.parse_known_args(argv)[0].model_name_or_path:
        parser.set_defaults(**TINY)
    return parser.parse_args_into_dataclasses(argv)


def tiny():
    """A random model, and a tokenizer with one token for each character."""
    tokenizer = Arithmetic().make_tokenizer()
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(shape), tokenizer


class Show(TrainerCallback):
    """The one of TRL's many numbers that says whether it learns."""

    def on_log(self, args, state, control, logs, **_):
        if state.is_world_process_zero and "reward" in logs:
            print(f"step {state.global_step}: reward {float(logs['reward']):.3f}")


def make_trainer(options: Options, config: GRPOConfig, given: ModelConfig) -> Trainer:
    """Raises ValueError for settings that the method cannot honour."""
    if given.model_name_or_path:  # which TRL loads, with its tokenizer, once all flags are checked
        model, tokenizer = given.model_name_or_path, None
        loading = {name: getattr(given, name) for name in ("dtype", "attn_implementation")}
        loading |= {"revision": given.model_revision, "device_map": None}  # under FSDP not "auto"
        config.model_init_kwargs = loading | (config.model_init_kwargs or {})
    else:
        model, tokenizer = tiny()
    return Trainer(
        model,
        reward,
        config,
        Dataset.from_list(ROWS),
        processing_class=tokenizer,
        peft_config=get_peft_config(given),
        quantization_config=get_quantization_config(given),
        method=options.method,
        hyper=dict(text.partition("=")[::2] for text in options.hyper.split()),
        prefix_baseline=options.prefix_baseline,
    )


def main(argv: list[str] | None = None):
    options, config, given = parse(argv)
    needed = config.generation_batch_size // config.num_generations
    if len(ROWS) < needed:  # TRL would save an untrained model, with only a warning
        sys.exit(f"error: a batch has {needed} prompts, and ROWS only {len(ROWS)}")
    trainer = make_trainer(options, config, given)
    trainer.add_callback(Show())
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
