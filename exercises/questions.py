"""What each exercise asks for: the right answer, inputs from small to large, and likely mistakes.

A right answer comes from losses.py, if need be through autograd. A mistake is a row: its name, a
function that is wrong in this one thing, and the hint for a student whose answers are the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from operator import truediv

import torch
from torch import Tensor

import losses
from losses import Batch, token_coefficients


@dataclass(frozen=True)
class Question:
    """A function that an exercise asks for. Exactly one of `right` and `check` decides."""

    function: str
    names: str = ""  # of its parameters
    inputs: tuple[tuple, ...] = ((),)  # from small to large, so that the first to fail is small
    right: Callable | None = None
    check: Callable | None = None  # where many answers are right: raises ValueError for another
    mistakes: tuple[tuple[str, Callable, str], ...] = ()  # name, wrong function, hint
    floor: float = 1.0  # an error is relative to the right number, or to this if it is larger


@dataclass(frozen=True)
class Exercise:
    why: str  # where its solution is explained
    questions: tuple[Question, ...]


# ---------------- inputs


def numbers(*values, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def grow(draw: Callable) -> tuple:
    """Random inputs for groups of 2, 3, 4 and 5 answers."""
    return tuple(draw(random.Random(k), 2 + k // 8) for k in range(32))


def draw_values(rng: random.Random, size: int) -> list[float]:
    """One number for each answer. Those of small groups are easy to calculate with."""
    if size < 4:
        return [rng.choice([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0]) for _ in range(size)]
    return [round(rng.gauss(0, 1), 2) for _ in range(size)]


def draw_centred(rng: random.Random, size: int) -> list[float]:
    """Advantages that sum to 0."""
    first = draw_values(rng, size)[1:]
    return [-sum(first), *first]


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


def draw_rewards(rng: random.Random, size: int) -> tuple:
    rewards = draw_values(rng, size) + draw_values(rng, size)
    return numbers(*rewards), size, rng.choice(["mean", "std"])


GROUP_ADVANTAGES = Question(
    "group_advantages",
    "rewards group_size scale",
    (
        (numbers(1, 0), 2, "mean"),
        (numbers(1, 0), 2, "std"),
        (numbers(1, 1), 2, "std"),
        (numbers(0.1, 0.1, 0.1), 3, "mean"),
        (numbers(0.1, 0.1, 0.1), 3, "std"),
        (numbers(1, 1.00001), 2, "std"),
        *grow(draw_rewards),
    ),
    losses.group_advantages,
    mistakes=(
        (
            "std over G",
            lambda *x: advantages_with(lambda g: g.std(1, keepdim=True, correction=0) + 1e-4, *x),
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


def shared_token_gradient(rho: float, advantages: list[float]) -> float:
    batch = start_alike(rho, advantages)
    c = first_coefficients(losses.dr_grpo, batch, eps_low=math.inf, eps_high=math.inf)
    return float(c.mean())


SHARED_TOKEN = Question(
    "shared_token_gradient",
    "rho advantages",
    (
        (1.0, [1.0, -1.0]),
        (1.0, [1.0, 0.0]),
        (2.0, [1.0, 0.0]),
        *grow(lambda rng, size: (rng.choice([0.5, 2.0, 3.0]), draw_values(rng, size))),
    ),
    shared_token_gradient,
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


def left_at_a_shared_token(rho, advantages, eps_low, eps_high) -> float:
    batch = start_alike(rho, advantages)
    c = first_coefficients(losses.dr_grpo, batch, eps_low=eps_low, eps_high=eps_high)
    return float(c.sum())


def gate_is_open(r, A, eps_low, eps_high) -> bool:
    return left_at_a_shared_token(r, [A, 0.0], eps_low, eps_high) != 0


RATIOS = (1.0, 1.5, 0.5, 1.3, 0.85, 0.7)
BOUNDS = ((0.1, 0.4), (0.35, 0.2))
GATE = Question(
    "gate_is_open",
    "r A eps_low eps_high",
    tuple((r, A, *bounds) for bounds in BOUNDS for r in RATIOS for A in (1.0, -0.5)),
    gate_is_open,
    mistakes=(
        (
            "no min",
            lambda r, A, eps_low, eps_high: 1 - eps_low < r < 1 + eps_high,
            "This is clip alone, without the min. Draw both lines over r: which one is smaller?",
        ),
        (
            "losers as winners",
            lambda r, A, *bounds: gate_is_open(r, -A, *bounds),
            "You have winners and losers the wrong way round. For A < 0 the line r A falls.",
        ),
        (
            "bounds ignored",
            lambda r, A, *bounds: gate_is_open(r, A, 0.2, 0.2),
            "Your bounds are always 0.2. Use eps_low and eps_high as they are given.",
        ),
    ),
)
GROUPS = ([1.0, -1.0], [2.0, 0.0, -0.5, -1.5], [0.3, 0.5, -0.8])
LEFT_BY_THE_GATE = Question(
    "left_at_a_shared_token",
    "rho advantages eps_low eps_high",
    tuple((r, adv, *bounds) for adv in GROUPS for bounds in BOUNDS for r in RATIOS),
    left_at_a_shared_token,
    mistakes=(
        (
            "nothing left",
            lambda *x: 0.0,
            "You leave nothing outside the range. There the min still lets one side through.",
        ),
        (
            "the shut side",
            lambda *x: -left_at_a_shared_token(*x),
            "You add up the side whose gate is shut. Add up the one whose gate is open.",
        ),
        (
            "no rho",
            lambda rho, *x: left_at_a_shared_token(rho, *x) / rho,
            "The factor rho is missing: d r / d log pi = r.",
        ),
        (
            "mean in place of sum",
            lambda rho, advantages, *x: (
                left_at_a_shared_token(rho, advantages, *x) / len(advantages)
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


def draw_batch(rng: random.Random, size: int) -> tuple:
    """At most size - 1 tokens an answer, some answers empty."""
    columns = range(size - 1)
    rows, advantages = [], []
    for _ in range(rng.choice([1, 2])):
        advantages += draw_centred(rng, 2)
        for length in (rng.randint(0, size - 1), rng.randint(0, size - 1)):
            rows.append([rng.choice(RATIOS) if t < length else None for t in columns])
    return make_batch(rows, advantages, size), 0.2, 0.4


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
        *grow(draw_batch),
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


def draw_lengths(rng: random.Random, size: int) -> tuple:
    return [rng.randint(1, size + 2) for _ in range(size)], draw_values(rng, size)


def left_by_the_length(lengths: list[int], advantages: list[float]) -> float:
    return float(first_coefficients(losses.grpo, start_alike(1.0, advantages, lengths)).mean())


def read_lists(answer, sizes: tuple, asked: str) -> list[list[float]]:
    """Lists of these sizes. Raises ValueError with what was asked for."""
    try:
        lists = [[float(x) for x in part] for part in answer]
    except (TypeError, ValueError):
        lists = []
    if tuple(map(len, lists)) != sizes:
        raise ValueError(asked)
    return lists


def ask(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_accident(answers: list) -> None:
    asked = "Lists of four lengths and four advantages are asked for."
    lengths, adv = read_lists(answers[0], (4, 4), asked)
    ask(all(T >= 1 and T % 1 == 0 for T in lengths), "A length is a whole number, at least 1.")
    ask(len(set(lengths)) > 1, "All lengths are equal: then sum A/T is 0 because sum A is.")
    ask(all(abs(a) >= 0.1 for a in adv), "Every |A| must be at least 0.1.")
    ask(abs(sum(adv)) < 1e-9, f"The advantages sum to {sum(adv):g}, not to 0.")
    left = sum(map(truediv, adv, lengths))
    ask(abs(left) < 1e-9, f"What is left, sum A/T, is {left:g}, not 0.")


LEFT_BY_LENGTH = Question(
    "left_by_the_length",
    "lengths advantages",
    (([1, 1], [1.0, -1.0]), ([1, 2], [1.0, -1.0]), *grow(draw_lengths)),
    left_by_the_length,
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


def draw_weights(rng: random.Random, size: int) -> tuple:
    groups = range(rng.choice([1, 2]))
    w = [[abs(x) for x in draw_values(rng, size)] for _ in groups]
    return numbers(*w, grad=True), numbers(*(draw_centred(rng, size) for _ in groups))


WEIGHTS = (
    (numbers([0.5, 2], grad=True), numbers([1, -1])),
    (numbers([1, 2], [4, 0.5], grad=True), numbers([1, -1], [0, 0])),
    *grow(draw_weights),
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


def subtract_projection(w: Tensor, adv: Tensor, norm) -> Tensor:
    return w - (adv * w).sum(1, keepdim=True) / norm * adv


def square(adv: Tensor) -> Tensor:
    """||A||^2, and 1 where it is 0."""
    norm = (adv * adv).sum(1, keepdim=True)
    return norm.masked_fill(norm == 0, 1.0)


def check_blind_spot(answers: list) -> None:
    asked = "Lists of four weights, four advantages and two places, 0 to 3, are asked for."
    w, adv, places = read_lists(answers[0], (4, 4, 2), asked)
    ask(len({*places} & {0, 1, 2, 3}) == 2, "The two places are different, and from 0 to 3.")
    i, j = map(int, places)
    ask(abs(sum(adv)) < 1e-9, f"The advantages sum to {sum(adv):g}, not to 0.")
    ask(abs(adv[i] + adv[j]) < 1e-9, f"The pair's advantages sum to {adv[i] + adv[j]:g}, not to 0.")
    transformed = losses.adv_orthogonal(numbers(w), numbers(adv))[0].tolist()
    left = transformed[i] * adv[i] + transformed[j] * adv[j]
    ask(abs(left) > 0.1, f"The pair is left with {left:.3g}: that is not more than 0.1.")


ADV_ORTHOGONAL = Question(
    "adv_orthogonal",
    "w adv",
    WEIGHTS,
    losses.adv_orthogonal,
    mistakes=(
        (
            "not detached",
            lambda w, adv: subtract_projection(w, adv, square(adv)),
            "This is what you get without detach. The weights w~ are constants for the gradient.",
        ),
        (
            "norm without its square",
            lambda w, adv: subtract_projection(w.detach(), adv, square(adv).sqrt()),
            "You divide by ||A||. The formula divides by its square, sum_i A_i^2.",
        ),
        (
            "no norm",
            lambda w, adv: subtract_projection(w.detach(), adv, 1.0),
            "You do not divide by ||A||^2 = sum_i A_i^2.",
        ),
        (
            "0 / 0",
            lambda w, adv: subtract_projection(w.detach(), adv, (adv * adv).sum(1, keepdim=True)),
            "0/0 is nan. A group whose advantages are all 0 keeps its w.",
        ),
    ),
)


# ---------------- 8. the learning tax


def draw_tree(rng: random.Random, size: int) -> tuple:
    """A group over two tokens. Some advantages are 0; the padding holds garbage."""
    columns = range(size - 1)
    lengths = torch.tensor([rng.randint(1, size - 1) for _ in range(size)])
    tokens = torch.tensor([[rng.choice([0, 1]) for _ in columns] for _ in range(size)])
    c = numbers(*zip(*(draw_values(rng, size) for _ in columns), strict=True))
    adv = numbers(*(rng.choice([0.0, x, x, x, x]) for x in draw_values(rng, size)))
    mask = torch.arange(size - 1) < lengths[:, None]
    nodes = losses.prefix_nodes(tokens, mask, size)
    return c.masked_fill(~mask, 7.0), adv, nodes, mask


def one_node(c: list[float], adv: list[float]) -> tuple:
    """Two answers that are the same token."""
    nodes = torch.zeros(2, 1, dtype=torch.int64)
    return numbers(c).T, numbers(*adv), nodes, nodes == 0


def tax_with(tax: Callable, c, adv, nodes, mask, least: int = 2) -> float:
    """The learning tax, with another tax of a node, or of nodes with fewer visitors."""
    visits: dict[int, list] = {}
    for i, t in mask.nonzero().tolist():
        if adv[i] != 0:
            visits.setdefault(int(nodes[i, t]), []).append((float(c[i, t]), float(adv[i])))
    counted = [node for node in visits.values() if len(node) >= least]
    size = sum(abs(c) for node in counted for c, _ in node)
    return sum(map(tax, counted)) / size if size else 0.0


def signed_tax(visitors: list[tuple]) -> float:
    mean_weight = sum(c / a for c, a in visitors) / len(visitors)
    return sum(c - mean_weight * a for c, a in visitors)


def nan_without_shared_nodes(*x) -> float:
    is_shared = tax_with(lambda visitors: 1.0, *x) > 0
    return losses.learning_tax(*x) if is_shared else math.nan


LEARNING_TAX = Question(
    "learning_tax",
    "coefficients advantages nodes mask",
    (
        one_node([1, -1], [1, -1]),
        one_node([1, -2], [1, -1]),
        one_node([2, 1], [2, 1]),
        one_node([2, -4], [1, -1]),
        one_node([0, 0], [1, -1]),
        *grow(draw_tree),
    ),
    losses.learning_tax,
    mistakes=(
        (
            "credit as tax",
            lambda *x: tax_with(lambda visitors: abs(sum(c for c, _ in visitors)), *x),
            "This is the whole sum of c. Take its credit away: the mean weight times sum A.",
        ),
        (
            "no absolute value",
            lambda *x: tax_with(signed_tax, *x),
            "A node's tax may be negative. Take its absolute value before you add up the nodes.",
        ),
        (
            "single visitors counted",
            lambda *x: tax_with(lambda visitors: abs(signed_tax(visitors)), *x, least=1),
            "Your divisor counts all nodes. Nodes with one visitor are left out above and below.",
        ),
        (
            "A = 0",
            lambda c, adv, *x: losses.learning_tax(c, adv, *x) if all(adv != 0) else math.nan,
            "An answer with A = 0 has no w: c / A divides by 0. Leave it out.",
        ),
        (
            "nothing shared",
            nan_without_shared_nodes,
            "Your divisor is 0 here. The exercise asks for 0.0 then.",
        ),
    ),
)


# ---------------- 9. what the corollary lacks


def check_counterexample(answers: list) -> None:
    asked = "A list of three positive probabilities is asked for."
    (p,) = read_lists(answers, (3,), asked)
    ask(all(x > 0 for x in p), asked)
    ask(abs(sum(p) - 1) < 1e-9, f"The probabilities sum to {sum(p):g}, not 1.")
    g_a, g_b = numbers(1, 0, 0) - numbers(*p), numbers(0, 1, 0) - numbers(*p)  # grad log pi
    change = float((g_a - g_b) @ (g_a + g_b) / 2)
    said = f"With these probabilities the log-odds change by {change:.3g} per eta"
    ask(abs(change) > 0.1, f"{said}: more than 0.1 is asked for, up or down.")


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
    """A softmax over six answers, and all 216 groups of three that another policy may draw.

    The answers begin with one of three tokens, two answers with each.
    """

    def __init__(self, seed: int):
        gen = torch.Generator().manual_seed(seed)
        logits, step, rewards = torch.randn(3, 6, generator=gen, dtype=torch.float64)
        self.p, old = logits.softmax(0), (logits + step).softmax(0)
        self.exact = self.p * (rewards - self.p @ rewards)  # of the expected reward, (6,)
        self.rows = torch.cartesian_prod(*[torch.arange(6)] * 3)  # (216, 3)
        self.odds = old[self.rows].prod(1, keepdim=True)  # (216, 1)
        self.s = (self.p / old)[self.rows]
        self.adv = losses.group_advantages(rewards[self.rows].view(-1), 3, "mean").view(-1, 3)

    def tax(self, w: Tensor) -> float:
        """At the first tokens."""
        nodes = 3 * torch.arange(len(w))[:, None] + self.rows // 2
        c, nodes = (w * self.adv).view(-1, 1), nodes.view(-1, 1)
        return losses.learning_tax(c, self.adv.view(-1), nodes, torch.ones_like(nodes).bool())

    def cosine(self, w: Tensor) -> float:
        """Between the exact gradient and the expected update."""
        c = torch.zeros_like(self.p)
        c.index_add_(0, self.rows.view(-1), (self.odds * w * self.adv).view(-1))
        update = c - self.p * c.sum()
        return float(torch.cosine_similarity(update, self.exact, 0))


WORLDS = [World(seed) for seed in range(100)]
KNOWN = {
    "1 (REINFORCE)": lambda s, adv: torch.ones_like(s),
    "s itself": lambda s, adv: s,
    "Min-Replace": losses.min_replace,
    "Adv-Orthogonal": losses.adv_orthogonal,
}


def measure(weights: list[Tensor]) -> tuple[float, float]:
    """Mean tax and mean cosine, of the weights for each world."""
    taxes = [world.tax(w) for world, w in zip(WORLDS, weights, strict=True)]
    cosines = [world.cosine(w) for world, w in zip(WORLDS, weights, strict=True)]
    return sum(taxes) / len(taxes), sum(cosines) / len(cosines)


def check_weight(answers: list) -> list[str]:
    """The lines of the table. The first answer is for a small group, the others for the worlds."""
    weights = []
    for answer, (s, _) in zip(answers, WEIGHT.inputs, strict=True):
        try:
            weights.append(torch.as_tensor(answer, dtype=torch.float64))
        except (TypeError, ValueError, RuntimeError):
            raise ValueError("A tensor of numbers is asked for.") from None
        shape = tuple(weights[-1].shape)
        ask(shape == s.shape, f"Your weights have shape {shape}, and s has {tuple(s.shape)}.")
        ask(bool(weights[-1].isfinite().all()), "One of your weights is not finite.")
    results = {"yours": measure(weights[1:])}
    for name, weight in KNOWN.items():
        results[name] = measure([weight(world.s, world.adv) for world in WORLDS])
    lines = [f"{'weight':16}{'tax':>8}{'cosine':>10}"]
    lines += [f"{name:16}{tax:8.4f}{cosine:10.4f}" for name, (tax, cosine) in results.items()]
    (tax, cosine), theirs = results["yours"], results["Min-Replace"][1]
    table = "\n".join(lines)
    said = f"Your weights have a tax of {tax:.3g}"
    ask(tax < 1e-9, f"{table}\n{said}: are they equal where only some answers share a token?")
    said = f"There is no tax, but the cosine is {cosine:.4f}"
    ask(cosine > theirs + 1e-9, f"{table}\n{said}: it must be larger than {theirs:.4f}.")
    return lines


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
            KNOWN["1 (REINFORCE)"],
            "This is REINFORCE: it does not correct for the old policy at all. Use s.",
        ),
    ),
)


# ---------------- 11. why is the loss 0


def on_policy(loss: Callable, advantages: list, lengths: list, budget: int = 1) -> tuple:
    """The value of a loss, and the sum of its coefficients at the token that all share."""
    batch = start_alike(1.0, advantages, lengths, budget)
    return loss(batch).item(), float(first_coefficients(loss, batch).sum())


UNEQUAL = (
    ([1.0, -1.0], [1, 1]),
    ([1.0, -1.0], [1, 2]),
    (losses.group_advantages(numbers(1, 0, 1, 0), 4).tolist(), [4, 6, 3, 5]),
    *(pair[::-1] for pair in grow(draw_lengths)),
)
GRPO_ON_POLICY = Question(
    "grpo_on_policy",
    "advantages lengths",
    UNEQUAL,
    lambda advantages, lengths: on_policy(losses.grpo, advantages, lengths),
    mistakes=(
        (
            "no length at the token",
            lambda advantages, lengths: (-sum(advantages) / len(advantages), sum(advantages)),
            "The value is right. But c of one token has the 1/T_i of its answer.",
        ),
        (
            "mean in place of sum",
            lambda advantages, lengths: (
                -sum(advantages) / len(advantages),
                sum(map(truediv, advantages, lengths)) / len(advantages),
            ),
            "The value is right. But c = G dJ / dlog pi: the G takes the 1/G of J away.",
        ),
        (
            "J itself",
            lambda advantages, lengths: (
                sum(advantages) / len(advantages),
                sum(map(truediv, advantages, lengths)),
            ),
            "This is the value of J. The loss is -J.",
        ),
    ),
)
DR_GRPO_ON_POLICY = Question(
    "dr_grpo_on_policy",
    "advantages lengths budget",
    tuple((*pair, 6 + k % 3) for k, pair in enumerate(UNEQUAL)),
    lambda *x: on_policy(losses.dr_grpo, *x),
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
            "sum always 0",
            lambda *x: (on_policy(losses.dr_grpo, *x)[0], 0.0),
            "The value is right. The sum is 0 where the advantages sum to 0: write it for any.",
        ),
    ),
)
NOTHING_IS_LEARNED = Question(
    "nothing_is_learned",
    "rewards",
    (
        ([1.0, 0.0],),
        ([1.0, 1.0],),
        ([0.0, 0.0],),
        ([1.0, 1.0, 0.0, 0.0],),
        ([0.1, 0.1, 0.1],),
        ([0.0, 1.0, -1.0],),
    ),
    lambda rewards: not losses.group_advantages(numbers(*rewards), len(rewards)).any(),
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
    11: Exercise(f"{EXPLAIN} C8", (GRPO_ON_POLICY, DR_GRPO_ON_POLICY, NOTHING_IS_LEARNED)),
}
