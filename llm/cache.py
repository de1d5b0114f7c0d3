"""A key-value cache into which new tokens are written in place, and from which rows can leave."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """The keys and values of one layer, (n, heads, tokens, d), with room for more tokens.

    transformers' own layer copies all that it holds for every token. This one copies when its room
    is full, and then makes room for a quarter more. For sampling alone: no gradient passes.
    """

    def __init__(self, layer: DynamicLayer):
        """With the tensors of a layer that nothing else uses."""
        super().__init__()
        vars(self).update(vars(layer))
        device = self.keys.device.type
        if torch.is_autocast_enabled(device):
            # Rotary keys come as fp32, and so does all that transformers joins to them. Attention
            # would cast it for every token.
            dtype = torch.get_autocast_dtype(device)
            self.keys, self.values = self.keys.to(dtype), self.values.to(dtype)
        self.room = [self.keys, self.values]

    def update(self, keys: Tensor, values: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens. Returns all, as views of the room."""
        start = self.keys.shape[2]
        end = start + keys.shape[2]
        for i, (old, new) in enumerate(((self.keys, keys), (self.values, values))):
            if end > self.room[i].shape[2]:
                n, heads, _, d = old.shape
                self.room[i] = old.new_empty(n, heads, end + end // 4 + 4, d)
                self.room[i][:, :, :start] = old
            self.room[i][:, :, start:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values

    def reorder_cache(self, index: Tensor):
        """Row index[i] becomes row i. Only rows that change their place are copied."""
        n = len(index)
        moved = (index != torch.arange(n, device=index.device)).nonzero().squeeze(1)
        for x in (self.keys, self.values):
            x[moved] = x[index[moved]]
        self.keys, self.values = self.keys[:n], self.values[:n]
        self.room = [room[:n] for room in self.room]
