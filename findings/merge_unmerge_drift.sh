#!/bin/bash
# LoRA on a bf16 model: merge_adapter and then unmerge_adapter, as a sync of weights does, moves
# the frozen base.
#
# One would guess: merging before a sync to the sampler and unmerging after it leaves the base as it
#   was, up to a rounding error that stays where it is. So the base is the reference (the adapter
#   switched off), and the adapter alone is what has to be saved.
# What is so: some weights do not come back, and while the adapter learns the errors add up. After
#   200 updates at a rate of 1e-5, with a sync after each, the base has moved half as far as
#   the adapter moves it, and the share still grows.
# Why: `merge` adds BA, and `unmerge` subtracts it, in the base's dtype, and no copy is kept
#   (peft/tuners/lora/layer.py:1008 and :1036).
# Who is hurt: LoRA with a bf16 base and a sampler that gets merged weights. TRL 1.16.0 merges and
#   unmerges at each sync (trl/generation/vllm_generation.py:469, read). A KL against "the adapter
#   switched off" is one against a moving model, and the saved adapter belongs to a base that
#   nobody has. Two runs that differ in the number of syncs differ in their base.
# Instead: put a copy of the base weights back after the sync (ms-swift 4.6.0 patches unmerge so,
#   read), keep the base in float32, or send the adapter itself.
# Versions: peft 0.21.2, torch 2.13.0, transformers 5.23.0 (a Llama of random weights, which learns
#   random tokens), Python 3.11. Seen on 2026-11-28 (the last digits are a machine's):
#   torch.float32, 200 updates and syncs: base moved 3.91e-07, adapter 3.36e-02, share 0.000
#   torch.bfloat16, 1 updates and syncs: base moved 9.66e-05, adapter 2.29e-03, share 0.042
#   torch.bfloat16, 10 updates and syncs: base moved 1.26e-03, adapter 8.69e-03, share 0.145
#   torch.bfloat16, 50 updates and syncs: base moved 6.05e-03, adapter 1.80e-02, share 0.335
#   torch.bfloat16, 200 updates and syncs: base moved 1.73e-02, adapter 3.36e-02, share 0.516
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q torch==2.13.0
venv/bin/pip install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
cat > see.py <<'P'
import copy

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
original = LlamaForCausalLM(config)
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
tokens = torch.randint(0, 512, (200, 4, 32))


def distances(model, base):
    """How far the base has moved, and how far the adapter moves it: norms over all matrices."""
    old = dict(base.named_parameters())
    moved = learned = 0.0
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            weight = old[f"{name}.weight"].float()
            moved += (module.base_layer.weight.float() - weight).square().sum().item()
            learned += module.get_delta_weight("default").float().square().sum().item()
    return moved**0.5, learned**0.5


print("torch", torch.__version__.split("+")[0], "peft", peft.__version__)
print("expected: a share of nearly 0 that does not grow")
shares = {}
for dtype in (torch.float32, torch.bfloat16):
    base = copy.deepcopy(original).to(dtype)
    torch.manual_seed(1)
    model = get_peft_model(copy.deepcopy(base), lora)  # the adapter's own weights are float32
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    for update, batch in enumerate(tokens, 1):
        loss = model(input_ids=batch, labels=batch).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
        model.merge_adapter()
        model.unmerge_adapter()
        if update in (1, 10, 50, 200):
            moved, learned = distances(model, base)
            shares[dtype, update] = moved / learned
            print(f"{dtype}, {update} updates and syncs: base moved {moved:.2e}, adapter "
                  f"{learned:.2e}, share {moved / learned:.3f}", flush=True)
grows = shares[torch.bfloat16, 200] > 0.3 > 2 * shares[torch.bfloat16, 1]
still = shares[torch.float32, 200] < 1e-3
raise SystemExit(0 if grows and still else "this has changed")
P
venv/bin/python see.py 2> log || { tail -n 3 log; exit 1; }
