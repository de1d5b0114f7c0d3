# %% [markdown]
"""
# 9. Find the condition of a corollary (25 minutes, pencil)

**Aim:** read a theorem like a referee. We know DFPO's Cor. 3.2 (Eq. 5) from reports only, so what
you find is about the statement *as reported*. It speaks of two answers of equal reward, after a
step of size eta along g = k_a grad log pi(y_a) + k_b grad log pi(y_b):

    d log( pi(y_a) / pi(y_b) ) = eta c (k_a - k_b),    so equal k would leave their odds alone.

(c is a positive number that does not depend on k. What it is was not reported.)

**a)** Find a case in which it does not hold as it stands there, with one softmax over three tokens,
whose logits are the parameters. y_a and y_b are tokens 0 and 1, and k_a = k_b = 1/2. Give
probabilities p, all positive, for which the log-odds change by more than 0.1 per eta, up or down.

**b)** What is the exact change per eta? Write it in terms of n_a = ||grad log pi(y_a)||^2, of n_b,
and of x = <grad log pi(y_a), grad log pi(y_b)>. From it read off a condition under which Eq. 5 is
right.

(There is another condition, the corollary's best case. In a) the k of the three tokens are 1/2,
1/2, 0: they do not sum to 0. Give token 2 the k = -1, so that they do. What is the change then?
After a PASS you can compare.)

**Hint:** grad log pi(a) = e_a - p. `python verify.py --explain C14` is the solution: look last.

**Grade it:** `make exercise N=9`
"""


# %%
def counterexample() -> list[float]:
    """Three probabilities."""
    raise NotImplementedError


# %%
def change_of_log_odds(k_a: float, k_b: float, n_a: float, n_b: float, x: float) -> float:
    """The change of log pi(y_a) - log pi(y_b) per eta."""
    raise NotImplementedError
