#!/bin/bash
# A model that transformers 5 has saved is another model in transformers 4.
#
# One would guess: save_pretrained in version 5 and from_pretrained in version 4 give the same
#   logits, or version 4 refuses the folder.
# What is so: version 4 loads it without a word, with the rotary base 10,000, whatever the model's
#   is (SmolLM2: 100,000; Qwen2.5: 1,000,000). Logits are off, and the more so the longer the text.
# Why: version 5 writes config.json's `rope_theta` (and `rope_scaling`) as `rope_parameters`, which
#   version 4 keeps as an unknown attribute; `rope_theta` then has its class's default
#   (configuration_llama.py of 4.57.6).
# Who is hurt: training with version 5, then sampling, evaluating or merging with a tool that pins
#   version 4. The model seems to have become worse by training.
# Instead: put `rope_theta` and `rope_scaling` back into config.json beside the new key (llm/runs.py
#   of this repository does), or compare the logits of one text on both sides.
# Versions: transformers 5.23.0 saves, 4.57.6 loads; torch 2.13.0, Python 3.11. A Llama of random
#   weights. Seen on 2026-11-28 (the last digits are a machine's):
#   5.23.0 rope_theta 1000000.0
#   4.57.6 rope_theta 10000.0
#   largest gap in the first 8 tokens 1.310 nats, in all 512 6.307
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
for version in 5.23.0 4.57.6; do
    "${PYTHON:-python3}" -m venv "$version"
    "$version/bin/pip" install -q torch==2.13.0
    "$version/bin/pip" install -q torch==2.13.0 "transformers==$version"
done
cat > see.py <<'P'
import pathlib

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
text = torch.randint(0, 512, (1, 512))
if not pathlib.Path("model").exists():
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        initializer_range=0.1,  # logits of a usual size
        rope_theta=1_000_000.0,
    )
    LlamaForCausalLM(config).save_pretrained("model")
model = LlamaForCausalLM.from_pretrained("model", dtype=torch.float32).eval()
rope = getattr(model.config, "rope_parameters", None) or {}
theta = getattr(model.config, "rope_theta", None) or rope["rope_theta"]
print(transformers.__version__, "rope_theta", theta)
with torch.no_grad():
    logp = model(text).logits[0].log_softmax(-1)
if not pathlib.Path("logp.pt").exists():
    torch.save(logp, "logp.pt")
else:
    gap = (logp - torch.load("logp.pt")).abs().max(1).values
    print("expected: the same log-probs, up to 0.0001, or an error")
    print(f"largest gap in the first 8 tokens {gap[:8].max():.3f} nats, in all 512 {gap.max():.3f}")
    raise SystemExit(0 if theta == 10_000 and gap.max() > 0.1 else "this has changed")
P
for version in 5.23.0 4.57.6; do
    "$version/bin/python" see.py 2> log || { tail -n 3 log; exit 1; }
done
