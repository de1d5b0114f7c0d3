#!/bin/bash
# Label smoothing in transformers' Trainer teaches a vision-language model to repeat its input.
#
# One would guess: label_smoothing_factor=0.1 changes the target a little; what is predicted stays
#   the next token.
# What is so: with smoothing the Trainer computes the loss itself, and it shifts the labels by
#   one only if the model's class has its name in the table of causal models
#   (transformers/trainer.py:2186).
#   Qwen2.5-VL, Qwen3-VL, Qwen3.5 and some seventy others are not in it, and neither is a
#   class that you derive from LlamaForCausalLM. These models learn to predict the token that they
#   just read, although they see it.
# Who is hurt: whoever fine-tunes such a model before RL. The training loss falls to the floor of a
#   perfect fit, on text alone as well, and the model cannot write.
# Instead: label_smoothing_factor=0 for such a class, or compute_loss_func with the shift. TRL's
#   SFTTrainer 1.16.0 asks for the shift itself (read).
# Versions: transformers 5.23.0, torch 2.13.0, Python 3.11. Seen on 2026-11-28:
#   LlamaForCausalLM                smoothing 0.1: loss 0.72, next token right 100%, input repeated 0%
#   MyModel(LlamaForCausalLM)       smoothing 0.1: loss 0.65, next token right 0%, input repeated 100%
#   Qwen3VLForConditionalGeneration smoothing 0.0: loss 0.09, next token right 100%, input repeated 0%
#   Qwen3VLForConditionalGeneration smoothing 0.1: loss 0.65, next token right 0%, input repeated 100%
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q torch==2.13.0
venv/bin/pip install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cat > see.py <<'P'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

transformers.logging.set_verbosity_error()
TEXT = dict(vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
TEXT |= dict(num_attention_heads=4, num_key_value_heads=4, head_dim=16)
VISION = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
VISION |= dict(deepstack_visual_indexes=[0], num_position_embeddings=16)


class MyModel(LlamaForCausalLM):
    """The same model under a name of its own."""


def llama(kind):
    return kind(LlamaConfig(**TEXT))


def vlm():
    text = dict(TEXT, rope_parameters={"rope_type": "default", "mrope_section": [4, 2, 2]})
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=VISION))


# The text to learn: counting in steps of 1, 2 or 3, modulo 29.
COUNT = [[(start + step * i) % 29 for i in range(16)] for start in range(29) for step in (1, 2, 3)]
ROWS = [{"input_ids": row, "labels": row} for row in COUNT]


def train(model, smoothing):
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=150,
        per_device_train_batch_size=29,
        learning_rate=3e-3,
        label_smoothing_factor=smoothing,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=ROWS)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.eval()
    ids = torch.tensor(COUNT)
    with torch.no_grad():
        best = model(input_ids=ids).logits.argmax(-1)
    following = (best[:, 1:-1] == ids[:, 2:]).float().mean().item()  # the step is known from token 2
    repeated = (best == ids).float().mean().item()
    loss = trainer.evaluate(ROWS)["eval_loss"]
    return loss, following, repeated


print("torch", torch.__version__.split("+")[0], "transformers", transformers.__version__)
print("expected: with and without smoothing nearly every next token is right")
seen = {}
for name, make, smoothing in [
    ("LlamaForCausalLM", lambda: llama(LlamaForCausalLM), 0.1),
    ("MyModel(LlamaForCausalLM)", lambda: llama(MyModel), 0.1),
    ("Qwen3VLForConditionalGeneration", vlm, 0.0),
    ("Qwen3VLForConditionalGeneration", vlm, 0.1),
]:
    torch.manual_seed(0)
    loss, following, repeated = train(make(), smoothing)
    seen[name, smoothing] = following
    print(f"{name:31} smoothing {smoothing}: loss {loss:.2f}, next token right {following:.0%}, "
          f"input repeated {repeated:.0%}", flush=True)
causal, mine, plain, smoothed = seen.values()
as_told = causal > 0.95 and plain > 0.95 and mine < 0.1 and smoothed < 0.1
raise SystemExit(0 if as_told else "this has changed")
P
venv/bin/python see.py 2> log || { tail -n 3 log; exit 1; }
