"""Our rollout against transformers' generate(), with the same model and the same sampling.

    python -m experiments.bench.rollout [--cases a b] [--rounds 5] [--cap 64] [--device cuda]

Case a has the toy's shape and b GSM8K's on a CPU. Case c is Qwen2.5-0.5B's architecture with random
weights, for a GPU, and has not been run yet.

The lengths of the answers are drawn once, from a geometric distribution, and cut at the cap. An
output layer in front of the real one allows the end-of-answer token there and nowhere else, so both
sides generate the same number of tokens. The sides are interleaved in one process. On a GPU, a line
more says how long it takes at least to read the weights and the cache once a token, at the
bandwidth of a plain copy.
"""

from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

import train
from experiments.bench.timing import make_parser, show_ratio, turns
from llm.policy import Policy, fill_gaps

EOS = 1
GROUP = 8


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
    "a": Case(prompts=32, prompt=6, mean=12, cap=16, layers=2, width=64, vocab=22),
    "b": Case(prompts=8, prompt=120, mean=70, cap=256, layers=4, width=256, vocab=2048),
    "c": Case(prompts=32, prompt=120, mean=128, cap=512, layers=24, width=896, vocab=151_936),
}


class Ends(nn.Module):
    """An output layer that ends answer i at its lengths[i]-th token.

    Its rows are all answers, or those that have not ended yet, in the order of train.generate.
    """

    def __init__(self, head: nn.Module, lengths: Tensor):
        super().__init__()
        self.head = head
        self.lengths = lengths
        self.t = 0

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        if len(logits) < len(self.lengths):
            self.lengths = self.lengths[fill_gaps(self.lengths > self.t)]
        self.t += 1
        last = (self.lengths == self.t).view(-1, *[1] * (logits.dim() - 2))
        logits[..., EOS] = torch.where(last, 1e4, -1e4)
        return logits


def architecture(case: Case):
    """The case's model: a GPT-2, or Qwen2.5-0.5B's shape where the width is its own."""
    if case.width == 896:
        config = Qwen2Config(
            vocab_size=case.vocab,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=case.layers,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        return Qwen2ForCausalLM(config)
    config = GPT2Config(
        vocab_size=case.vocab,
        n_layer=case.layers,
        n_embd=case.width,
        n_head=4,
        n_positions=max(1024, case.prompt + case.cap),
        activation_function="gelu_pytorch_tanh",
        bos_token_id=None,
        eos_token_id=EOS,
        # We never drop out; TRL would.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def build(case: Case, device: str) -> tuple[nn.Module, list[list[int]], Tensor]:
    """A model with random weights, random prompts, and the lengths of the answers (N,)."""
    torch.manual_seed(0)
    model = architecture(case)
    model.generation_config.update(eos_token_id=EOS, pad_token_id=0)
    gen = torch.Generator().manual_seed(0)
    lengths = torch.empty(case.prompts * GROUP).geometric_(1 / case.mean, generator=gen)
    prompts = torch.randint(2, case.vocab, (case.prompts, case.prompt), generator=gen).tolist()
    return model.to(device).eval(), prompts, lengths.long().clamp(max=case.cap).to(device)


def ours(model, prompts: list[list[int]], cap: int, seed: int) -> Tensor:
    policy = Policy(model, None, torch.tensor([EOS], device=model.device))
    gen = torch.Generator().manual_seed(seed)
    asked = [prompt for prompt in prompts for _ in range(GROUP)]
    rows, _ = train.generate(policy, asked, cap, 1.0, gen)
    return rows.tokens


@torch.no_grad()
def theirs(model, prompts: list[list[int]], cap: int, seed: int, processors=()) -> Tensor:
    torch.manual_seed(seed)
    ids = torch.tensor(prompts, device=model.device)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=GROUP,
            logits_processor=[*processors],
            max_new_tokens=cap,
        )
    return whole[:, ids.shape[1] :]


def bandwidth_floor(model, case: Case, lengths: Tensor) -> float:
    """Seconds to read bf16 weights once a step, and each answer's bf16 cache once a token."""
    config = model.config
    size = sum(p.numel() for p in model.parameters())
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = heads * config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * width  # keys and values
    cached = (case.prompt * lengths + lengths * (lengths + 1) // 2).sum().item()
    x = torch.empty(2**28, dtype=torch.uint8, device=model.device)
    seconds = median(turns({"copy": x.clone}, 10, model.device.type)["copy"])
    bandwidth = 2 * len(x) / seconds  # a copy reads and writes
    return 2 * (size * lengths.max().item() + per_token * cached) / bandwidth


def time_sides(case: Case, rounds: int, device: str) -> tuple[dict, Tensor]:
    """Seconds of both sides, and the lengths of the answers."""
    model, prompts, lengths = build(case, device)
    head = model.get_output_embeddings()
    seeds = {ours: 0, theirs: 0}

    def side(generate):
        model.set_output_embeddings(Ends(head, lengths))
        seeds[generate] += 1
        tokens = generate(model, prompts, case.cap, seeds[generate])
        ends = (tokens == EOS).int().argmax(1) + 1
        assert ((ends == lengths) | (lengths == case.cap)).all(), "the lengths are not those drawn"

    seconds = turns({"ours": lambda: side(ours), "theirs": lambda: side(theirs)}, rounds, device)
    if device == "cuda":
        print(f"   bandwidth floor {bandwidth_floor(model, case, lengths):.3f} s")
    return seconds, lengths


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=["a", "b"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cap", type=int, help="another cap, for a quick look")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    for name in args.cases:
        case = replace(CASES[name], cap=args.cap or CASES[name].cap)
        seconds, lengths = time_sides(case, args.rounds, args.device)
        size = f"{len(lengths)} answers, {lengths.sum()} tokens, longest {lengths.max()}"
        times = ", ".join(f"{side} {median(x):.3f} s" for side, x in seconds.items())
        print(f"{name}: {size}: {times}")
        print(f"{name}: theirs / ours {show_ratio(seconds['theirs'], seconds['ours'])}")


if __name__ == "__main__":
    main()
