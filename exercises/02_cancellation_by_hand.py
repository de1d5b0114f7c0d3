# %% [markdown]
"""
# 2. The cancellation, by hand (10 minutes, pencil first)

**Aim:** see with your own eyes when the pushes on a token that all answers share cancel.

G answers begin with the same token a. The prefix h is what stands before it: here the prompt. So
the token's importance ratio, rho = pi(a|h) / pi_old(a|h), is the same number for all of them. The
token-factorised objective without length normaliser and clip is

    J = (1/G) sum_i sum_t r_{i,t} A_i        r_{i,t}: the ratio of token t of answer i

What factor stands before grad log pi(a|h) of the shared token in grad J? Write it for any
advantages, even if they do not sum to 0. When is it 0? (After a PASS you can compare.)

**Hint:** each of the G answers has one term with this gradient. Add up the G terms. Use
grad r = r grad log pi.

**Grade it:** `make exercise N=2`
"""


# %%
def shared_token_gradient(rho: float, advantages: list[float]) -> float:
    """The factor before grad log pi(a|h)."""
    raise NotImplementedError
