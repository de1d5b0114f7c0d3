"""Log-probs and their gradients over a large vocabulary.

    python -m experiments.bench.scoring [--answers 8] [--tokens 1024] [--width 896] ...

token_log_probs of llm/policy.py works in chunks and computes them again in backward. Here it stands
against the plain path: logits of all tokens, log_softmax, gather. Random hidden states take the
place of a transformer, so only the output layer is measured. Ours also gives the entropies.

Memory: rise of the peak of a fresh process (on a GPU: of the allocator), gradients included. Time:
the sides interleaved, medians.
"""

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.bench.timing import child, make_parser, rise_mb, show_ratio, turns
from llm.policy import token_log_probs


@dataclass
class Layer:
    """An output layer's weights, M hidden states, their targets, and the gradient to carry back."""

    weight: Tensor  # (V, d)
    hidden: Tensor  # (M, d)
    targets: Tensor  # (M,)
    grad: Tensor  # (M,)


def build(tokens: int, width: int, vocab: int, device: str) -> Layer:
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, width, generator=gen) * width**-0.5
    hidden = torch.randn(tokens, width, generator=gen)
    targets = torch.randint(vocab, (tokens,), generator=gen)
    grad = torch.randn(tokens, generator=gen)
    leaves = [x.to(device).requires_grad_() for x in (weight, hidden)]
    return Layer(*leaves, targets.to(device), grad.to(device))


def ours(layer: Layer) -> Tensor:
    logp, _ = token_log_probs(layer.hidden, layer.weight, None, layer.targets, 1.0)
    logp.backward(layer.grad)
    return logp.detach()


def plain(layer: Layer) -> Tensor:
    logps = F.linear(layer.hidden, layer.weight).log_softmax(-1)
    logp = logps.gather(1, layer.targets[:, None]).squeeze(1)
    logp.backward(layer.grad)
    return logp.detach()


SIDES = {"ours": ours, "plain": plain}


def measure_memory(side: str, tokens: int, *shape) -> float:
    torch.set_num_threads(1)
    SIDES[side](build(2, *shape))  # loads the libraries' kernels
    layer = build(tokens, *shape)
    return rise_mb(lambda: SIDES[side](layer), layer.weight.device.type)


def main(argv: list[str] | None = None):
    parser = make_parser(__doc__)
    for name, value in dict(answers=8, tokens=1024, width=896, vocab=151_936, rounds=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--memory", choices=tuple(SIDES), help="only this side's peak, in MB")
    args = parser.parse_args(argv)
    work = (args.answers * args.tokens, args.width, args.vocab, args.device)
    if args.memory:
        print(f"{measure_memory(args.memory, *work):.1f}")
        return
    flags = []
    for name in ("answers", "tokens", "width", "vocab", "device"):
        flags += [f"--{name}", str(getattr(args, name))]
    module = ("-m", "experiments.bench.scoring")
    memory = {side: child(*module, *flags, "--memory", side)[0] for side in SIDES}
    layer = build(*work)
    seconds = turns(
        {"ours": lambda: ours(layer), "plain": lambda: plain(layer)}, args.rounds, args.device
    )
    size = f"{args.answers} x {args.tokens} tokens, hidden {args.width}"
    print(f"{size}, vocabulary {args.vocab:,}, {args.device}")
    for side in SIDES:
        print(f"{side:6} {memory[side]:8.0f} MB {median(seconds[side]):8.2f} s")
    print(f"ours / plain: memory 1/{memory['plain'] / memory['ours']:.1f}, ", end="")
    print(f"time {show_ratio(seconds['ours'], seconds['plain'])}")


if __name__ == "__main__":
    main()
