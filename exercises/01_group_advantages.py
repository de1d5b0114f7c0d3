# %% [markdown]
"""
# 1. Compare every answer with its group (10 minutes)

**Aim:** compute the number that every method here starts from. An answer gets one reward, at its
end. The G answers to the same prompt decide whether that reward is high or low.

    A_i = R_i - mean(R)                            scale "mean" (Dr. GRPO)
    A_i = (R_i - mean(R)) / (std(R) + 1e-4)        scale "std" (GRPO); the unbiased std, over G - 1

`rewards` is (N,): one number for each of the N answers of the batch. The result has the same shape.
The G = `group_size` answers of a group are neighbours.

A group whose rewards are all equal gets exactly 0. Take care: three rewards of 0.1 have a float64
mean that is not 0.1, and 1e-17 / 1e-4 is not 0.

Checks of the input (G divides N, the scale is one of the two) are welcome. They are not graded.

**Hint:** `view(-1, group_size)` makes a row of each group. Compare the largest reward with the
smallest.

**Grade it:** `make exercise N=1`
"""

# %%
import torch


def group_advantages(rewards: torch.Tensor, group_size: int, scale: str = "std") -> torch.Tensor:
    raise NotImplementedError
