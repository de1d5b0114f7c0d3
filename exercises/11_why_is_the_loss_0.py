# %% [markdown]
"""
# 11. Why is the loss 0? (15 minutes)

**Aim:** answer what users of GRPO ask most. The trainer prints a loss of 0, and yet the model
learns.

Everything is on-policy here: all r are 1. No clip acts.

    GRPO:     J = sum_i (1/T_i) sum_t r_{i,t} A_i
    Dr. GRPO: J = sum_i (1/L) sum_t r_{i,t} A_i

The loss is -J. All answers of the group share their first token. The push on a token is
c = dJ / dlog pi.

For each method give two numbers: the value of the loss, and the net push on the shared token, the
sum of its c. Write them for any advantages, even if they do not sum to 0. Then look at
rewards 1, 0, 1, 0 and lengths 4, 6, 3, 5. Which loss is 0 there, and which net push? (After a PASS
you can compare. `python verify.py --explain Q1` says more.)

**Hint:** dr / dlog pi = r = 1. So the value has a sum over all tokens, and the net push has only
the shared one.

**Grade it:** `python -m exercises.grader 11`
"""


# %%
def grpo_on_policy(advantages: list[float], lengths: list[int]) -> tuple[float, float]:
    """The value of the loss, and the net push on the shared token."""
    raise NotImplementedError


# %%
def dr_grpo_on_policy(
    advantages: list[float], lengths: list[int], budget: int
) -> tuple[float, float]:
    """The value of the loss, and the net push on the shared token. `budget` is L."""
    raise NotImplementedError
