"""7. Adv-Orthogonal, and its blind spot (20 minutes).

Aim: write DFPO's second repair, and find what it does not see. It removes from w only what
correlates with A (Eq. 18): w~ = w - (A.w / ||A||^2) A. Then sum_i w~_i A_i = 0, and sum_i w~_i =
sum_i w_i. (P, G), (P, G) -> (P, G), detached; a group without advantages keeps its w.

a) Write it.
b) Some answers of a group may share a token that the others lack: that is its blind spot. Give four
   weights and four advantages (sum A = 0), and a pair of answers whose advantages cancel, A_i + A_j
   = 0. But w~_i A_i + w~_j A_j must not be 0 (its size must exceed 0.1).

Hint: for b), w~ differs between the two unless ... Expected: C10 and X7 hold.
"""

from torch import Tensor


def adv_orthogonal(w: Tensor, adv: Tensor) -> Tensor:
    raise NotImplementedError


def blind_spot() -> tuple[list[float], list[float], tuple[int, int]]:
    """Four weights, four advantages, the two places of the pair."""
    raise NotImplementedError
