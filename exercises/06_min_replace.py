# %% [markdown]
"""
# 6. Min-Replace (10 minutes)

**Aim:** repair what a sequence ratio breaks. s_i gives each answer its own weight, and shared
tokens no longer cancel. DFPO's first repair gives the whole group one weight, the smallest
(Eq. 17):

    w~_i = min_j w_j

`w` and `adv` are (P, G), a row per group, and so is the result. It is a stop-gradient weight: return
it detached. Otherwise the loss would also learn to lower the smallest ratio, and the shared token
would get a gradient again.

**Hint:** one line. `adv` is there so that the two transforms can be exchanged.

**Grade it:** `make exercise N=6`
"""

# %%
import torch


def min_replace(w: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError
