"""The same `generate` and `log_probs` as train.py's, in less time and memory (--fast).

Nothing here changes a number by more than rounding; tests/test_fast.py says so. What it does:

- Each different prompt is read once, in sampling and in scoring. The answers of a group share it.
- Answers that have ended leave the batch.
- Answers of like length are scored together, so that little padding is computed.
- Logits are made a chunk at a time. With a vocabulary of 152,000, those of 16 answers of 1,024
  tokens would need 10 GB.
- Where the model computes in bf16, no bf16 copy of its weights waits for the backward pass.

`python -m experiments.memory` counts what a step needs.

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
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

# Logits held at once: 16 MB of fp32 stay near a CPU's caches. But at least those of 128 tokens.
CHUNK = 2**22
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
                rows = stays.nonzero().squeeze(1)
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
    with autocast(policy), RecastWeights():
        if len(mask) == 1:
            # Prompt and answer in one call: with two, the weights' gradients of the one would wait
            # for those of the other.
            prompt, answer = rollout.prompt_ids[rollout.prompt_ids >= 0], rollout.tokens[mask]
            ids = torch.cat([prompt, answer])[None, :-1]
            hidden = model.base_model(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
            new = token_log_probs(model, hidden, answer, temperature)
            return logp.index_put(mask.nonzero(as_tuple=True), new)
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
            row, column = seen.nonzero().T  # (M,) each: the tokens of these answers
            targets = tokens[row, column]
            new = token_log_probs(model, hidden[row, column], targets, temperature)
            logp = logp.index_put((bucket[row], column), new)
    return logp


# ---------------- bf16 without a copy of the weights


def autocast(policy) -> torch.autocast:
    """As train.Policy.autocast, without its cache of weights: where there is a gradient, prompts
    and answers use each weight twice, and a cached bf16 copy would add these up in bf16."""
    device, on = policy.model.device.type, policy.bf16
    return torch.autocast(device, torch.bfloat16, enabled=on, cache_enabled=False)


class RecastWeights(TorchFunctionMode):
    """Inside autocast, linear layers keep no bf16 copy of a weight, and cast it again in backward.

    autograd would keep one copy for the prompts, and one for each bucket of answers. The numbers
    are autocast's own.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is linear and not kwargs and torch.is_autocast_enabled(args[0].device.type):
            return RecastLinear.apply(*args)
        return func(*args, **kwargs or {})


class RecastLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None):
        """(..., d), (e, d), (e,) -> (..., e), in bf16."""
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)  # autocast casts all three

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)  # (M, e)
        d_weight = rows.T @ x.flatten(0, -2).to(grad.dtype)  # (e, d); autograd makes it fp32
        d_bias = rows.sum(0) if ctx.needs_input_grad[2:] == (True,) else None
        return grad @ weight.to(grad.dtype), d_weight, d_bias


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
    cache = SmallCache(config=model.config)
    hidden = model.base_model(
        different.clamp(min=0),
        attention_mask=seen.long(),
        position_ids=(seen.cumsum(1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state[:, -1]
    return PromptStates(cache, hidden, seen, place)


class SmallCache(DynamicCache):
    """In sampling, keys and values as attention reads them. Inside autocast transformers' own cache
    keeps them in fp32, because rotary keys are, and each token casts all of them again."""

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs):
        device = keys.device.type
        if torch.is_autocast_enabled(device) and not torch.is_grad_enabled():
            dtype = torch.get_autocast_dtype(device)
            keys, values = keys.to(dtype), values.to(dtype)
        return super().update(keys, values, *args, **kwargs)


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
    """log pi of M target tokens, differentiable, in fp32. pi = softmax(logits / temperature).

    (M, d), (M,) -> (M,).
    """
    head = model.get_output_embeddings()
    return TokenLogProbs.apply(hidden.float(), head.weight, head.bias, targets, temperature)


class TokenLogProbs(torch.autograd.Function):
    """A chunk of logits at a time, and once more in backward, so that all never exist together.

    autograd would hold the weight's gradient three times: a chunk's, the sum so far, the new sum.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature):
        # With much fewer rows than 128, a product with a large matrix takes as long as reading it.
        ctx.size = max(128, CHUNK // len(weight))
        logp = []
        with torch.autocast(hidden.device.type, enabled=False):
            for h, y in zip(hidden.split(ctx.size), targets[:, None].split(ctx.size), strict=True):
                logits = linear(h, weight, bias).div_(temperature)  # (m, V)
                logp.append(logits.log_softmax(-1).gather(1, y))
        logp = torch.cat(logp)  # (M, 1)
        ctx.save_for_backward(hidden, weight, bias, targets[:, None], logp)
        ctx.temperature = temperature
        return logp.squeeze(1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        hidden, weight, bias, *columns = ctx.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        d_bias = None if bias is None else torch.zeros_like(bias)
        rows = (x.split(ctx.size) for x in (hidden, d_hidden, *columns, grad[:, None]))
        for h, d_h, y, logp, g in zip(*rows, strict=True):
            # One (m, V) tensor, changed in place: logits, p, the gradient of the logits.
            x = linear(h, weight, bias).div_(ctx.temperature)
            x.sub_(x.gather(1, y) - logp).exp_()  # p; log Z is a token's logit less its logp
            # d logp / d logits is (1 at the token, 0 elsewhere) less p, over the temperature.
            g = g / ctx.temperature
            x.mul_(-g).scatter_add_(1, y, g)
            torch.mm(x, weight, out=d_h)
            d_weight.addmm_(x.T, h)
            if bias is not None:
                d_bias += x.sum(0)
            del x  # before there is another
        return d_hidden, d_weight, d_bias, None, None
