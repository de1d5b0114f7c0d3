"""8. The tax is a covariance (25 minutes).

Aim: measure what a loss does to shared tokens, for any loss and any model, from token ids and
d loss / d logp alone.

A node is a prefix of a group's answers. Its visitors S_v are the answers that begin with it. With
w_i = c_i / A_i, and wbar its mean over S_v, the node gets

    sum_{S_v} c_i = wbar sum A_i + sum (w_i - wbar) A_i = credit + tax

The result is sum_v |tax_v| / sum_v sum_{S_v} |c_i| over nodes with at least two visitors. It is 0.0
if there are none. Answers with A_i = 0 have no w: leave them out.

coefficients (N, T), advantages (N,), nodes (N, T) int (equal = same node), mask (N, T) -> float.

Hint: torch.unique(..., return_inverse=True) numbers the nodes, index_add_ sums over them. A Python
loop is fine, too. Expected: C15 holds.
"""

from torch import Tensor


def learning_tax(coefficients: Tensor, advantages: Tensor, nodes: Tensor, mask: Tensor) -> float:
    raise NotImplementedError
