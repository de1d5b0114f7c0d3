"""6. Min-Replace (10 minutes).

Aim: repair what a sequence ratio breaks. s_i gives each answer its own weight, and shared tokens no
longer cancel. DFPO's first repair gives the whole group one weight, the smallest (Eq. 17): w~_i =
min_j w_j.

w and adv are (P, G), a row per group, and so is the result. It is a stop-gradient weight. Without
.detach() the loss would also learn to lower the smallest ratio, and the shared token would get a
gradient again (claim C12).

Hint: one line; return it detached. adv is there so that the two transforms can be exchanged.
Expected: C9 holds, on the group and on every part of it whose advantages sum to zero.
"""

from torch import Tensor


def min_replace(w: Tensor, adv: Tensor) -> Tensor:
    raise NotImplementedError
