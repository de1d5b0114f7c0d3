# %% [markdown]
"""
# 10. The tax is a covariance (25 minutes)

**Aim:** measure what a loss does to shared tokens, for any loss and any model, from token ids and
d loss / d logp.

A node v is a place in the tree of a group's answers: the tokens up to and with this one. Its
visitors S_v are the answers that begin with these tokens. c_i is the push on that last token in
answer i. With w_i = c_i / A_i, and wbar its mean over S_v, the net push at the node is

    sum_{S_v} c_i = wbar sum A_i + sum (w_i - wbar) A_i = credit + tax

The credit says how much more the visitors earned than the group did. All their tokens so far have
a part in it, by luck or merit, not only the last one. At a token that the whole group shares, the
credit is 0. The tax comes from unequal weights: with equal weights it is 0. The result, the tax
share, is

    sum_v |tax_v| / sum_v sum_{S_v} |c_i|        over the nodes v with at least two visitors

It may be larger than 1. It is 0.0 where the divisor is 0, for example if there are no such nodes.
An answer with A_i = 0 has no w: it is no visitor, of any node.

`pushes` is (N, T), `advantages` (N,). `nodes` (N, T) has the same number where answers are at
the same node. Where `mask` (N, T) is False there is no token.

**Hint:** a Python loop is fine. For each node, collect the pairs (c_i, A_i) in a dictionary.
Without a loop: `torch.unique(..., return_inverse=True)` numbers the nodes, and `index_add_` sums
over them.

**Grade it:** `python -m exercises.grader 10`
"""

# %%
import torch


def learning_tax(
    pushes: torch.Tensor, advantages: torch.Tensor, nodes: torch.Tensor, mask: torch.Tensor
) -> float:
    raise NotImplementedError
