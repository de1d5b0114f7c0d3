"""Our rollout against transformers' generate(), same model, same sampling: python
experiments/bench/rollout.py [--cases a b] ...

a: the toy's shape. b: GSM8K's on a CPU. c: Qwen2.5-0.5B's architecture with random weights, for --device cuda (not run
yet). An answer ends where a fixed draw of geometric lengths, cut at the cap, says: an output layer in front of the
real one allows the end-of-answer token there and nowhere else, so both sides generate the same number of tokens.
Turn and turn about in one process; medians; on a GPU also the least time that reading weights and cache once a token
would take, at the bandwidth of a plain copy.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from experiments.bench.timing import ratio, turns
from llm.policy import autocast, rollout

EOS, GROUP = 1, 8


@dataclass
class Case:
    prompts: int
    prompt: int  # tokens
    mean: float  # of the answers' lengths before they are cut
    cap: int
    layers: int
    width: int
    vocab: int


CASES = {
    "a": Case(32, 6, 12, 16, 2, 64, 22),
    "b": Case(8, 120, 70, 256, 4, 256, 2048),
    "c": Case(32, 120, 128, 512, 24, 896, 151_936),
}


class Ends(nn.Module):
    """An output layer that ends answer i at its lengths[i]-th token. Its rows: all answers, or
    those not yet ended."""

    def __init__(self, head: nn.Module, lengths: Tensor):
        super().__init__()
        self.head, self.lengths, self.t = head, lengths, 0

    def forward(self, hidden: Tensor) -> Tensor:
        logits, lengths = self.head(hidden), self.lengths
        if len(logits) < len(lengths):
            lengths = lengths[lengths > self.t]
        self.t += 1
        last = (lengths == self.t).view(-1, *[1] * (logits.dim() - 2))
        logits[..., EOS] = torch.where(last, 1e4, -1e4)
        return logits


def architecture(case: Case):
    if case.width == 896:
        shape = dict(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=case.layers,
            num_attention_heads=14,
        )
        config = Qwen2Config(
            vocab_size=case.vocab, num_key_value_heads=2, tie_word_embeddings=True, **shape
        )
        return Qwen2ForCausalLM(config)
    shape = dict(
        n_layer=case.layers, n_embd=case.width, n_head=4, activation_function="gelu_pytorch_tanh"
    )
    shape |= dict(n_positions=max(1024, case.prompt + case.cap))
    shape |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # we never drop out; TRL would
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=case.vocab, bos_token_id=None, eos_token_id=EOS, **shape)
    )


def build(case: Case, device: str):
    torch.manual_seed(0)
    model = architecture(case)
    model.generation_config.update(eos_token_id=EOS, pad_token_id=0)
    gen = torch.Generator().manual_seed(0)
    lengths = (
        torch.empty(case.prompts * GROUP)
        .geometric_(1 / case.mean, generator=gen)
        .long()
        .clamp(max=case.cap)
    )
    prompts = torch.randint(2, case.vocab, (case.prompts, case.prompt), generator=gen).tolist()
    return model.to(device).eval(), prompts, lengths.to(device)


def ours(model, prompts: list[list[int]], cap: int, seed: int) -> Tensor:
    eos, gen = torch.tensor([EOS], device=model.device), torch.Generator().manual_seed(seed)
    return rollout(model, prompts, GROUP, cap, 1.0, eos, gen)[0].tokens


@torch.no_grad()
def theirs(model, prompts: list[list[int]], cap: int, seed: int, processors=()) -> Tensor:
    torch.manual_seed(seed)
    ids = torch.tensor(prompts, device=model.device)
    sampling = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=GROUP)
    sampling |= dict(logits_processor=[*processors], max_new_tokens=cap)
    with autocast(model.device):
        return model.generate(ids, attention_mask=torch.ones_like(ids), **sampling)[
            :, ids.shape[1] :
        ]


def floor(model, case: Case, lengths: Tensor) -> float:
    """Seconds to read bf16 weights once a step, and each answer's bf16 keys and values once a
    token."""
    config, size = model.config, sum(p.numel() for p in model.parameters())
    head = config.hidden_size // config.num_attention_heads
    per_token = (
        2
        * config.num_hidden_layers
        * getattr(config, "num_key_value_heads", config.num_attention_heads)
        * head
    )
    cached = (case.prompt * lengths + lengths * (lengths + 1) // 2).sum().item()
    x = torch.empty(2**28, dtype=torch.uint8, device=model.device)
    copy = median(turns({"copy": x.clone}, 10, model.device.type)["copy"])
    return 2 * (size * lengths.max().item() + per_token * cached) / (2 * len(x) / copy)


def compare(case: Case, rounds: int, device: str) -> tuple[dict, int, int]:
    model, prompts, lengths = build(case, device)
    head, seeds = model.get_output_embeddings(), {ours: 0, theirs: 0}

    def side(generate):
        model.set_output_embeddings(Ends(head, lengths))
        seeds[generate] += 1
        tokens = generate(model, prompts, case.cap, seeds[generate])
        found = (tokens == EOS).int().argmax(1) + 1
        assert ((found == lengths) | (lengths == case.cap)).all(), "the lengths are not those drawn"

    seconds = turns({f.__name__: lambda f=f: side(f) for f in (ours, theirs)}, rounds, device)
    if device == "cuda":
        print(f"   bandwidth floor {floor(model, case, lengths):.3f} s")
    return seconds, lengths.sum().item(), lengths.max().item()


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=["a", "b"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cap", type=int, help="another cap, for a quick look")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    for name in args.cases:
        case = replace(CASES[name], cap=args.cap or CASES[name].cap)
        seconds, tokens, longest = compare(case, args.rounds, args.device)
        times = ", ".join(f"{side} {median(x):.3f} s" for side, x in seconds.items())
        print(
            f"{name}: {case.prompts * GROUP} answers, {tokens} tokens, longest {longest}: {times},",
            end=" ",
        )
        print(
            f"theirs / ours {ratio(seconds['theirs'], seconds['ours']):.2f} (median of {args.rounds})"
        )


if __name__ == "__main__":
    main()
