"""The same `generate` and `log_probs` as train.py's, in less time and memory (--fast).

Nothing here changes a number by more than rounding; tests/test_fast.py says so. What it does:

- Each different prompt is read once, in sampling and in scoring. The answers of a group share it.
- Answers that have ended leave the batch.
- The cache of sampled tokens grows in place.
- Answers of like length are scored together, so that little padding is computed.
- Logits are made a chunk at a time. With a vocabulary of 152,000, those of 16 answers of 1,024
  tokens would need 10 GB.

So it calls a model's trunk and its output layer itself, and copies its cache. This is wrong for a
model that does more between the two (a soft cap), or keeps more in its cache. train.py compares
both ways before a run.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Logits held at once: 16 MB of fp32 stay near a CPU's caches; 256 MB on a GPU. But at least those
# of 128 tokens.
CHUNK = {"cpu": 2**22, "cuda": 2**26}
# Padded positions that cost about as much as one more call of the model.
PADDING = {"cpu": 2**9, "cuda": 2**12}


# ---------------- the two functions


@torch.no_grad()
def generate(policy, prompts, max_tokens: int, temperature: float, gen):
    """As train.generate: tokens, mask, log-probs and entropies, (N, T) each."""
    model, n, device = policy.model, len(prompts), prompts.device
    uniform = torch.rand(n, max_tokens, generator=gen, dtype=torch.float64).to(device)
    tokens = torch.zeros(n, max_tokens, dtype=torch.long, device=device)
    mask = torch.zeros(n, max_tokens, dtype=torch.bool, device=device)
    logps, entropies = torch.zeros(2, n, max_tokens, device=device)
    alive = torch.arange(n, device=device)  # the answers that are still in the batch
    with policy.autocast():  # which casts each weight once
        cache, hidden, seen = read_prompts(model, prompts).of(alive)
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:  # sliding windows do not grow
                cache.layers[i] = RoomyLayer(layer)
        attention = torch.cat([seen, seen.new_ones(n, max_tokens)], 1).long()
        position = seen.sum(1, keepdim=True)  # of the next token
        for t in range(max_tokens):
            logp = (output_logits(model, hidden) / (temperature or 1.0)).log_softmax(-1)
            token = logp.argmax(-1)
            if temperature:  # as train.sample_token
                cdf = logp.double().exp().cumsum(-1)
                number = uniform[alive, t, None] * cdf[:, -1:]
                token = torch.searchsorted(cdf, number, right=True).squeeze(1)
                token = token.clamp(max=logp.shape[1] - 1)
            tokens[alive, t] = token
            mask[alive, t] = True
            logps[alive, t] = logp.gather(1, token[:, None]).squeeze(1)
            entropies[alive, t] = -(logp.exp() * logp).sum(1)
            stays = ~torch.isin(token, policy.eos)
            left = int(stays.sum())  # a GPU is waited for here
            if t + 1 == max_tokens or not left:
                break
            if left < len(stays):
                rows = fill_gaps(stays, left)
                cache.reorder_cache(rows)
                alive, token = alive[rows], token[rows]
                attention, position = attention[rows], position[rows]
            hidden = model.base_model(
                token[:, None],
                attention_mask=attention[:, : seen.shape[1] + t + 1],
                position_ids=position + t,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
    return tuple(x[:, : t + 1] for x in (tokens, mask, logps, entropies))


def log_probs(policy, rollout, temperature: float) -> Tensor:
    """As train.log_probs: log pi of the answers' tokens, differentiable. (N, T)."""
    model, mask = policy.model, rollout.mask
    logp = torch.zeros(mask.shape, device=mask.device)
    with autocast(policy):
        prompts = read_prompts(model, rollout.prompt_ids)
        for bucket in length_buckets(mask):
            seen, tokens = mask[bucket], rollout.tokens[bucket]  # (n, T)
            width = max(1, int(seen.sum(1).max()))
            cache, first, before = prompts.of(bucket)
            hidden = first[:, None]  # (n, 1, d) predicts the first tokens
            if width > 1:
                attention = torch.cat([before, seen[:, : width - 1]], 1).long()
                rest = model.base_model(
                    tokens[:, : width - 1],
                    attention_mask=attention,
                    position_ids=(attention.cumsum(1) - 1)[:, 1 - width :],
                    past_key_values=cache,
                    use_cache=True,
                ).last_hidden_state
                hidden = torch.cat([hidden, rest], 1)  # (n, width, d)
            hidden = hidden[seen[:, :width]]  # (M, d)
            row, column = bucket[:, None].expand_as(seen)[seen], seen.nonzero()[:, 1]  # (M,)
            new = token_log_probs(model, hidden, tokens[seen], temperature)
            logp = logp.index_put((row, column), new)
    return logp


def autocast(policy) -> torch.autocast:
    """As train.Policy.autocast, without its cache of weights: where there is a gradient, prompts
    and answers use each weight twice, and a cached bf16 copy would add these up in bf16."""
    device, on = policy.model.device.type, policy.bf16
    return torch.autocast(device, torch.bfloat16, enabled=on, cache_enabled=False)


# ---------------- prompts that are read once


@dataclass
class PromptStates:
    """What a model keeps of U different prompts, for the N rows that share them."""

    cache: DynamicCache  # keys and values of the U prompts
    hidden: Tensor  # (U, d) the hidden states that predict the first tokens of answers
    seen: Tensor  # (U, P) bool; prompts are padded on the left
    place: Tensor  # (N,) which of the U prompts a row has

    def of(self, rows: Tensor) -> tuple[DynamicCache, Tensor, Tensor]:
        """For some of the rows: a cache of their own, hidden states (n, d), prompt mask (n, P)."""
        which = self.place[rows]
        own = copy.copy(self.cache)
        own.layers = [copy.copy(layer) for layer in self.cache.layers]
        own.reorder_cache(which)
        return own, self.hidden[which], self.seen[which]


def read_prompts(model, prompts) -> PromptStates:
    """Send each different prompt through the model once: a group shares it, and its gradient."""
    different, place = prompts.unique(dim=0, return_inverse=True)  # (U, P), (N,)
    seen = different >= 0
    cache = DynamicCache(config=model.config)
    hidden = model.base_model(
        different.clamp(min=0),
        attention_mask=seen.long(),
        position_ids=(seen.cumsum(1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state[:, -1]
    return PromptStates(cache, hidden, seen, place)


# ---------------- a cache that grows in place, and from which rows can leave


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


def fill_gaps(stays: Tensor, left: int) -> Tensor:
    """The rows that stay, as many as `left`. The last ones fill the gaps, so that few rows change
    their place. (n,) bool -> (left,)."""
    order = torch.arange(left, device=stays.device)
    order[~stays[:left]] = stays[left:].nonzero().squeeze(1) + left
    return order


# ---------------- little padding, few logits


def length_buckets(mask: Tensor) -> list[Tensor]:
    """Row numbers in buckets of answers of like length, the longest first; every row once.

    A bucket ends where one row more would bring its padding over PADDING.
    (N, T) bool -> index tensors.
    """
    length = mask.sum(1)
    order = length.argsort(descending=True, stable=True)
    buckets, longest, padding = [], 0, math.inf
    for row, n in zip(order.tolist(), length[order].tolist(), strict=True):
        padding += longest - n
        if padding > PADDING[mask.device.type]:
            longest, padding = n, 0
            buckets.append([])
        buckets[-1].append(row)
    return [torch.tensor(bucket, device=mask.device) for bucket in buckets]


def output_logits(model, hidden: Tensor) -> Tensor:
    """The output layer in fp32, outside any autocast: bf16 logits near 20 are a tenth apart.

    (..., d) -> (..., V).
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return model.get_output_embeddings()(hidden.float())


def token_log_probs(model, hidden: Tensor, targets: Tensor, temperature: float):
    """log pi of M target tokens, differentiable, in fp32.

    pi = softmax(logits / temperature). Many rows of a large vocabulary go through it a chunk at a
    time, and once more in backward, so that all logits never exist together.
    (M, d), (M,) -> (M,).
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    # With much fewer rows than 128, a product with a large matrix takes as long as reading it.
    size = max(128, CHUNK[hidden.device.type] // vocabulary)
    if len(hidden) <= size:
        return _chunk_log_probs(model, hidden, targets, temperature)
    parts = [
        checkpoint(_chunk_log_probs, model, h, y, temperature, use_reentrant=False)
        for h, y in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return torch.cat(parts)


def _chunk_log_probs(model, hidden: Tensor, targets: Tensor, temperature: float):
    logp = (output_logits(model, hidden) / temperature).log_softmax(-1)  # (M, V)
    return logp.gather(1, targets[:, None]).squeeze(1)
