"""What the projection does where a token earns nothing: two ways to answer that are worth the same.

    python -m toy.alike    the tables

An answer takes one of two ways. Then it is right or wrong, with the same chances on both ways. So
nothing speaks for one of them. Right and wrong answers differ in length, and grpo divides by the
length. Nothing is sampled: all groups of G answers are enumerated, and each counts with its
probability. A push is the expected one, on-policy, on the logit of the first way. toy/README.md
says what came out.
"""

from __future__ import annotations

import math

import torch

import losses
from claims.tax import apply_projection
from toy.figure import parse_arguments, print_row
from toy.worlds import Groups, Outcome

RIGHT = 0.6  # the chance to be right
ALIKE = ((24, 4), (24, 4))  # lengths: of the first way's right and wrong answers, of the second's
EXCHANGED = ((4, 24), (4, 24))
UNLIKE = ((16, 16), (4, 24))
SIZES = (4, 8, 12)  # G
TRAINED, UPDATES = 4, 300  # G of the second table, and how many
STEP = 4.0  # the learning rate
KINDS = ("grpo", "node mean", "unbiased")  # as apply_projection names them


def make_groups(lengths: tuple[tuple[int, int], ...], G: int) -> Groups:
    outcomes = []
    for way, (right, wrong) in enumerate(lengths):
        outcomes += [Outcome(way, RIGHT, 1.0, right), Outcome(way, 1 - RIGHT, 0.0, wrong)]
    return Groups(outcomes, G)


def expected_push(groups: Groups, start: float, kind: str, scale: str) -> tuple[float, float]:
    """On the first way's logit, if `start` is that way's share; and the learning tax."""
    logits = torch.tensor([start, 1 - start], dtype=torch.float64).log().requires_grad_()
    batch = groups.expected_batch(logits, scale)
    loss = apply_projection(losses, kind, batch, losses.grpo(batch), groups.nodes)
    c = losses.token_coefficients(loss, batch.logp)
    tax = losses.learning_tax(c, batch.adv[:, 0], groups.nodes, groups.mask)
    return -float(torch.autograd.grad(loss, logits)[0][0]), tax


def train(groups: Groups, start: float, kind: str) -> tuple[float, float]:
    """GRPO's share of the first way at the end, and the mean learning tax."""
    share, taxes = start, []
    for _ in range(UPDATES):
        push, tax = expected_push(groups, share, kind, losses.METHODS["grpo"].scale)
        taxes.append(tax)
        log_odds = math.log(share / (1 - share)) + 2 * STEP * push  # the other logit falls as much
        share = 1 / (1 + math.exp(-log_odds))
    return share, sum(taxes) / len(taxes)


def main(argv: list[str] | None = None):
    parse_arguments(__doc__, argv, {})
    torch.set_num_threads(1)
    print("Expected push on the first way's logit, advantages R - mean R\n")
    print_row("", [f"G = {G}" for G in SIZES])
    for name, lengths, start in (("alike", ALIKE, 0.7), ("unlike", UNLIKE, 0.5)):
        for kind in KINDS:
            groups = [make_groups(lengths, G) for G in SIZES]
            pushes = [expected_push(x, start, kind, "mean")[0] for x in groups]
            cells = [f"{x if abs(x) > 1e-9 else 0:.5f}" for x in pushes]
            print_row(f"{name}, {start}: {kind}", cells)
    print(f"\nFrom 0.7, {UPDATES} updates with G = {TRAINED}, advantages of GRPO\n")
    print_row("", ["first way's share", "learning tax"])
    for name, lengths in (("alike", ALIKE), ("exchanged", EXCHANGED)):
        for kind in KINDS:
            share, tax = train(make_groups(lengths, TRAINED), 0.7, kind)
            print_row(f"{name}: {kind}", [f"{share:.3f}", f"{tax:.3f}"])


if __name__ == "__main__":
    main()
