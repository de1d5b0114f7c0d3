"""1. Compare every answer with its group (10 minutes).

Aim: compute the number that every method here starts from. Rewards come at the end of an answer
only. What is good is decided by the G answers to the same prompt.

    A_i = R_i - mean(R)                            scale "mean" (Dr. GRPO)
    A_i = (R_i - mean(R)) / (std(R) + 1e-4)        scale "std" (GRPO); the unbiased std, over G - 1

rewards is (N,): the G answers of a group are neighbours. A group whose rewards are all equal gets
exactly 0. Take care: three rewards of 0.1 have a float mean that is not 0.1, and 1e-17 / 1e-4 is
not 0. G < 2, an N that G does not divide, rewards that are not floats, and any other scale are
refused with a ValueError.

Hint: view(-1, group_size) makes a row of each group. Compare the largest reward with the smallest.
Expected: M3, N1 and N2 hold. N2 says why the two sides of a group weigh the same.
"""

from torch import Tensor


def group_advantages(rewards: Tensor, group_size: int, scale: str = "std") -> Tensor:
    raise NotImplementedError
