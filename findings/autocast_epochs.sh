#!/bin/bash
# PPO epochs inside one torch.autocast block: the log shows a policy that hardly moves.
#
# One would guess: where the block of autocast begins is a matter of style. Four epochs over one
#   batch inside a single block log the same ratios, KL and clip fraction as with a block a pass.
# What is so: the block casts each float32 matrix to bf16 once and keeps the copy until the block
#   ends, whatever the optimiser does to the matrix meanwhile. So all epochs are scored, and their
#   gradients taken, at the first epoch's matrices (embeddings and norms are new). The ratio stays
#   near 1, the clip never acts, the logged KL is small, and the weights move on.
# Why: the cache of casts (cache_enabled=True), which is emptied at the end of the outermost block.
#   torch's pages say that a block should hold the forward pass and the loss; they do not say that
#   a longer one trains on old weights.
# Who is hurt: whoever writes the epochs of PPO or GRPO in one block, because the old and the new
#   log-probs should have the same numerics. "KL is small" then invites a higher learning rate.
# Instead: one block a forward pass, as accelerate does, or cache_enabled=False.
# Versions: torch 2.13.0, transformers 5.23.0 (a Llama of random weights), Python 3.11.
#   Seen on 2026-11-28 (the last digits are a machine's):
#   a block a pass         : in the last epoch KL 0.0422, clipped 70.3%; measured after it: KL 0.0503
#   one block              : in the last epoch KL 0.0058, clipped 6.0%; measured after it: KL 0.0436
#   one block without cache: in the last epoch KL 0.0422, clipped 70.3%; measured after it: KL 0.0503
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q torch==2.13.0
venv/bin/pip install -q torch==2.13.0 transformers==5.23.0
cat > see.py <<'P'
from contextlib import nullcontext

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
EPOCHS, ANSWERS, LENGTH = 6, 16, 24


def autocast(cache=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)


def log_probs(model, ids):
    logits = model(input_ids=ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def run(whole, each):
    """PPO's epochs over one batch of sampled answers. Returns what the last epoch logs: the KL
    (k3) and the share of ratios outside 1 +- 0.2; and the KL that one then measures."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    start = torch.zeros(ANSWERS, 1, dtype=torch.long)
    ids = model.generate(start, do_sample=True, max_new_tokens=LENGTH, min_new_tokens=LENGTH,
                         eos_token_id=63, pad_token_id=63)
    advantage = torch.linspace(-1, 1, ANSWERS)[:, None]
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    with torch.no_grad(), autocast():
        old = log_probs(model, ids)
    with whole:
        for _ in range(EPOCHS):
            with each():
                new = log_probs(model, ids)
            ratio = (new - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            logged = (ratio - 1 - (new - old)).mean().item()
            outside = ((ratio < 0.8) | (ratio > 1.2)).float().mean().item()
            adam.zero_grad()
            loss.backward()
            adam.step()
    with torch.no_grad(), autocast():
        moved = log_probs(model, ids) - old
    return logged, outside, (moved.exp() - 1 - moved).mean().item()


print("torch", torch.__version__.split("+")[0], "transformers", transformers.__version__)
print("expected: three equal lines")
seen = []
for name, whole, each in [
    ("a block a pass         ", nullcontext(), autocast),
    ("one block              ", autocast(), nullcontext),
    ("one block without cache", autocast(cache=False), nullcontext),
]:
    seen.append(run(whole, each))
    logged, outside, measured = seen[-1]
    print(f"{name}: in the last epoch KL {logged:.4f}, clipped {outside:.1%}; "
          f"measured after it: KL {measured:.4f}", flush=True)
plain, cached, uncached = seen
as_told = plain == uncached and cached[0] < 0.5 * plain[0] and cached[2] > 5 * cached[0]
raise SystemExit(0 if as_told else "this has changed")
P
venv/bin/python see.py 2> log || { tail -n 3 log; exit 1; }
