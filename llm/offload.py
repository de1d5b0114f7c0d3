"""A GPU that is small for a model: AdamW in main memory, and a refusal where even that is too much.

Nothing here changes a number. `python -m experiments.memory` counts what a step needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW in main memory, for weights on a GPU: the moments, 8 bytes a weight, stay there.

    It makes the same updates. Main memory needs 16 bytes a weight. A checkpoint is an AdamW's.
    """

    def __init__(self, weights: Iterable[Tensor], **options):
        self.weights = list(weights)
        super().__init__([weight.detach().cpu() for weight in self.weights], **options)

    @torch.no_grad()
    def step(self):
        pairs = list(zip(self.weights, self.param_groups[0]["params"], strict=True))
        for weight, copy in pairs:
            copy.copy_(weight)  # a checkpoint may have been loaded
            copy.grad = None if weight.grad is None else weight.grad.cpu()
        super().step()
        for weight, copy in pairs:
            weight.copy_(copy)
            copy.grad = None


def check_room(model: torch.nn.Module, has_reference: bool, is_offloaded: bool):
    """Refuse a model that cannot learn on this GPU, however few answers it reads at once.

    Its fp32 weights are there. Gradients and AdamW's two moments take 12 bytes a weight more, and
    the reference of a KL term 4.
    """
    if not torch.cuda.is_available():
        return
    size, free = sum(weight.numel() for weight in model.parameters()), torch.cuda.mem_get_info()[0]
    needs = size * (4 + 8 * (not is_offloaded) + 4 * has_reference)
    if needs > free:
        less = "" if is_offloaded else "; --offload true needs less"
        room = f"{needs / 1e9:.1f} GB of the GPU, of which {free / 1e9:.1f} GB are free"
        raise ValueError(f"learning needs {room}{less}")
    if is_offloaded and hasattr(os, "sysconf"):  # Windows does not tell
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 16 * size > memory:
            has = f"this machine has {memory / 1e9:.1f} GB"
            raise ValueError(f"--offload needs {16 * size / 1e9:.1f} GB of main memory; {has}")
