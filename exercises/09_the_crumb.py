# %% [markdown]
"""
# 9. The crumb: what the std does to sizes (15 minutes)

**Aim:** find out whether GRPO takes the better of two ways. The usual way earns 0.1 every time, for
example for its format: a crumb. A rare way earns 1 with chance 0.45, and 0 otherwise. So it earns
4.5 times as much. Guess first: does a policy that has just found it take it more often?

The way is rare, so at most one answer of a group takes it. The other G - 1 earn the crumb. A is
that of exercise 1, without the 1e-4. Equal rewards give 0.

**a)** What is A of this lone answer if it earns `reward` and the scale is "std"? (Try 1, 0 and 5
with the crumb 0.1 and G = 8, and look at the sizes.)

**b)** It earns 1 with `chance`, and 0 otherwise. The crumb is between 0 and 1. What A can it expect
with the scale "std", and what with "mean"? Put in 0.45, 0.1 and 8. Above 0 the way grows.

**c)** Give a crumb and a chance for which the rare way earns at least 20 times the crumb on
average, although "std" pushes it down. G is 8.

**Hint:** for a): with d = reward - crumb, what is R - mean, and what is the std? For c): what does
the sign of the first number in b) depend on, and what does it not depend on?

**Grade it:** `make exercise N=9`
"""


# %%
def lone_advantage(reward: float, crumb: float, group_size: int) -> float:
    """A of one answer that earns `reward` among G - 1 that earn `crumb`; scale "std"."""
    raise NotImplementedError


# %%
def expected_advantages(chance: float, crumb: float, group_size: int) -> tuple[float, float]:
    """What the lone answer's A is on average, with the scale "std" and with the scale "mean"."""
    raise NotImplementedError


# %%
def a_better_way_that_loses() -> tuple[float, float]:
    """The crumb, and the chance of the rare way."""
    raise NotImplementedError
