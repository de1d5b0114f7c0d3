# %% [markdown]
"""
# 3. GRPO's gate (15 minutes)

**Aim:** see that clipping does not merely stop an update. GRPO's clip asks who won, and stops
winners and losers at different ends.

    J = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)        of one token; no 1/G here

**a)** For which (r, A) does a token still have a gradient? Draw the four cases: winner or loser, r
too large or too small. (r is never exactly at an edge here, and A is never 0.)

**b)** A winner and a loser share a token with r = 1.5. What is left of the sum of their two
dJ / dlog pi? Write it for a group of any size, as a sum without 1/G. The advantages of the group
sum to 0.

**Hint:** a min takes the smaller of two lines. Where it takes the flat one, the gradient is 0. And
dr / dlog pi = r.

**Grade it:** `make exercise N=3`
"""


# %%
def gate_is_open(r: float, A: float, eps_low: float = 0.2, eps_high: float = 0.2) -> bool:
    """Whether the gradient gets through."""
    raise NotImplementedError


# %%
def left_at_a_shared_token(
    rho: float, advantages: list[float], eps_low: float = 0.2, eps_high: float = 0.2
) -> float:
    """The sum over the group of dJ_i / dlog pi at a token that all share, with the ratio rho."""
    raise NotImplementedError
