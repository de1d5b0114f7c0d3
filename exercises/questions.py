"""What each exercise asks for: the right answer, inputs from small to large, and likely mistakes.

A right answer comes from losses.py, if need be through autograd. A mistake is a row: its name, a
function that is wrong in this one thing, and the hint for a student whose answers are the same.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from operator import truediv

import torch
from torch import Tensor

import losses
from losses import Batch, token_coefficients
from toy.policy import Policy, all_histories, count_orders, pad, tabular

Mistake = tuple[str, Callable, str]  # name, wrong function, hint


@dataclass(frozen=True)
class Question:
    """A function that an exercise asks for. Exactly one of `right` and `check` decides."""

    function: str
    names: str = ""  # of its parameters
    inputs: tuple[tuple, ...] = ((),)  # from small to large, so that the first to fail is small
    right: Callable | None = None
    check: Callable | None = None  # where many answers are right: answers -> (problem, lines)
    mistakes: tuple[Mistake, ...] = ()
    floor: float = 1.0  # an error is relative to the right number, or to this if it is larger


@dataclass(frozen=True)
class Exercise:
    questions: tuple[Question, ...]
    why: str  # where the solution is explained


def numbers(*values, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def centred(rng: random.Random, size: int) -> list[float]:
    """Random advantages that sum to 0."""
    x = [rng.gauss(0, 1) for _ in range(size)]
    return [v - sum(x) / size for v in x]


def start_alike(
    ratio: float, advantages: list[float], lengths: list[int] | None = None, budget: int = 1
) -> Batch:
    """Answers whose first token is the same and has this ratio. Their other tokens have ratio 1."""
    lengths = lengths or [1] * len(advantages)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (G, T)
    logp = torch.full(mask.shape, -1.0, dtype=torch.float64, requires_grad=True)
    logp_old = logp.detach().clone()
    logp_old[:, 0] -= math.log(ratio)
    adv = numbers(*advantages)[:, None].expand(mask.shape)
    return Batch(logp, logp_old, adv, mask, len(advantages), budget)


def first_coefficients(loss: Callable, batch: Batch, **options) -> Tensor:
    """c of the first token of every answer. (G,)"""
    return token_coefficients(loss(batch, **options), batch.logp)[:, 0]


# ---------------- 1. group advantages


def advantages_with(deviation: Callable, rewards: Tensor, group_size: int, scale: str) -> Tensor:
    """The right advantages, with another deviation of the groups (P, G) -> (P, 1)."""
    right = losses.group_advantages(rewards, group_size, scale)
    groups = rewards.view(-1, group_size)
    adv = (groups - groups.mean(1, keepdim=True)) / deviation(groups)
    return right if scale == "mean" else adv.view(-1).masked_fill(right == 0, 0.0)


def without_the_guard(rewards: Tensor, group_size: int, scale: str) -> Tensor:
    groups = rewards.view(-1, group_size)
    adv = groups - groups.mean(1, keepdim=True)
    if scale == "std":
        adv = adv / (groups.std(1, keepdim=True) + 1e-4)
    return adv.view(-1)


def draw_rewards(seed: int) -> tuple:
    rng = random.Random(seed)
    size = rng.randint(2, 6)
    return numbers(*(rng.gauss(0, 1) for _ in range(3 * size))), size, rng.choice(["mean", "std"])


GROUP_ADVANTAGES = Question(
    "group_advantages",
    "rewards group_size scale",
    (
        (numbers(1, 0), 2, "mean"),
        (numbers(1, 0), 2, "std"),
        (numbers(1, 1), 2, "std"),
        (numbers(1, 0, 3, 1), 2, "mean"),
        (numbers(1, 0, 3, 1), 2, "std"),
        (numbers(1, 0, 0), 3, "std"),
        (numbers(0.1, 0.1, 0.1), 3, "mean"),
        (numbers(0.1, 0.1, 0.1), 3, "std"),
        (numbers(1, 1.00001), 2, "std"),
        *map(draw_rewards, range(8)),
    ),
    losses.group_advantages,
    mistakes=(
        (
            "std over G",
            lambda *x: advantages_with(lambda g: g.std(1, True, correction=0) + 1e-4, *x),
            "Your std divides by G. The unbiased one divides by G - 1, as torch's std does.",
        ),
        (
            "no epsilon",
            lambda *x: advantages_with(lambda g: g.std(1, keepdim=True), *x),
            "This is what you get without the 1e-4. It is added to the std.",
        ),
        (
            "one mean for all",
            lambda rewards, _, scale: losses.group_advantages(rewards, len(rewards), scale),
            "This compares with all rewards. Every group has a mean and a std of its own.",
        ),
        (
            "no guard",
            without_the_guard,
            "The float mean of equal rewards may differ from them. Ask whether max equals min.",
        ),
    ),
    floor=1e-6,  # 1e-17 / 1e-4 is not 0
)


# ---------------- 2. the cancellation by hand


def draw_shared(seed: int) -> tuple:
    rng = random.Random(seed)
    return rng.uniform(0.3, 3), [rng.gauss(0, 1) for _ in range(rng.randint(2, 8))]


SHARED_TOKEN = Question(
    "shared_token_gradient",
    "rho advantages",
    (
        (1.0, [1.0, -1.0]),
        (1.0, [1.0, 0.0]),
        (2.0, [1.0, 0.0]),
        (0.5, [2.0, -1.0, 0.5]),
        *map(draw_shared, range(8)),
    ),
    lambda rho, advantages: float(
        first_coefficients(
            losses.dr_grpo, start_alike(rho, advantages), eps_low=math.inf, eps_high=math.inf
        ).mean()
    ),
    mistakes=(
        (
            "no 1/G",
            lambda rho, advantages: rho * sum(advantages),
            "This is what you get without the 1/G in front of J.",
        ),
        (
            "no rho",
            lambda rho, advantages: sum(advantages) / len(advantages),
            "This is what you get without rho: grad r is r grad log pi, not grad log pi.",
        ),
        (
            "always 0",
            lambda rho, advantages: 0.0,
            "It is 0 only where the advantages sum to 0. Write the factor for any advantages.",
        ),
    ),
)


# ---------------- 3. the gate


def gate_is_open(r, A, eps_low, eps_high) -> bool:
    batch = start_alike(r, [A, -A])
    c = first_coefficients(losses.dr_grpo, batch, eps_low=eps_low, eps_high=eps_high)
    return bool(c[0])


def left_at_a_shared_token(rho, advantages, eps_low, eps_high) -> float:
    batch = start_alike(rho, advantages)
    c = first_coefficients(losses.dr_grpo, batch, eps_low=eps_low, eps_high=eps_high)
    return float(c.sum())


def draw_gate(seed: int) -> tuple:
    rng = random.Random(seed)
    eps_low, eps_high = rng.uniform(0.1, 0.4), rng.uniform(0.1, 0.4)
    return rng.uniform(0.3, 2), rng.choice([1.5, -0.5]), eps_low, eps_high


def draw_left(seed: int) -> tuple:
    rho, _, eps_low, eps_high = draw_gate(seed)
    return rho, centred(random.Random(seed), 2 + seed % 5), eps_low, eps_high


FOUR_CASES = [(r, A, 0.1, 0.4) for r in (1.0, 1.5, 0.5, 1.3, 0.85, 0.7) for A in (1.0, -1.0)]
GATE = Question(
    "gate_is_open",
    "r A eps_low eps_high",
    (*FOUR_CASES, *map(draw_gate, range(12))),
    gate_is_open,
    mistakes=(
        (
            "no min",
            lambda r, A, eps_low, eps_high: 1 - eps_low < r < 1 + eps_high,
            "This is clip alone, without the min. Draw both lines over r: which one is smaller?",
        ),
        (
            "losers as winners",
            lambda r, A, eps_low, eps_high: gate_is_open(r, -A, eps_low, eps_high),
            "You have winners and losers the wrong way round. For A < 0 the line r A falls.",
        ),
        (
            "bounds ignored",
            lambda r, A, eps_low, eps_high: gate_is_open(r, A, 0.2, 0.2),
            "Your bounds are always 0.2. Use eps_low and eps_high as they are given.",
        ),
    ),
)
LEFT_BY_THE_GATE = Question(
    "left_at_a_shared_token",
    "rho advantages eps_low eps_high",
    (
        *((r, [1.0, -1.0], 0.1, 0.4) for r in (1.0, 1.5, 0.5, 1.3, 0.85, 0.7)),
        (1.5, [2.0, 0.0, -0.5, -1.5], 0.1, 0.4),
        *map(draw_left, range(8)),
    ),
    left_at_a_shared_token,
    mistakes=(
        (
            "nothing left",
            lambda rho, advantages, eps_low, eps_high: 0.0,
            "You leave nothing outside the range. There the min still lets one side through.",
        ),
        (
            "the shut side",
            lambda rho, advantages, eps_low, eps_high: (
                -left_at_a_shared_token(rho, advantages, eps_low, eps_high)
            ),
            "You add up the side whose gate is shut. Add up the one whose gate is open.",
        ),
        (
            "no rho",
            lambda rho, advantages, eps_low, eps_high: (
                left_at_a_shared_token(rho, advantages, eps_low, eps_high) / rho
            ),
            "The factor rho is missing: d r / d log pi = r.",
        ),
        (
            "mean in place of sum",
            lambda rho, advantages, eps_low, eps_high: (
                left_at_a_shared_token(rho, advantages, eps_low, eps_high) / len(advantages)
            ),
            "You divide by G. The exercise asks for the sum.",
        ),
    ),
)


# ---------------- 4. symmetric clipping


def make_batch(ratios: list[list], advantages: list[float], max_tokens: int) -> Batch:
    """Answers with these ratios, two in a group. None is padding, and holds garbage."""
    mask = torch.tensor([[r is not None for r in row] for row in ratios])
    log_r = numbers(*([math.log(r or 1) for r in row] for row in ratios))
    logp = torch.where(mask, -1.0, 1e4).double()
    logp_old = torch.where(mask, logp - log_r, -1e4)
    adv = torch.where(mask, numbers(*advantages)[:, None], 1e4)
    return Batch(logp.requires_grad_(), logp_old, adv, mask, 2, max_tokens)


def draw_batch(seed: int) -> tuple:
    rng = random.Random(seed)
    rows = []
    for _ in range(4):
        length = rng.randint(0, 3)
        rows.append([rng.uniform(0.4, 2) if t < length else None for t in range(3)])
    return make_batch(rows, [*centred(rng, 2), *centred(rng, 2)], 5), 0.2, 0.4


def masks_after_exp(batch, eps_low, eps_high):
    ratio = (batch.logp - batch.logp_old).exp().masked_fill(~batch.mask, 0.0)
    return -losses.budget_mean(ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch)


def mean_of_every_answer(batch, eps_low, eps_high):
    ratio = losses.token_ratio(batch).clamp(1 - eps_low, 1 + eps_high)
    return -losses.seq_mean(ratio * batch.adv, batch)


SYMMETRIC = Question(
    "grpo_symmetric",
    "batch eps_low eps_high",
    (
        (make_batch([[1.0], [1.0]], [1.0, -1.0], 1), 0.2, 0.4),
        (make_batch([[1.5], [1.5]], [1.0, -1.0], 1), 0.2, 0.4),
        (make_batch([[0.5], [0.5]], [1.0, -1.0], 1), 0.2, 0.4),
        (make_batch([[1.3], [1.3]], [1.0, -1.0], 1), 0.2, 0.4),
        (make_batch([[1.0], [1.0]], [1.0, -1.0], 4), 0.2, 0.4),
        (make_batch([[1.0, 1.0], [1.0, None]], [1.0, -1.0], 4), 0.2, 0.4),
        (make_batch([[None], [None]], [1.0, -1.0], 1), 0.2, 0.4),
        *map(draw_batch, range(6)),
    ),
    losses.grpo_symmetric,
    mistakes=(
        (
            "keeps the min",
            losses.dr_grpo,
            "This still has the min: it lets losers through above the range, and winners below it.",
        ),
        (
            "J itself",
            lambda *x: -losses.grpo_symmetric(*x),
            "You return J. A loss is minimised: return -J.",
        ),
        (
            "mean of every answer",
            mean_of_every_answer,
            "You divide every answer by its own length. The budget mean divides the sum by N L.",
        ),
        (
            "mask after exp",
            masks_after_exp,
            "The exp of the padding is inf, and 0 * inf makes the gradient nan. Mask before exp.",
        ),
    ),
)


# ---------------- 5. length


def draw_lengths(seed: int) -> tuple:
    rng = random.Random(seed)
    size = rng.randint(2, 6)
    return [rng.randint(1, 9) for _ in range(size)], [rng.gauss(0, 1) for _ in range(size)]


def check_accident(answers: list) -> tuple[str, list]:
    try:
        lengths, adv = ([float(x) for x in part] for part in answers[0])
    except (TypeError, ValueError):
        lengths = adv = []
    if len(lengths) != 4 or len(adv) != 4:
        return "Lists of four lengths and four advantages are asked for.", []
    if min(lengths) < 1 or any(T != round(T) for T in lengths):
        return "A length is a whole number, at least 1.", []
    if len(set(lengths)) == 1:
        return "All lengths are equal: then sum A/T is 0 because sum A is.", []
    if not all(abs(a) >= 0.1 for a in adv):
        return "Every |A| must be at least 0.1.", []
    if not abs(sum(adv)) < 1e-9:
        return f"The advantages sum to {sum(adv):g}, not to 0.", []
    left = sum(a / T for a, T in zip(adv, lengths, strict=True))
    return ("" if abs(left) < 1e-9 else f"What is left, sum A/T, is {left:g}, not 0."), []


LEFT_BY_LENGTH = Question(
    "left_by_the_length",
    "lengths advantages",
    (
        ([1, 1], [1.0, -1.0]),
        ([1, 1], [1.0, 0.0]),
        ([1, 2], [1.0, -1.0]),
        ([2, 4], [1.0, 0.0]),
        ([1, 2, 4], [2.0, -1.0, -1.0]),
        *map(draw_lengths, range(8)),
    ),
    lambda lengths, advantages: float(
        first_coefficients(losses.grpo, start_alike(1.0, advantages, lengths)).mean()
    ),
    mistakes=(
        (
            "no 1/G",
            lambda lengths, advantages: sum(map(truediv, advantages, lengths)),
            "This is what you get without the 1/G in front of J.",
        ),
        (
            "no length",
            lambda lengths, advantages: sum(advantages) / len(lengths),
            "The lengths do not occur in it. Every answer has the factor 1/T_i of its own.",
        ),
        (
            "one length for all",
            lambda lengths, advantages: sum(advantages) / sum(lengths),
            "You divide by the tokens of the whole group. GRPO divides each answer by its own T_i.",
        ),
    ),
)


# ---------------- 6. Min-Replace


def draw_weights(seed: int) -> tuple:
    rng = random.Random(seed)
    size = rng.randint(2, 5)
    w = [[math.exp(rng.gauss(0, 1)) for _ in range(size)] for _ in range(2)]
    return numbers(*w, grad=True), numbers(*(centred(rng, size) for _ in range(2)))


WEIGHTS = (
    (numbers([0.5, 2], grad=True), numbers([1, -1])),
    (numbers([2, 0.5], grad=True), numbers([1, -1])),
    (numbers([4, 2, 3], grad=True), numbers([2, -0.5, -1.5])),
    (numbers([0.5, 2], [3, 1], grad=True), numbers([1, -1], [2, -2])),
    (numbers([1, 2], [4, 0.5], grad=True), numbers([1, -1], [0, 0])),
    (numbers([3, 1, 2, 0.5], [1, 2, 1, 4], grad=True), numbers([2, -1, 0, -1], [3, -1, -1, -1])),
    *map(draw_weights, range(6)),
)
MIN_REPLACE = Question(
    "min_replace",
    "w adv",
    WEIGHTS,
    losses.min_replace,
    mistakes=(
        (
            "not detached",
            lambda w, adv: w.amin(1, keepdim=True).expand_as(w),
            "This is what you get without detach. The loss would then learn to lower a ratio.",
        ),
        (
            "minimum of the batch",
            lambda w, adv: w.detach().amin().expand_as(w),
            "This is the smallest weight of the whole batch. Every row is a group.",
        ),
        (
            "minimum of a column",
            lambda w, adv: w.detach().amin(0, keepdim=True).expand_as(w),
            "You compare answers of different groups. A group is a row: the minimum is over dim 1.",
        ),
        (
            "one number a group",
            lambda w, adv: w.detach().amin(1, keepdim=True),
            "You give one number a group. The result has the shape of w: expand_as(w) helps.",
        ),
    ),
)


# ---------------- 7. Adv-Orthogonal


def subtract_projection(w: Tensor, adv: Tensor, norm: Callable) -> Tensor:
    return w - (adv * w).sum(1, keepdim=True) / norm(adv) * adv


def square(adv: Tensor) -> Tensor:
    return (adv * adv).sum(1, keepdim=True)


def guarded_square(adv: Tensor) -> Tensor:
    return torch.where(square(adv) == 0, 1.0, square(adv))


def check_blind_spot(answers: list) -> tuple[str, list]:
    try:
        w, adv, places = ([float(x) for x in part] for part in answers[0])
        i, j = map(int, places)
    except (TypeError, ValueError):
        w = adv = []
    if len(w) != 4 or len(adv) != 4:
        return "Lists of four weights, four advantages and two places, 0 to 3, are asked for.", []
    if i == j or not {i, j} <= {0, 1, 2, 3}:
        return "The two places are different, and from 0 to 3.", []
    if not abs(sum(adv)) < 1e-9:
        return f"The advantages sum to {sum(adv):g}, not to 0.", []
    if not abs(adv[i] + adv[j]) < 1e-9:
        return f"The pair's advantages sum to {adv[i] + adv[j]:g}, not to 0.", []
    transformed = losses.adv_orthogonal(numbers(w), numbers(adv))[0].tolist()
    left = transformed[i] * adv[i] + transformed[j] * adv[j]
    if not abs(left) > 0.1:
        return f"The pair is left with {left:.3g}: that is not more than 0.1.", []
    return "", []


ADV_ORTHOGONAL = Question(
    "adv_orthogonal",
    "w adv",
    WEIGHTS,
    losses.adv_orthogonal,
    mistakes=(
        (
            "not detached",
            lambda w, adv: subtract_projection(w, adv, guarded_square),
            "This is what you get without detach. The weights w~ are constants for the gradient.",
        ),
        (
            "norm without its square",
            lambda w, adv: subtract_projection(w.detach(), adv, lambda A: guarded_square(A).sqrt()),
            "You divide by ||A||. The formula divides by its square, sum_i A_i^2.",
        ),
        (
            "no norm",
            lambda w, adv: subtract_projection(w.detach(), adv, lambda A: 1.0),
            "You do not divide by ||A||^2 = sum_i A_i^2.",
        ),
        (
            "0 / 0",
            lambda w, adv: subtract_projection(w.detach(), adv, square),
            "0/0 is nan. A group whose advantages are all 0 keeps its w.",
        ),
    ),
)


# ---------------- 8. the learning tax


def tax_with(visitor_is_counted: Callable, tax: Callable, arguments: tuple, least: int = 2):
    """The learning tax in a loop, with one thing another. Raises ZeroDivisionError for 0 / 0."""
    c, adv, nodes, mask = arguments
    visits: dict[int, list] = {}
    for i, t in mask.nonzero().tolist():
        if visitor_is_counted(adv[i]):
            visits.setdefault(int(nodes[i, t]), []).append((float(c[i, t]), float(adv[i])))
    shared = [node for node in visits.values() if len(node) >= least]
    return sum(map(tax, shared)) / sum(abs(c) for node in shared for c, _ in node)


def signed_tax(visitors: list[tuple]) -> float:
    mean_weight = sum(c / a for c, a in visitors) / len(visitors)
    return sum(c - mean_weight * a for c, a in visitors)


def is_compared(advantage) -> bool:
    return advantage != 0


def or_zero(function: Callable, *arguments) -> float:
    try:
        return function(*arguments)
    except ZeroDivisionError:
        return 0.0


def make_tax_input(c: list[list], advantages: list[float], nodes: list[list[int]]) -> tuple:
    """Arguments of learning_tax. None is padding, and holds garbage."""
    mask = torch.tensor([[x is not None for x in row] for row in c])
    filled = numbers(*([7.0 if x is None else x for x in row] for row in c))
    return filled, numbers(*advantages), torch.tensor(nodes), mask


def draw_tree(seed: int) -> tuple:
    """Two groups of three answers over two tokens; some advantages are 0."""
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 2, (6, 4), generator=gen)
    mask = torch.arange(4) < torch.randint(1, 5, (6, 1), generator=gen)
    c, adv = torch.randn(2, 6, 4, generator=gen, dtype=torch.float64)
    adv = adv[:, 0].masked_fill(torch.rand(6, generator=gen) < 0.2, 0.0)
    return c, adv, losses.prefix_nodes(tokens, mask, 3), mask


LEARNING_TAX = Question(
    "learning_tax",
    "coefficients advantages nodes mask",
    (
        make_tax_input([[1], [-1]], [1, -1], [[0], [0]]),
        make_tax_input([[1], [-2]], [1, -1], [[0], [0]]),
        make_tax_input([[2], [2]], [2, 1], [[0], [0]]),
        make_tax_input([[1], [-1]], [1, -1], [[0], [1]]),
        make_tax_input([[0], [0]], [1, -1], [[0], [0]]),
        make_tax_input([[1, 5], [-2, -4]], [1, -1], [[0, 1], [0, 2]]),
        make_tax_input([[1, 2], [-2, -1]], [1, -1], [[0, 1], [0, 1]]),
        make_tax_input([[1, None], [-2, None]], [1, -1], [[0, -1], [0, -1]]),
        make_tax_input([[1], [-2], [0]], [1, -1, 0], [[0], [0], [0]]),
        make_tax_input([[1, 5], [-2, 4], [0, 3]], [1, -1, 0], [[0, 1], [0, 2], [3, 1]]),
        make_tax_input([[1], [1], [1], [1], [-2]], [1, 1, 1, 1, -4], [[0], [0], [0], [0], [0]]),
        *map(draw_tree, range(8)),
    ),
    losses.learning_tax,
    mistakes=(
        (
            "credit as tax",
            lambda *x: or_zero(tax_with, is_compared, lambda v: abs(sum(c for c, _ in v)), x),
            "This is the whole sum of c. Take its credit away: the mean weight times sum A.",
        ),
        (
            "no absolute value",
            lambda *x: or_zero(tax_with, is_compared, signed_tax, x),
            "A node's tax may be negative. Take its absolute value before you add up the nodes.",
        ),
        (
            "single visitors counted",
            lambda *x: or_zero(tax_with, is_compared, lambda v: abs(signed_tax(v)), x, 1),
            "Your divisor counts all nodes. Nodes with one visitor are left out above and below.",
        ),
        (
            "A = 0",
            lambda *x: (
                or_zero(tax_with, is_compared, lambda v: abs(signed_tax(v)), x)
                if all(x[1] != 0)
                else math.nan
            ),
            "An answer with A = 0 has no w: c / A divides by 0. Leave it out.",
        ),
        (
            "nothing shared",
            lambda *x: tax_with(is_compared, lambda v: abs(signed_tax(v)), x),
            "Your divisor is 0 here. The exercise asks for 0.0 then.",
        ),
    ),
)


# ---------------- 9. what the corollary lacks


def check_counterexample(answers: list) -> tuple[str, list]:
    try:
        p = [float(x) for x in answers[0]]
    except (TypeError, ValueError):
        p = []
    if len(p) != 3 or not all(x > 0 for x in p):
        return "A list of three positive probabilities is asked for.", []
    if not abs(sum(p) - 1) < 1e-9:
        return f"The probabilities sum to {sum(p):g}, not 1.", []
    e = torch.eye(3, dtype=torch.float64)
    g_a, g_b = e[0] - numbers(*p), e[1] - numbers(*p)  # grad log pi of tokens 0 and 1
    change = float((g_a - g_b) @ (g_a + g_b) / 2)
    if not abs(change) > 0.1:
        said = f"With these probabilities the log-odds change by {change:.3g} per eta"
        return f"{said}: more than 0.1 is asked for, up or down.", []
    return "", []


LOG_ODDS = Question(
    "change_of_log_odds",
    "k_a k_b n_a n_b x",
    (
        (1.0, 1.0, 1.0, 1.0, 0.0),
        (1.0, 0.0, 1.0, 1.0, 0.0),
        (1.0, 1.0, 2.0, 1.0, 0.0),
        (1.0, 0.0, 1.0, 1.0, 0.5),
        (0.5, 2.0, 3.0, 1.0, -0.5),
        (-0.4, 1.3, 0.7, 1.9, 0.6),
    ),
    lambda k_a, k_b, n_a, n_b, x: k_a * n_a - k_b * n_b + (k_b - k_a) * x,
    mistakes=(
        (
            "the corollary itself",
            lambda k_a, k_b, n_a, n_b, x: k_a - k_b,
            "This is Eq. 5 itself. Multiply out <grad log pi(y_a) - grad log pi(y_b), g>.",
        ),
        (
            "no cross terms",
            lambda k_a, k_b, n_a, n_b, x: k_a * n_a - k_b * n_b,
            "The products of one score gradient with the other are missing, so x does not occur.",
        ),
        (
            "cross terms turned round",
            lambda k_a, k_b, n_a, n_b, x: k_a * n_a - k_b * n_b + (k_a - k_b) * x,
            "Your terms with x have the wrong sign. Multiply out <grad of y_a - grad of y_b, g>.",
        ),
    ),
)


# ---------------- 10. a weight of your own


class World:
    """Every group of 3 answers to one prompt of a toy with 7 answers, under two policies."""

    def __init__(self, seed: int):
        gen = torch.Generator().manual_seed(seed)
        W, step = torch.randn(2, 3, 3, generator=gen, dtype=torch.float64)
        new = Policy(W, tabular(all_histories((0,), 3, 2)), 2)
        p, q = dict(new.answers((0,))), dict(new.step(step, 0.5).answers((0,)))  # q: the old policy
        rewards = torch.randn(len(p), generator=gen, dtype=torch.float64).tolist()
        reward = dict(zip(p, rewards, strict=True))
        self.exact = new.grad_expected_reward((0,), reward.__getitem__)
        groups = list(itertools.combinations_with_replacement(p, 3))  # P of them
        rows = [y for group in groups for y in group]  # N = 3 P
        self.odds = numbers(*([count_orders(g) * math.prod(q[y] for y in g)] for g in groups))
        self.s = numbers(*((p[y] / q[y]) ** (1 / len(y)) for y in rows)).view(-1, 3)
        self.adv = losses.group_advantages(numbers(*(reward[y] for y in rows)), 3, "mean")
        self.adv = self.adv.view(-1, 3)
        self.scores = torch.stack([new.grad_log_prob_answer((0,), y) for y in p])  # (7, V, D)
        self.which = torch.tensor([list(p).index(y) for y in rows])  # (N,) of the 7
        tokens, self.mask = pad(rows)  # (N, T)
        self.nodes = losses.prefix_nodes(tokens, self.mask, 3)

    def tax(self, w: Tensor) -> float:
        c = (w * self.adv).view(-1, 1) * self.mask
        return losses.learning_tax(c, self.adv.view(-1), self.nodes, self.mask)

    def cosine(self, w: Tensor) -> float:
        """Between the exact gradient and the expected update off-policy."""
        c = (self.odds * w * self.adv).view(-1)
        c = torch.zeros(len(self.scores), dtype=c.dtype).index_add_(0, self.which, c)  # (7,)
        g = (c[:, None, None] * self.scores).sum(0)
        return float((g * self.exact).sum() / (g.norm() * self.exact.norm()).clamp(min=1e-300))


WORLDS = [World(seed) for seed in range(100)]
KNOWN = {
    "1 (reinforce)": lambda s, adv: torch.ones_like(s),
    "s itself": lambda s, adv: s,
    "min_replace": losses.min_replace,
    "adv_orthogonal": losses.adv_orthogonal,
}


def race(weights: list[Tensor]) -> tuple[float, float]:
    """Mean tax and mean cosine of the weights for each world."""
    taxes = [world.tax(w) for world, w in zip(WORLDS, weights, strict=True)]
    cosines = [world.cosine(w) for world, w in zip(WORLDS, weights, strict=True)]
    return sum(taxes) / len(taxes), sum(cosines) / len(cosines)


def check_weight(answers: list) -> tuple[str, list]:
    """The first answer is for a small group, the others are for the worlds."""
    weights = []
    for answer, (s, _) in zip(answers, WEIGHT.inputs, strict=True):
        try:
            weights.append(torch.as_tensor(answer, dtype=torch.float64))
        except (TypeError, ValueError, RuntimeError):
            return "A tensor of numbers is asked for.", []
        if weights[-1].shape != s.shape:
            return f"Your weights have shape {tuple(weights[-1].shape)}, s {tuple(s.shape)}.", []
        if not bool(weights[-1].isfinite().all()):
            return "A weight is not finite.", []
    results = {"yours": race(weights[1:])}
    for name, weight in KNOWN.items():
        results[name] = race([weight(world.s, world.adv) for world in WORLDS])
    lines = [f"{'weight':16}{'tax':>8}{'cosine':>10}"]
    lines += [f"{name:16}{tax:8.4f}{cosine:10.4f}" for name, (tax, cosine) in results.items()]
    (tax, cosine), theirs = results["yours"], results["min_replace"][1]
    if not tax < 1e-9:
        question = "are they equal at a node that only some answers visit?"
        return f"Your weights have a tax of {tax:.3g}: {question}", lines
    if not cosine > theirs + 1e-9:
        said = f"There is no tax, but the cosine is {cosine:.4f}"
        return f"{said}: it must be larger than Min-Replace's {theirs:.4f}.", lines
    return "", lines


WEIGHT = Question(
    "weight",
    "s adv",
    ((numbers([0.5, 2]), numbers([1, -1])), *((world.s, world.adv) for world in WORLDS)),
    check=check_weight,
    mistakes=(
        (
            "the ratio itself",
            KNOWN["s itself"],
            "This is the sequence ratio as it is: a weight per answer does not cancel everywhere.",
        ),
        (
            "Adv-Orthogonal",
            losses.adv_orthogonal,
            "This is Adv-Orthogonal. It does not see tokens that only a part of the group shares.",
        ),
        (
            "Min-Replace",
            losses.min_replace,
            "This is Min-Replace itself. Which other number can stand for the whole group?",
        ),
        (
            "no weight",
            KNOWN["1 (reinforce)"],
            "This is REINFORCE: it does not correct for the old policy at all. Use s.",
        ),
    ),
)


# ---------------- 11. why is the loss 0


def on_policy(loss: Callable, advantages: list, lengths: list, budget: int = 1) -> tuple:
    """The value of a loss, and the sum of its coefficients at the token that all share."""
    batch = start_alike(1.0, advantages, lengths, budget)
    return float(loss(batch)), float(first_coefficients(loss, batch).sum())


UNEQUAL = (
    ([1.0, -1.0], [1, 1]),
    ([1.0, -1.0], [1, 2]),
    ([1.0, 0.0], [1, 2]),
    (losses.group_advantages(numbers(1, 0, 1, 0), 4).tolist(), [4, 6, 3, 5]),
    *((adv, lengths) for lengths, adv in map(draw_lengths, range(6))),
)
GRPO_ON_POLICY = Question(
    "grpo_on_policy",
    "advantages lengths",
    UNEQUAL,
    lambda advantages, lengths: on_policy(losses.grpo, advantages, lengths),
    mistakes=(
        (
            "both 0",
            lambda advantages, lengths: (-sum(advantages) / len(advantages), sum(advantages)),
            "The value is right. But at one token nothing makes up for the 1/T_i of its answer.",
        ),
        (
            "sum over T_i twice",
            lambda advantages, lengths: (
                -sum(map(truediv, advantages, lengths)) / len(lengths),
                sum(map(truediv, advantages, lengths)),
            ),
            "The value is a sum over tokens: an answer has T_i of them, each with 1/T_i.",
        ),
        (
            "J itself",
            lambda advantages, lengths: (
                sum(advantages) / len(advantages),
                sum(map(truediv, advantages, lengths)),
            ),
            "This is J. The loss is -J. (c is not affected: it already points upwards in J.)",
        ),
    ),
)
DR_GRPO_ON_POLICY = Question(
    "dr_grpo_on_policy",
    "advantages lengths budget",
    tuple((*pair, 6 + max(pair[1]) // 7 * 3) for pair in UNEQUAL),
    lambda advantages, lengths, budget: on_policy(losses.dr_grpo, advantages, lengths, budget),
    mistakes=(
        (
            "GRPO",
            lambda advantages, lengths, budget: on_policy(losses.grpo, advantages, lengths),
            "This is GRPO. Dr. GRPO divides by the same L in every answer.",
        ),
        (
            "no length in the value",
            lambda advantages, lengths, budget: (
                -sum(advantages) / len(advantages) / budget,
                sum(advantages) / budget,
            ),
            "An answer has T_i tokens, and the value is a sum over all of them.",
        ),
        (
            "no budget at the token",
            lambda advantages, lengths, budget: (
                on_policy(losses.dr_grpo, advantages, lengths, budget)[0],
                sum(advantages),
            ),
            "The value is right. The coefficient of a single token has the factor 1/L, too.",
        ),
    ),
)
NOTHING_IS_LEARNED = Question(
    "nothing_is_learned",
    "rewards",
    tuple(
        (rewards,)
        for rewards in (
            [1.0, 0.0],
            [1.0, 1.0],
            [0.0, 0.0],
            [1.0, 1.0, 0.0, 0.0],
            [0.5, 0.5, 0.5],
            [0.1, 0.1, 0.1],
            [0.0, 1.0, -1.0],
        )
    ),
    lambda rewards: not losses.group_advantages(numbers(*rewards), len(rewards)).any().item(),
    mistakes=(
        (
            "the sum of A",
            lambda rewards: True,
            "The advantages always sum to 0. But a group in which some answers win learns.",
        ),
        (
            "all wrong",
            lambda rewards: not any(rewards),
            "All right is like all wrong: there is nothing to compare.",
        ),
        (
            "one winner",
            lambda rewards: sum(rewards) == 0,
            "What counts is not the sum of the rewards. Are they all equal?",
        ),
    ),
)


EXPLAIN = "python verify.py --explain"
EXERCISES = {
    1: Exercise((GROUP_ADVANTAGES,), "the docstring of group_advantages in losses.py"),
    2: Exercise((SHARED_TOKEN,), f"{EXPLAIN} C2"),
    3: Exercise((GATE, LEFT_BY_THE_GATE), f"{EXPLAIN} C6"),
    4: Exercise((SYMMETRIC,), f"{EXPLAIN} C7"),
    5: Exercise((LEFT_BY_LENGTH, Question("an_accident", check=check_accident)), f"{EXPLAIN} C8"),
    6: Exercise((MIN_REPLACE,), f"{EXPLAIN} C9"),
    7: Exercise((ADV_ORTHOGONAL, Question("blind_spot", check=check_blind_spot)), f"{EXPLAIN} C10"),
    8: Exercise((LEARNING_TAX,), f"{EXPLAIN} C15"),
    9: Exercise(
        (Question("counterexample", check=check_counterexample), LOG_ODDS), f"{EXPLAIN} C14"
    ),
    10: Exercise((WEIGHT,), f"{EXPLAIN} C15"),
    11: Exercise((GRPO_ON_POLICY, DR_GRPO_ON_POLICY, NOTHING_IS_LEARNED), f"{EXPLAIN} C8"),
}
