# %% [markdown]
"""
# 3. PPO's clip asks who won (15 minutes)

**Aim:** see that the clip does not merely stop an update. It stops winners (A > 0) and losers
(A < 0) at different ends. GRPO has this clip from PPO:

    J = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)        for one token of one answer

**a)** For which (r, A) does an answer still push the token? Draw the four cases: winner or loser, r
too large or too small. (r is never exactly at an edge here, and A is never 0.)

**b)** A winner and a loser share a token with r = 1.5. What is their net push, the sum of their two
dJ / dlog pi? Write it for a group of any size. The advantages of the group sum to 0.

**Hint:** a min takes the smaller of two lines. Where it takes the flat one, the derivative is 0.
And dr / dlog pi = r.

**Grade it:** `python -m exercises.grader 3`
"""


# %%
def still_pushes(r: float, A: float, eps_low: float = 0.2, eps_high: float = 0.2) -> bool:
    """a) Whether an answer with the advantage A still pushes a token with the ratio r."""
    raise NotImplementedError


# %%
def net_push_with_clip(
    rho: float, advantages: list[float], eps_low: float = 0.2, eps_high: float = 0.2
) -> float:
    """b) The sum over the group of dJ_i / dlog pi at a token that all share, with the ratio rho."""
    raise NotImplementedError
