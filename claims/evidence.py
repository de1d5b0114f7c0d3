"""What a claim is, what it is checked on, and how it is examined.

A claim is a function `check(name, draws, evidence)`. It takes the name of a function of losses.py
and random prefix trees (`Draw`), and adds what it finds to the evidence. It compares two numbers.
The *measured* one is autograd's, through that function. The *predicted* one is a formula that
shares no code with it.

The docstring of a check begins with three paragraphs: the statement, one to three sentences;
"Source: ", where it comes from, with its grades; and "Measured: ", what is compared with what. A
short proof follows, from "Proof: " to the end. A long one is a section of PROOFS.md. `python
verify.py --explain ID` prints all of it.

A group of answers to one prompt is a tree. Answers that begin with the same tokens share their
first nodes, and there their gradients add up. The policy of a random tree is tabular: every prefix
has logits of its own, so the gradient at a node belongs to that node only. Padding holds garbage on
purpose.
"""

from __future__ import annotations

import inspect
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_columns

from losses import Batch
from toy.policy import EOS, Policy, pad, tabular

DRAWS = 24  # ordinary random trees per claim
TOLERANCE = 1e-10  # of |measured - predicted| / max(1, |predicted|), float64
NOTICEABLE = 1e-6  # how large "otherwise" must be at least, on average over the draws

# ---------------- a claim and its evidence


@dataclass(frozen=True)
class Claim:
    id: str
    check: Callable  # (name of the function it speaks of, draws, evidence) -> None
    names: tuple[str, ...]  # the functions of losses.py that it speaks of
    condition: str = ""  # without which the claim is false, if there is one

    @property
    def text(self) -> list[str]:
        """Statement, source and what is measured: the first paragraphs of the check's docstring."""
        paragraphs = self._docstring[0].split("\n\n")
        return [" ".join(paragraph.split()) for paragraph in paragraphs]

    @property
    def proof(self) -> str:
        """The rest of the docstring, as it is written there. Empty if PROOFS.md has the proof."""
        return self._docstring[2]

    @property
    def _docstring(self) -> tuple[str, str, str]:
        return inspect.cleandoc(self.check.__doc__).partition("\n\nProof: ")


def claim(id_: str, *names: str, only_if: str = ""):
    """Turn a check into a claim about these functions: it holds, or it holds only_if."""
    return lambda check: Claim(id_, check, names, only_if)


class Evidence:
    """What the draws said about one function."""

    def __init__(self, claim: str = "", function: str = ""):
        self.claim, self.function = claim, function
        self.message = ""  # what is wrong, if something is
        self.error = -1.0  # largest |measured - predicted| / max(1, |predicted|) so far
        self.pair = (math.nan, math.nan)  # predicted and measured where they are furthest apart
        self.what = ""  # which of several things the pair is, if the claim says so
        self.otherwise = []  # sizes of errors without the condition, or what "Measured: " says
        self.rows = []  # of the claim's own table: a name, then numbers

    def equal(self, predicted, measured, what: str = "") -> None:
        p, m = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (predicted, measured))
        if p.shape != m.shape:
            raise ValueError(f"a result of shape {tuple(m.shape)}; {tuple(p.shape)} was expected")
        if not p.numel():
            return
        errors = ((m - p).abs() / p.abs().clamp(min=1)).nan_to_num(math.inf).flatten()
        worst = errors.argmax()
        if errors[worst] > self.error:
            self.error = float(errors[worst])
            self.pair = (float(p.flatten()[worst]), float(m.flatten()[worst]))
            self.what = what and f"{what}: "

    def record_otherwise(self, size) -> None:
        self.otherwise.append(torch.as_tensor(size, dtype=torch.float64).abs().mean().item())

    @property
    def mean_otherwise(self) -> float:
        return fmean(self.otherwise) if self.otherwise else math.nan


def examine(claim: Claim, function: str, draws: list[Draw]) -> Evidence:
    """One claim about one function, on ordinary trees and then, if it holds there, on extreme ones.

    Numbers and tables come from the ordinary trees, unless the claim fails on the others.
    """
    evidence = examine_on([draw for draw in draws if not draw.kind], claim, function)
    if evidence.otherwise and not evidence.mean_otherwise >= NOTICEABLE and not evidence.message:
        evidence.message = "otherwise is 0 or nan, but must not be"
    if evidence.error < 0 and not evidence.otherwise and not evidence.message:
        evidence.message = "nothing was measured"
    if not evidence.message:
        beyond = examine_on([draw for draw in draws if draw.kind], claim, function)
        if beyond.message:
            beyond.message += " (on extreme trees)"
            return beyond
    return evidence


def examine_on(draws: list[Draw], claim: Claim, function: str) -> Evidence:
    """A ValueError or a RuntimeError (torch's) is the function's fault. Any other is the check's
    own, and is not caught.
    """
    evidence = Evidence(claim.id, function)
    for draw in draws:
        draw.generator.manual_seed(draw.seed)  # the same numbers, whatever was examined before
    try:
        claim.check(function, draws, evidence)
    except (ValueError, RuntimeError) as error:
        evidence.message = f"{type(error).__name__}: {error}"
    if evidence.error > TOLERANCE and not evidence.message:
        predicted, measured = evidence.pair
        evidence.message = f"{evidence.what}expected {predicted:.12g}, got {measured:.12g}"
    return evidence


def ascent(loss: Tensor, variable: Tensor) -> Tensor:
    """-dLoss/dvariable."""
    return -torch.autograd.grad(loss, variable, retain_graph=True)[0]


def pushes_of(loss: Tensor, batch) -> Tensor:
    """c = -N dLoss/dlogp. (N, T)."""
    return len(batch.logp) * ascent(loss, batch.logp)


# ---------------- random prefix trees

GARBAGE = 1e4  # sits in every padded position; exp(2e4) overflows
# Trees beyond the ordinary ones, where users are: group size, index (which decides on prompts and
# lengths), how many tokens are fully shared, longest answer, size of the advantages.
EXTREMES = {
    "steep": (3, 2, 2, 5, 100.0),  # ratios of 20 and more, and the ids of a large vocabulary
    "wide": (64, 6, 2, 5, 1e-6),  # a large group whose rewards nearly agree
    "long": (3, 1, 260, 300, 1.0),  # more tokens than a byte counts
}
LARGE = 152_000  # ids; short integers cannot tell these apart
LARGE_IDS = [LARGE - 1, 1, 65_537, 131_073, 257]


class Draw:
    """A random prefix tree: 1 to 3 prompts with G answers each.

    The answers to a prompt share their first token or two. Token t of answer i leads to the node
    (prompt number, prefix); `tree` lists the visits (i, t) of every node. The policy has the ids
    below `vocabulary`; `tokens` has the ids of `ids` in their place.
    """

    def __init__(self, seed: int, index: int, kind: str = ""):
        size, index, common, longest, self.size = EXTREMES.get(kind, (0, index, 2, 0, 1.0))
        rng = random.Random(f"{seed} {index} {kind or None}")
        self.kind = kind
        self.seed = rng.getrandbits(40)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.G = size or 2 + 7 * index % 15  # 2 to 16, all of them in 15 draws
        self.equal_lengths = index % 3 == 0
        self.max_tokens = rng.randint(8, 12) + longest
        self.vocabulary = rng.randint(3, 5)
        self.longest = longest or rng.randint(4, 6)
        self.ids = LARGE_IDS if kind == "steep" else list(range(self.vocabulary))
        self._grow_answers(rng, index, common)
        self._build_tree(rng)
        prefixes = {(p, *y[:-1]) for p, y in self.tree}
        W = self.randn(self.vocabulary, len(prefixes)).requires_grad_()
        self.policy = Policy(W, tabular(sorted(prefixes)), self.longest)
        self.logp = pad_columns(self.policy.log_probs(self.prompts, self.answers)[0], (0, 1))
        self.logp_ref = self.logp.detach() + 0.5 * self.randn(*self.mask.shape)
        # the K nodes that the whole group shares, and where: answers and places, (K, G) both
        self.shared = [node for node, visits in self.tree.items() if len(visits) == self.G]
        self.shared_at = torch.tensor([self.tree[node] for node in self.shared]).unbind(-1)

    def _grow_answers(self, rng: random.Random, index: int, common: int) -> None:
        """Answers and advantages. Advantages sum to zero in each group; in some draws one of them
        is 0, in others those of a whole group are."""
        self.prompts, self.answers, adv = [], [], []
        for p in range(1 + index // 2 % 3):
            shared = rng.randint(common - 1, common)
            start = [rng.randrange(1, self.vocabulary) for _ in range(shared)]
            for _ in range(self.G):
                length = self.longest
                if not self.equal_lengths:
                    length = rng.randint(len(start) + 1, self.longest)
                middle = [rng.randrange(1, self.vocabulary) for _ in range(length - len(start) - 1)]
                self.prompts.append((p,))
                self.answers.append((*start, *middle, EOS))
            size = 0.0 if index % 2 == 1 and p == 1 else self.size
            some = self.G - (index % 4 == 2 and self.G > 2)
            x = [size * rng.gauss(0, 1) for _ in range(some)]
            adv += [v - sum(x) / some for v in x] + [0.0] * (self.G - some)
        self.adv = torch.tensor(adv, dtype=torch.float64)
        self.N = len(self.answers)
        self.T = [len(y) for y in self.answers]

    def _build_tree(self, rng: random.Random) -> None:
        self.tree = defaultdict(list)
        for i, y in enumerate(self.answers):
            for t in range(len(y)):
                self.tree[i // self.G, y[: t + 1]].append((i, t))
        tokens, mask = pad(self.answers)
        self.mask = pad_columns(mask, (0, 1))  # (N, T): the last column is padding only
        junk = torch.randint(0, self.vocabulary, self.mask.shape, generator=self.generator)
        self.tokens = torch.tensor(self.ids)[junk.masked_scatter(self.mask, tokens[mask])]
        self.nodes = torch.full(self.mask.shape, -1)
        self.noise = torch.zeros(self.mask.shape, dtype=torch.float64)
        numbers = rng.sample(range(len(self.tree)), len(self.tree))
        for number, visits in zip(numbers, self.tree.values(), strict=True):
            at = tuple(zip(*visits, strict=True))
            self.nodes[at] = number
            self.noise[at] = rng.uniform(-1, 1)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def rows(self, x: Tensor) -> Tensor:
        """One number per answer, repeated along its tokens. (N,) -> (N, T)."""
        return x[:, None].expand(self.mask.shape)

    def fill(self, x: Tensor, garbage: float = GARBAGE) -> Tensor:
        """x, with garbage on the padding. (N, T) -> (N, T)."""
        return torch.where(self.mask, x, garbage)

    def log_ratio(self, spread: float, offset: float = 0.0) -> Tensor:
        """log(pi/pi_old), the same at every visit of a node. (N, T).

        |log r| lies between offset and offset + spread. In steep trees a spread is five times as
        large, unless it is a small one, which keeps ratios inside a clip range.
        """
        if self.kind == "steep" and spread >= 0.6:
            spread = 5 * spread
        return spread * self.noise + offset * self.noise.sign()

    def batch(
        self, spread: float = 0.0, offset: float = 0.0, adv=None, garbage: float = GARBAGE
    ) -> Batch:
        """These answers as a Batch; adv is (N,) or (N, T), the draw's own if None."""
        adv = self.adv if adv is None else adv
        return Batch(
            logp=self.fill(self.logp, garbage),
            logp_old=self.fill(self.logp.detach() - self.log_ratio(spread, offset), -garbage),
            adv=self.fill(adv if adv.dim() == 2 else self.rows(adv)),
            mask=self.mask.clone(),
            group_size=self.G,
            max_tokens=self.max_tokens,
            logp_ref=self.fill(self.logp_ref, 3 * garbage),
        )

    def group(self, i: int) -> range:
        """The rows of answer i's group."""
        return range(i - i % self.G, i - i % self.G + self.G)

    def at_shared(self, x: Tensor) -> Tensor:
        """x at the K tokens that a whole group shares. (N,) or (N, T) -> (K, G)."""
        return (x if x.dim() == 2 else self.rows(x))[self.shared_at]


def random_draws(seed: int, count: int = DRAWS) -> list[Draw]:
    """Ordinary random trees, then one of each extreme kind."""
    extreme = [Draw(seed, 0, kind=kind) for kind in EXTREMES]
    return [*(Draw(seed, k) for k in range(count)), *extreme]
