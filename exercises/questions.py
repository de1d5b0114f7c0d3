"""What each exercise asks for: the right answer, from losses.py, and what to say after a PASS.

An answer is tried on the small cases of mistakes.json first, and on random ones, drawn here, after
them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import losses
from losses import Batch, token_pushes
from toy.clips import make_group


@dataclass(frozen=True)
class Question:
    """A function that an exercise asks for. Exactly one of `right` and `check` decides."""

    function: str
    right: Callable | None = None
    draw: Callable = lambda group: ()  # a Group -> random inputs
    call: Callable = lambda function, *inputs: function(*inputs)  # the inputs are plain lists
    check: Callable | None = None  # where many answers are right: yields what one of them lacks
    tolerance: float = 1e-9  # how far off a right number may be
    blank: str = ""  # what else to say where it is blank
    passed: str = "PASS"  # the verdict on a right answer


@dataclass(frozen=True)
class Exercise:
    why: str
    more: str  # where its solution is explained
    questions: tuple[Question, ...]


# ---------------- inputs

RATIOS = (1.0, 1.5, 0.5, 1.3, 0.85, 0.7)  # none is at an edge of a clip with the bounds below


class Group(random.Random):
    """Random numbers for a group of 2 to 5 answers, the same in every run."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.size = 2 + seed % 4

    def values(self) -> list[float]:
        return [round(self.uniform(-2, 2), 1) or 1.0 for _ in range(self.size)]  # none is 0

    def centred(self) -> list[float]:
        """Their sum is 0."""
        values = self.values()[1:]
        return [-sum(values), *values]

    def some_zero(self) -> list[float]:
        return [self.choice([0.0, x, x, x]) for x in self.values()]

    def ratios(self) -> list[float]:
        return self.choices(RATIOS, k=self.size)

    def bounds(self) -> list[float]:
        return self.choices([0.1, 0.2, 0.35, 0.4], k=2)

    def lengths(self) -> list[int]:
        return self.choices(range(1, self.size + 3), k=self.size)

    def chances(self) -> list[float]:
        parts = self.choices(range(1, 6), k=self.size)
        return [x / sum(parts) for x in parts]

    def rows(self) -> list[list]:
        """A ratio for every token. An answer may be empty: None is padding."""
        width = self.size - 1
        return [
            [*self.ratios()[:T], *[None] * (width - T)]
            for T in self.choices(range(width + 1), k=self.size)
        ]

    def nodes(self) -> list[list[int]]:
        """Two at each place, so that answers share some."""
        return [
            [2 * t + self.choice([0, 1]) for t in range(self.size - 1)] for _ in range(self.size)
        ]


def numbers(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def read_rows(rows: list[list]) -> tuple[Tensor, Tensor]:
    """The numbers (1 where there is padding) and the mask. (N, T) both"""
    mask = torch.tensor([[x is not None for x in row] for row in rows])
    return numbers([[1.0 if x is None else x for x in row] for row in rows]), mask


def start_alike(ratio, advantages: list, lengths: list | None = None, budget: int = 1) -> Batch:
    """Answers whose first tokens have this ratio, or these. Their other tokens have ratio 1."""
    lengths = lengths or [1] * len(advantages)
    log_ratio = numbers(ratio).log()[..., None] * (torch.arange(max(lengths)) == 0)
    return replace(make_group(advantages, lengths, log_ratio), max_tokens=budget)


def first_pushes(loss: Callable, batch: Batch, **options) -> Tensor:
    """The push c on the first token of every answer. (G,)"""
    return token_pushes(loss(batch, **options), batch.logp)[:, 0]


def value_and_pushes(loss, logp: Tensor) -> tuple[Tensor, Tensor] | None:
    """A student's loss, and its push at every token. None if nothing was returned."""
    if loss is None:
        return None
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss is a {type(loss).__name__}, not a tensor")
    return loss, token_pushes(loss, logp)


# ---------------- 2. and 3. the net push, PPO's clip


def net_push(rho, advantages, eps_low=math.inf, eps_high=math.inf) -> float:
    batch = start_alike(rho, advantages)
    c = first_pushes(losses.dr_grpo, batch, eps_low=eps_low, eps_high=eps_high)
    return float(c.sum())


# ---------------- 4. train it


def call_with_log_pi(function, log_pi, advantages, lengths, method) -> tuple:
    x = numbers(log_pi).requires_grad_()
    return value_and_pushes(function(x, numbers(advantages), torch.tensor(lengths), method), x)


def loss(log_pi: Tensor, A: Tensor, T: Tensor, method: str) -> Tensor:
    return -(log_pi * A / (T if method == "grpo" else 24)).mean()


def check_prediction(answer) -> Iterator[str]:
    grpo, dr_grpo = answer
    if not (0 <= grpo <= 1 and 0 <= dr_grpo <= 1):
        yield "Two mean rewards between 0 and 1 are asked for: of GRPO, and of Dr. GRPO."


# ---------------- 5. the format bonus


def lone_advantage(reward: float, bonus: float, group_size: int, scale: str = "std") -> float:
    """With the 1e-4 of the std taken out again."""
    rewards = numbers([reward] + [bonus] * (group_size - 1))
    adv = losses.group_advantages(rewards, group_size, scale)[0]
    return float(adv * (1 + 1e-4 / rewards.std()) if scale == "std" and adv else adv)


def mean_advantages(chance: float, bonus: float, group_size: int) -> list[float]:
    return [
        chance * lone_advantage(1.0, bonus, group_size, scale)
        + (1 - chance) * lone_advantage(0.0, bonus, group_size, scale)
        for scale in ("std", "mean")
    ]


def check_better_strategy(answer) -> Iterator[str]:
    bonus, chance = answer
    if not (0 < bonus < 1 and 0 <= chance <= 1):
        yield "Two numbers between 0 and 1 are asked for. The bonus comes first."
    if not chance >= 20 * bonus:
        yield f"It earns {chance / bonus:.3g} times the bonus: 20 times is asked for."
    std, _ = mean_advantages(chance, bonus, 8)
    if not std < 0:
        yield f"With the std its mean A is {std:.3g}, not below 0. How often may it win?"


# ---------------- 6. the prefix baseline


def prefix_baseline(c: list[float]) -> list[float]:
    """One prefix, at which all answers take a token, and an empty answer beside them."""
    batch = start_alike(1.0, [*c, 0.0], [1] * len(c) + [0])
    loss = losses.prefix_baseline(losses.reinforce(batch), batch, batch.mask.long())
    return token_pushes(loss, batch.logp)[:-1, 0].tolist()


def expect_without_baseline(pi: list[float], c: list[float]) -> tuple[Tensor, float]:
    """The expected push of two answers without the baseline, and no net push. C22: it is the
    same."""
    push = numbers(pi) * numbers(c)
    return 2 * (push - numbers(pi) * push.sum()), 0.0


# ---------------- 7. a sign-blind clip


def call_with_batch(function, ratios, advantages, max_tokens, eps_low, eps_high) -> tuple:
    """The log-probs of padding are garbage."""
    ratio, mask = read_rows(ratios)
    logp = torch.where(mask, -0.7, 1e4).double()
    logp_old = torch.where(mask, logp - ratio.log(), -1e4)
    adv = numbers(advantages)[:, None].expand_as(logp)
    batch = Batch(logp.requires_grad_(), logp_old, adv, mask, 2, max_tokens)
    return value_and_pushes(function(batch, eps_low, eps_high), batch.logp)


# ---------------- 8. and 9. Min-Replace and Adv-Orthogonal


def draw_weights(group: Group) -> tuple:
    return [group.values(), group.values()], [group.centred(), group.centred()]


def call_with_weights(function: Callable, w: list, *adv: list):
    weights = function(numbers(w).requires_grad_(), *map(numbers, adv))
    return (weights, "with a gradient") if weights.requires_grad else weights


def check_blind_spot(weights) -> Iterator[str]:
    if len(weights) != 4:
        yield "Four weights are asked for."
    adv = numbers([[1, 1, -1, -1]])
    pushes = losses.adv_orthogonal(numbers([weights]), adv) * adv
    left = float(pushes[0, 0] + pushes[0, 2])
    if not abs(left) > 0.1:
        yield f"The size of the sum is {abs(left):.3f}: more than 0.1 is asked for. See the hint."


# ---------------- 10. the tax share


def call_with_nodes(function: Callable, pushes: list, advantages: list, nodes: list):
    c, mask = read_rows(pushes)
    return function(c, numbers(advantages), torch.tensor(nodes), mask)


# ---------------- 11. why is the loss 0


def draw_answers(group: Group) -> tuple:
    return group.values(), group.lengths()


def on_policy(loss: Callable, advantages: list, lengths: list, budget: int = 1) -> tuple:
    """The value of the loss, and its net push at the token that all share."""
    batch = start_alike(1.0, advantages, lengths, budget)
    return loss(batch).item(), float(first_pushes(loss, batch).sum())


# ---------------- all eleven

EXERCISES = {
    1: Exercise(
        "An advantage is what an answer has above the others. Equal rewards have nothing to say.",
        "the docstring of group_advantages in losses.py",
        (
            Question(
                "group_advantages",
                losses.group_advantages,
                lambda group: (
                    group.values() + group.values(),
                    group.size,
                    group.choice(["mean", "std"]),
                ),
                lambda function, rewards, *how: function(numbers(rewards), *how),
                tolerance=0.01,  # whatever small number is added to the std
            ),
        ),
    ),
    2: Exercise(
        "One divisor for all answers leaves the sum of the A, which is 0. 1/T_i weighs each A by "
        "itself, and weighted with unequal numbers the A sum to 0 only by accident: the net push "
        "is 0.15 on the board, and 0.175 on the sheet.",
        "python verify.py --explain C2 C8",
        (
            Question("net_push", net_push, lambda group: (group.choice(RATIOS), group.values())),
            Question(
                "net_push_by_length",
                lambda T, A: float(first_pushes(losses.grpo, start_alike(1.0, A, T)).sum()),
                lambda group: (group.lengths(), group.values()),
            ),
        ),
    ),
    3: Exercise(
        "Above the range winners are stopped, and losers push the token down. Below it losers are "
        "stopped, and winners push it up.",
        "python verify.py --explain C6",
        (
            Question(
                "still_pushes",
                lambda r, A, *bounds: net_push(r, [A, 0.0], *bounds) != 0,
                lambda group: (group.choice(RATIOS), group.values()[0], *group.bounds()),
            ),
            Question(
                "net_push_with_clip",
                net_push,
                lambda group: (group.choice(RATIOS), group.centred(), *group.bounds()),
            ),
        ),
    ),
    4: Exercise(
        "GRPO pushes a right shortcut up by A/4, and a wrong one down by only A/24. So the "
        "shortcut becomes more likely, although it earns less. Dr. GRPO divides both by 24, and "
        "only the reward counts. toy/tax.png shows the same world without sampling.",
        "python verify.py --explain C18",
        (
            Question(
                "prediction",
                check=check_prediction,
                blank="Nothing is trained before you have written down what you expect.",
                passed="NOTED",
            ),
            Question(
                "loss",
                loss,
                lambda group: (
                    [-abs(x) for x in group.values()],
                    group.values(),
                    group.lengths(),
                    group.choice(["grpo", "dr-grpo"]),
                ),
                call_with_log_pi,
            ),
        ),
    ),
    5: Exercise(
        "With the std a lone answer gets (G - 1)/sqrt(G), up or down: 2.47 for G = 8. Only the "
        "sign counts, because the std grows with the difference. So a rare strategy that wins less "
        "than every second time is pushed down, by -0.25 in the example, however much it earns. "
        "With the mean it gets (1 - 1/G) times what it earns more, +0.31. This matters on hard "
        "prompts with a small bonus for something else.",
        "the docstring of group_advantages in losses.py",
        (
            Question(
                "lone_advantage",
                lone_advantage,
                lambda group: (group.choice([0.0, 0.5, 1.0, 2.0]), group.random(), group.size),
            ),
            Question(
                "mean_advantages",
                mean_advantages,
                lambda group: (group.random(), group.random(), group.size),
            ),
            Question("opposite_signs", check=check_better_strategy),
        ),
    ),
    6: Exercise(
        "The pushes cancel because the c' sum to 0. The expected push stays because the other "
        "answer is drawn without looking at this one, and grad log pi has the mean 0. Only the "
        "noise changes. This needs a push that depends on its own answer only. If the group mean "
        "is subtracted from the rewards, a push depends on the others, and the expected push "
        "moves.",
        "python verify.py --explain C22 C27",
        (
            Question("prefix_baseline", prefix_baseline, lambda group: (group.values(),)),
            Question(
                "over_all_pairs",
                expect_without_baseline,
                lambda group: (group.chances(), group.values()),
            ),
        ),
    ),
    7: Exercise(
        "A clip without the min asks how far r is from 1, and not who won.",
        "python verify.py --explain C7",
        (
            Question(
                "grpo_symmetric",
                losses.grpo_symmetric,
                lambda group: (
                    group.rows() + group.rows(),
                    group.values() + group.values(),
                    group.size,
                    *group.bounds(),
                ),
                call_with_batch,
            ),
        ),
    ),
    8: Exercise(
        "With one weight w for the group the net push is w sum A, and sum A is 0.",
        "python verify.py --explain C9",
        (
            Question(
                "min_replace",
                losses.min_replace,
                lambda group: draw_weights(group)[:1],
                call_with_weights,
            ),
        ),
    ),
    9: Exercise(
        "The sum of w~ A is 0 over the whole group. Nothing says that it is 0 over a part of it.",
        "python verify.py --explain C10",
        (
            Question("adv_orthogonal", losses.adv_orthogonal, draw_weights, call_with_weights),
            Question("blind_spot", check=check_blind_spot),
        ),
    ),
    10: Exercise(
        "tax_v is the number of visitors times the covariance of their w and A. Equal w: no tax.",
        "python verify.py --explain C15",
        (
            Question(
                "learning_tax",
                losses.learning_tax,
                lambda group: (group.rows(), group.some_zero(), group.nodes()),
                call_with_nodes,
            ),
        ),
    ),
    11: Exercise(
        "In the example GRPO's loss is 0, and its net push 0.175. Dr. GRPO's loss is 0.875/L, and "
        "its net push is 0. The value of a loss does not say what is learned. Only where all "
        "rewards of a group are equal, each A is 0 (exercise 1), and nothing is learned from it.",
        "python verify.py --explain Q1",
        (
            Question("grpo_on_policy", lambda *x: on_policy(losses.grpo, *x), draw_answers),
            Question(
                "dr_grpo_on_policy",
                lambda *x: on_policy(losses.dr_grpo, *x),
                lambda group: (*draw_answers(group), group.size + 2),
            ),
        ),
    ),
}
