"""How many tokens of a model's answers have a sibling at their history?

Cancelling can only do something where two answers of a group take a token after the same words.
This samples a group of answers to each prompt, and prints the share of such tokens.

    python -m engines.siblings Qwen/Qwen2.5-0.5B-Instruct prompts.txt

prompts.txt has one prompt a line. A model with a chat template gets it as a user's message.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from losses import histories, prefix_nodes


@torch.no_grad()
def has_sibling(model, tokenizer, prompt: str, answers: int, max_tokens: int, temperature: float):
    """Whether each token of a group's answers has a sibling, and the mask: (G, T) bool twice."""
    if tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
    ids = ids["input_ids"].to(model.device)
    # All that a model's own generation config might bring along is set.
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        num_return_sequences=answers,
        max_new_tokens=max_tokens,
    )[:, ids.shape[1] :]
    is_end = torch.isin(tokens, torch.tensor(ends, device=tokens.device))
    mask = is_end.cumsum(1) - is_end.long() == 0  # up to and including the first end
    history = histories(prefix_nodes(tokens, mask, answers), answers)
    _, at, visitors = history[mask].unique(return_inverse=True, return_counts=True)
    return torch.zeros_like(mask).masked_scatter(mask, visitors[at] > 1), mask


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m engines.siblings", description=__doc__)
    parser.add_argument("model", help="a directory or hub id")
    parser.add_argument("prompts", type=Path, help="a file with one prompt a line")
    parser.add_argument("--answers", type=int, default=8, help="G, answers to a prompt")
    parser.add_argument("--max_tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args(argv)
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
        prompts = options.prompts.read_text().splitlines()
    except OSError as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    shared, seen = torch.zeros(2, options.max_tokens)
    for prompt in prompts:
        group = options.answers, options.max_tokens, options.temperature
        for count, x in zip(
            (shared, seen), has_sibling(model, tokenizer, prompt, *group), strict=True
        ):
            count[: x.shape[1]] += x.sum(0).cpu()
    print(f"{len(prompts)} prompts, {options.answers} answers each, {int(seen.sum())} tokens")
    for first in (1, 3, 10, 30, 100, options.max_tokens):
        if first <= options.max_tokens:
            share = shared[:first].sum() / seen[:first].sum()
            print(f"of the first {first} tokens of an answer, {share:.3f} have a sibling")


if __name__ == "__main__":
    main()
