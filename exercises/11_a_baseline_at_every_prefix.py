# %% [markdown]
"""
# 11. A baseline at every prefix (20 minutes)

**Aim:** make any loss cancel at shared tokens, and see what that moves. It takes a leave-one-out
baseline away at every prefix. So the expected push stays, as with any baseline. (The noise
changes, for the better or the worse: claims C22 and C27.)

**a)** At one prefix n answers take a token, the same one or others. A loss pushes them with c_i.
Their ratios are r_i = pi / pi_old. Let every answer be compared with the others:

    c'_i = c_i - r_i mean_j (c_j / r_j)            over the others, j != i

An answer that is alone keeps its c. `c` and `r` are lists of n numbers, and so is the result. See
on paper: if all n take the same token, their r are one number, and the c' sum to 0.

**b)** Now take all groups of two answers. An answer is one token out of K, drawn from `pi_old`.
Token a has the push c[a], its ratio r included. That is any loss in which c depends on the own
answer alone: for example r (R - b), clipped or not, divided by a length or not, with a fixed
baseline b. (The group's mean is no fixed baseline, because it holds the rewards of the others. With
it the expected push would move.) A group (a_1, a_2) pushes the K logits by

    1/2 sum_i c'_i grad log pi(a_i),    grad log pi(a) = e_a - pi

where e_a is 1 at a and 0 elsewhere. Return two things. First, the expected push: the sum over all
K times K groups, each times its chance pi_old(a_1) pi_old(a_2), a list of K numbers. Second, the
most that is left at a shared token: the largest |c'_1 + c'_2| of the groups with a_1 = a_2.

The grader computes the expected push of the loss as it was, without any c'. Yours must be the same.

**Hint:** two loops, and `prefix_baseline([c[a], c[b]], [r[a], r[b]])`. Leave it away once, and look
at both results again.

**Grade it:** `make exercise N=11`
"""


# %%
def prefix_baseline(c: list[float], r: list[float]) -> list[float]:
    raise NotImplementedError


# %%
def over_all_pairs(
    pi: list[float], pi_old: list[float], c: list[float]
) -> tuple[list[float], float]:
    """The expected push on the K logits, and the most that is left at a shared token."""
    raise NotImplementedError
