# %% [markdown]
"""
# 8. Find the bug (20 minutes)

**Aim:** read code that runs, trains, and is wrong. Each of these three pieces has one mistake. All
three have been seen in public code, and none of them raises an error.

**a)** `dr_grpo` should give every token the same weight, whatever the length of its answer:

    python verify.py exercises/08_find_the_bug.py:dr_grpo

The page that this prints is explained in claims/README.md. Look at WEIGHT of a token, by the length
of its answer.

**b)** `kl_penalty` should pull a policy back to the reference. It is k3, Schulman's estimate of
KL(pi || pi_ref), with q = pi_ref / pi at each token:

    k3 = q - 1 - log q

    python verify.py exercises/08_find_the_bug.py:kl_penalty

Look at PULL on a token at 2 and 0.5 times its reference. By the formula, which of the two should be
pulled back more?

**c)** `score` should give the log-probs that `sample` draws with, because the ratio of a loss is
the quotient of the two. train.py logs the largest difference of one batch as max_logp_gap:

    python exercises/08_find_the_bug.py

What does it print at the temperature 1, and why did nobody notice?

A Batch is that of exercise 7, and its `logp_ref` are the log-probs of the reference. Fix each piece
in its place. The copy for a class may have no verify.py: then read the code.

**Hint:** compute the result by hand for two answers, one of one token and one of two.

**Grade it:** `python -m exercises.grader 8`
"""

# %%
import torch
from torch import Tensor

scale = "mean"  # of the advantages, for the page


def dr_grpo(batch, eps: float = 0.2) -> Tensor:
    """a) GRPO's loss, with one divisor for all answers."""
    log_ratio = (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0.0)
    ratio = log_ratio.exp()
    J = torch.minimum(ratio * batch.adv, ratio.clamp(1 - eps, 1 + eps) * batch.adv)
    return -(J.sum(1) / batch.mask.sum(1).clamp(min=1)).mean()


# %%
def kl_penalty(batch, beta: float = 0.04) -> Tensor:
    """b) beta times k3, with the divisor of Dr. GRPO. It is added to a loss."""
    log_q = (batch.logp - batch.logp_ref).masked_fill(~batch.mask, 0.0)
    k3 = log_q.exp() - 1 - log_q
    return beta * k3.sum() / (len(k3) * batch.max_tokens)


# %%
def sample(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A token for each row of logits (N, V), and its log-prob. (N,) each. There is no bug here."""
    logp = (logits / temperature).log_softmax(-1)
    tokens = logp.exp().multinomial(1)
    return tokens.squeeze(1), logp.gather(1, tokens).squeeze(1)


def score(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """c) The log-probs with which `sample` draws these tokens. (N,)"""
    logp = logits.log_softmax(-1)
    return logp.gather(1, tokens[:, None]).squeeze(1)


if __name__ == "__main__":
    logits = torch.randn(1000, 20)
    for temperature in (1.0, 0.6):
        tokens, logp = sample(logits, temperature)
        gap = (logp - score(logits, tokens, temperature)).abs().max()
        print(f"temperature {temperature}: max_logp_gap {gap:.3f}")
