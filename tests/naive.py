"""To whoever changes train.py: what it does beyond toy/plain.py, as plainly, sharing no code.

One answer at a time: no cache, no padding, no batches. Only the random numbers are the trainer's
own, so that both see the same draws.
"""

from functools import cache
from statistics import fmean, stdev

import torch

from toy import plain

# ---------------- score


def log_probs(policy, prompts, answers, temperature):
    """log pi of the rows' tokens: tensors (T_i,), differentiable."""
    pairs = zip(prompts, answers, strict=True)
    return [plain.log_probs(policy, *pair, temperature) for pair in pairs]


def advantages(rewards, G, scale):
    found = []
    for start in range(0, len(rewards), G):
        group = rewards[start : start + G]
        deviation = stdev(group) + 1e-4 if scale == "std" else 1.0
        found += [(reward - fmean(group)) / deviation for reward in group]
    return found


def kept(a, b):
    """Which tokens of a stay when it becomes b, by the fewest edits and then with the most kept."""

    @cache
    def best(t, u):  # of the first t tokens into the first u: edits, minus how many stay, which
        if not (t and u):
            return t + u, 0, (False,) * t
        same = a[t - 1] == b[u - 1]
        ways = [(best(t - 1, u - 1), (same,))]
        if not same:  # then it is substituted, deleted, or the other one inserted
            ways += [(best(t - 1, u), (False,)), (best(t, u - 1), ())]
        (edits, minus, stays), last = min(ways, key=lambda way: way[0][:2])
        return edits + 1 - same, minus - same, stays + last

    return best(len(a), len(b))[2]


# ---------------- the optimiser


def gradient(model, loss, grad_clip):
    """Leaves the clipped gradient in the weights. Returns its norm before that."""
    model.zero_grad()
    loss.backward()
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip))


def adam(model, lr):
    """AdamW without weight decay."""
    return torch.optim.Adam(model.parameters(), lr, betas=(0.9, 0.95))
