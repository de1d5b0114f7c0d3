# %% [markdown]
"""
# 5. The format bonus: what the std does to sizes (15 minutes)

**Aim:** find out whether GRPO takes the better of two strategies. The usual strategy always earns
a bonus of 0.1, for example for its format. A rare strategy earns 1 with probability 0.45, and 0
otherwise. So it earns 4.5 times as much. Guess first: a policy has just found the rare strategy.
Does GRPO make it more likely?

The strategy is rare, so at most one answer of a group follows it. The other G - 1 answers earn the
bonus. A is that of exercise 1, with nothing added to the std. Equal rewards give 0.

**a)** What is A of this lone answer if it earns `reward` and the scale is "std"? (Try 1, 0 and 5
with the bonus 0.1 and G = 8, and look at the sizes.)

**b)** It earns 1 with probability `chance`, and 0 otherwise. The bonus is between 0 and 1. What is
its mean A with the scale "std", and what with "mean"? Put in 0.45, 0.1 and 8. If the number is
above 0, the strategy becomes more likely.

**c)** Give a bonus and a chance for which the rare strategy earns at least 20 times the bonus on
average, and for which the two numbers of b) have opposite signs. G is 8.

**Hint:** for a): with d = reward - bonus, what is R - mean, and what is the std? For c): what does
the sign of the first number in b) depend on, and what does it not depend on?

**Grade it:** `python -m exercises.grader 5`
"""


# %%
def lone_advantage(reward: float, bonus: float, group_size: int) -> float:
    """a) A of one answer that earns `reward` among G - 1 that earn `bonus`; scale "std"."""
    raise NotImplementedError


# %%
def mean_advantages(chance: float, bonus: float, group_size: int) -> tuple[float, float]:
    """b) The mean A of the lone answer, with the scale "std" and with the scale "mean"."""
    raise NotImplementedError


# %%
def opposite_signs() -> tuple[float, float]:
    """c) The bonus, and the chance of the rare strategy."""
    raise NotImplementedError
