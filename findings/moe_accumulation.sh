#!/bin/bash
# A mixture of experts: gradient accumulation multiplies router_aux_loss_coef.
#
# One would guess: one batch of 8 rows and 8 accumulated batches of one row give the same gradient,
#   as they do for a dense model. (The rows here are equal, so the balance of the experts is, too.)
# What is so: under transformers' Trainer the auxiliary loss counts once in each micro-batch, and
#   nothing divides it, so its coefficient is multiplied by gradient_accumulation_steps.
# Why: since the loss is divided by the tokens of all micro-batches (num_items_in_batch), the Trainer
#   no longer divides by the number of steps; the model adds its auxiliary loss undivided
#   (models/qwen3_moe/modeling_qwen3_moe.py:660, models/mixtral/modeling_mixtral.py:631).
# Who is hurt: whoever tunes the coefficient on one machine and trains with another number of
#   accumulation steps. At 64 steps the usual 0.001 acts as 0.064; the logged loss rises as well.
#   transformers' issue 48690 reports the same factor for the number of processes.
# Instead: divide router_aux_loss_coef by gradient_accumulation_steps, or use TRL 1.16.0, which does
#   it (trl/trainer/sft_trainer.py:1629, read).
# Versions: transformers 5.23.0, torch 2.13.0, Python 3.11. Seen on 2026-11-28:
#   Qwen3MoeForCausalLM: 8 steps of one row against one of 8: cross-entropy times 1.00, auxiliary
#   loss times 8.00 (cosine 1.000); MixtralForCausalLM: the same
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q torch==2.13.0
venv/bin/pip install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cat > see.py <<'P'
import copy

import torch
import transformers
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

transformers.logging.set_verbosity_error()
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=4, output_router_logits=True)


def gradient(model, coefficient, rows_at_once):
    """The routers' gradient of one update on the same 8 rows, and the logged loss."""
    model = copy.deepcopy(model)
    model.router_aux_loss_coef = coefficient
    seen = []

    class Look(torch.optim.SGD):
        def step(self, *args, **kwargs):
            routers = [p for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")]
            seen.append(torch.cat([p.grad.flatten() for p in routers]))

    arguments = TrainingArguments(
        output_dir="out",
        max_steps=1,
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=8 // rows_at_once,
        max_grad_norm=0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    row = torch.arange(16).tolist()
    rows = [{"input_ids": row, "labels": row}] * 8
    look = Look(model.parameters(), lr=1e-3)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(look, None))
    trainer.remove_callback(PrinterCallback)
    loss = trainer.train().training_loss
    return seen[0], loss


print("torch", torch.__version__.split("+")[0], "transformers", transformers.__version__)
print("expected: the auxiliary part of the gradient is multiplied by 1.0")
as_told = True
torch.manual_seed(0)
for model in [
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    ),
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
]:
    grad = {}
    for rows_at_once in (8, 1):
        for coefficient in (0.0, 1.0):
            grad[rows_at_once, coefficient], loss = gradient(model, coefficient, rows_at_once)
    plain = (grad[1, 0.0].norm() / grad[8, 0.0].norm()).item()
    whole, pieces = (grad[n, 1.0] - grad[n, 0.0] for n in (8, 1))  # the auxiliary loss alone
    factor = (pieces.norm() / whole.norm()).item()
    same = torch.cosine_similarity(pieces, whole, dim=0).item()
    print(f"{type(model).__name__}: 8 steps of one row against one of 8: cross-entropy times "
          f"{plain:.2f}, auxiliary loss times {factor:.2f} (cosine {same:.3f})", flush=True)
    as_told &= abs(plain - 1) < 0.01 and abs(factor - 8) < 0.1
raise SystemExit(0 if as_told else "this has changed")
P
venv/bin/python see.py 2> log || { tail -n 3 log; exit 1; }
