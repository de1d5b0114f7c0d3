"""What each exercise asks for: the right answer, inputs from small to large, and likely mistakes.

A right answer comes from losses.py, if need be through autograd. A mistake is a function that is
wrong in one thing, and the hint for a student whose answers are the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import truediv

import torch
from torch import Tensor

import losses
from losses import Batch, token_coefficients


def call_as_it_is(function: Callable, *inputs):
    return function(*inputs)


@dataclass(frozen=True)
class Question:
    """A function that an exercise asks for. Exactly one of `right` and `check` decides."""

    function: str
    names: str = ""  # of the inputs
    inputs: tuple[tuple, ...] = ((),)  # plain lists; the first to fail should be a small one
    right: Callable | None = None
    mistakes: tuple[tuple[Callable, str], ...] = ()  # wrong function, hint
    call: Callable = call_as_it_is  # with a function and plain inputs
    check: Callable | None = None  # where many answers are right: yields what one of them lacks


@dataclass(frozen=True)
class Exercise:
    why: str  # where its solution is explained
    questions: tuple[Question, ...]


# ---------------- inputs

RATIOS = (1.0, 1.5, 0.5, 1.3, 0.85, 0.7)


def grow(*draws: Callable) -> tuple:
    """Random inputs for groups of 2, 3, 4 and 5 answers."""
    return tuple(
        tuple(draw(random.Random(f"{k} {i}"), 2 + k // 8) for i, draw in enumerate(draws))
        for k in range(32)
    )


def draw_ratio(rng: random.Random, size: int) -> float:
    return rng.choice(RATIOS)


def draw_bound(rng: random.Random, size: int) -> float:
    """Of a clip. No ratio is at an edge."""
    return rng.choice([0.1, 0.2, 0.35, 0.4])


def draw_value(rng: random.Random, size: int) -> float:
    """Easy to calculate with in small groups."""
    return rng.choice([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0]) if size < 4 else round(rng.gauss(0, 1), 2)


def draw_values(rng: random.Random, size: int) -> list[float]:
    return [draw_value(rng, size) for _ in range(size)]


def draw_centred(rng: random.Random, size: int) -> list[float]:
    """Advantages that sum to 0."""
    first = draw_values(rng, size)[1:]
    return [-sum(first), *first]


def draw_lengths(rng: random.Random, size: int) -> list[int]:
    return [rng.randint(1, size + 2) for _ in range(size)]


def draw_rows(rng: random.Random, size: int) -> list[list]:
    """A ratio for every token of answers that may be empty. None is padding."""
    lengths = [rng.randint(0, size - 1) for _ in range(size)]
    return [[rng.choice(RATIOS) if t < n else None for t in range(size - 1)] for n in lengths]


def numbers(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def read_rows(rows: list[list]) -> tuple[Tensor, Tensor]:
    """The numbers (1 where there is padding) and the mask. (N, T) both"""
    mask = torch.tensor([[x is not None for x in row] for row in rows])
    return numbers([[1.0 if x is None else x for x in row] for row in rows]), mask


def start_alike(
    ratio: float, advantages: list[float], lengths: list[int] | None = None, budget: int = 1
) -> Batch:
    """Answers whose first token is the same and has this ratio. Their other tokens have ratio 1."""
    lengths = lengths or [1] * len(advantages)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (G, T)
    logp = torch.full(mask.shape, -1.0, dtype=torch.float64, requires_grad=True)
    logp_old = logp.detach().clone()
    logp_old[:, 0] -= math.log(ratio)
    adv = numbers(advantages)[:, None].expand(mask.shape)
    return Batch(logp, logp_old, adv, mask, len(advantages), budget)


def first_coefficients(loss: Callable, batch: Batch, **options) -> Tensor:
    """c of the first token of every answer. (G,)"""
    return token_coefficients(loss(batch, **options), batch.logp)[:, 0]


# ---------------- 1. group advantages


def call_with_rewards(function: Callable, rewards: list[float], group_size: int, scale: str):
    return function(numbers(rewards), group_size, scale)


def advantages_with(rewards: Tensor, group_size: int, scale: str, correction: int) -> Tensor:
    """The formula as it is, with another correction of the variance."""
    groups = rewards.view(-1, group_size)
    adv = groups - groups.mean(1, keepdim=True)
    if scale == "std":
        adv = adv / (groups.std(1, keepdim=True, correction=correction) + 1e-4)
    return adv.view(-1)


GROUP_ADVANTAGES = Question(
    "group_advantages",
    "rewards group_size scale",
    (
        ([1.0, 0.0], 2, "mean"),
        ([1.0, 0.0], 2, "std"),
        ([8000.9] * 3, 3, "std"),  # their float mean is another number
        *grow(
            lambda rng, size: draw_values(rng, 2 * size),
            lambda rng, size: size,
            lambda rng, size: rng.choice(["mean", "std"]),
        ),
    ),
    losses.group_advantages,
    (
        (
            lambda *x: advantages_with(*x, correction=0) * (losses.group_advantages(*x) != 0),
            "Your std divides by G. The unbiased one divides by G - 1, as torch's std does.",
        ),
        (
            lambda rewards, _, scale: losses.group_advantages(rewards, len(rewards), scale),
            "This compares with all rewards. Every group has a mean and a std of its own.",
        ),
        (
            lambda *x: advantages_with(*x, correction=1),
            "The float mean of equal rewards may differ from them. Ask whether max equals min.",
        ),
    ),
    call_with_rewards,
)


# ---------------- 2. the cancellation by hand


def shared_token_gradient(rho: float, advantages: list[float]) -> float:
    batch = start_alike(rho, advantages)
    c = first_coefficients(losses.dr_grpo, batch, eps_low=math.inf, eps_high=math.inf)
    return float(c.mean())


SHARED_TOKEN = Question(
    "shared_token_gradient",
    "rho advantages",
    ((1.0, [1.0, -1.0]), (2.0, [1.0, 0.0]), *grow(draw_ratio, draw_values)),
    shared_token_gradient,
    (
        (
            lambda rho, advantages: rho * sum(advantages),
            "This is what you get without the 1/G in front of J.",
        ),
        (
            lambda rho, advantages: sum(advantages) / len(advantages),
            "This is what you get without rho: grad r is r grad log pi, not grad log pi.",
        ),
        (
            lambda rho, advantages: 0.0,
            "It is 0 only where the advantages sum to 0. Write the factor for any advantages.",
        ),
    ),
)


# ---------------- 3. the gate


def left_at_a_shared_token(rho, advantages, eps_low, eps_high) -> float:
    batch = start_alike(rho, advantages)
    c = first_coefficients(losses.dr_grpo, batch, eps_low=eps_low, eps_high=eps_high)
    return float(c.sum())


GATE = Question(
    "gate_is_open",
    "r A eps_low eps_high",
    grow(draw_ratio, draw_value, draw_bound, draw_bound),
    lambda r, A, *bounds: left_at_a_shared_token(r, [A, 0.0], *bounds) != 0,
    (
        (
            lambda r, A, eps_low, eps_high: 1 - eps_low < r < 1 + eps_high,
            "This is clip alone, without the min. Draw both lines over r: which one is smaller?",
        ),
        (
            lambda r, A, *bounds: left_at_a_shared_token(r, [-A, 0.0], *bounds) != 0,
            "You have winners and losers the wrong way round. For A < 0 the line r A falls.",
        ),
    ),
)
LEFT_BY_THE_GATE = Question(
    "left_at_a_shared_token",
    "rho advantages eps_low eps_high",
    grow(draw_ratio, draw_centred, draw_bound, draw_bound),
    left_at_a_shared_token,
    (
        (
            lambda rho, *x: left_at_a_shared_token(rho, *x) / rho,
            "The factor rho is missing: d r / d log pi = r.",
        ),
    ),
)


# ---------------- 4. symmetric clipping


def call_with_batch(function, ratios, advantages, max_tokens, eps_low, eps_high) -> tuple:
    """The padding holds garbage."""
    ratio, mask = read_rows(ratios)
    logp = torch.where(mask, -1.0, 1e4).double()
    logp_old = torch.where(mask, logp - ratio.log(), -1e4)
    adv = torch.where(mask, numbers(advantages)[:, None], 1e4)
    batch = Batch(logp.requires_grad_(), logp_old, adv, mask, len(adv), max_tokens)
    loss = function(batch, eps_low, eps_high)
    return "loss", loss, "coefficients", token_coefficients(loss, batch.logp)


def masks_after_exp(batch, eps_low, eps_high):
    ratio = (batch.logp - batch.logp_old).exp().masked_fill(~batch.mask, 0.0)
    return -losses.budget_mean(ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch)


def with_average(average: Callable) -> Callable:
    """Exercise 4 with another average, (N, T) terms, mask -> scalar."""

    def loss(batch, eps_low, eps_high):
        ratio = losses.token_ratio(batch)
        return -average(ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch.mask)

    return loss


TOKEN_MEANS = (  # they differ on a batch without tokens: 0, nan, and nan with a gradient of nan
    losses.token_mean,
    lambda x, mask: x[mask].mean(),
    lambda x, mask: (x * mask).sum() / mask.sum(),
)
SYMMETRIC = Question(
    "grpo_symmetric",
    "r A L eps_low eps_high",
    (
        ([[1.0], [1.0]], [1.0, -1.0], 1, 0.2, 0.4),
        ([[1.5], [1.5]], [1.0, -1.0], 1, 0.2, 0.4),
        *grow(draw_rows, draw_centred, lambda rng, size: size, draw_bound, draw_bound),
    ),
    losses.grpo_symmetric,
    (
        (
            losses.dr_grpo,
            "This still has the min: it lets losers through above the range, and winners below it.",
        ),
        (
            lambda *x: -losses.grpo_symmetric(*x),
            "You return J. A loss is minimised: return -J.",
        ),
        (
            masks_after_exp,
            "The exp of the padding is inf, and 0 * inf makes the gradient nan. Mask before exp.",
        ),
        *(
            (
                with_average(token_mean),
                "You divide by the number of tokens; the formula says N L.",
            )
            for token_mean in TOKEN_MEANS
        ),
    ),
    call_with_batch,
)


# ---------------- 5. length


def check_accident(answer) -> Iterator[str]:
    lengths, adv = answer
    if not all(T >= 1 and T % 1 == 0 for T in lengths):
        yield "A length is a whole number, at least 1."
    if len(set(lengths)) == 1:
        yield "All lengths are equal: then sum A/T is 0 because sum A is."
    if not all(abs(a) >= 0.1 for a in adv):
        yield "Every |A| must be at least 0.1."
    if abs(sum(adv)) > 1e-9:
        yield f"The advantages sum to {sum(adv):g}, not to 0."
    left = sum(a / T for a, T in zip(adv, lengths, strict=True))
    if abs(left) > 1e-9:
        yield f"What is left, sum A/T, is {left:g}, not 0."


LEFT_BY_LENGTH = Question(
    "left_by_the_length",
    "lengths advantages",
    (([1, 2], [1.0, -1.0]), *grow(draw_lengths, draw_values)),
    lambda T, A: float(first_coefficients(losses.grpo, start_alike(1.0, A, T)).mean()),
    (
        (
            lambda lengths, advantages: sum(map(truediv, advantages, lengths)),
            "This is what you get without the 1/G in front of J.",
        ),
        (
            lambda lengths, advantages: sum(advantages) / len(lengths),
            "The lengths do not occur in it. Every answer has the factor 1/T_i of its own.",
        ),
    ),
)


# ---------------- 6. and 7. Min-Replace and Adv-Orthogonal


def call_with_weights(function: Callable, w: list, adv: list) -> tuple:
    weights = function(numbers(w).requires_grad_(), numbers(adv))
    return weights, "with a gradient" if weights.requires_grad else "detached"


def subtract_projection(w: Tensor, adv: Tensor, power: int) -> Tensor:
    """Adv-Orthogonal with a power of the norm, without a case for the norm 0."""
    return w - (adv * w).sum(1, keepdim=True) / adv.norm(dim=1, keepdim=True) ** power * adv


WEIGHTS = (
    ([[0.5, 2.0]], [[1.0, -1.0]]),
    ([[1.0, 2.0], [4.0, 0.5]], [[1.0, -1.0], [2.0, -2.0]]),
    *grow(
        lambda rng, size: [draw_values(rng, size), draw_values(rng, size)],
        lambda rng, size: [draw_centred(rng, size), draw_centred(rng, size)],
    ),
    ([[1.0, 2.0]], [[0.0, 0.0]]),
)
MIN_REPLACE = Question(
    "min_replace",
    "w adv",
    WEIGHTS,
    losses.min_replace,
    (
        (
            lambda w, adv: w.amin(1, keepdim=True).expand_as(w),
            "This is what you get without detach. The loss would then learn to lower a ratio.",
        ),
        (
            lambda w, adv: w.detach().amin().expand_as(w),
            "This is the smallest weight of the whole batch. Every row is a group.",
        ),
        (
            lambda w, adv: w.detach().amin(1, keepdim=True),
            "You give one number a group. The result has the shape of w: expand_as(w) helps.",
        ),
    ),
    call_with_weights,
)


def check_blind_spot(answer) -> Iterator[str]:
    w, adv, (i, j) = answer
    i, j = int(i), int(j)
    if abs(sum(adv)) > 1e-9:
        yield f"The advantages sum to {sum(adv):g}, not to 0."
    if abs(adv[i] + adv[j]) > 1e-9:
        yield f"The pair's advantages sum to {adv[i] + adv[j]:g}, not to 0."
    products = losses.adv_orthogonal(numbers([w]), numbers([adv]))[0] * numbers(adv)
    left = float(products[i] + products[j])
    if not abs(left) > 0.1:
        yield f"The pair is left with {left:.3g}: that is not more than 0.1."


ADV_ORTHOGONAL = Question(
    "adv_orthogonal",
    "w adv",
    WEIGHTS,
    losses.adv_orthogonal,
    (
        (
            lambda w, adv: subtract_projection(w, adv, power=2).where(adv != 0, w),
            "This is what you get without detach. The weights w~ are constants for the gradient.",
        ),
        (
            lambda w, adv: subtract_projection(w.detach(), adv, power=1).where(adv != 0, w),
            "You divide by ||A||. The formula divides by its square, sum_i A_i^2.",
        ),
        (
            lambda w, adv: subtract_projection(w.detach(), adv, power=2),
            "0/0 is nan. A group whose advantages are all 0 keeps its w.",
        ),
    ),
    call_with_weights,
)


# ---------------- 8. the learning tax


def call_with_nodes(function: Callable, coefficients: list, advantages: list, nodes: list):
    c, mask = read_rows(coefficients)
    return function(c, numbers(advantages), torch.tensor(nodes), mask)


def tax_with(c, adv, nodes, mask, *, least=2, credit=1.0, zeros=False) -> float:
    """The learning tax, with another rule for who counts, or without the credit."""
    tax = size = 0.0
    for node in nodes[mask].unique():
        here = (nodes == node) & mask & ((adv != 0) | zeros)[:, None]
        A, x = adv[:, None].expand_as(c)[here], c[here]
        if len(x) >= least:
            tax += float((x.sum() - credit * (x / A).mean() * A.sum()).abs())
            size += float(x.abs().sum())
    return tax / size if size else 0.0


LEARNING_TAX = Question(
    "learning_tax",
    "coefficients advantages nodes",
    (
        ([[1.0], [-1.0]], [1.0, -1.0], [[0], [0]]),
        ([[1.0], [-2.0]], [1.0, -1.0], [[0], [0]]),
        ([[0.0], [0.0]], [1.0, -1.0], [[0], [0]]),
        *grow(
            draw_rows,
            lambda rng, size: [rng.choice([0.0, x, x, x]) for x in draw_values(rng, size)],
            lambda rng, size: [
                [2 * t + rng.choice([0, 1]) for t in range(size - 1)] for _ in range(size)
            ],
        ),
    ),
    losses.learning_tax,
    (
        (
            lambda *x: tax_with(*x, credit=0.0),
            "This is the whole sum of c. Take its credit away: the mean weight times sum A.",
        ),
        (
            lambda *x: tax_with(*x, least=1),
            "Your divisor counts all nodes. Nodes with one visitor are left out above and below.",
        ),
        (
            lambda *x: tax_with(*x, zeros=True),
            "An answer with A = 0 has no w: c / A divides by 0. Leave it out.",
        ),
    ),
    call_with_nodes,
)


# ---------------- 9. what the corollary lacks


def check_counterexample(p) -> Iterator[str]:
    if len(p) != 3 or not min(p) > 0:
        yield "A list of three positive probabilities is asked for."
    if abs(sum(p) - 1) > 1e-9:
        yield f"The probabilities sum to {sum(p):g}, not 1."
    g_a, g_b = numbers([1, 0, 0]) - numbers(p), numbers([0, 1, 0]) - numbers(p)  # grad log pi
    change = float((g_a - g_b) @ (g_a + g_b) / 2)
    if not abs(change) > 0.1:
        said = f"With these probabilities the log-odds change by {change:.3g} per eta"
        yield f"{said}: more than 0.1 is asked for, up or down."


LOG_ODDS = Question(
    "change_of_log_odds",
    "k_a k_b n_a n_b x",
    grow(draw_value, draw_value, draw_ratio, draw_ratio, draw_value),
    lambda k_a, k_b, n_a, n_b, x: k_a * n_a - k_b * n_b + (k_b - k_a) * x,
    (
        (
            lambda k_a, k_b, n_a, n_b, x: k_a - k_b,
            "This is Eq. 5 itself. Multiply out <grad log pi(y_a) - grad log pi(y_b), g>.",
        ),
        (
            lambda k_a, k_b, n_a, n_b, x: k_a * n_a - k_b * n_b,
            "The products of one score gradient with the other are missing, so x does not occur.",
        ),
    ),
)


# ---------------- 10. a weight of your own


class Worlds:
    """A hundred softmaxes over six answers, and all groups of three that another policy draws."""

    def __init__(self):
        gen = torch.Generator().manual_seed(0)
        logits, step, rewards = torch.randn(3, 100, 6, generator=gen, dtype=torch.float64)
        self.p, old = logits.softmax(1), (logits + step).softmax(1)  # (100, 6)
        self.exact = self.p * (rewards - (self.p * rewards).sum(1, keepdim=True))  # gradient
        self.rows = torch.cartesian_prod(*[torch.arange(6)] * 3)  # (216, 3)
        self.odds = old[:, self.rows].prod(2, keepdim=True)  # (100, 216, 1)
        self.s = (self.p / old)[:, self.rows].view(-1, 3)  # (21600, 3)
        self.adv = losses.group_advantages(rewards[:, self.rows].view(-1), 3, "mean").view(-1, 3)

    def cosine(self, w: Tensor) -> float:
        """Between the exact gradient and the expected update, in the mean over the worlds."""
        each = self.odds * (w * self.adv).view(100, -1, 3)
        c = torch.zeros_like(self.p).index_add_(1, self.rows.view(-1), each.view(100, -1))
        update = c - self.p * c.sum(1, keepdim=True)
        return float(torch.cosine_similarity(update, self.exact, 1).mean())


WORLDS = Worlds()


def check_weight(answer) -> Iterator[str]:
    w, adv = numbers(answer), WORLDS.adv
    if w.shape != adv.shape:
        yield f"Your weights have shape {tuple(w.shape)}, and s has {tuple(adv.shape)}."
    tax = ((w - w.roll(1, 1)) * (adv - adv.roll(1, 1))).abs().max() / 2  # of every pair
    if not tax < 1e-9:
        yield f"Two answers that share a token leave {tax:.3g} there, and should leave nothing."
    cosine, bound = WORLDS.cosine(w), WORLDS.cosine(losses.min_replace(WORLDS.s, adv))
    if not cosine > bound + 1e-6:
        yield f"Shared tokens cancel. But the cosine is {cosine:.4f}: at most {bound:.4f} so far."


WEIGHT = Question(
    "weight",
    inputs=((WORLDS.s.tolist(), WORLDS.adv.tolist()),),
    mistakes=(
        (
            lambda s, adv: s,
            "This is the sequence ratio as it is: a weight per answer does not cancel everywhere.",
        ),
        (
            losses.adv_orthogonal,
            "This is Adv-Orthogonal. It does not see tokens that only a part of the group shares.",
        ),
    ),
    call=lambda function, s, adv: function(numbers(s), numbers(adv)),
    check=check_weight,
)


# ---------------- 11. why is the loss 0


def on_policy(loss: Callable, advantages: list, lengths: list, budget: int = 1) -> tuple:
    """The value of a loss, and the sum of its coefficients at the token that all share."""
    batch = start_alike(1.0, advantages, lengths, budget)
    return loss(batch).item(), float(first_coefficients(loss, batch).sum())


WITHOUT_G = "c is G times dJ/dlog pi."
BY_LENGTH = "Long answers count more often: the value is -sum A T / (G L)."
GRPO_ON_POLICY = Question(
    "grpo_on_policy",
    "advantages lengths",
    (([1.0, -1.0], [1, 2]), *grow(draw_values, draw_lengths)),
    lambda advantages, lengths: on_policy(losses.grpo, advantages, lengths),
    (
        (
            lambda advantages, lengths: (-sum(advantages) / len(advantages), sum(advantages)),
            "The value is right. But c of one token has the 1/T_i of its answer.",
        ),
        (
            lambda advantages, lengths: (
                sum(advantages) / len(advantages),
                sum(map(truediv, advantages, lengths)),
            ),
            "This is the value of J. The loss is -J.",
        ),
        (
            lambda advantages, lengths: (
                -sum(advantages) / len(advantages),
                sum(map(truediv, advantages, lengths)) / len(advantages),
            ),
            WITHOUT_G,
        ),
        (
            lambda advantages, lengths: (0.0, 0.0),
            "A loss of 0 may have a gradient. c is G times dJ/dlog pi, and has the answer's 1/T_i.",
        ),
    ),
)
DR_GRPO_ON_POLICY = Question(
    "dr_grpo_on_policy",
    "advantages lengths budget",
    (([1.0, -1.0], [1, 2], 6), *grow(draw_values, draw_lengths, lambda rng, size: size + 2)),
    lambda *x: on_policy(losses.dr_grpo, *x),
    (
        (lambda A, lengths, budget: (0.0, 0.0), BY_LENGTH),
        (lambda A, lengths, budget: (0.0, sum(A) / budget), BY_LENGTH),
        (lambda A, lengths, budget: (-sum(A) / len(A) / budget, sum(A) / budget), BY_LENGTH),
        (
            lambda A, lengths, budget: (
                on_policy(losses.dr_grpo, A, lengths, budget)[0],
                sum(A) / len(A) / budget,
            ),
            WITHOUT_G,
        ),
    ),
)
NOTHING_IS_LEARNED = Question(
    "nothing_is_learned",
    "rewards",
    (([1.0, 0.0],), ([1.0, 1.0],), ([0.0, 0.0],), ([1.0, 1.0, 0.0, 0.0],), ([0.1] * 3,)),
    lambda rewards: not losses.group_advantages(numbers(rewards), len(rewards)).any(),
    (
        (
            lambda rewards: not any(rewards),
            "All right is like all wrong: there is nothing to compare.",
        ),
        (
            lambda rewards: sum(rewards) in (0, len(rewards)),
            "Rewards may be any numbers: compare the largest and the smallest.",
        ),
    ),
)


EXPLAIN = "python verify.py --explain"
AN_ACCIDENT = Question("an_accident", check=check_accident)
BLIND_SPOT = Question("blind_spot", check=check_blind_spot)
COUNTEREXAMPLE = Question("counterexample", check=check_counterexample)
EXERCISES = {
    1: Exercise("the docstring of group_advantages in losses.py", (GROUP_ADVANTAGES,)),
    2: Exercise(f"{EXPLAIN} C2", (SHARED_TOKEN,)),
    3: Exercise(f"{EXPLAIN} C6", (GATE, LEFT_BY_THE_GATE)),
    4: Exercise(f"{EXPLAIN} C7", (SYMMETRIC,)),
    5: Exercise(f"{EXPLAIN} C8", (LEFT_BY_LENGTH, AN_ACCIDENT)),
    6: Exercise(f"{EXPLAIN} C9", (MIN_REPLACE,)),
    7: Exercise(f"{EXPLAIN} C10", (ADV_ORTHOGONAL, BLIND_SPOT)),
    8: Exercise(f"{EXPLAIN} C15", (LEARNING_TAX,)),
    9: Exercise(f"{EXPLAIN} C14", (COUNTEREXAMPLE, LOG_ODDS)),
    10: Exercise(f"{EXPLAIN} C15", (WEIGHT,)),
    11: Exercise(f"{EXPLAIN} loss", (GRPO_ON_POLICY, DR_GRPO_ON_POLICY, NOTHING_IS_LEARNED)),
}
