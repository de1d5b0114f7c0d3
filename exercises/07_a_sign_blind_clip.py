# %% [markdown]
"""
# 7. Equal bounds do not make a clip blind to the sign (15 minutes)

**Aim:** write a clip that ignores the sign of A. PPO's clip does not, even with eps_low = eps_high
(exercise 3), because of its min. So the min has to go.

Write GRPO without it, with one divisor for all answers:

    J = (1/N) sum_i (1/L) sum_t clip(r_{i,t}, 1 - eps_low, 1 + eps_high) A_{i,t}

The first sum is over all N answers of the batch. L is the largest number of tokens that an answer
may have.

A loss is something to minimise: return -J, a tensor that can be differentiated by `batch.logp`.

A Batch has `logp`, `logp_old`, `adv` (all (N, T)), `mask` (N, T) bool, `group_size`, and
`max_tokens`, which is L. T is the width of these tensors: the length of the longest answer. Where
the mask is False, `adv` is 0, but the log-probs are garbage. So mask the log-ratio *before* exp:
otherwise a padded 1e4 becomes inf, and 0 * inf is nan in the backward pass.

A batch may have no token at all. Its loss is a tensor with the value 0 and the gradient 0.

You are graded on the loss, and on its push at every token: c = N dJ / dlogp, as in exercise 2
without the 1/N of the mean.

To try it on two answers of one token, with the ratios 1.5 and 0.5:

    from exercises.call import make_batch
    print(grpo_symmetric(make_batch(r=[[1.5], [0.5]], A=[1, -1], L=1)))

**Grade it:** `python -m exercises.grader 7`
"""

# %%
import torch


def grpo_symmetric(batch, eps_low: float = 0.2, eps_high: float = 0.2) -> torch.Tensor:
    raise NotImplementedError
