# %% [markdown]
"""
# 6. Min-Replace (10 minutes)

**Aim:** repair what a sequence ratio breaks. Every answer has its own weight w_i: in GSPO the
sequence ratio s_i. Then shared tokens no longer cancel. The first repair of the paper DFPO (its
Eq. 17) gives the whole group one weight, the smallest:

    w~_i = min_j w_j

`w` and `adv` are (P, G), a row per group, and so is the result. It is a stop-gradient weight:
return it detached. Otherwise the loss would also learn to move the smallest ratio, and this would
leave a push at the shared token again.

**Hint:** one line. `adv` is there so that the two transforms can be exchanged.

**Grade it:** `make exercise N=6`
"""

# %%
import torch


def min_replace(w: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError
