"""What a claim is, and the random prefix trees that it is checked on.

A claim is a function of the name of a function in losses.py and a tree, which asserts. It compares
numbers. The *measured* one is autograd's, through that function. The *predicted* one is a formula
that shares no code with it. The docstring has the statement, its source and a short proof; a long
one is in PROOFS.md. `python verify.py C9` prints both and checks the claim.

A group of answers to one prompt is a tree. Answers that begin with the same tokens share their
first nodes, and there their gradients add up. The log-probs at a node are random numbers. They
belong to no policy: those of siblings need not sum to 1. Padding holds garbage on purpose.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from losses import Batch

CLAIMS: dict[str, tuple[Callable, tuple[str, ...]]] = {}  # id -> check, and what it speaks of
TOLERANCE = 1e-10  # of |measured - predicted| / max(1, |predicted|), in float64
errors: list[float] = []  # of all numbers compared since somebody cleared this list


def claim(id_: str, *names: str):
    """Turn a check(name, tree) into a claim about these functions."""

    def register(check: Callable) -> Callable:
        if id_ in CLAIMS:
            raise ValueError(f"there are two claims {id_}")
        CLAIMS[id_] = check, names
        return check

    return register


def equal(predicted, measured, what: str = ""):
    """Tensors or numbers, of one shape, agree to the last digits."""
    p, m = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (predicted, measured))
    near = dict(rtol=TOLERANCE, atol=TOLERANCE, msg=lambda said: f"{what}: {said}")
    torch.testing.assert_close(m, p, **near)  # of one shape, and no nan
    errors.extend(((m - p).abs() / p.abs().clamp(min=1)).flatten().tolist())


def not_zero(x: Tensor, what: str = "a number that must not be 0"):
    assert x.detach().abs().mean() > 1e-6, f"{what} is 0"


# ---------------- random prefix trees

GARBAGE = 1e4  # sits in every padded position; exp(2e4) overflows
# Trees beyond the ordinary ones, where users are: answers to a prompt, index (which decides on
# prompts and lengths), fully shared tokens, longest answer, size of the advantages.
EXTREMES = {
    "steep": (3, 2, 2, 5, 100.0),  # ratios of 20 and more
    "wide": (64, 6, 2, 5, 1e-6),  # a large group whose rewards nearly agree
    "long": (3, 1, 260, 300, 1.0),  # more tokens than a byte counts
}


class Tree:
    """1 to 3 prompts with G answers each, which share their first token or two.

    Token t of answer i leads to the node (prompt number, prefix). `visits` lists the pairs (i, t)
    of every node. All visits of a node have one log-prob and one ratio.
    """

    def __init__(self, seed: int, index: int, kind: str = ""):
        self.kind, self.name = kind, kind or f"tree {index}"
        G, index, shared, longest, size = EXTREMES.get(kind, (0, index, 2, 0, 1.0))
        rng = random.Random(f"{seed} {index} {kind or None}")
        self.seed, self.size = rng.getrandbits(40), size
        self.generator = torch.Generator().manual_seed(self.seed)
        self.G = G or 2 + 7 * index % 15  # 2 to 16, all of them in 15 trees
        self.equal_lengths = index % 3 == 0
        self.max_tokens, ids = rng.randint(8, 12) + longest, rng.randint(3, 5)
        longest = longest or rng.randint(4, 6)
        answers, adv, self.visits = [], [], defaultdict(list)
        for p in range(1 + index // 2 % 3):
            start = [rng.randrange(1, ids) for _ in range(rng.randint(shared - 1, shared))]
            for _ in range(self.G):
                T = longest if self.equal_lengths else rng.randint(len(start) + 1, longest)
                rest = [rng.randrange(1, ids) for _ in range(T - len(start) - 1)]
                answers.append((*start, *rest, 0))
            # In some trees one advantage is 0, in others those of a whole group are.
            silent, n = index % 2 == 1 and p == 1, self.G - (index % 4 == 2 and self.G > 2)
            A = [(0 if silent else size) * rng.gauss(0, 1) for _ in range(n)]
            adv += [x - sum(A) / n for x in A] + [0.0] * (self.G - n)
        self.adv = torch.tensor(adv, dtype=torch.float64)  # (N,)
        self.N, self.T = len(answers), torch.tensor([len(y) for y in answers])
        for i, y in enumerate(answers):
            for t in range(len(y)):
                self.visits[i // self.G, y[: t + 1]].append((i, t))
        self.mask = torch.arange(longest + 1) < self.T[:, None]  # the last column is padding only
        self.tokens = torch.randint(0, ids, self.mask.shape, generator=self.generator)
        self.nodes = torch.full(self.mask.shape, -1)
        self.logp, self.noise = torch.zeros(2, *self.mask.shape, dtype=torch.float64)
        numbers = rng.sample(range(len(self.visits)), len(self.visits))
        for number, ((_, prefix), visits) in zip(numbers, self.visits.items(), strict=True):
            at = tuple(zip(*visits, strict=True))
            self.nodes[at], self.tokens[at] = number, prefix[-1]
            self.noise[at] = rng.uniform(-1, 1)
            self.logp[at] = -3 * torch.rand(1, generator=self.generator, dtype=torch.float64)
        fully = [visits for visits in self.visits.values() if len(visits) == self.G]
        self.shared_at = torch.tensor(fully).unbind(-1)  # answers and places, (K, G) both

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def rows(self, x: Tensor) -> Tensor:
        """One number per answer, repeated along its tokens. (N,) -> (N, T)."""
        return x[:, None].expand(self.mask.shape)

    def fill(self, x: Tensor, garbage: float = GARBAGE) -> Tensor:
        """x, with garbage on the padding. (N, T) -> (N, T)."""
        return torch.where(self.mask, x, garbage)

    def log_ratio(self, spread: float, offset: float = 0.0) -> Tensor:
        """log(pi / pi_old): its size lies between offset and offset + spread. (N, T).

        In the steep tree a spread that may leave the clip range is five times as large.
        """
        if self.kind == "steep" and spread >= 0.6:
            spread *= 5
        return spread * self.noise + offset * self.noise.sign()

    def batch(self, spread=0.0, offset=0.0, adv=None, garbage: float = GARBAGE) -> Batch:
        """These answers as a Batch; adv is (N,) or (N, T), the tree's own if None."""
        adv = self.adv if adv is None else adv
        return Batch(
            logp=self.fill(self.logp, garbage).requires_grad_(),
            logp_old=self.fill(self.logp - self.log_ratio(spread, offset), -garbage),
            adv=self.fill(adv if adv.dim() == 2 else self.rows(adv)),
            mask=self.mask.clone(),
            group_size=self.G,
            max_tokens=self.max_tokens,
            logp_ref=self.fill(self.logp + 0.5 * self.noise.roll(1, 0), 3 * garbage),
            tokens=self.tokens,
            rewards=(self.adv > 0).double(),
        )

    def at_shared(self, x: Tensor) -> Tensor:
        """x at the K tokens that a whole group shares. (N,) or (N, T) -> (K, G)."""
        return (x if x.dim() == 2 else self.rows(x))[self.shared_at]


def random_trees() -> list[Tree]:
    """24 ordinary random trees, then one of each extreme kind."""
    return [*(Tree(0, k) for k in range(24)), *(Tree(0, 0, kind) for kind in EXTREMES)]
