#!/bin/bash
# Constrained decoding: generate()'s "unprocessed" logits have the grammar's mask in them.
#
# One would guess: output_logits=True gives what the model said, output_scores=True what the
#   processors made of it. That is what the two are for.
# What is so: xgrammar's own processor for transformers writes its mask into the tensor that it is
#   passed, and generate() returns that tensor as "unprocessed" afterwards. With min_new_tokens=1,
#   which the grammar demands anyway, a processor before it makes a copy, and the same call
#   returns the model's logits. With prefix_allowed_tokens_fn it does so in any case.
# Why: apply_token_bitmask_inplace in xgrammar/contrib/hf.py:106; transformers/generation/utils.py
#   stores next_token_logits (line 3257) after the processors had it (line 3250). transformers has
#   rid its own processors of such writes (pull request 29680). A processor of one's own with
#   scores[:, banned] = -inf does the same as xgrammar's (run by hand).
# Who is hurt: loops of one's own with tool calls or JSON. The share of probability on valid tokens,
#   which says whether the model has learned the format, reads 1 before any training; the entropy
#   is the mask's. As old log-probs, beside new ones from a full pass, they start the ratio at 0.07
#   on average, and PPO's clip takes the gradient of every token with A < 0 in the first update.
# Instead: logits_processor=[lambda ids, scores: grammar(ids, scores.clone())], and one call whose
#   log-probs a full forward pass repeats.
# Versions: xgrammar 0.2.9, transformers 5.23.0, torch 2.13.0, Python 3.11. A Llama of random
#   weights, and a grammar of eight digits. Seen on 2026-11-28 (the last digits are a machine's):
#   xgrammar                  : on digits 1.00 (model 0.07), entropy 1.77 (model 4.28), ratio 0.07
#   xgrammar, temperature=0.7 : on digits 1.00 (model 0.07), entropy 1.77 (model 4.28), ratio 0.07
#   xgrammar, min_new_tokens=1: on digits 0.07 (model 0.07), entropy 4.28 (model 4.28), ratio 1.00
#   xgrammar, passed a copy   : on digits 0.07 (model 0.07), entropy 4.28 (model 4.28), ratio 1.00
#   prefix_allowed_tokens_fn  : on digits 0.07 (model 0.07), entropy 4.28 (model 4.28), ratio 1.00
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q torch==2.13.0
venv/bin/pip install -q torch==2.13.0 transformers==5.23.0 xgrammar==0.2.9
cat > see.py <<'P'
from importlib.metadata import version

import torch
import transformers
import xgrammar
from transformers import LlamaConfig, LlamaForCausalLM
from xgrammar.contrib.hf import LogitsProcessor

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
VOCABULARY, LENGTH = 128, 8  # the ASCII characters; 0 is the end
config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.2,  # logits of a usual size
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
prompts = torch.randint(1, VOCABULARY, (64, 6))
characters = xgrammar.TokenizerInfo([chr(i) for i in range(VOCABULARY)], stop_token_ids=[0])
compiled = xgrammar.GrammarCompiler(characters).compile_regex("[0-9]{%d}" % LENGTH)
digits = [ord(digit) for digit in "0123456789"]


def fresh():
    return LogitsProcessor(compiled)  # one for each call, as its page says


def copying():
    grammar = fresh()
    return lambda ids, scores: grammar(ids, scores.clone())


def measure(logits, sampled):
    """Probability on digits, entropy, log-prob of each sampled token. logits: [64, 8, 128]."""
    p = logits.softmax(-1)
    entropy = torch.special.entr(p).sum(-1).mean().item()
    log_probs = logits.log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
    return p[..., digits].sum(-1).mean().item(), entropy, log_probs


@torch.no_grad()
def ask(**how):
    """Of generate()'s raw logits: mass, entropy, and ratio of a full forward pass to them."""
    torch.manual_seed(1)
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        max_new_tokens=LENGTH,
        output_logits=True,
        return_dict_in_generate=True,
        **how,
    )
    sampled = out.sequences[:, prompts.shape[1] :]
    mass, entropy, old = measure(torch.stack(out.logits, 1), sampled)
    full = model(out.sequences).logits[:, prompts.shape[1] - 1 : -1]
    true_mass, true_entropy, new = measure(full, sampled)
    return mass, true_mass, entropy, true_entropy, (new - old).exp().mean().item()


print(*(f"{name} {version(name)}" for name in ("xgrammar", "transformers", "torch")))
print("expected: the model's own values and a ratio of 1.00 in every line")
seen = {}
for name, how in {
    "xgrammar": dict(logits_processor=[fresh()]),
    "xgrammar, temperature=0.7": dict(logits_processor=[fresh()], temperature=0.7),
    "xgrammar, min_new_tokens=1": dict(logits_processor=[fresh()], min_new_tokens=1),
    "xgrammar, passed a copy": dict(logits_processor=[copying()]),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=lambda row, ids: digits),
}.items():
    mass, true_mass, entropy, true_entropy, ratio = seen[name] = ask(**how)
    print(f"{name:26}: on digits {mass:.2f} (model {true_mass:.2f}), "
          f"entropy {entropy:.2f} (model {true_entropy:.2f}), ratio {ratio:.2f}")
rows = list(seen.values())
masked = all(mass > 0.999 and ratio < 0.2 for mass, *_, ratio in rows[:2])
raw = all(abs(mass - true) < 1e-4 and abs(ratio - 1) < 1e-3 for mass, true, *_, ratio in rows[2:])
raise SystemExit(0 if masked and raw else "this has changed")
P
venv/bin/python see.py 2> log || { tail -n 3 log; exit 1; }
