# %% [markdown]
"""
# 7. Adv-Orthogonal, and its blind spot (20 minutes)

**Aim:** write DFPO's second repair, and find what it does not see. It removes from w only what
correlates with A (Eq. 18 of the paper):

    w~ = w - (A.w / ||A||^2) A        A.w = sum_i A_i w_i and ||A||^2 = sum_i A_i^2, over a group

Then `sum_i w~_i A_i = 0`. And if sum A = 0, `sum_i w~_i = sum_i w_i`.

**a)** Write it. `w` and `adv` are (P, G), a row per group, and so is the result. Return it
detached. A group whose advantages are all 0 keeps its w.

**b)** Some answers of a group may share a token that the others lack: that is its blind spot. Give
four weights and four advantages (sum A = 0), and the places of a pair of answers whose advantages
cancel, A_i + A_j = 0. But `w~_i A_i + w~_j A_j` must not be 0: its size must exceed 0.1. Places
count from 0.

**Hint** for b): the pair is left with (w~_i - w~_j) A_i, so its two w~ must differ. The other two
answers need an A, too: otherwise the whole correction falls on the pair.

**Grade it:** `make exercise N=7`
"""

# %%
import torch


def adv_orthogonal(w: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


# %%
def blind_spot() -> tuple[list[float], list[float], tuple[int, int]]:
    """Four weights, four advantages, the two places of the pair."""
    raise NotImplementedError
