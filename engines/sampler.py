"""What the corrections for another sampler cost: bias and noise against the spread of an answer.

vLLM draws the answers with other numerics than the trainer, so its policy mu is not quite the
trainer's pi. Trainers multiply what an answer pushes by a weight made of u = pi / mu. Here all
1,024 answers of 10 tokens are enumerated, so nothing is estimated:

    bias    |expected update - gradient under pi| / |gradient under pi|. It stays, however many
            answers an update has.
    noise   the variance of one answer's update, over that with the answer's full weight, which is
            unbiased. It falls with the number of answers.

tau is the spread of an answer: the standard deviation of log(pi / mu), summed over its tokens. If
tokens are alike, it is the token's times sqrt(T). Updates are group-relative and on-policy, but for
the sampler. Means over WORLDS random policies, with a logit for each prefix and random rewards
(claim C25).

    python -m engines.sampler
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

T, WORLDS = 10, 20
SPREADS = (0.30, 0.51, 0.72, 0.96, 1.5)
CAP = 3.0  # TRL's vllm_importance_sampling_clip_max


def whole(log_u: Tensor) -> Tensor:
    """The product of an answer's u, at each of its tokens. (..., T) -> (..., T)."""
    return log_u.sum(-1, keepdim=True).exp().expand_as(log_u)


def below(w: Tensor, low: float, high: float) -> Tensor:
    """The weight, or 0 where it lies outside low to high."""
    return w.masked_fill((w < low) | (w > high), 0.0)


# log u of the tokens, 0 on padding -> their weights. (..., T) -> (..., T).
MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,
    "token_truncate": lambda log_u: log_u.exp().clamp(max=CAP),  # TIS: TRL; slime and verl with 2
    "token_mask": lambda log_u: below(log_u.exp(), 0.0, CAP),  # TRL
    "IcePop": lambda log_u: below(log_u.exp(), 0.5, 5.0),  # OpenRLHF's icepop, with its bounds
    "sequence_mask": lambda log_u: below(whole(log_u), 0.0, CAP),  # TRL's default
    "sequence_truncate": lambda log_u: whole(log_u).clamp(max=CAP),  # TRL
    "seq_is_rs": lambda log_u: below(whole(log_u), 0.5, 2.0),  # verl
    "the full weight": whole,
}


# ---------------- all answers of a policy over two tokens


ANSWERS = torch.arange(2**T)
PLACES = T - torch.arange(T)
PREFIXES = ANSWERS[:, None] >> PLACES  # (Y, T): the tokens before, read as a binary number
PREFIXES = PREFIXES + 2 ** torch.arange(T) - 1  # one number for each prefix of each length
TAKEN = (ANSWERS[:, None] >> (PLACES - 1)) & 1  # (Y, T)


def log_probs(logits: Tensor) -> Tensor:
    """log pi of each token of each answer. (W, 2^T - 1) logits of token 1 -> (W, Y, T)."""
    z = logits[:, PREFIXES]
    return torch.nn.functional.logsigmoid(torch.where(TAKEN > 0, z, -z))


@dataclass
class World:
    """W policies pi with their samplers mu, and rewards."""

    logits: Tensor  # (W, H) of pi
    logp: Tensor  # (W, Y, T) under pi
    log_u: Tensor  # (W, Y, T) log(pi / mu)
    mu: Tensor  # (W, Y) chance of an answer under the sampler
    rewards: Tensor  # (W, Y)

    def update(self, weights: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance, over answers of these chances, of sum_t w (R - mean R) grad log pi_t.

        That is the group-relative update of one answer, over 1 - 1/G. (W, H), (W,).
        """
        adv = self.rewards - (self.mu * self.rewards).sum(1, keepdim=True)  # (W, Y)
        score = TAKEN - self.logits.sigmoid()[:, PREFIXES]  # (W, Y, T): grad in the own logit
        x = weights * adv[..., None] * score
        where = PREFIXES.expand_as(x).flatten(1)
        mean = torch.zeros_like(self.logits)
        mean = mean.scatter_add(1, where, (chances[..., None] * x).flatten(1))
        second = (chances * (x * x).sum(2)).sum(1)  # logits of different prefixes do not mix
        return mean, second - (mean * mean).sum(1)


def make_world(tau: float) -> World:
    """Random policies and rewards, and samplers whose spread is tau."""
    gen = torch.Generator().manual_seed(0)
    logits, noise = torch.randn(2, WORLDS, 2**T - 1, generator=gen, dtype=torch.float64)
    R = torch.rand(WORLDS, 2**T, generator=gen, dtype=torch.float64)
    logp = log_probs(logits)
    low, high = torch.zeros(WORLDS, 1).double(), torch.full((WORLDS, 1), 10.0).double()
    for _ in range(40):  # how much noise makes a spread of tau
        size = (low + high) / 2
        log_u = logp - log_probs(logits + size * noise)
        mu = (logp - log_u).sum(2).exp()
        log_w = log_u.sum(2)
        mean = (mu * log_w).sum(1, keepdim=True)
        spread = (mu * (log_w - mean) ** 2).sum(1, keepdim=True).sqrt()
        low, high = torch.where(spread < tau, size, low), torch.where(spread < tau, high, size)
    return World(logits, logp, log_u, mu, R)


def measure(world: World) -> dict[str, tuple[float, float]]:
    """Bias and noise of each mode, means over the worlds."""
    truth, _ = world.update(torch.ones_like(world.log_u), world.logp.sum(2).exp())
    found = {mode: world.update(weigh(world.log_u), world.mu) for mode, weigh in MODES.items()}
    full = found["the full weight"][1]
    return {
        mode: (
            ((mean - truth).norm(dim=1) / truth.norm(dim=1)).mean().item(),
            (variance / full).mean().item(),
        )
        for mode, (mean, variance) in found.items()
    }


def main():
    columns = [measure(make_world(tau)) for tau in SPREADS]
    print(f"| correction | {' | '.join(f'tau {tau:.2f}' for tau in SPREADS)} |")
    print("|---" + "|---:" * len(SPREADS) + "|")
    for mode in MODES:
        cells = (f"{bias:.3f}, {noise:.2f}" for bias, noise in (x[mode] for x in columns))
        print(f"| {mode} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
