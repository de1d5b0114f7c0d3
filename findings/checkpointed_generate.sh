#!/bin/bash
# generate() in train mode with gradient checkpointing writes answers that do not know the prompt.
# (That the layers drop the cache is said in a warning; what generate() makes of it is not.)
#
# One would guess: without a cache, sampling is slow, and the answers stay what they were. The
#   warning says "Setting `use_cache=False`".
# What is so: each layer drops the cache that it is passed, while generate() still feeds only the
#   newest token. So every token after the first follows from the one before it alone, whatever the
#   prompt. In rows that are padded on the left, the usual case in a batch, it does not follow even
#   from that one: the mask of the one token is the mask's first column, the padding's.
# Why: GradientCheckpointingLayer (modeling_layers.py of 5.23.0) sets past_key_values to None in
#   train mode, also under torch.no_grad(); generate() (generation/utils.py) decides by
#   generation_config.use_cache whether to feed one token.
# Who is hurt: a loop of one's own that samples and learns with model.train() and
#   gradient_checkpointing_enable(), as the memory of a long answer suggests. The text is fluent
#   nonsense, the reward falls to chance, and log-probs from a full forward pass are those of
#   another policy. (TRL switches checkpointing off while it samples.)
# Instead: model.eval() around generate(), or model.gradient_checkpointing_disable(). With
#   use_cache=False the answers are right, and slow.
# Versions: transformers 5.23.0, torch 2.13.0, Python 3.11. A Qwen2 of random weights, no dropout.
#   Seen on 2026-11-28:
#   eval                          : 16 of 16 answers as without a cache
#   train                         : 16 of 16 answers as without a cache
#   train, checkpointing          : 0 of 16 answers as without a cache
#   each of its tokens follows from the one before it alone: True
#   and in padded rows from nothing that is visible: True
#   eval, checkpointing           : 16 of 16 answers as without a cache
#   train, checkpointing, no cache: 16 of 16 answers as without a cache
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q torch==2.13.0
venv/bin/pip install -q torch==2.13.0 transformers==5.23.0
cat > see.py <<'P'
import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

transformers.logging.set_verbosity_error()  # or one line: "Caching is incompatible ..."
torch.manual_seed(0)
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
)
prompts = torch.randint(0, 256, (16, 12))


def answers(padding=0, **more):
    """Greedy, so that nothing is drawn; with so many padded columns on the left."""
    mask = torch.ones_like(prompts)
    mask[:, :padding] = 0
    out = model.generate(
        prompts,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=24,
        pad_token_id=0,
        **more,
    )
    return out[:, prompts.shape[1] :]


model.eval()
right = answers(use_cache=False)
print("transformers", transformers.__version__, "- expected: 16 of 16 in every line")
found = []
for name, train, checkpointing, more in (
    ("eval", False, False, {}),
    ("train", True, False, {}),
    ("train, checkpointing", True, True, {}),
    ("eval, checkpointing", False, True, {}),
    ("train, checkpointing, no cache", True, True, {"use_cache": False}),
):
    model.train(train)
    if checkpointing:
        model.gradient_checkpointing_enable()
    made = answers(**more)
    found.append(int((made == right).all(1).sum()))
    print(f"{name:30}: {found[-1]} of 16 answers as without a cache")
    if name == "train, checkpointing":
        padded = answers(padding=3)
        model.eval()  # steps of the model that see one token and no more, or no token at all
        alone, nothing = (
            all(
                torch.equal(
                    model(x[:, k - 1 : k], attention_mask=mask).logits[:, -1].argmax(-1), x[:, k]
                )
                for k in range(1, 24)
            )
            for x, mask in ((made, torch.ones(16, 1)), (padded, torch.zeros(16, 1)))
        )
        print("each of its tokens follows from the one before it alone:", alone)
        print("and in padded rows from nothing that is visible:", nothing)
raise SystemExit(0 if found == [16, 16, 0, 16, 16] and alone and nothing else "this has changed")
P
venv/bin/python see.py
