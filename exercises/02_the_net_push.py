# %% [markdown]
"""
# 2. The net push on a shared token (12 minutes, pencil first)

**Aim:** see with your own eyes when the pushes on a token that all answers share cancel.

G answers begin with the same token a. The prefix h is what comes before it, here the prompt. So the
token's ratio, rho = pi(a|h) / pi_old(a|h), is the same number in all G answers.

J is a mean over answers. The push of an answer on a is the derivative of its own term, in brackets
below, by log pi(a|h). **The net push is the sum of the G pushes.** So a push does not contain the
1/G of the mean. The same holds on the board, in toy/plain.py and in losses.py.

**a)** Without a divisor and without a clip, the objective is

    J = (1/G) sum_i [ sum_t r_{i,t} A_i ]        r_{i,t}: the ratio of token t of answer i

What is the net push on a? Write it for any advantages, even if they do not sum to 0. When is it 0?

**b)** GRPO divides each answer by its own length T_i:

    J = (1/G) sum_i [ (1/T_i) sum_t r_{i,t} A_i ]

Let all ratios be 1, as in the first update. What is the net push on a? When is it 0? (A is 0.5,
-0.5, 0.5, -0.5 for the board's answers, of the lengths 4, 5, 2, 4, and for the sheet's, of the
lengths 2, 4, 5, 10.)

**Hint:** each answer has one term with log pi(a|h). Add up the G pushes. Use dr / dlog pi = r.

**Grade it:** `python -m exercises.grader 2`
"""


# %%
def net_push(rho: float, advantages: list[float]) -> float:
    """a) The net push at the ratio rho."""
    raise NotImplementedError


# %%
def net_push_by_length(lengths: list[int], advantages: list[float]) -> float:
    """b) The net push at the ratio 1, if each answer is divided by its own length."""
    raise NotImplementedError
