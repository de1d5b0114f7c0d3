# %% [markdown]
"""
# 9. Adv-Orthogonal, and its blind spot (20 minutes)

**Aim:** repair what a sequence ratio breaks, and find what the repair does not see. In GSPO an
answer has one weight w_i for all its tokens, its sequence ratio, so the pushes on a shared token no
longer cancel. The first repair of the paper DFPO, Min-Replace, gives all answers of a group the
smallest weight. The second, Adv-Orthogonal, removes from w only what correlates with A (its Eq. 18):

    w~ = w - (A.w / ||A||^2) A        A.w = sum_i A_i w_i and ||A||^2 = sum_i A_i^2, over a group

Then `sum_i w~_i A_i = 0`. And if sum A = 0, `sum_i w~_i = sum_i w_i`.

**a)** Write it. `w` and `adv` are (P, G), a row for each group, and so is the result. Return it
detached: otherwise the loss would also learn to move the weights. A group whose advantages are all 0 keeps its w.

**b)** Some answers of a group may share a token that the others lack: that is its blind spot. Take
the advantages 1, 1, -1, -1, and let the first and the third answer share such a token. Their
advantages cancel. Give four weights for which their two pushes `w~ A` do not cancel: the size of
the net push must exceed 0.1.

**Hint** for b): the pair's net push is `w~_1 - w~_3`, so its two `w~` must differ. Make one of its
weights much larger than all others. The correction is spread over all four answers, so it does not
repair the pair.

**Grade it:** `python -m exercises.grader 9`
"""

# %%
import torch


def adv_orthogonal(w: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


# %%
def blind_spot() -> list[float]:
    """b) Four weights."""
    raise NotImplementedError
