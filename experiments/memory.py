"""Count the GPU memory of a training step, in seconds and without a GPU.

    python -m experiments.memory --task gsm8k --micro-rows 4 --offload true
    python -m experiments.memory --task sums --model DIR --prompt-tokens 60

It takes all flags of train.py, and reads no weights: only config.json, of a directory or of the
hub. train.py's own code runs on torch's fake tensors, which have a shape and no numbers, and every
storage is counted while it lives. Answers have all of --max-tokens tokens. GB are 1e9 bytes.

- *learning*: a later micro-batch of a later update, when gradients and moments exist.
- *sampling*: the last token of all answers, when the cache is longest.

Not counted: what the allocator loses between blocks, cuBLAS's workspace, CUDA's own part of the
card. A card of 8 GB has 8.6e9 bytes; we call it large enough if a tenth of them and 0.5 GB remain.
"""

from __future__ import annotations

import argparse
import weakref
from types import SimpleNamespace

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from llm import start

CARDS = (8, 12, 16, 24)


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that live, each once, and their peak."""

    now = peak = 0

    def __init__(self):
        super().__init__()
        self.known = weakref.WeakSet()

    def add(self, found):
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage()) not in self.known:
                self.known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.drop, storage.nbytes())

    def drop(self, size: int):
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() >= 0:
            return args[0]  # with real tensors backward adds gradients in place
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 10**9  # how many answers have not ended: all
        found = func(*args, **kwargs or {})
        self.add(found)
        return found


def count(config: train.Config, shape, prompt_tokens: int, bf16: bool = True) -> dict[str, int]:
    """The bytes of one training step.

    shape: a transformers config. bf16: as on cards from Ampere on.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()
    policy = train.Policy(model, None, torch.tensor([0]), fast=config.fast, bf16=bf16)
    live = Live()
    live.add(list(model.parameters()))
    found = {"weights": live.now, "moments": 0 if config.offload else 2 * live.now}

    def answers(n: int):
        tokens = torch.zeros(n, config.max_tokens, dtype=torch.long)
        prompt = torch.ones(n, prompt_tokens, dtype=torch.long)
        return SimpleNamespace(prompt_ids=prompt, tokens=tokens, mask=tokens == 0)

    piece = answers(min(config.micro_rows, config.prompts * config.group_size))
    with live:
        for _ in range(2):
            live.peak = live.now
            train.log_probs(policy, piece, config.temperature).sum().backward()
        found["gradients"] = live.now - found["weights"]
        found["activations"] = live.peak - live.now
        found["learning"] = live.peak + found["moments"]
        model.zero_grad()
        live.peak = live.now
        # The prompts have all but the answers' last two tokens, of which the second is counted.
        longer = torch.arange(config.prompts).repeat_interleave(config.group_size)
        longer = longer[:, None].expand(-1, prompt_tokens + config.max_tokens - 2)
        train.generate(policy, longer, 2, config.temperature, train.rng(0))
        found["sampling"] = live.peak + found["moments"]
    return found


def main(argv: list[str] | None = None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    options, flags = parser.parse_known_args(argv)
    config, task = train.parse(flags)
    torch.set_num_threads(1)
    if config.model == "scratch":
        shape = start.make_model(config, task().make_tokenizer()).config
    else:
        shape = transformers.AutoConfig.from_pretrained(config.model)
    found = count(config, shape, options.prompt_tokens)
    for name, size in found.items():
        print(f"{name:11} {size / 1e9:6.2f} GB")
    peak = max(found["learning"], found["sampling"])
    room = [f"{card} GB" for card in CARDS if 0.9 * card * 2**30 - 5e8 > peak]
    print(f"peak        {peak / 1e9:6.2f} GB; cards with room: {', '.join(room) or 'none'}")


if __name__ == "__main__":
    main()
