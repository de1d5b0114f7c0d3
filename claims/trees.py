"""Random prefix trees: what the claims are checked on.

A group of answers to one prompt is a tree. Answers that begin alike share their first nodes, and
there their gradients add up. The policy is tabular: every history has logits of its own, so the
gradient's part at a node belongs to that node alone. Padding holds garbage on purpose.
"""

from __future__ import annotations

import random
from collections import defaultdict

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_columns

from toy.policy import EOS, Policy, pad, tabular

GARBAGE = 1e4  # sits in every padded position; exp(2e4) overflows
# Trees beyond the ordinary ones, where users are: group size, index (which decides on prompts and
# lengths), how many tokens all share, longest answer, size of the advantages.
EXTREMES = {
    "steep": (3, 2, 2, 5, 100.0),  # ratios of 20 and more, and the ids of a large vocabulary
    "wide": (64, 6, 2, 5, 1e-6),  # a large group whose rewards nearly agree
    "long": (3, 1, 260, 300, 1.0),  # more tokens than a byte counts
}
LARGE = 152_000  # ids; these are alike for short integers
LARGE_IDS = [LARGE - 1, 1, 65_537, 131_073, 257]


class Draw:
    """A random prefix tree: 1 to 3 prompts with G answers each.

    The answers to a prompt share their first token or two. Token t of answer i leads to the node
    (prompt number, prefix); `tree` lists the visits (i, t) of every node. The policy has the ids
    below `vocabulary`; `tokens` has those of `ids` in their place.
    """

    def __init__(self, seed: int, index: int, group_size: int | None = None, kind: str = ""):
        size, index, common, longest, self.size = EXTREMES.get(kind, (0, index, 2, 0, 1.0))
        rng = random.Random(f"{seed} {index} {group_size}{kind}")
        self.kind = kind
        self.seed = rng.getrandbits(40)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.G = group_size or size or 2 + 7 * index % 15  # 2 to 16, all of them in 15 draws
        self.equal_lengths = index % 3 == 0
        self.max_tokens = rng.randint(8, 12) + longest
        self.vocabulary = rng.randint(3, 5)
        self.longest = longest or rng.randint(4, 6)
        self.ids = LARGE_IDS if kind == "steep" else list(range(self.vocabulary))
        self._grow_answers(rng, index, common)
        self._build_tree(rng)
        histories = set()
        for x, y in zip(self.prompts, self.answers, strict=True):
            histories |= {x + y[:t] for t in range(len(y))}
        W = self.randn(self.vocabulary, len(histories)).requires_grad_()
        self.policy = Policy(W, tabular(sorted(histories)), self.longest)
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
        far = (self.nodes % 3 == 0) & (self.kind == "steep")  # up and down by turns
        up_or_down = 1 - 2 * (self.nodes % 2)
        self.far_noise = torch.where(far, up_or_down * (4 + self.noise.abs()), self.noise)

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

        |log r| lies between offset and offset + spread. In steep trees every third one is up to
        five times as large, but not under a small spread, which keeps ratios inside a clip range.
        """
        noise = self.far_noise if spread >= 0.6 else self.noise
        return spread * noise + offset * self.noise.sign()

    def batch(self, module, spread: float = 0.0, offset: float = 0.0, adv=None):
        """These answers as the Batch of a module; adv is (N,) or (N, T), the draw's own if None."""
        adv = self.adv if adv is None else adv
        return module.Batch(
            logp=self.fill(self.logp),
            logp_old=self.fill(self.logp.detach() - self.log_ratio(spread, offset), -GARBAGE),
            adv=self.fill(adv if adv.dim() == 2 else self.rows(adv)),
            mask=self.mask.clone(),
            group_size=self.G,
            max_tokens=self.max_tokens,
            logp_ref=self.fill(self.logp_ref, 3 * GARBAGE),
        )

    def group(self, i: int) -> range:
        """The rows of answer i's group."""
        return range(i - i % self.G, i - i % self.G + self.G)

    def at_shared(self, x: Tensor) -> Tensor:
        """x at the K tokens that a whole group shares. (N,) or (N, T) -> (K, G)."""
        return (x if x.dim() == 2 else self.rows(x))[self.shared_at]

    def left_shared(self, c: Tensor) -> list[float]:
        """|sum c| / sum |c| at the tokens that a whole group shares, if it has any c there."""
        c = self.at_shared(c)
        size = c.abs().sum(1)
        return (c.sum(1).abs() / size)[size > 0].tolist()

    def sequence_ratios(self, spread: float, kind: str = "geometric") -> Tensor:
        """s_i of every answer. (N,)."""
        log_s = self.log_ratio(spread).sum(1)  # 0 on padding
        return (log_s / torch.tensor(self.T) if kind == "geometric" else log_s).exp()


def ascent(loss: Tensor, variable: Tensor) -> Tensor:
    """-dLoss/dvariable. Raises TypeError, in plain words, for what is no loss."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"a loss is a scalar tensor, not {loss!r}")
    if loss.dim():
        raise TypeError(f"a loss is a scalar tensor, not {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise TypeError("the loss does not depend on logp")
    return -torch.autograd.grad(loss, variable, retain_graph=True)[0]


def coefficients(loss: Tensor, batch) -> Tensor:
    """c = -N dLoss/dlogp. (N, T)."""
    return len(batch.logp) * ascent(loss, batch.logp)
