#!/bin/bash
# Packed rows: whether the answers in one row see each other depends on use_cache, and as a model
# is loaded they do.
#
# One would guess: a row that transformers' own collator packs (positions from 0 in each answer, no
#   attention mask) is scored as its answers alone are, since sdpa and eager read the boundaries
#   from the positions; or it never is. A cache for later tokens changes no log-prob of these.
# What is so: with use_cache=True, the default of every loaded model, each answer sees those before
#   it; with use_cache=False none does. Gradient checkpointing in training mode and transformers'
#   Trainer switch the cache off, and so change the log-probs. gpt-oss leaks in either case (open
#   pull request 39997).
# Why: masking_utils.py:876 looks for boundaries only if there is no cache, and an empty one counts
#   (models/llama/modeling_llama.py:372). Off it goes in utils/generic.py:1042 and trainer.py:646
#   (read). gpt_oss/modeling_gpt_oss.py:460 does not pass the positions on.
# Who is hurt: whoever writes a loop of her own without FlashAttention, for which the page on
#   padding-free training asks, and which finds the boundaries with a cache as well (read). All
#   passes leak alike, so the ratio starts at 1 and the KL at 0. Several answers to one prompt in
#   a row are copied from each other: the loss below falls to a quarter, on new questions too,
#   and nothing was learned. A reference beside the Trainer's policy is scored by another mask.
# Instead: use_cache=False in every pass that scores, and one row against its answers alone.
# Versions: transformers 5.23.0, torch 2.13.0, Python 3.11; models of random weights. Seen on
#   2026-11-28 (the last digits are a machine's):
#   Llama   as loaded 0.51 (up to 3.11), use_cache=False 0.00 (up to 0.00), checkpointing 0.00 (up to 0.00)
#   gpt-oss as loaded 0.47 (up to 1.69), use_cache=False 0.47 (up to 1.69), checkpointing 0.47 (up to 1.69)
#   trained as loaded      : loss 1.11, on new questions packed 1.11, alone 4.23
#   trained use_cache=False: loss 4.17, on new questions packed 4.16, alone 4.16
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
from transformers import DataCollatorWithFlattening
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=4, head_dim=16)
USUAL = SIZES | dict(initializer_range=0.1)  # logits of a usual size without training
ANSWERS, LENGTH = 4, 24
pack = DataCollatorWithFlattening()


def log_probs(model, answers, **how):
    """Log-probs of tokens 1 to 23 of each answer, packed into one row: [answers, 23]."""
    row = pack([{"input_ids": answer.tolist()} for answer in answers])
    logits = model(input_ids=row["input_ids"], position_ids=row["position_ids"], **how).logits
    logp = logits.log_softmax(-1).view(len(answers), LENGTH, -1)
    return logp[:, :-1].gather(-1, answers[:, 1:, None])[..., 0]


def alone(model, answers):
    return torch.cat([log_probs(model, answer[None]) for answer in answers])


print("torch", torch.__version__.split("+")[0], "transformers", transformers.__version__)
print("expected: packed and alone are 0.00 nats a token apart")
as_told = True
for name, make in [
    ("Llama", lambda: LlamaForCausalLM(LlamaConfig(**USUAL))),
    ("gpt-oss", lambda: GptOssForCausalLM(
        GptOssConfig(**USUAL, num_local_experts=4, num_experts_per_tok=2))),
]:
    torch.manual_seed(0)
    model, answers = make().eval(), torch.randint(0, 64, (ANSWERS, LENGTH))
    seen = {}
    with torch.no_grad():
        right = alone(model, answers)
        seen["as loaded"] = log_probs(model, answers)
        seen["use_cache=False"] = log_probs(model, answers, use_cache=False)
        model.train()
        model.gradient_checkpointing_enable()
        seen["checkpointing"] = log_probs(model, answers)
    gaps = {how: (logp - right).abs() for how, logp in seen.items()}
    line = [f"{how} {gap.mean():.2f} (up to {gap.max():.2f})" for how, gap in gaps.items()]
    print(f"{name:7}", ", ".join(line), flush=True)
    leaks = [gap.max().item() > 1 for gap in gaps.values()]
    sealed = [gap.max().item() < 1e-3 for gap in gaps.values()]
    as_told &= all(leaks) if name == "gpt-oss" else leaks[0] and all(sealed[1:])


def rows(n):
    """n questions of four equal right answers. Tokens are random: none can be known in advance."""
    return torch.randint(0, 64, (n, 1, LENGTH)).expand(n, ANSWERS, LENGTH)


print("expected: no loss below log(64) = 4.16")
for name, how in [("as loaded      ", {}), ("use_cache=False", dict(use_cache=False))]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
    for _ in range(400):
        loss = -torch.cat([log_probs(model, row, **how) for row in rows(4)]).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        new = rows(32)
        packed = -torch.cat([log_probs(model, row, **how) for row in new]).mean().item()
        single = -torch.cat([alone(model, row[:1]) for row in new]).mean().item()
    print(f"trained {name}: loss {loss.item():.2f}, on new questions packed {packed:.2f}, "
          f"alone {single:.2f}", flush=True)
    as_told &= single > 4.1 and (packed > 4.1 if how else packed < 1.5)
raise SystemExit(0 if as_told else "this has changed")
P
venv/bin/python see.py 2> log || { tail -n 3 log; exit 1; }
