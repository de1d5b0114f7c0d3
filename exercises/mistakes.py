"""What each exercise asks for: the right functions, small inputs, and tempting mistakes with hints.

The inputs go from small to large, so the first that fails is a small one. A mistake is a function
that is wrong in one thing; its docstring is the hint for a student whose answers are the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import losses
from losses import Batch


@dataclass(frozen=True)
class Question:
    """A function that an exercise asks for.

    Where many answers are right, `right` is None, and the exercise's own claim decides.
    """

    function: str
    right: Callable | None = None
    inputs: tuple[tuple, ...] = ()
    mistakes: tuple[Callable, ...] = ()
    floor: float = 1.0  # errors are relative to the right number, or to this if it is larger


@dataclass(frozen=True)
class Exercise:
    questions: tuple[Question, ...]
    claim: str  # whose derivation says why


def numbers(*values, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


# ---------------- 1. group advantages


def advantages_with(deviation: Callable, rewards: Tensor, group_size: int, scale: str) -> Tensor:
    """The right advantages, with another deviation of the groups (P, G) -> (P, 1)."""
    right = losses.group_advantages(rewards, group_size, scale)
    if scale == "mean":
        return right
    groups = rewards.view(-1, group_size)
    adv = (groups - groups.mean(1, keepdim=True)) / deviation(groups)
    return adv.view(-1).masked_fill(right == 0, 0.0)


def population_std(rewards, group_size, scale):
    """Your std divides by G. The unbiased one divides by G - 1, as torch's std does by default."""

    def deviation(groups):
        return groups.std(1, keepdim=True, correction=0) + 1e-4

    return advantages_with(deviation, rewards, group_size, scale)


def no_epsilon(rewards, group_size, scale):
    """This is what you get without the 1e-4. It is added to the std."""
    return advantages_with(lambda x: x.std(1, keepdim=True), rewards, group_size, scale)


def one_mean_for_all(rewards, group_size, scale):
    """This compares with all rewards. Every group has a mean and a std of its own."""
    losses.group_advantages(rewards, group_size, scale)
    return losses.group_advantages(rewards, len(rewards), scale)


def distant_neighbours(rewards, group_size, scale):
    """Your groups are made of rows that are far apart. The first G rows are the first group."""
    losses.group_advantages(rewards, group_size, scale)
    groups = rewards.view(group_size, -1)
    adv = losses.group_advantages(groups.T.reshape(-1), group_size, scale)
    return adv.view(-1, group_size).T.reshape(-1)


def ignores_the_scale(rewards, group_size, scale):
    """This divides by the std for scale "mean", too. Dr. GRPO only subtracts the mean."""
    losses.group_advantages(rewards, group_size, scale)
    return losses.group_advantages(rewards, group_size, "std")


def trusts_the_epsilon(rewards, group_size, scale):
    """The float mean of equal rewards may differ from them by 1e-17. Ask whether max equals min."""
    losses.group_advantages(rewards, group_size, scale)
    groups = rewards.view(-1, group_size)
    adv = groups - groups.mean(1, keepdim=True)
    if scale == "std":
        adv = adv / (groups.std(1, keepdim=True) + 1e-4)
    return adv.view(-1)


def takes_whole_numbers(rewards, group_size, scale):
    """These rewards are integers. The exercise asks for a ValueError: is_floating_point() tells."""
    floats = rewards if rewards.is_floating_point() else rewards.double()
    return losses.group_advantages(floats, group_size, scale)


def nearly_equal_is_equal(rewards, group_size, scale):
    """You take nearly equal rewards for equal ones. Ask whether max equals min."""
    adv = losses.group_advantages(rewards, group_size, scale)
    is_near = rewards.view(-1, group_size).std(1) < 1e-3
    return adv.masked_fill(is_near.repeat_interleave(group_size), 0.0)


GROUP_ADVANTAGES = Question(
    "group_advantages",
    losses.group_advantages,
    (
        (numbers(1, 0), 2, "mean"),
        (numbers(1, 0), 2, "std"),
        (numbers(1, 1), 2, "std"),
        (numbers(1, 0, 3, 1), 2, "mean"),
        (numbers(1, 0, 3, 1), 2, "std"),
        (numbers(1, 0, 0), 3, "std"),
        (numbers(0.1, 0.1, 0.1), 3, "mean"),
        (numbers(0.1, 0.1, 0.1), 3, "std"),
        (numbers(2, 1, 0.5, -1, 0.25, 3, 1, 0), 4, "std"),
        (numbers(1, 0), 1, "std"),
        (numbers(1, 0, 1), 2, "std"),
        (torch.tensor([1, 0]), 2, "std"),
        (numbers(1, 0), 2, "median"),
        (numbers(1, 1.00001), 2, "std"),
        (numbers(1, 0).float(), 2, "mean"),
    ),
    (
        population_std,
        no_epsilon,
        one_mean_for_all,
        distant_neighbours,
        ignores_the_scale,
        trusts_the_epsilon,
        takes_whole_numbers,
        nearly_equal_is_equal,
    ),
    floor=0.0,
)


# ---------------- 2. the cancellation by hand


def shared_token_gradient(rho, advantages):
    return rho * sum(advantages) / len(advantages)


def no_mean_over_the_group(rho, advantages):
    """This is what you get without the 1/G in front of J."""
    return rho * sum(advantages)


def no_ratio(rho, advantages):
    """This is what you get without rho: grad r is r grad log pi, not grad log pi."""
    return sum(advantages) / len(advantages)


def ratio_upside_down(rho, advantages):
    """You divide by rho. grad r = r grad log pi, so rho is a factor."""
    return sum(advantages) / len(advantages) / rho


def always_zero(rho, advantages):
    """It is 0 only where the advantages sum to 0. Write the factor for any advantages."""
    return 0.0


SHARED_TOKEN = Question(
    "shared_token_gradient",
    shared_token_gradient,
    ((1.0, [1.0, -1.0]), (1.0, [1.0, 0.0]), (2.0, [1.0, 0.0]), (0.5, [2.0, -1.0, 0.5])),
    (no_mean_over_the_group, no_ratio, ratio_upside_down, always_zero),
)


# ---------------- 3. the gate


def gate_is_open(r, A, eps_low=0.2, eps_high=0.2):
    return not (A > 0 and r > 1 + eps_high or A < 0 and r < 1 - eps_low)


def clip_without_min(r, A, eps_low=0.2, eps_high=0.2):
    """This is clip alone, without the min. Draw both lines over r: which one is smaller?"""
    return 1 - eps_low < r < 1 + eps_high


def winners_and_losers_swapped(r, A, eps_low=0.2, eps_high=0.2):
    """You have winners and losers the wrong way round. For A < 0 the line r A falls."""
    return gate_is_open(r, -A, eps_low, eps_high)


def shut_instead_of_open(r, A, eps_low=0.2, eps_high=0.2):
    """You say where the gate is shut. The exercise asks where it is open."""
    return not gate_is_open(r, A, eps_low, eps_high)


def upper_bound_only(r, A, eps_low=0.2, eps_high=0.2):
    """Your gate knows only the upper bound. For a loser it is the lower one that shuts."""
    return not (A > 0 and r > 1 + eps_high)


def upper_bound_for_all(r, A, eps_low=0.2, eps_high=0.2):
    """You shut the gate above the range for losers, too. For them the min takes r A there."""
    return r < 1 + eps_high


def bounds_swapped(r, A, eps_low=0.2, eps_high=0.2):
    """Your bounds are swapped. The range is 1 - eps_low to 1 + eps_high."""
    return gate_is_open(r, A, eps_high, eps_low)


def loser_gate_upside_down(r, A, eps_low=0.2, eps_high=0.2):
    """Your gate is open for losers below the range only. It is shut there, and open elsewhere."""
    return r < 1 + eps_high if A > 0 else r < 1 - eps_low


def bounds_ignored(r, A, eps_low=0.2, eps_high=0.2):
    """Your bounds are always 0.2. Use eps_low and eps_high as they are given."""
    return gate_is_open(r, A)


GATE = Question(
    "gate_is_open",
    gate_is_open,
    tuple((r, A, 0.1, 0.4) for r in (1.0, 1.5, 0.5, 1.3, 0.85, 0.7) for A in (1.0, -1.0)),
    (
        clip_without_min,
        winners_and_losers_swapped,
        shut_instead_of_open,
        upper_bound_only,
        upper_bound_for_all,
        bounds_swapped,
        loser_gate_upside_down,
        bounds_ignored,
    ),
)


def sum_of_open(gate, rho, advantages, eps_low, eps_high):
    return rho * sum(a for a in advantages if gate(rho, a, eps_low, eps_high))


def left_at_a_shared_token(rho, advantages, eps_low=0.2, eps_high=0.2):
    return sum_of_open(gate_is_open, rho, advantages, eps_low, eps_high)


def left_by_clip_without_min(rho, advantages, eps_low=0.2, eps_high=0.2):
    """You leave nothing outside the range. There the min still lets one side through."""
    return sum_of_open(clip_without_min, rho, advantages, eps_low, eps_high)


def left_by_the_other_side(rho, advantages, eps_low=0.2, eps_high=0.2):
    """You add up the side whose gate is shut. Add up the one whose gate is open."""
    return sum_of_open(winners_and_losers_swapped, rho, advantages, eps_low, eps_high)


def left_without_the_ratio(rho, advantages, eps_low=0.2, eps_high=0.2):
    """The factor rho is missing: d r / d log pi = r."""
    return sum_of_open(gate_is_open, rho, advantages, eps_low, eps_high) / rho


def left_on_average(rho, advantages, eps_low=0.2, eps_high=0.2):
    """You divide by G. The exercise asks for the sum."""
    return sum_of_open(gate_is_open, rho, advantages, eps_low, eps_high) / len(advantages)


def objective_itself(rho, advantages, eps_low=0.2, eps_high=0.2):
    """This is the sum of the J_i themselves. The exercise asks for their derivatives."""
    clipped = min(max(rho, 1 - eps_low), 1 + eps_high)
    return sum(min(rho * a, clipped * a) for a in advantages)


def left_above_the_range(rho, advantages, eps_low=0.2, eps_high=0.2):
    """This is what is left above the range. Inside it all cancels. Below it winners are left."""
    return -rho * sum(a for a in advantages if a > 0)


def nothing_left_below(rho, advantages, eps_low=0.2, eps_high=0.2):
    """You leave nothing below the range. Below the range the winners are let through."""
    left = sum_of_open(gate_is_open, rho, advantages, eps_low, eps_high)
    return left if rho > 1 - eps_low else 0.0


def left_with_bounds_swapped(rho, advantages, eps_low=0.2, eps_high=0.2):
    """You have swapped the bounds: eps_low belongs to the lower one, eps_high to the upper one."""
    return left_at_a_shared_token(rho, advantages, eps_high, eps_low)


def left_with_bounds_ignored(rho, advantages, eps_low=0.2, eps_high=0.2):
    """The range that you use is 0.8 to 1.2. Pass eps_low and eps_high on to the gate."""
    return left_at_a_shared_token(rho, advantages)


LEFT_BY_THE_GATE = Question(
    "left_at_a_shared_token",
    left_at_a_shared_token,
    (
        (1.0, [1.0, -1.0], 0.1, 0.4),
        (1.5, [1.0, -1.0], 0.1, 0.4),
        (0.5, [1.0, -1.0], 0.1, 0.4),
        (1.3, [1.0, -1.0], 0.1, 0.4),
        (0.85, [1.0, -1.0], 0.1, 0.4),
        (0.7, [1.0, -1.0], 0.1, 0.4),
        (1.5, [2.0, 0.0, -0.5, -1.5], 0.1, 0.4),
    ),
    (
        left_by_clip_without_min,
        left_by_the_other_side,
        left_without_the_ratio,
        left_on_average,
        objective_itself,
        left_above_the_range,
        nothing_left_below,
        left_with_bounds_swapped,
        left_with_bounds_ignored,
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


def clip_ratio(batch, eps_low, eps_high):
    return losses.token_ratio(batch).clamp(1 - eps_low, 1 + eps_high)


def keeps_the_min(batch, eps_low=0.2, eps_high=0.2):
    """This still has the min: it lets losers through above the range, and winners below it."""
    return losses.dr_grpo(batch, eps_low, eps_high)


def not_a_loss(batch, eps_low=0.2, eps_high=0.2):
    """You return J. A loss is minimised: return -J."""
    return -losses.grpo_symmetric(batch, eps_low, eps_high)


def mean_of_every_answer(batch, eps_low=0.2, eps_high=0.2):
    """You divide every answer by its own length. The budget mean divides the sum by N L."""
    return -losses.seq_mean(clip_ratio(batch, eps_low, eps_high) * batch.adv, batch)


def mean_of_the_tokens(batch, eps_low=0.2, eps_high=0.2):
    """You divide by the number of tokens. The budget mean divides the sum by N L."""
    return -losses.token_mean(clip_ratio(batch, eps_low, eps_high) * batch.adv, batch.mask)


def mean_of_the_columns(batch, eps_low=0.2, eps_high=0.2):
    """You divide by N T, the size of the tensor. The budget mean divides by N L."""
    return -(clip_ratio(batch, eps_low, eps_high) * losses.masked_adv(batch)).mean()


def counts_the_padding(batch, eps_low=0.2, eps_high=0.2):
    """Your sum counts the padding. Its log-ratios and its advantages are garbage: mask them."""
    ratio = (batch.logp - batch.logp_old).exp().clamp(1 - eps_low, 1 + eps_high)
    return -(ratio * batch.adv).sum() / len(ratio) / batch.max_tokens


def masks_after_exp(batch, eps_low=0.2, eps_high=0.2):
    """The exp of the padding is inf, and 0 * inf makes the gradient nan. Mask before exp."""
    ratio = (batch.logp - batch.logp_old).exp().masked_fill(~batch.mask, 0.0)
    return -losses.budget_mean(ratio.clamp(1 - eps_low, 1 + eps_high) * batch.adv, batch)


def detached_ratio(batch, eps_low=0.2, eps_high=0.2):
    """Your ratio is detached, so nothing can be learned. Here the gradient runs through it."""
    return losses.grpo_symmetric(batch, eps_low, eps_high).detach()


def clip_bounds_swapped(batch, eps_low=0.2, eps_high=0.2):
    """Your bounds are swapped. The clip is from 1 - eps_low to 1 + eps_high."""
    return losses.grpo_symmetric(batch, eps_high, eps_low)


SYMMETRIC = Question(
    "grpo_symmetric",
    losses.grpo_symmetric,
    tuple(
        (make_batch(*spec), 0.2, 0.4)
        for spec in (
            ([[1.0], [1.0]], [1.0, -1.0], 1),
            ([[1.5], [1.5]], [1.0, -1.0], 1),
            ([[0.5], [0.5]], [1.0, -1.0], 1),
            ([[1.3], [1.3]], [1.0, -1.0], 1),
            ([[1.0], [1.0]], [1.0, -1.0], 4),
            ([[1.0, 1.0], [1.0, None]], [1.0, -1.0], 4),
            ([[1.5, 0.9], [1.1, None], [0.5, 1.0], [1.3, 1.0]], [1.0, -1.0, 2.0, -2.0], 4),
            ([[None], [None]], [1.0, -1.0], 1),
        )
    ),
    (
        keeps_the_min,
        not_a_loss,
        mean_of_every_answer,
        mean_of_the_tokens,
        mean_of_the_columns,
        counts_the_padding,
        masks_after_exp,
        detached_ratio,
        clip_bounds_swapped,
    ),
)


# ---------------- 5. length


def left_by_the_length(lengths, advantages):
    return sum(a / T for a, T in zip(advantages, lengths, strict=True)) / len(lengths)


def sum_over_the_group(lengths, advantages):
    """This is what you get without the 1/G in front of J."""
    return len(lengths) * left_by_the_length(lengths, advantages)


def length_forgotten(lengths, advantages):
    """This leaves the 1/T_i out. It stands in front of every answer's sum."""
    return sum(advantages) / len(advantages)


def all_tokens_alike(lengths, advantages):
    """You divide by all tokens of the group. Here every answer has a 1/T_i of its own."""
    return sum(advantages) / sum(lengths)


def length_as_a_factor(lengths, advantages):
    """You multiply by T_i. The shared token occurs once in every answer, with the factor 1/T_i."""
    return sum(a * T for a, T in zip(advantages, lengths, strict=True)) / len(lengths)


LEFT_BY_LENGTH = Question(
    "left_by_the_length",
    left_by_the_length,
    (
        ([1, 1], [1.0, -1.0]),
        ([1, 1], [1.0, 0.0]),
        ([1, 2], [1.0, -1.0]),
        ([2, 4], [1.0, 0.0]),
        ([1, 2, 4], [2.0, -1.0, -1.0]),
        ([2, 4, 1, 1], [1.0, 3.0, -0.5, 1.5]),
    ),
    (sum_over_the_group, length_forgotten, all_tokens_alike, length_as_a_factor),
)


# ---------------- 6. Min-Replace


def no_detach(w, adv):
    """This is what you get without detach. The loss would then learn to lower a ratio."""
    return w.amin(1, keepdim=True).expand_as(w)


def minimum_of_the_batch(w, adv):
    """This is the smallest weight of the whole batch. Every row is a group with its own minimum."""
    return w.detach().amin().expand_as(w)


def minimum_of_the_column(w, adv):
    """You compare answers of different groups. A group is a row, so the minimum is over dim 1."""
    return w.detach().amin(0, keepdim=True).expand_as(w)


def column_of_minima(w, adv):
    """You give one number a group. The result has the shape of w: a number for every answer."""
    return w.detach().amin(1, keepdim=True)


def list_of_minima(w, adv):
    """You give one number a group, and without dim 1. keepdim=True and expand_as(w) help."""
    return w.detach().amin(1)


def mean_of_the_group(w, adv):
    """This is the mean of the group. Any constant would cancel, but Eq. 17 takes the smallest."""
    return w.detach().mean(1, keepdim=True).expand_as(w)


def maximum_of_the_group(w, adv):
    """This is the largest weight of the group. Eq. 17 takes the smallest."""
    return w.detach().amax(1, keepdim=True).expand_as(w)


def minimum_of_the_products(w, adv):
    """This is the smallest w A of the group. Eq. 17 takes the smallest w, and does not need A."""
    return (w.detach() * adv).amin(1, keepdim=True).expand_as(w)


WEIGHTS_AND_ADVANTAGES = (
    (numbers([0.5, 2], grad=True), numbers([1, -1])),
    (numbers([2, 0.5], grad=True), numbers([1, -1])),
    (numbers([4, 2, 3], grad=True), numbers([2, -0.5, -1.5])),
    (numbers([0.5, 2], [3, 1], grad=True), numbers([1, -1], [2, -2])),
    (numbers([1, 2], [4, 0.5], grad=True), numbers([1, -1], [0, 0])),
    (numbers([3, 1, 2, 0.5], [1, 2, 1, 4], grad=True), numbers([2, -1, 0, -1], [3, -1, -1, -1])),
    (numbers([1, 1]).float(), numbers([1, -1]).float()),
)
MIN_REPLACE = Question(
    "min_replace",
    losses.min_replace,
    WEIGHTS_AND_ADVANTAGES,
    (
        no_detach,
        minimum_of_the_batch,
        minimum_of_the_column,
        column_of_minima,
        list_of_minima,
        mean_of_the_group,
        maximum_of_the_group,
        minimum_of_the_products,
    ),
)


# ---------------- 7. Adv-Orthogonal


def no_detach_of_the_projection(w, adv):
    """This is what you get without detach. The weights w~ are constants for the gradient."""
    norm = (adv * adv).sum(1, keepdim=True)
    projection = (adv * w).sum(1, keepdim=True) / norm.masked_fill(norm == 0, 1.0)
    return w - projection * adv


def norm_without_square(w, adv):
    """You divide by ||A||. The formula divides by its square, sum_i A_i^2."""
    right = losses.adv_orthogonal(w, adv)
    return w.detach() + (right - w.detach()) * adv.norm(dim=1, keepdim=True)


def no_norm(w, adv):
    """You do not divide by ||A||^2 = sum_i A_i^2."""
    w = w.detach()
    return w - (adv * w).sum(1, keepdim=True) * adv


def adds_the_projection(w, adv):
    """You add what correlates with A. Subtract it."""
    return 2 * w.detach() - losses.adv_orthogonal(w, adv)


def one_projection_for_the_batch(w, adv):
    """You sum over the whole batch. Every row is a group with its own A.w and its own ||A||^2."""
    flat = losses.adv_orthogonal(w.reshape(1, -1), adv.reshape(1, -1))
    return flat.view(w.shape)


def nan_without_advantages(w, adv):
    """0/0 is nan. A group whose advantages are all 0 keeps its w."""
    w = w.detach()
    return w - (adv * w).sum(1, keepdim=True) / (adv * adv).sum(1, keepdim=True) * adv


def centred_weights(w, adv):
    """You subtract the mean of w first. Then sum_i w~_i is 0, and no longer sum_i w_i."""
    return losses.adv_orthogonal(w - w.mean(1, keepdim=True), adv)


def norm_of_the_weights(w, adv):
    """You divide by ||w||^2. The formula divides by ||A||^2."""
    w = w.detach()
    return w - (adv * w).sum(1, keepdim=True) / (w * w).sum(1, keepdim=True) * adv


ADV_ORTHOGONAL = Question(
    "adv_orthogonal",
    losses.adv_orthogonal,
    WEIGHTS_AND_ADVANTAGES,
    (
        no_detach_of_the_projection,
        norm_without_square,
        no_norm,
        adds_the_projection,
        one_projection_for_the_batch,
        nan_without_advantages,
        centred_weights,
        norm_of_the_weights,
    ),
)


# ---------------- 8. the learning tax


def find_visits(coefficients, advantages, nodes, mask, with_zeros=False) -> list[list[tuple]]:
    """(c_i, A_i) of every visitor of every node."""
    visits = defaultdict(list)
    for i, t in mask.nonzero().tolist():
        if with_zeros or advantages[i] != 0:
            visits[int(nodes[i, t])].append((float(coefficients[i, t]), float(advantages[i])))
    return list(visits.values())


def tax_of(visitors: list[tuple]) -> float:
    mean_weight = sum(c / a for c, a in visitors) / len(visitors)
    return sum(c - mean_weight * a for c, a in visitors)


def size_of(visitors: list[tuple]) -> float:
    return sum(abs(c) for c, _ in visitors)


def divide(taxes: list[float], sizes: list[float]) -> float:
    return sum(taxes) / sum(sizes) if sum(sizes) else 0.0


def shared(coefficients, advantages, nodes, mask, with_zeros=False) -> list[list[tuple]]:
    visits = find_visits(coefficients, advantages, nodes, mask, with_zeros)
    return [visitors for visitors in visits if len(visitors) > 1]


def measure(tax: Callable, size: Callable, arguments: tuple) -> float:
    """The result with another tax or another size of a node."""
    visits = shared(*arguments)
    return divide([abs(tax(v)) for v in visits], [size(v) for v in visits])


def single_visitors_counted(coefficients, advantages, nodes, mask):
    """Your divisor counts all nodes. Nodes with one visitor are left out above and below."""
    visits = find_visits(coefficients, advantages, nodes, mask)
    return divide([abs(tax_of(v)) for v in visits], [size_of(v) for v in visits])


def taxes_cancel(coefficients, advantages, nodes, mask):
    """The taxes of your nodes cancel. Take the absolute value at every node, then the sum."""
    visits = shared(coefficients, advantages, nodes, mask)
    return divide([abs(sum(tax_of(v) for v in visits))], [size_of(v) for v in visits])


def push_of(visitors: list[tuple]) -> float:
    return sum(c for c, _ in visitors)


def credit_as_tax(*arguments):
    """This is the whole sum of c. Take its credit away: the mean weight times sum A."""
    return measure(push_of, size_of, arguments)


def credit_alone(*arguments):
    """This is the credit, wbar times sum A. The tax is what is left of sum c without it."""
    return measure(lambda v: push_of(v) - tax_of(v), size_of, arguments)


def sizes_cancel(*arguments):
    """Your divisor has |sum c|. It is the sum of the sizes, sum |c|."""
    return measure(tax_of, lambda v: abs(push_of(v)), arguments)


def sizes_cancel_to_zero(*arguments):
    """Here sum c is 0, and you divide by it. The divisor is the sum of the sizes, sum |c|."""
    visits = shared(*arguments)
    return sum(abs(tax_of(v)) for v in visits) / sum(abs(push_of(v)) for v in visits)


def no_absolute_value(*arguments):
    """A node's tax may be negative. Take its absolute value before you add up the nodes."""
    visits = shared(*arguments)
    return divide([tax_of(v) for v in visits], [size_of(v) for v in visits])


def absolute_value_of_every_term(*arguments):
    """You take the absolute value for every visitor. First add up a node's terms, then take it."""

    def tax(visitors):
        mean_weight = sum(c / a for c, a in visitors) / len(visitors)
        return sum(abs(c - mean_weight * a) for c, a in visitors)

    return measure(tax, size_of, arguments)


def mean_of_the_terms(*arguments):
    """You divide a node's tax by its number of visitors. The formula has the sum, not the mean."""
    return measure(lambda v: tax_of(v) / len(v), size_of, arguments)


def mean_weight_of_the_sums(*arguments):
    """Your wbar is sum c / sum A. It is the mean of the w_i = c_i / A_i."""

    def tax(visitors):
        adv = sum(a for _, a in visitors)
        return push_of(visitors) - push_of(visitors) / adv * adv

    return measure(tax, size_of, arguments)


def no_node_is_shared(coefficients, advantages, nodes, mask):
    """Your divisor is 0 here. The exercise asks for 0.0 then."""
    visits = shared(coefficients, advantages, nodes, mask)
    return sum(abs(tax_of(v)) for v in visits) / sum(size_of(v) for v in visits)


def nothing_is_pushed(coefficients, advantages, nodes, mask):
    """A node has two visitors here, but all c are 0, and so is your divisor. Return 0.0 then."""
    right = losses.learning_tax(coefficients, advantages, nodes, mask)
    return right if bool((coefficients != 0).any()) else math.nan


def division_by_zero(coefficients, advantages, nodes, mask):
    """An answer with A = 0 has no w: c / A divides by 0. Leave it out."""
    visits = shared(coefficients, advantages, nodes, mask, with_zeros=True)
    return divide([abs(tax_of(v)) for v in visits], [size_of(v) for v in visits])


def always_without_tax(*arguments):
    """Your result is always 0. Did you forget A in (w - wbar) A? Or are your keys no int(...)?"""
    return 0.0


def no_visitor_at_all(coefficients, advantages, nodes, mask):
    """You divide by 0, as if no node had two visitors. Are the keys of your dictionary int(...)?"""
    return math.nan


def padding_as_a_node(coefficients, advantages, nodes, mask):
    """You count the padding. It is no token, and its coefficients are garbage: use the mask."""
    return losses.learning_tax(coefficients, advantages, nodes, torch.ones_like(mask))


def make_tax_input(c: list[list], advantages: list[float], nodes: list[list[int]]) -> tuple:
    """Arguments of learning_tax. None is padding, and holds garbage."""
    mask = torch.tensor([[x is not None for x in row] for row in c])
    filled = numbers(*([7.0 if x is None else x for x in row] for row in c))
    return filled, numbers(*advantages), torch.tensor(nodes), mask


LEARNING_TAX = Question(
    "learning_tax",
    losses.learning_tax,
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
        make_tax_input([[1, 2], [-2, 3], [4, None]], [1, -1, 2], [[5, 3], [5, 3], [5, -1]]),
        make_tax_input([[1], [1], [1], [1], [-2]], [1, 1, 1, 1, -4], [[0], [0], [0], [0], [0]]),
    ),
    (
        single_visitors_counted,
        taxes_cancel,
        credit_as_tax,
        credit_alone,
        sizes_cancel,
        sizes_cancel_to_zero,
        no_absolute_value,
        absolute_value_of_every_term,
        mean_of_the_terms,
        mean_weight_of_the_sums,
        no_node_is_shared,
        nothing_is_pushed,
        division_by_zero,
        always_without_tax,
        no_visitor_at_all,
        padding_as_a_node,
    ),
)


# ---------------- 9. what the corollary lacks


def change_of_log_odds(k_a, k_b, n_a, n_b, x):
    return k_a * n_a - k_b * n_b + (k_b - k_a) * x


def as_in_the_corollary(k_a, k_b, n_a, n_b, x):
    """This is Eq. 5 itself. Multiply out <grad log pi(y_a) - grad log pi(y_b), g> without it."""
    return k_a - k_b


def no_cross_terms(k_a, k_b, n_a, n_b, x):
    """The products of one score gradient with the other are missing, so x does not occur."""
    return k_a * n_a - k_b * n_b


def cross_terms_turned_round(k_a, k_b, n_a, n_b, x):
    """Your terms with x have the wrong sign. Multiply out <grad of y_a - grad of y_b, g> again."""
    return k_a * n_a - k_b * n_b + (k_a - k_b) * x


def change_of_the_sum(k_a, k_b, n_a, n_b, x):
    """This is the change of log pi(y_a) + log pi(y_b). The log-odds are their difference."""
    return k_a * n_a + k_b * n_b + (k_a + k_b) * x


def change_of_one_answer(k_a, k_b, n_a, n_b, x):
    """This is the change of log pi(y_a). Subtract that of log pi(y_b)."""
    return k_a * n_a + k_b * x


LOG_ODDS = Question(
    "change_of_log_odds",
    change_of_log_odds,
    (
        (1.0, 1.0, 1.0, 1.0, 0.0),
        (1.0, 0.0, 1.0, 1.0, 0.0),
        (1.0, 1.0, 2.0, 1.0, 0.0),
        (1.0, 0.0, 1.0, 1.0, 0.5),
        (0.5, 2.0, 3.0, 1.0, -0.5),
    ),
    (
        as_in_the_corollary,
        no_cross_terms,
        cross_terms_turned_round,
        change_of_the_sum,
        change_of_one_answer,
    ),
)


# ---------------- 10. a weight of your own


def ratio_itself(s, adv):
    """This is the sequence ratio as it is: a weight per answer, so it does not cancel everywhere.
    The row "gspo" has a larger tax, because GSPO also clips, and divides by T_i."""
    return s


def orthogonal_weight(s, adv):
    """This is Adv-Orthogonal. It does not see the tokens that only a part of the group shares."""
    return losses.adv_orthogonal(s, adv)


def smallest_ratio(s, adv):
    """This is Min-Replace itself. Which other number can stand for the whole group?"""
    return losses.min_replace(s, adv)


def no_weight(s, adv):
    """This is REINFORCE: it does not correct for the old policy at all. Use s."""
    return torch.ones_like(s)


WEIGHT = Question(
    "weight",
    inputs=WEIGHTS_AND_ADVANTAGES,
    mistakes=(ratio_itself, orthogonal_weight, smallest_ratio, no_weight),
)


EXERCISES = {
    1: Exercise((GROUP_ADVANTAGES,), "M3"),
    2: Exercise((SHARED_TOKEN,), "C3"),
    3: Exercise((GATE, LEFT_BY_THE_GATE), "C6"),
    4: Exercise((SYMMETRIC,), "C7"),
    5: Exercise((LEFT_BY_LENGTH, Question("an_accident")), "C8"),
    6: Exercise((MIN_REPLACE,), "C9"),
    7: Exercise((ADV_ORTHOGONAL, Question("blind_spot")), "C10"),
    8: Exercise((LEARNING_TAX,), "C15"),
    9: Exercise((Question("counterexample"), LOG_ODDS), "C14"),
    10: Exercise((WEIGHT,), "C15"),
}
