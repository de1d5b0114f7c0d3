# %% [markdown]
"""
# 10. Why is the loss 0? (15 minutes)

**Aim:** answer what users of GRPO ask most. The trainer prints a loss of 0, and yet the model
learns.

Everything is on-policy here: all r are 1. No clip acts.

    GRPO:     J = (1/G) sum_i (1/T_i) sum_t r_{i,t} A_i
    Dr. GRPO: J = (1/G) sum_i (1/L) sum_t r_{i,t} A_i

The loss is -J. All G answers share their first token. The push on a token is c = G dJ / dlog pi.
(So c has no 1/G: the G takes that of J away.)

**a)** and **b)** Give two numbers: the value of the loss, and the sum of the G pushes c on the
shared token. Write them for any advantages, even if they do not sum to 0. Then look at
rewards 1, 0, 1, 0 and lengths 4, 6, 3, 5. Which loss is 0 there, and which sum? (After a PASS you
can compare.)

**Hint:** dr / dlog pi = r = 1. So c and the value differ by a sum over the tokens only.

**Grade it:** `make exercise N=10`
"""


# %%
def grpo_on_policy(advantages: list[float], lengths: list[int]) -> tuple[float, float]:
    """The value of the loss, and the sum of c at the shared token."""
    raise NotImplementedError


# %%
def dr_grpo_on_policy(
    advantages: list[float], lengths: list[int], budget: int
) -> tuple[float, float]:
    """The value of the loss, and the sum of c at the shared token. `budget` is L."""
    raise NotImplementedError
