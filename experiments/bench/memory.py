"""Does it fit? The memory of a training step with --fast on Qwen2.5-0.5B's architecture.

    python -m experiments.bench.memory [--micro-rows 8] [--max-tokens 512] [--measure cuda]
    python -m experiments.bench.memory --fp32 --no-reference --fits 16

Computed without a GPU, in bf16 as on a GPU; with --fp32 as on a card before Ampere, which has no
bf16. The model reads its prompts and micro_rows answers with tensors that have shapes but no data.
What autograd keeps of that for the backward pass is added up, every storage once. No answer ends
early. The peak of the rollout comes at another time than that of backward.

--fits GB prints the most --micro-rows that fit, for several --max-tokens.

--measure also makes a step from random weights on that device, with --fast and without, and prints
their peaks (cpu: of resident memory, in fp32). Needs transformers 5.
"""

import argparse
import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import DynamicCache

import train
from experiments.bench.cases import (
    CASES,
    GROUP,
    Case,
    Ids,
    Task,
    architecture,
    make_config,
    make_policy,
    step,
)
from experiments.bench.timing import peak_gb
from llm.fast import CHUNK, PromptStates


def count_kept(case: Case, rows: int, fake: bool = True, fp32: bool = False) -> tuple[int, int]:
    """Bytes that autograd keeps of scoring `rows` full answers, and the number of parameters."""
    bf16 = torch.autocast("cpu", torch.bfloat16, enabled=not fp32)
    with FakeTensorMode() if fake else nullcontext(), bf16:
        model = architecture(case).eval()
        hidden, kept = saved_storages(lambda: read(model, case, rows))
        kept[hidden.untyped_storage()._cdata] = hidden  # the output layer keeps it
        weights = {p.untyped_storage()._cdata for p in model.parameters()}  # are there anyway
        sizes = (x.untyped_storage().nbytes() for key, x in kept.items() if key not in weights)
        return sum(sizes), sum(p.numel() for p in model.parameters())


def saved_storages(work: Callable) -> tuple[object, dict[int, Tensor]]:
    """What work() returns, and the storages that autograd saves meanwhile, by address.

    Each comes as a tensor, which keeps it alive: the address of a freed one may be used again.
    """
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return work(), storages


def read(model, case: Case, rows: int) -> Tensor:
    """Hidden states (rows cap, d) of full answers, as llm.fast.log_probs makes them.

    Without its steps that look at data: which prompts are alike, and how long answers are.
    """
    prompts = -(-rows // GROUP)
    seen = torch.ones(prompts, case.prompt, dtype=torch.bool)
    cache = DynamicCache(config=model.config)
    first = model.base_model(
        seen.long(), attention_mask=seen.long(), past_key_values=cache, use_cache=True
    ).last_hidden_state[:, -1]
    states = PromptStates(cache, first, seen, torch.arange(rows) // GROUP)
    cache, first, before = states.of(torch.arange(rows))
    attention = torch.cat([before, before.new_ones(rows, case.cap - 1)], 1).long()
    rest = model.base_model(
        torch.zeros(rows, case.cap - 1, dtype=torch.long),
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1)[:, 1 - case.cap :],
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return torch.cat([first[:, None], rest], 1).flatten(0, 1).float()


def compute(
    case: Case, micro_rows: int, fp32: bool = False, reference: bool = True
) -> dict[str, float]:
    """GB by what needs them; and at the peak, where not all of them are there."""
    answers = case.prompts * GROUP
    rows = min(answers, micro_rows)
    kept, parameters = count_kept(case, rows, fp32=fp32)
    shape = architecture(replace(case, layers=1, vocab=2)).config
    heads = getattr(shape, "num_key_value_heads", shape.num_attention_heads)
    number = 4 if fp32 else 2  # bytes
    token = (
        2 * number * case.layers * heads * case.width // shape.num_attention_heads
    )  # keys, values
    chunk = 4 * max(512 * case.vocab, CHUNK["cuda"])  # of logits, fp32
    room = 1.25 * (case.prompt + case.cap)  # the cache grows by a quarter at a time
    rollout = answers * (token * room + 16 * case.vocab)
    output = 2 * chunk + 4 * case.vocab * case.width
    start = 4 * parameters if reference else 0
    needs = {
        "weights, gradients, AdamW's two moments": 16 * parameters,
        "start policy (--no-reference: none)": start,
        f"activations of {rows} answers{'' if fp32 else ', a bf16 copy of the weights'}": kept,
        "output layer: two chunks of logits, its gradient": output,
        "rollout: keys and values, distributions": rollout,
    }
    needs["at the peak"] = 16 * parameters + start + max(kept + output, rollout)
    return {what: number / 1e9 for what, number in needs.items()}


def most_rows(case: Case, gb: float, **choices) -> int:
    """The most micro_rows that fit, a power of 2 up to 64; 0 if not even one does."""
    rows = 1
    while rows <= 64 and compute(case, rows, **choices)["at the peak"] <= gb:
        rows *= 2
    return rows // 2


def measure(case: Case, config: train.Config, device: str, fp32: bool = False) -> float:
    """GB at the peak of a step, from building the model on."""

    def work():
        policy = make_policy(case, Ids(), device)
        policy.fast = config.fast
        policy.bf16 = policy.bf16 and not fp32
        start = replace(policy, model=copy.deepcopy(policy.model)) if config.reference else None
        step(policy, Task(case), config, reference=start)

    return peak_gb(work, device)


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    sizes = dict(prompts=16, micro_rows=8, prompt=120, max_tokens=512, layers=24)
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--reference", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--fits", type=float, metavar="GB")
    parser.add_argument("--measure", choices=("cuda", "cpu"))
    options = parser.parse_args(argv)
    case = replace(
        CASES["0.5B"],
        prompts=options.prompts,
        prompt=options.prompt,
        cap=options.max_tokens,
        layers=options.layers,
    )
    choices = dict(fp32=options.fp32, reference=options.reference)
    if options.fits:
        for cap in (256, 512, 1024, 2048):
            rows = most_rows(replace(case, cap=cap), options.fits, **choices)
            print(f"--max-tokens {cap}: --micro-rows {rows or 'none'} fits, computed")
        return
    for what, gb in compute(case, options.micro_rows, **choices).items():
        print(f"{gb:7.1f} GB  {what}, computed")
    for fast in (True, False) if options.measure else ():
        more = dict(lr=1e-6, fast=fast, reference=options.reference)
        config = make_config(case, micro_rows=options.micro_rows, **more)
        gb = measure(case, config, options.measure, options.fp32)
        print(f"{gb:7.1f} GB  at the peak with --{'' if fast else 'no-'}fast, measured")


if __name__ == "__main__":
    main()
