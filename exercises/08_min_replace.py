# %% [markdown]
"""
# 8. Min-Replace (10 minutes)

**Aim:** repair what a sequence ratio breaks. In GSPO an answer has one weight w_i for all its
tokens, its sequence ratio s_i. So the pushes on a shared token no longer cancel. The first repair
of the paper DFPO (its Eq. 17) gives all answers of a group one weight, the smallest:

    w~_i = min_j w_j

`w` is (P, G), a row for each group, and so is the result. It is a stop-gradient weight: return it
detached. Otherwise the loss would also learn to move the smallest ratio, and the net push would
no longer be 0.

**Hint:** one line.

**Grade it:** `python -m exercises.grader 8`
"""

# %%
import torch


def min_replace(w: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError
