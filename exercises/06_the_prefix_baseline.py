# %% [markdown]
"""
# 6. The prefix baseline (25 minutes)

**Aim:** make the pushes of any loss cancel at shared tokens, and see what that changes on average.

All ratios are 1 here, as in the first update from a batch.

**a)** Answers that begin alike have the same prefix. Each of these n answers takes a next token
there, and a loss pushes this token with c_i. The *prefix baseline* subtracts the mean push of the
other answers:

    c'_i = c_i - mean_j c_j            over the others, j != i

An answer that is alone with its prefix keeps its c. `c` is a list of n numbers, and so is the
result. Show on paper that the c' sum to 0 if n is at least 2. So the net push is 0 where all n
answers take the same token.

**b)** Does this change what is learned on average? Guess first. Then take all groups of two
answers. An answer is one token out of K, drawn from the policy `pi`. Token a has the push c[a], for
example its reward. A group (a_1, a_2) pushes the K logits by

    sum_i c'_i grad log pi(a_i)

`grad_log_pi(pi, a)` below gives you the K numbers of grad log pi(a). Return two things:

1. the expected push, a list of K numbers. It is the sum over all K times K groups, each times its
   probability pi(a_1) pi(a_2).
2. the largest net push on a shared token, that is, the largest |c'_1 + c'_2| of the groups with
   a_1 = a_2.

**Hint:** two loops, and `prefix_baseline([c[a], c[b]])`.

**After a PASS,** use c instead of c' for a moment, and grade again. You then get a NOT YET, as you
should. Which of your two results still is the expected one?

**Grade it:** `python -m exercises.grader 6`
"""


# %%
def prefix_baseline(c: list[float]) -> list[float]:
    raise NotImplementedError


# %%
def grad_log_pi(pi: list[float], a: int) -> list[float]:
    """The gradient by the K logits, of which pi is the softmax: 1 at a, 0 elsewhere, minus pi."""
    return [(k == a) - p for k, p in enumerate(pi)]


def over_all_pairs(pi: list[float], c: list[float]) -> tuple[list[float], float]:
    """b) The expected push on the K logits, and the largest net push on a shared token."""
    raise NotImplementedError
