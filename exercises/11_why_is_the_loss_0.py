# %% [markdown]
"""
# 11. Why is the loss 0? (15 minutes)

**Aim:** answer what users of GRPO ask most. The trainer prints a loss of 0, and yet the model
learns.

Everything is on-policy here: all r are 1. No clip acts.

    GRPO:     J = (1/G) sum_i [ (1/T_i) sum_t r_{i,t} A_i ]
    Dr. GRPO: J = (1/G) sum_i [ (1/L) sum_t r_{i,t} A_i ]

The loss is -J. All answers of the group share their first token. As in exercise 2, the push c of an
answer on it is the derivative of the answer's brackets by log pi, and the net push is the sum of c.

For each method give two numbers: the value of the loss, and the net push on the shared token. Write
them for any advantages, even if they do not sum to 0. Then look at rewards 1, 0, 1, 0 and lengths
2, 4, 5, 10. Which loss is 0 there, and which net push? (After a PASS you can compare.)

**Hint:** dr / dlog pi = r = 1. So the value has a sum over all tokens, divided by G, and the net
push has only the shared token.

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
