"""Where a policy comes from: a tiny GPT-2 with its supervised start, or a pretrained model.

If every answer is wrong, all rewards are equal and there is nothing to compare. So a model from
scratch first imitates demonstrations. None of this is RL, and a pretrained model needs none of it.
"""

from __future__ import annotations

import inspect
import math
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import eager_mask

from llm.runs import rng

# With these a chat template closes a turn. The model's own EOS may be another token.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>")
# The argument of a model's forward that takes the cache. transformers 5.24 has renamed it, and 5.40
# will not know the old name.
new_name = "cache" in inspect.signature(GPT2LMHeadModel.forward).parameters
CACHE = "cache" if new_name else "past_key_values"


def load(path: str) -> tuple[torch.nn.Module, object, list[int]]:
    """A causal LM with fp32 weights, its tokenizer, and the ids that end an answer.

    path: a directory or a hub id. Raises ValueError for weights that the files do not have: they
    would be random, and the model would train all the same.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    if info["missing_keys"]:
        raise ValueError(f"{path} has no weights for {sorted(info['missing_keys'])[:3]}")
    # AutoTokenizer of transformers 5 builds many a tokenizer anew, by its class, and some of these
    # split a text otherwise than their tokenizer.json says. This class takes the file as it is.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    was = model.generation_config
    ends = was.eos_token_id  # one id, a list or None
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    known = tokenizer.added_tokens_encoder
    ends = sorted(ends | {known[token] for token in TURN_ENDS if token in known})
    if not ends:
        raise ValueError(f"{path}: nothing says which token ends an answer (eos_token_id)")
    # The model's own sampler (its temperature, top-k) is not used here. It is not stored with the
    # trained model either, because transformers refuses to store some of those that it loads.
    model.generation_config = GenerationConfig(
        eos_token_id=ends, bos_token_id=was.bos_token_id, pad_token_id=was.pad_token_id
    )
    return model, tokenizer, ends


def make(config, tokenizer) -> torch.nn.Module:
    """A small GPT-2 with random weights."""
    torch.manual_seed(config.seed)
    shape = GPT2Config(
        vocab_size=len(tokenizer),
        n_layer=config.layers,
        n_embd=config.width,
        n_head=4 if config.width < 512 else 8,
        n_positions=1024,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own GELU, one kernel instead of eight
        initializer_range=config.width**-0.5,  # the usual 0.02 is meant for wide models
    )
    return GPT2LMHeadModel(shape)


@torch.no_grad()
def take_quick_ways(model, ids: Tensor) -> bool:
    """On a CPU, compute fp32 in less time, if the numbers stay. Returns whether they do.

    torch gives fp32 products to MKL, which on AMD's processors has half of oneDNN's speed or less.
    The switch to oneDNN has the name of a lower precision, because on processors with AMX it rounds
    to bf16; elsewhere it does not. It slows torch's own attention, so `attend` takes its place.
    Both are tried on one text, ids: (W,).
    """
    x = torch.randn(256, 256, generator=rng("product"))
    torch.set_float32_matmul_precision("highest")
    own, product = model.config._attn_implementation, x @ x
    before = model(ids[None]).logits.log_softmax(-1)
    torch.set_float32_matmul_precision("medium")
    is_quick = not torch.equal(x @ x, product)  # some processors have no other way
    if is_quick and own == "sdpa":  # which knows nothing of caps and sinks either
        model.set_attn_implementation("grouped")
    gap = (model(ids[None]).logits.log_softmax(-1) - before).abs().max().item()
    is_quick = is_quick and gap < 2e-4
    if not is_quick:
        torch.set_float32_matmul_precision("highest")
        model.set_attn_implementation(own)
    return is_quick


LONG = 2**17  # T * S beyond which the weights of `attend` take too much memory


def attend(module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling=None, **_):
    """Attention by products. Several heads of the query share a head of the keys: here they read it
    in one product, and transformers' own ways copy it for each of them.

    query: (n, H, T, d); key, value: (n, K, S, d); mask: 0 or a large negative number, (n, 1, T, S).
    Returns (n, T, H, d).
    """
    n, H, T, d = query.shape
    shared, scaling = key.shape[1], scaling or d**-0.5
    if T * key.shape[2] > LONG:
        key, value = (x.repeat_interleave(H // shared, 1) for x in (key, value))
        out = scaled_dot_product_attention(
            query, key, value, mask[..., : key.shape[2]], scale=scaling
        )
        return out.transpose(1, 2).contiguous(), None
    scores = query.reshape(n, shared, -1, d) @ key.mT * scaling  # (n, K, H / K * T, S)
    weights = (scores.view(n, H, T, -1) + mask[..., : key.shape[2]]).softmax(-1)
    out = weights.view(n, shared, -1, key.shape[2]) @ value  # (n, K, H / K * T, d)
    return out.view(n, H, T, d).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", attend)
AttentionMaskInterface.register("grouped", eager_mask)


class Cache(DynamicCache):
    """Keys and values in the dtype in which attention reads them. Inside autocast transformers'
    own cache keeps them in fp32, as rotary keys are, and each token casts all of them again."""

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs):
        device = keys.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            keys, values = keys.to(dtype), values.to(dtype)
        return super().update(keys, values, *args, **kwargs)


# ---------------- the supervised start


def warm_start(policy, task, optimizer, method, config):
    """Supervised steps on the task's demonstrations, so that RL has something to find.

    If the method corrects wrong answers, 30% of the demonstrations are corrections: a policy that
    never saw a correction makes none.
    """
    items = [item for item in task.train if item.demo]
    plain, fixed = encode_demos(policy, task, items), []
    if method.repair:
        items = [task.correction(item, config.repair_references) for item in items]
        fixed = encode_demos(policy, task, items)
    corrections = round(0.3 * config.warm_rows) if fixed else 0
    model = policy.model
    for step in tqdm(range(config.warm_steps), "warm start", disable=None):
        for group in optimizer.param_groups:  # 20 steps of warm-up, linear decay
            group["lr"] = config.warm_lr * min((step + 1) / 20, 1 - step / config.warm_steps)
        gen = rng(config.seed, "warm", step)
        picks = torch.randint(len(plain), (config.warm_rows,), generator=gen).tolist()
        rows = [(fixed if i < corrections else plain)[k] for i, k in enumerate(picks)]
        learned = sum(len(demo) for _, demo in rows)
        # Long texts go through the model apart, because the short ones would be mostly padding.
        average = fmean(len(prompt + demo) for prompt, demo in rows)
        short = [row for row in rows if len(row[0] + row[1]) <= average]
        long = [row for row in rows if len(row[0] + row[1]) > average]
        for some in filter(None, (short, long)):  # all may be of one length
            # Padding follows a text, where a causal model does not look. A label of -100 is not
            # learned: neither prompts nor padding are.
            ids = pad([prompt + demo for prompt, demo in some], 0, model)
            labels = pad([[-100] * len(prompt) + demo for prompt, demo in some], -100, model)
            with policy.autocast():
                out = model(ids, labels=labels, num_items_in_batch=learned, use_cache=False)
            out.loss.backward()  # the sum over these tokens, divided by those of all rows
        norm = clip_grad_norm_(model.parameters(), 1.0).item()
        if not math.isfinite(norm):
            raise ValueError(f"warm start, step {step + 1}: the gradient is not finite ({norm})")
        optimizer.step()
        model.zero_grad()


def encode_demos(policy, task, items) -> list[tuple[list[int], list[int]]]:
    """The ids of each item's prompt, and those of its demonstration with its end."""
    tokenizer = policy.tokenizer
    end = int(policy.eos[0]) if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    demos = tokenizer([item.demo for item in items], add_special_tokens=False)["input_ids"]
    prompts = task.encode(tokenizer, items)
    return [(prompt, [*demo, end]) for prompt, demo in zip(prompts, demos, strict=True)]


def pad(rows: list[list[int]], value: int, model) -> Tensor:
    """Rows of ids as one tensor, filled up with a value on the right."""
    return pad_sequence([torch.tensor(row) for row in rows], True, value).to(model.device)
