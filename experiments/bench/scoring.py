"""Log-probs and their gradients over a large vocabulary: python experiments/bench/scoring.py
[--answers 8] [--tokens 1024] ...

model.score, which works in chunks and computes them again in backward, against the plain path: logits of all tokens,
log_softmax, gather. The transformer is a table of hidden states, so only the output layer is measured. Memory: rise of
the peak of a fresh process (GPU: of the allocator), gradients included. Time: turn and turn about, medians.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from experiments.bench.timing import child, ratio, rise_mb, turns
from llm.policy import Rows, score


def build(answers: int, tokens: int, width: int, vocab: int, device: str):
    """A model without a transformer, its hidden states, rows of random tokens, the gradient to
    carry back."""
    gen = torch.Generator().manual_seed(0)
    head = nn.Linear(width, vocab, bias=False, device=device)
    head.weight.data = torch.randn(vocab, width, generator=gen).to(device) * width**-0.5
    hidden = torch.randn(answers, tokens + 1, width, generator=gen).to(device).requires_grad_()
    model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=vocab),
        base_model=lambda *_, **__: SimpleNamespace(last_hidden_state=hidden),
        get_output_embeddings=lambda: head,
    )
    ids = torch.randint(vocab, (answers, tokens), generator=gen).to(device)
    yes = torch.ones_like(ids, dtype=torch.bool)
    return (
        model,
        hidden,
        Rows(ids[:, :1], yes[:, :1], ids, yes),
        torch.randn(answers, tokens, generator=gen).to(device),
    )


def ours(model, hidden: Tensor, rows: Rows, grad: Tensor) -> Tensor:
    logp, _ = score(model, rows, 1.0)
    logp.backward(grad)
    return logp.detach()


def plain(model, hidden: Tensor, rows: Rows, grad: Tensor) -> Tensor:
    logp = (
        model.get_output_embeddings()(hidden[:, :-1])
        .log_softmax(-1)
        .gather(2, rows.tokens[..., None])
        .squeeze(2)
    )
    logp.backward(grad)
    return logp.detach()


SIDES = {"ours": ours, "plain": plain}


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in dict(answers=8, tokens=1024, width=896, vocab=151_936, rounds=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--memory", choices=tuple(SIDES), help="only this side's peak, in MB")
    args = parser.parse_args(argv)
    shape = dict(
        answers=args.answers,
        tokens=args.tokens,
        width=args.width,
        vocab=args.vocab,
        device=args.device,
    )
    if args.memory:
        torch.set_num_threads(1)
        SIDES[args.memory](
            *build(**shape | dict(answers=1, tokens=2))
        )  # loads the libraries' kernels
        work = build(**shape)
        return print(f"{rise_mb(lambda: SIDES[args.memory](*work), args.device):.1f}")
    flags = [x for key, value in shape.items() for x in (f"--{key}", str(value))]
    memory = {name: child(__file__, *flags, "--memory", name)[0] for name in SIDES}
    work = build(**shape)
    seconds = turns(
        {name: lambda side=side: side(*work) for name, side in SIDES.items()},
        args.rounds,
        args.device,
    )
    print(
        f"{args.answers} x {args.tokens} tokens, hidden {args.width}, vocabulary {args.vocab:,}, {args.device}"
    )
    for name in SIDES:
        print(f"{name:6} {memory[name]:8.0f} MB {median(seconds[name]):8.2f} s")
    share, slower = memory["ours"] / memory["plain"], ratio(seconds["ours"], seconds["plain"])
    print(f"ours / plain: memory 1/{1 / share:.1f}, time {slower:.2f}")


if __name__ == "__main__":
    main()
