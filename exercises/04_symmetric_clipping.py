"""4. Equal bounds are not a symmetric clip (15 minutes).

Aim: make GRPO's gate blind to who won. With eps_low = eps_high it still asks (exercise 3). What has
to go is the min.

Write GRPO without it: J = clip(r, 1 - eps_low, 1 + eps_high) A, summed over all tokens and divided
by N L (the budget mean). A loss is something to minimise: return -J.

A Batch has logp, logp_old, adv (all (N, T)), mask (N, T) bool, group_size, max_tokens = L (see
losses.py). The padding holds garbage. So mask the log-ratio *before* exp: otherwise a padded 1e4
becomes inf, and 0 * inf is nan in the backward pass.

Hint: you may import token_ratio and budget_mean from losses, but try without. Expected: M1, M2, C2,
C3, C7, C8, C13, C16 and the AUDIT hold: four zeros in its row.
"""

from torch import Tensor


def grpo_symmetric(batch, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    raise NotImplementedError
