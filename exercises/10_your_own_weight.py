# %% [markdown]
"""
# 10. Design a weight of your own (open)

**Aim:** beat Min-Replace. It has no tax at any node of the prefix tree, and pays for it with bias:
the expected update does not point along the true gradient. Find sequence weights without a tax,
off-policy, with less bias.

    J = (1/(N L)) sum_i sum_t sg[w~_i] A_i log pi(y_{i,t}),    w~ = weight(s, A)

`s` are the ratios of whole sequences, pi(y) / pi_old(y): products here, not geometric means. `s`
and `adv` are (P, G), a row per group, and so is the result. In some groups all A are 0: a weight
must be finite there, too.

You are graded on two numbers, over a hundred small toys of which every group of three answers is
counted. The tax (exercise 8) of every two answers that share a token must be 0, also where the
third lacks it. The cosine between expected update and exact gradient must be larger than
Min-Replace's, in the mean over the toys: 0.9332. Some simple ideas pass at once. Then look for
more: after a PASS both numbers are printed, and the price, which is the noise of a group's update.

**Hint:** when is the covariance of exercise 8 zero for every subset of a group? What may w~ depend
on, then? There is more than one solution, and one reaches the cosine 1.0000. What is its price?

**Grade it:** `make exercise N=10`
"""

# %%
import torch


def weight(s: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError
