"""Does it fit? The memory of a training step on Qwen2.5-0.5B's architecture.

    python -m experiments.bench.memory [--micro-rows 8] [--prompts 16] [--measure cuda] ...

Computed without a GPU, in bf16 as on a GPU. The prompts are read and a bucket of micro_rows answers
is scored with tensors that have shapes but no data. What autograd keeps of that for the backward
pass is added up, every storage once. No answer ends early.

With more answers than micro_rows, log_probs() keeps no activations. Backward makes them again: of
one bucket after another, and then of at most micro_rows prompts. So the peak has either those of a
bucket or those of some prompts. The prompts' keys and values, and their gradients, are there all
the time. The peak of the rollout comes at another time than that of backward.

--measure also makes two steps from random weights on that device and prints their peak (cpu: of
resident memory, in fp32). Needs transformers 5.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import train
from experiments.bench.rollout import CASES, Case, architecture, build
from experiments.bench.step import Ids, Task, make_policy, make_step
from experiments.bench.timing import make_parser, rise_mb
from llm.cache import RoomyLayer
from llm.policy import CHUNK, read_prompts


@dataclass
class Kept:
    """Bytes that autograd keeps for backward beside the parameters, and what goes with them."""

    prompts: int  # of reading the prompts
    bucket: int  # of scoring a bucket
    both: int  # of the two together, which share a bf16 copy of the weights
    token: int  # keys and values of a prompt's token, as they are read
    sampled: int  # keys and values of a token in the rollout
    parameters: int  # their number


def count_kept(case: Case, rows: int, fake: bool = True) -> Kept:
    """Of forward passes over the case's prompts and then a bucket of `rows` full answers."""
    with FakeTensorMode() if fake else nullcontext(), torch.autocast("cpu", torch.bfloat16):
        model = architecture(case).eval()
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        prompts = [[i] * case.prompt for i in range(case.prompts)]
        read, of_prompts = saved_storages(lambda: read_prompts(model, prompts))
        read.place = torch.arange(rows) % case.prompts
        states = read.of(torch.arange(rows))
        hidden, of_bucket = saved_storages(lambda: read_answers(model, case.cap, states))
        of_bucket[hidden.untyped_storage()._cdata] = hidden  # the output layer keeps it
        bytes_kept = [
            sum(x.untyped_storage().nbytes() for key, x in storages.items() if key not in own)
            for storages in (of_prompts, of_bucket, of_prompts | of_bucket)
        ]
        tokens = [cache_size(cache) for cache in (read.cache, read.to_sample()[0])]
        return Kept(*bytes_kept, *tokens, sum(p.numel() for p in model.parameters()))


def cache_size(cache) -> int:
    """Bytes of a token's keys and values in all layers."""
    n, _, tokens, _ = cache.layers[0].keys.shape
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    return held // (n * tokens)


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


def read_answers(model, cap: int, states: tuple) -> Tensor:
    """Hidden states (n cap, d) of full answers, as log_probs() hands them to the output layer."""
    cache, before, attention = states
    n = len(before)
    attention = torch.cat([attention, attention.new_ones(n, cap - 1)], 1).long()
    rest = model.base_model(
        torch.zeros(n, cap - 1, dtype=torch.long),
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1)[:, 1 - cap :],
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return torch.cat([before[:, None], rest], 1).flatten(0, 1).float()


def count_room(case: Case) -> int:
    """Tokens for which the rollout's cache has room at the end of the longest answer."""
    prompt, token = (torch.zeros(1, 1, n, 1) for n in (case.prompt, 1))
    layer = RoomyLayer(SimpleNamespace(keys=prompt, values=prompt))
    for _ in range(case.cap - 1):
        layer.update(token, token)
    return layer.room[0].shape[2]


def compute(case: Case, group_size: int, micro_rows: int) -> tuple[dict[str, float], float]:
    """GB by what needs them; and at the peak, where not all of them are there."""
    answers = case.prompts * group_size
    rows, prompts = min(answers, micro_rows), case.prompts
    while answers > rows and prompts > micro_rows:  # log_probs() halves its rows
        prompts = (prompts + 1) // 2
    kept = count_kept(replace(case, prompts=prompts), rows)
    shared = kept.token * case.prompts * case.prompt
    chunk = 4 * max(512 * case.vocab, CHUNK["cuda"])  # of logits, fp32
    head = 2 * chunk + 4 * case.vocab * case.width
    rollout = answers * (kept.sampled * count_room(case) + 16 * case.vocab)
    needs = {
        "weights, gradients, AdamW's two moments": 16 * kept.parameters,
        "start policy (--no-reference: none)": 4 * kept.parameters,
        "keys and values of the prompts, their gradients": 2 * shared,
        f"activations of {rows} answers, a bf16 copy of the weights": kept.bucket,
        f"activations of {prompts} prompts, a bf16 copy of the weights": kept.prompts,
        "output layer: two chunks of logits, its gradient": head,
        "rollout: keys and values, distributions": rollout,
    }
    backward = max(kept.bucket + head, kept.prompts) if answers > rows else kept.both + head
    peak = 20 * kept.parameters + max(2 * shared + backward, rollout)
    return {what: number / 1e9 for what, number in needs.items()}, peak / 1e9


def measure(case: Case, config: train.Config, device: str) -> float:
    """GB at the peak of two steps, from building the model on."""

    def work():
        model, prompts, _ = build(case, device)
        policy = make_policy(model, Ids())
        reference = replace(policy, model=copy.deepcopy(model))
        step = make_step(policy, Task(prompts), prompts, reference)
        for number in (1, 2):
            step(config, number)

    return rise_mb(work, device) / 1e3


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    sizes = dict(prompts=16, group_size=8, micro_rows=8, prompt=120, max_tokens=512, layers=24)
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--measure", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    case = replace(
        CASES["c"],
        prompts=args.prompts,
        prompt=args.prompt,
        mean=1e9,
        cap=args.max_tokens,
        layers=args.layers,
    )
    needs, peak = compute(case, args.group_size, args.micro_rows)
    for what, gb in needs.items():
        print(f"{gb:7.1f} GB  {what}")
    print(f"{peak:7.1f} GB  at the peak, computed")
    if args.measure:
        names = ("prompts", "group_size", "micro_rows", "max_tokens")
        same = {name: getattr(args, name) for name in names}
        config = train.Config(**same, minibatches=1, lr=1e-6)
        print(f"{measure(case, config, args.measure):7.1f} GB  at the peak of two steps, measured")


if __name__ == "__main__":
    main()
