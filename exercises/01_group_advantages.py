# %% [markdown]
"""
# 1. Compare every answer with its group (10 minutes)

**Aim:** compute the number that every method here starts from. An answer earns one reward, at its
end. The G answers to the same prompt decide whether that reward is high or low.

    A_i = R_i - mean(R)               scale "mean" (Dr. GRPO)
    A_i = (R_i - mean(R)) / std(R)    scale "std" (GRPO); the unbiased std, which divides by G - 1

`rewards` is (N,): one number for each of the N answers of the batch. The result has the same shape.
The G = `group_size` answers of a group are neighbours.

If all rewards of a group are equal, there is nothing to compare, and all its A are 0. Take care:
then the std is also 0.

Trainers add a small number such as 1e-4 to the std. You may do so as well: it is not graded.

**If you are early:** what is A for three rewards of 8000.9, in float64? How could it be exactly 0?

**Hint:** `view(-1, group_size)` makes a row of each group. `torch.where` can treat a std of 0.

**Grade it:** `python -m exercises.grader 1`
"""

# %%
import torch


def group_advantages(rewards: torch.Tensor, group_size: int, scale: str = "std") -> torch.Tensor:
    raise NotImplementedError
