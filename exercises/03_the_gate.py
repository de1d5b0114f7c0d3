"""3. GRPO's gate (15 minutes).

Aim: see that clipping does not merely stop an update. Whom it stops depends on who won.

    J = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)

For which (r, A) does a token still have a gradient? Draw the four cases: winner or loser, r too
large or too small. Then take a token that a winner and a loser share, with r = 1.5. What is left of
its two coefficients?

Hint: a min takes the smaller of two lines. Where it takes the flat one, the gradient is 0.
Expected: X3 holds. The second function is claim C6. It explains the 1.000 that
`python verify.py --only AUDIT` prints in its last column.
"""


def gate_is_open(r: float, A: float, eps_low: float = 0.2, eps_high: float = 0.2) -> bool:
    """Whether the gradient gets through (r is never exactly at an edge here)."""
    raise NotImplementedError


def left_at_a_shared_token(
    rho: float, advantages: list[float], eps_low: float = 0.2, eps_high: float = 0.2
) -> float:
    """The sum over the group of d J_i / d log pi at a token that all share, with the ratio rho."""
    raise NotImplementedError
