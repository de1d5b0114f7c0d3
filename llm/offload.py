"""AdamW in main memory (--offload), for a GPU that is small for its model. No number changes."""

from __future__ import annotations

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
