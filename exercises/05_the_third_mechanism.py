# %% [markdown]
"""
# 5. Length, the third mechanism (10 minutes)

**Aim:** see what GRPO's average over the tokens of each answer does. It leaves a push on a token
that all share, even fully on-policy, where nothing is clipped and every ratio is 1. (Exercise 3 has
another mechanism, and GSPO's ratio of a whole answer is one more: exercise 6.)

    J = (1/G) sum_i (1/T_i) sum_t A_i log pi(y_{i,t})        T_i: the length of answer i

(At r = 1 this has the gradient of r A: grad r = r grad log pi = grad log pi.)

What is left at a token that all G answers share, as the factor before grad log pi? Write it for any
advantages, even if they do not sum to 0. Then look at advantages that do: when is it 0?

**Hint:** it is exercise 2 with a weight of its own for every answer.

**Grade it:** `make exercise N=5`
"""


# %%
def left_by_the_length(lengths: list[int], advantages: list[float]) -> float:
    """The factor before grad log pi of the shared token."""
    raise NotImplementedError
