"""A language model small enough to know everything about it: logits = W phi(prefix).

A real policy maps a prefix h (prompt + answer so far) to features with a transformer, and the
features to logits with one matrix. Here phi is any fixed function, and only the matrix W is
learned. So nothing has to be estimated: gradients, the Fisher matrix and the probability of every
possible answer are short formulas, written out below. The formulas do not use autograd. Only
`log_probs` can be differentiated, so that autograd can be compared with them.

V = vocabulary size, D = number of features. An answer ends with token 0 (EOS) or after `horizon`
tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EOS = 0
Tokens = tuple[int, ...]  # an answer, or a prefix: the prompt's tokens and the answer's so far


@dataclass
class Policy:
    """pi(a|h) = softmax(W phi(h))_a."""

    W: Tensor  # (V, D) float64
    phi: Callable[[Tokens], Tensor]  # prefix -> (D,)
    horizon: int  # longest answer

    # ------------------------------------------------ one token

    def probs(self, h: Tokens) -> Tensor:
        """pi(.|h) = exp(z) / sum exp(z) with z = W phi(h). (V,)"""
        z = self.W.detach() @ self.phi(h)
        e = (z - z.max()).exp()
        return e / e.sum()

    def grad_log_prob(self, h: Tokens, a: int) -> Tensor:
        """grad_W log pi(a|h) = (e_a - pi(.|h)) phi(h)^T: taken minus expected. (V, D)"""
        error = -self.probs(h)
        error[a] += 1
        return torch.outer(error, self.phi(h))

    def fisher(self, h: Tokens) -> Tensor:
        """F(h) = E_a[grad log pi(a|h) grad log pi(a|h)^T] = (diag(pi) - pi pi^T) kron (phi phi^T).

        (VD, VD), its rows and columns in the order of W.flatten().
        """
        p, phi = self.probs(h), self.phi(h)
        return torch.kron(p.diag() - torch.outer(p, p), torch.outer(phi, phi))

    def step(self, direction: Tensor, eta: float) -> Policy:
        """The policy after W + eta * direction."""
        return Policy(self.W.detach() + eta * direction, self.phi, self.horizon)

    # ------------------------------------------------ whole answers

    def answers(self, prompt: Tokens) -> Iterator[tuple[Tokens, float]]:
        """Every possible answer with its probability, prod_t pi(y_t|h_t); they sum to 1."""
        unfinished: list[tuple[Tokens, float]] = [((), 1.0)]
        while unfinished:
            y, p = unfinished.pop()
            for a, p_a in enumerate(self.probs(prompt + y).tolist()):
                longer = (*y, a)
                if a == EOS or len(longer) == self.horizon:
                    yield longer, p * p_a
                else:
                    unfinished.append((longer, p * p_a))

    def grad_log_prob_answer(self, prompt: Tokens, y: Tokens) -> Tensor:
        """grad_W log pi(y) = sum_t grad_W log pi(y_t|h_t). (V, D)"""
        return sum(self.grad_log_prob(prompt + y[:t], a) for t, a in enumerate(y))

    def grad_expected_reward(self, prompt: Tokens, reward: Callable[[Tokens], float]) -> Tensor:
        """grad_W of the expected reward, sum_y pi(y) R(y). (V, D)

        sum_y pi(y) R(y) grad_W log pi(y), over every possible answer.
        """
        answers = self.answers(prompt)
        return sum(p * reward(y) * self.grad_log_prob_answer(prompt, y) for y, p in answers)

    def log_probs(self, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> Tensor:
        """log pi(y_t|h_t) of every token, 0 on padding. Differentiable in W. (N, T).

        N prompts, N answers; T is the longest answer given.
        """
        _, mask = pad(answers)
        pairs = list(zip(prompts, answers, strict=True))
        prefixes = [x + y[:t] for x, y in pairs for t in range(len(y))]
        features = torch.stack([self.phi(h) for h in prefixes])  # (tokens, D)
        taken = torch.tensor([a for y in answers for a in y])  # (tokens,)
        log_pi = torch.log_softmax(features @ self.W.T, dim=-1)  # (tokens, V)
        logp = torch.zeros(mask.shape, dtype=self.W.dtype)
        return logp.masked_scatter(mask, log_pi.gather(1, taken[:, None]))


def pad(answers: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """Answers of unequal length as tokens (N, T) int64, 0 on padding, and mask (N, T) bool."""
    width = max(len(y) for y in answers)
    tokens = torch.tensor([[*y, *[0] * (width - len(y))] for y in answers])
    lengths = torch.tensor([[len(y)] for y in answers])
    return tokens, torch.arange(width) < lengths


def count_orders(group: Sequence[Hashable]) -> int:
    """In how many orders these answers can be drawn; some may be equal."""
    return math.factorial(len(group)) // math.prod(map(math.factorial, Counter(group).values()))


# ---------------- feature maps


def tabular(prefixes: Iterable[Tokens]) -> Callable[[Tokens], Tensor]:
    """One-hot features: every prefix has logits of its own, a column of W, in the order given."""
    distinct = list(dict.fromkeys(prefixes))
    one_hot = dict(zip(distinct, torch.eye(len(distinct), dtype=torch.float64), strict=True))
    return one_hot.__getitem__
