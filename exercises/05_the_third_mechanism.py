# %% [markdown]
"""
# 5. Length, the third mechanism (15 minutes)

**Aim:** see what GRPO's average over the tokens of each answer does. It leaves a push on a token
that all share, even fully on-policy, where nothing is clipped and every ratio is 1. (Exercise 3 has
another mechanism, and GSPO's ratio of a whole answer is one more: exercise 6.)

    J = (1/G) sum_i (1/T_i) sum_t A_i log pi(y_{i,t})        T_i: the length of answer i

(At r = 1 this has the gradient of r A: grad r = r grad log pi = grad log pi.)

**a)** What is left at a token that all G answers share, as the factor before grad log pi? Write it
for any advantages, also for some that do not sum to 0.

**b)** Lengths differ in practice, yet the token *can* cancel. Find lengths and advantages for a
group of four with nothing left: sum A = 0, lengths not all equal, and every |A| at least 0.1. (It
is an accident: why?)

**Hint** for b): take two answers of one length, and two of another. When do two of one length
cancel?

**Grade it:** `make exercise N=5`
"""


# %%
def left_by_the_length(lengths: list[int], advantages: list[float]) -> float:
    """The factor before grad log pi of the shared token."""
    raise NotImplementedError


# %%
def an_accident() -> tuple[list[int], list[float]]:
    """Four lengths and four advantages."""
    raise NotImplementedError
