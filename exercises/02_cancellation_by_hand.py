# %% [markdown]
"""
# 2. The cancellation, by hand (10 minutes, pencil first)

**Aim:** see with your own eyes when a token that all answers share learns nothing.

G answers begin with the same token. Its importance ratio is rho = pi(a|h) / pi_old(a|h). That is
the same number for all of them, because the history is the same. The token-factorised objective
without length normaliser and clip is

    J = (1/G) sum_i sum_t r_{i,t} A_i

What factor stands before grad log pi(a|h) of the shared token in grad J? Write it for any
advantages, also for some that do not sum to 0. When is it 0?

**Hint:** only the terms of that token have this gradient; add up its G visitors. And grad r =
r grad log pi.

**Grade it:** `make exercise N=2`
"""


# %%
def shared_token_gradient(rho: float, advantages: list[float]) -> float:
    """The factor before grad log pi(a|h)."""
    raise NotImplementedError
