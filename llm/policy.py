"""The policy: load it, sample from it, score what it said. model -> rollout -> score, in this
order."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from cli import fail
from config import Config
from losses import METHODS


def rng(*key) -> torch.Generator:
    """A fresh generator for each use and step, so that a resumed run needs no random state to be
    restored."""
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")
    )


# ---------------- model


def load_model(config: Config, task, device: torch.device, path: str):
    """A causal LM with fp32 master weights, its tokenizer, its end-of-answer ids. In eval mode for
    good: no dropout."""
    if path == "scratch":
        tokenizer = task.make_tokenizer()
        ids = dict(
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        shape = dict(
            n_layer=config.layers,
            n_embd=config.width,
            n_head=4 if config.width < 512 else 8,
            n_positions=1024,
        )
        shape |= dict(
            activation_function="gelu_pytorch_tanh"
        )  # GPT-2's own GELU, in one kernel and not in eight
        torch.manual_seed(config.seed)
        # The usual init of 0.02 is meant for wide models; a narrow one learns several times faster
        # from this.
        start = dict(initializer_range=config.width**-0.5)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape, **ids, **start))
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            fail(
                f"--model {path} cannot be loaded ({reason}); accepted: scratch, a directory, a hub id"
            )
    eos = model.generation_config.eos_token_id
    eos = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    if not eos:
        fail(
            f"--model {path}: neither its tokenizer nor its generation config names an end-of-sequence token"
        )
    model.to(device).eval()
    eos = torch.tensor(sorted(eos), device=device)
    # Its own generation config may hold a sampler, which rollout() ignores and save_pretrained()
    # may refuse.
    model.generation_config = GenerationConfig(
        eos_token_id=eos.tolist(), pad_token_id=tokenizer.pad_token_id
    )
    try:  # rollout() and score() apply the output layer themselves: make sure that this, and the cache, is all there is
        ids = torch.arange(min(8, model.config.vocab_size), device=device)[None]
        inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
        with torch.no_grad():
            plain, ours = (
                model(**inputs).logits,
                logits_of(model, model.base_model(**inputs).last_hidden_state),
            )
        rows, sampled = rollout(
            model, [ids[0].tolist(), ids[0, 1:].tolist()], 1, 3, 1.0, eos, rng("try")
        )
        logp, _ = score_all(model, rows, 1.0, 1, grad=True)
        logp.sum().backward()
        model.zero_grad()
    except torch.OutOfMemoryError:  # a RuntimeError as well, but none of the model's making
        raise
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError) as error:
        fail(
            f"--model {path}: {type(model).__name__} is not supported ({str(error).splitlines()[0]})"
        )
    if not isinstance(model.get_output_embeddings(), torch.nn.Linear) or not torch.allclose(
        plain, ours, atol=1e-4
    ):
        fail(
            f"--model {path}: {type(model).__name__} changes its logits after the output layer; not supported"
        )
    if off := apart(rows, sampled, logp):
        fail(
            f"--model {path}: {type(model).__name__} is not supported (scored and sampled log-probs differ by {off})"
        )
    if (
        METHODS[config.method].needs_hidden
        and getattr(model.get_output_embeddings(), "bias", None) is not None
    ):
        fail(
            f"--method {config.method}: the output layer of {path} has a bias, which its token scores leave out"
        )
    return model, tokenizer, eos


def logits_of(model, hidden: Tensor) -> Tensor:
    """The output layer in fp32, outside any autocast: bf16 logits near 20 are a tenth apart. (...,
    d) -> (..., V)."""
    with torch.autocast(hidden.device.type, enabled=False):
        return model.get_output_embeddings()(hidden.float())


def autocast(device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


# ---------------- rollout


@dataclass
class Rows:
    """Prompts with their answers, as ids. A row is prompt (left-padded) + answer (right-padded)."""

    prompt: Tensor  # (N, P)
    prompt_mask: Tensor  # (N, P) bool
    tokens: Tensor  # (N, T)
    mask: Tensor  # (N, T) bool, True up to and including the first EOS

    def __getitem__(self, index) -> Rows:
        return Rows(
            self.prompt[index], self.prompt_mask[index], self.tokens[index], self.mask[index]
        )


def pad_left(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor(
        [[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=device
    )
    return ids, mask


def make_rows(prompts: list[list[int]], answers: list[list[int]], device: torch.device) -> Rows:
    width = max(map(len, answers))
    tokens = torch.tensor([a + [0] * (width - len(a)) for a in answers], device=device)
    mask = torch.tensor(
        [[True] * len(a) + [False] * (width - len(a)) for a in answers], device=device
    )
    return Rows(*pad_left(prompts, device), tokens, mask)


def read_prompts(
    model, prompt: Tensor, mask: Tensor
) -> Callable[[Tensor | slice], tuple[DynamicCache, Tensor]]:
    """Each different prompt of (N, P) goes through the model once: a group's answers share it, and
    its gradients.

    To be called inside autocast. Returns a function of some of the N rows: their keys and values,
    and the hidden states (n, d) before their answers.
    """
    places = {}
    which = [
        places.setdefault(tuple(row), len(places)) for row in torch.where(mask, prompt, -1).tolist()
    ]
    ids, which = (
        torch.tensor([*places], device=prompt.device),
        torch.tensor(which, device=prompt.device),
    )
    once, cache = ids >= 0, DynamicCache(config=model.config)
    position = (once.cumsum(1) - 1).clamp(min=0)
    inputs = dict(
        attention_mask=once.long(), position_ids=position, past_key_values=cache, use_cache=True
    )
    hidden = model.base_model(ids.clamp(min=0), **inputs).last_hidden_state[:, -1]

    def of(rows: Tensor | slice) -> tuple[DynamicCache, Tensor]:
        part = copy.copy(cache)
        part.layers = [copy.copy(layer) for layer in cache.layers]
        part.reorder_cache(which[rows])
        return part, hidden[which[rows]]

    return of


@torch.no_grad()
def rollout(
    model, prompts, copies: int, max_tokens: int, temperature: float, eos: Tensor, gen
) -> tuple[Rows, Tensor]:
    """Sample `copies` answers to each prompt (list of id lists); temperature 0 is greedy. Rows, (N,
    T) log-probs.

    Nothing but the temperature shapes the distribution: no top-p, no top-k, no penalty, whatever
    the model's own generation config says. Finished rows leave the batch.
    """
    device = eos.device
    ids, prompt_mask = pad_left(prompts, device)
    ids, prompt_mask = ids.repeat_interleave(copies, 0), prompt_mask.repeat_interleave(copies, 0)
    n = len(ids)
    uniform = torch.rand(n, max_tokens, generator=gen, dtype=torch.float64).to(device)
    tokens = torch.zeros(n, max_tokens, dtype=torch.long, device=device)
    mask = torch.zeros(n, max_tokens, dtype=torch.bool, device=device)
    logps = torch.zeros(n, max_tokens, device=device)
    with autocast(device):
        cache, hidden = read_prompts(model, ids, prompt_mask)(slice(None))
        attention, position = prompt_mask.long(), prompt_mask.sum(1, keepdim=True) - 1
        rows = torch.arange(n, device=device)  # which answers are still in the batch
        for t in range(max_tokens):
            logp = (logits_of(model, hidden) / (temperature or 1.0)).log_softmax(-1)
            if temperature:  # inverse of the distribution function: a row's draws do not depend on its neighbours
                cdf = logp.double().exp().cumsum(-1)
                token = torch.searchsorted(
                    cdf, uniform[rows, t, None] * cdf[:, -1:], right=True
                ).squeeze(1)
                token = token.clamp(max=logp.shape[1] - 1)
            else:
                token = logp.argmax(-1)
            tokens[rows, t], mask[rows, t] = token, True
            logps[rows, t] = logp.gather(1, token[:, None]).squeeze(1)
            alive = ~torch.isin(token, eos)
            if t + 1 == max_tokens or not alive.any():
                break
            if not alive.all():
                keep = alive.nonzero().squeeze(1)
                cache.reorder_cache(keep)
                rows, token, attention, position = (
                    rows[keep],
                    token[keep],
                    attention[keep],
                    position[keep],
                )
            attention = torch.cat([attention, attention.new_ones(len(rows), 1)], 1)
            position = position + 1
            inputs = dict(
                attention_mask=attention,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
            )
            hidden = model.base_model(token[:, None], **inputs).last_hidden_state[:, -1]
    return Rows(ids, prompt_mask, tokens[:, : t + 1], mask[:, : t + 1]), logps[:, : t + 1]


# ---------------- score

CHUNK = {
    "cpu": 2**22,
    "cuda": 2**26,
}  # logits held at once: 16 MB of fp32 stay near a CPU's caches; 256 MB on a GPU


def score(
    model, rows: Rows, temperature: float, keep_hidden: bool = False, read=None
) -> tuple[Tensor, ...]:
    """Log-probs of the answers' tokens (differentiable) and entropies (detached), both (N, T) fp32,
    0 on padding.

    The output layer runs on answer positions only, chunk by chunk, and again in backward: full
    logits never exist. With keep_hidden also the last hidden states that predict the tokens, (N, T,
    d), detached. read: these rows' prompts as read_prompts() has read them; without it, they are
    read here, row by row.
    """
    P, T = (
        rows.prompt.shape[1],
        max(1, rows.mask.sum(1).max().item()),
    )  # the longest answer of these rows
    attention = torch.cat([rows.prompt_mask, rows.mask[:, :T]], 1).long()
    position = (attention.cumsum(1) - 1).clamp(min=0)
    with autocast(attention.device):
        if read is None:
            inputs = dict(attention_mask=attention, position_ids=position, use_cache=False)
            ids = torch.cat([rows.prompt, rows.tokens[:, :T]], 1)
            hidden = model.base_model(ids, **inputs).last_hidden_state[:, P - 1 : -1]  # (N, T, d)
        else:
            cache, hidden = read[0], read[1][:, None]  # (N, 1, d)
            if T > 1:
                inputs = dict(attention_mask=attention[:, :-1], position_ids=position[:, P:-1])
                inputs |= dict(past_key_values=cache, use_cache=True)
                rest = model.base_model(rows.tokens[:, : T - 1], **inputs).last_hidden_state
                hidden = torch.cat([hidden, rest], 1)  # (N, T, d)
        hidden, targets = hidden[rows.mask[:, :T]], rows.tokens[rows.mask]  # (M, d), (M,)
    head = model.get_output_embeddings()
    logps = head_logps if len(chunks(hidden, head.weight)) == 1 else HeadLogps.apply
    with torch.autocast(hidden.device.type, enabled=False):  # fp32, see logits_of
        flat = [*logps(hidden.float(), head.weight, head.bias, targets, temperature)]
    flat += [hidden.detach()] if keep_hidden else []
    return tuple(
        x.new_zeros(*rows.mask.shape, *x.shape[1:]).index_put((rows.mask,), x) for x in flat
    )


def apart(rows: Rows, sampled: Tensor, scored: Tensor) -> float:
    """By how much sampled and scored log-probs of one policy differ; 0 if by rounding (bf16 rounds
    by the shape)."""
    off = (scored.detach() - sampled)[rows.mask].abs()
    off, rounding = (
        (off.max().item(), 1e-3) if off.device.type == "cpu" else (off.mean().item(), 0.05)
    )
    return (
        off if off > rounding else 0.0
    )  # nan, which only broken weights give, is left to update()


def head_logps(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
):
    """Log-prob of target, entropy of softmax(hidden W^T / temperature). (M, d), (V, d), (V,), (M,)
    -> (M,), (M,)."""
    logp = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


class HeadLogps(torch.autograd.Function):
    """head_logps a chunk of rows at a time, and again in backward, where dlogp_y / dlogits = (e_y -
    p) / temperature.

    So there are never more logits than two chunks of them, and the gradient of W is summed in
    place.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
    ):
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.temperature, found = temperature, []
        for rows in chunks(hidden, weight):
            found.append(head_logps(hidden[rows], weight, bias, targets[rows], temperature))
        logp, entropy = (torch.cat(x) for x in zip(*found, strict=True))
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        hidden, weight, bias, targets = ctx.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        d_bias = None if bias is None else torch.zeros_like(bias)
        for rows in chunks(hidden, weight):
            p, g = (
                F.linear(hidden[rows], weight, bias).div_(ctx.temperature).softmax(-1),
                grad[rows, None],
            )
            d_logits = p.mul_(-g).scatter_add_(1, targets[rows, None], g).div_(ctx.temperature)
            d_hidden[rows] = d_logits @ weight
            d_weight.addmm_(d_logits.T, hidden[rows])
            if bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight, d_bias, None, None


def chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """At least 512 rows each: with fewer, a product with a large W takes as long as reading W from
    memory."""
    size = max(512, CHUNK[hidden.device.type] // len(weight))
    return [slice(i, i + size) for i in range(0, len(hidden), size)]


PADDING = {
    "cpu": 2**9,
    "cuda": 2**12,
}  # padded positions that cost about as much as one more call of the model


def pieces(rows: Rows, size: int) -> list[Tensor]:
    """Indices of all rows, longest answer first, cut where a piece has `size` rows or would have
    more than PADDING."""
    length = rows.mask.sum(1)
    order, split, longest, padding = length.argsort(descending=True, stable=True), [], 0, 0
    for i, n in zip(order.tolist(), length[order].tolist(), strict=True):
        if (
            not split
            or len(split[-1]) == size
            or padding + longest - n > PADDING[length.device.type]
        ):
            longest, padding = n, 0
            split.append([])
        padding += longest - n
        split[-1].append(i)
    return [torch.tensor(piece, device=length.device) for piece in split]


def score_all(
    model, rows: Rows, temperature: float, size: int, keep_hidden=False, grad=False
) -> tuple[Tensor, ...]:
    """score() in pieces of at most `size` rows, their different prompts read all at once. Gradients
    only if asked for.

    All in one autocast: each new one would make, and a graph keep, another bf16 copy of the
    weights.
    """
    split = pieces(rows, size)
    with torch.set_grad_enabled(grad), autocast(rows.mask.device):
        read = read_prompts(model, rows.prompt, rows.prompt_mask)
        parts = [
            score(model, rows[piece], temperature, keep_hidden, read(piece)) for piece in split
        ]
        back = torch.cat(split).argsort()
        return tuple(torch.cat(x)[back] for x in zip(*parts, strict=True))
