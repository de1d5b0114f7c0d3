"""Does it fit? Memory of a step on Qwen2.5-0.5B's architecture: python experiments/bench/memory.py
[--micro-rows 8] ...

Computed without a GPU: the forward pass is made with tensors that have shapes but no data, in bf16 as on a GPU, and
what it keeps for the backward pass is added up. No answer ends early; no two rows of a piece share their prompt.
--measure also makes two steps from random weights on that device and prints their peak (cpu: of resident memory, in
fp32). Needs transformers 5.
"""

import argparse
import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import train
from experiments.bench.meter import Ids, Task
from experiments.bench.rollout import CASES, EOS, Case, architecture, build
from experiments.bench.timing import rise_mb
from llm.policy import CHUNK


def forward(case: Case, rows: int) -> tuple[int, int, int]:
    """Parameters; bytes of all else that a forward pass of `rows` full rows keeps; of a token's
    keys and values."""
    tensors = {}

    def pack(
        tensor: torch.Tensor,
    ) -> torch.Tensor:  # a storage once, with its tensor: a freed one's name is used again
        tensors[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        model = architecture(case).eval()
        ids = torch.zeros(rows, case.prompt + case.cap, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model.base_model(
                ids, attention_mask=torch.ones_like(ids), use_cache=False
            ).last_hidden_state
        cache = model.base_model(ids[:1, :1], use_cache=True).past_key_values
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        kept = sum(x.untyped_storage().nbytes() for name, x in tensors.items() if name not in own)
        pair = sum(x.numel() * 2 for layer in cache.layers for x in (layer.keys, layer.values))
        return sum(p.numel() for p in model.parameters()), kept + 4 * hidden.numel(), pair


def computed(case: Case, answers: int, micro_rows: int) -> dict[str, float]:
    """GB, by what needs it. The last comes when the two before it are not there."""
    size, kept, pair = forward(case, micro_rows)
    chunk = 4 * max(512 * case.vocab, CHUNK["cuda"])  # of logits, fp32
    return {
        "weights, gradients, AdamW's two moments": 16 * size / 1e9,
        "start policy (--no-reference: none)": 4 * size / 1e9,
        f"activations of {micro_rows} rows, a bf16 copy of the weights": kept / 1e9,
        "output layer: two chunks of logits, its gradient": (
            2 * chunk + 4 * case.vocab * case.width
        )
        / 1e9,
        "rollout: keys and values, distributions": answers
        * (pair * (case.prompt + case.cap) + 32 * case.vocab)
        / 1e9,
    }


def measured(case: Case, config: train.Config, device: str) -> float:
    """GB at the peak of two steps, from building the model on."""

    def work():
        model, prompts, _ = build(case, device)
        reference = copy.deepcopy(model)
        optimizer = train.adamw(model, 1e-6)
        for step in (1, 2):
            rest = (optimizer, torch.tensor([EOS], device=device), Task(prompts), config, {}, step)
            train.train_step(model, reference, Ids(), *rest)

    return rise_mb(work, device) / 1e3


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in dict(
        prompts=16, group_size=8, micro_rows=8, prompt=120, max_tokens=512, layers=24
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--measure", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    case = Case(
        args.prompts,
        args.prompt,
        1e9,
        args.max_tokens,
        args.layers,
        CASES["c"].width,
        CASES["c"].vocab,
    )
    found = computed(case, args.prompts * args.group_size, args.micro_rows)
    for what, gb in found.items():
        print(f"{gb:7.1f} GB  {what}")
    state, start, kept, head, rollout = found.values()
    print(f"{state + start + max(kept + head, rollout):7.1f} GB  at the peak, computed")
    if args.measure:
        names = ("prompts", "group_size", "micro_rows", "max_tokens")
        config = train.Config(
            **{name: getattr(args, name) for name in names}, minibatches=1, lr=1e-6
        )
        print(f"{measured(case, config, args.measure):7.1f} GB  at the peak of two steps, measured")


if __name__ == "__main__":
    main()
