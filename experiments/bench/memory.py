"""Does it fit? The memory of a training step on Qwen2.5-0.5B's architecture.

    python -m experiments.bench.memory [--micro-rows 8] [--prompts 16] [--measure cuda] ...

Computed without a GPU, in bf16 as on a GPU. The prompts are read and a bucket of micro_rows answers
is scored with tensors that have shapes but no data. What autograd keeps of that for the backward
pass is added up, every storage once. No answer ends early.

With more answers than micro_rows, log_probs() keeps no activations. Backward makes those of one
bucket at a time again, and at last those of the prompts, so the larger of the two counts. The
prompts' keys and values, and their gradients, are there all the time.

--measure also makes two steps from random weights on that device and prints their peak (cpu: of
resident memory, in fp32). Needs transformers 5.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import train
from experiments.bench.rollout import CASES, Case, architecture, build
from experiments.bench.step import Ids, Task, make_policy, make_step
from experiments.bench.timing import make_parser, rise_mb
from llm.policy import CHUNK, read_prompts


@dataclass
class Kept:
    """Bytes that a step on full answers keeps, parameters apart."""

    parameters: int  # their number
    prompts: int  # for backward, of reading the prompts
    bucket: int  # for backward, of scoring a bucket
    both: int  # for backward, where both are kept; a bf16 copy of the weights serves them both
    token: int  # the keys and values of a token


def count_kept(case: Case, rows: int, fake: bool = True) -> Kept:
    """What the forward passes over the case's prompts and a bucket of `rows` full answers keep."""
    with FakeTensorMode() if fake else nullcontext(), torch.autocast("cpu", torch.bfloat16):
        model = architecture(case).eval()
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        prompts = [[i] * case.prompt for i in range(case.prompts)]
        read, of_prompts = saved_storages(lambda: read_prompts(model, prompts))
        place = torch.arange(rows) % case.prompts
        _, of_bucket = saved_storages(lambda: score_bucket(model, case, read.of(place)))
        layers = read.cache.layers
        cached = sum(x.nbytes for layer in layers for x in (layer.keys, layer.values))
        sizes = [
            sum(x.untyped_storage().nbytes() for key, x in storages.items() if key not in own)
            for storages in (of_prompts, of_bucket, of_prompts | of_bucket)
        ]
        parameters = sum(p.numel() for p in model.parameters())
        return Kept(parameters, *sizes, cached // (case.prompts * case.prompt))


def saved_storages(work: Callable) -> tuple[object, dict[int, Tensor]]:
    """What work() returns, and the storages that autograd saves meanwhile, each with a tensor.

    The tensor stays alive with the storage: the address of a freed one may be used again.
    """
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return work(), storages


def score_bucket(model, case: Case, states: tuple) -> Tensor:
    """log_probs() of full answers up to their output layer, which keeps these hidden states."""
    cache, before, attention = states
    n = len(before)
    attention = torch.cat([attention, attention.new_ones(n, case.cap - 1)], 1).long()
    rest = model.base_model(
        torch.zeros(n, case.cap - 1, dtype=torch.long),
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1)[:, 1 - case.cap :],
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    hidden = torch.cat([before[:, None], rest], 1).float().flatten(0, 1)  # (n cap, d)
    return hidden * hidden.detach()
