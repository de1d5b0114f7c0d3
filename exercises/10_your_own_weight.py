# %% [markdown]
"""
# 10. Design a weight of your own (open)

**Aim:** beat Min-Replace. It cancels at every node of the prefix tree, and pays for it with bias:
the expected update points away from the true gradient. Find sequence weights that cancel at every
node, off-policy, with less bias.

    J = (1/(N L)) sum_i sum_t sg[w~_i] A_i log pi(y_{i,t}),    w~ = weight(s, A)

`s` are the geometric sequence ratios. `s` and `adv` are (P, G), a row per group, and so is the
result.

You are graded on two numbers. The learning tax over all nodes of random trees must be 0. The cosine
between expected update and exact gradient, on small toys that are enumerated, must be larger than
Min-Replace's. Both numbers of the methods in losses.py are printed beside yours.

**Hint:** what does claim C15 allow w~ to depend on? There is more than one solution, and no best
one is known to us. One weight per group is all that sequence weights allow; per token (claim C17)
there is more room.

**Grade it:** `make exercise N=10`
"""

# %%
import torch


def weight(s: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError
