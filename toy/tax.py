"""When the learning tax costs reward, and when it does not: two ways to answer, five settings.

    python -m toy.tax                      the table
    python -m toy.tax --plot toy/tax.png   and the picture (needs matplotlib)

An answer takes way A or way B. On A it then makes a good or a bad plan. With a good plan it is
right with probability 0.6, with a bad one never. On B it is right with a fixed probability, at most
0.2. Filler without any choice follows and gives the answer its length. The policy has one logit for
the way, 2 at the start, and one for the plan, 0 at the start.

Nothing is sampled. All groups of 4 answers are enumerated, and each counts with its probability
under the policy that began the batch. So an update is an expectation. toy/README.md says what came
out, and claim C18 why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from losses import Batch, learning_tax, token_coefficients
from toy.figure import (
    compute_loss,
    draw_lines,
    find_method,
    line_style,
    make_figure,
    parse_plot,
    print_row,
    save_picture,
)
from toy.worlds import Groups, Outcome

G, BATCHES, UPDATES = 4, 120, 8
START = (2.0, 0.0)  # the logits of way A and of a good plan
SIZE = 0.1  # the length of the first update
RIGHT = 0.6  # with a good plan
# lengths of right and wrong answers on A; chance to be right on B, and lengths there
SETTINGS = {
    "1: all lengths equal": ((16, 16), 0.0, (16, 16)),
    "2: A wrong is long": ((6, 24), 0.0, (32, 32)),
    "3: A wrong is short": ((24, 6), 0.0, (32, 32)),
    "4: as 3, B is shorter": ((24, 6), 0.0, (4, 4)),
    "5: B right is short": ((16, 16), 0.2, (4, 24)),
}
NAMES = ("grpo", "gspo", "grpo+proj", "dr-grpo", "cispo", "dfpo-min", "recentred")
HYPER = {"gspo": {"eps_low": 0.02, "eps_high": 0.02}, "dfpo-min eps 0.2": {"eps": 0.2}}
LINES = ("grpo", "gspo", "grpo+proj", "dr-grpo")  # cispo and dfpo-min lie on dr-grpo
PANELS = {  # what happens to the reward in some settings
    "2: A wrong is long": "better way A: wrong answers long",
    "3: A wrong is short": "better way A: wrong answers short",
    "5: B right is short": "worse way B: right answers short",
}


def make_groups(setting: str) -> Groups:
    (right, wrong), chance, (right_b, wrong_b) = SETTINGS[setting]
    outcomes = [
        Outcome(0, RIGHT, 1.0, right, plan=0),
        Outcome(0, 1 - RIGHT, 0.0, wrong, plan=0),
        Outcome(0, 1.0, 0.0, wrong, plan=1),
        Outcome(1, chance, 1.0, right_b),
        Outcome(1, 1 - chance, 0.0, wrong_b),
    ]
    return Groups([outcome for outcome in outcomes if outcome.chance], G)


def log_probs(groups: Groups, logits: Tensor) -> Tensor:
    """Of the way and of the plan, and 0 for filler. (2,) -> (N, T)."""
    choices = torch.stack([groups.way, groups.plan], 1)  # (N, 2): 0 for A, 0 for good, -1 for none
    logp = logsigmoid((1 - 2 * choices) * logits).masked_fill(choices < 0, 0.0)
    return pad(logp, (0, groups.mask.shape[1] - 2))


def start_batch(groups: Groups, logits: Tensor, scale: str) -> Batch:
    old = log_probs(groups, logits)
    return groups.batch(old, groups.probabilities(old), scale)


def compute_push(
    name: str, batch: Batch, nodes: Tensor, logits: Tensor, forward: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The gradient of a method's J by the logits, and the token coefficients, (N, T).

    forward: logits -> log pi of the batch's tokens, (N, T). Nodes: (N, T).
    """
    logits = logits.detach().requires_grad_()
    logp = forward(logits)
    loss = compute_loss(name, HYPER, replace(batch, logp=logp), nodes)
    c = token_coefficients(loss, logp)
    return torch.autograd.grad(logp, logits, c / len(c))[0], c


def train(groups: Groups, name: str) -> tuple[Tensor, float]:
    """The logits before each batch and after the last, (BATCHES + 1, 2).

    And the mean learning tax of the last updates of the batches.
    """
    logits, rate = torch.tensor(START, dtype=torch.float64), None
    forward = functools.partial(log_probs, groups)
    path, taxes = [logits], []
    for _ in range(BATCHES):
        batch = start_batch(groups, logits, find_method(name).scale)
        for _ in range(UPDATES):
            push, c = compute_push(name, batch, groups.nodes, logits, forward)
            rate = rate or SIZE / push.norm()
            logits = logits + rate * push
        path.append(logits)
        taxes.append(learning_tax(c, batch.adv[:, 0], groups.nodes, groups.mask))
    return torch.stack(path), sum(taxes) / len(taxes)


def expected_reward(setting: str, logits: Tensor) -> Tensor:
    """(..., 2) -> (...)."""
    way, plan = logits.sigmoid().unbind(-1)
    return way * plan * RIGHT + (1 - way) * SETTINGS[setting][1]


def predict_difference(setting: str, share: float) -> float:
    """f_A - f_B of grpo without its factor, if A has this share and all plans are good (C18)."""
    A, chance, B = SETTINGS[setting]
    b = share * RIGHT + (1 - share) * chance
    f = [q * (1 - b) / T[0] - (1 - q) * b / T[1] for q, T in ((RIGHT, A), (chance, B))]
    return f[0] - f[1]


def predict_reward(setting: str) -> float:
    """At the end of grpo: where f_A - f_B, a straight line, becomes 0 from above, or an end."""
    low, high = predict_difference(setting, 0.0), predict_difference(setting, 1.0)
    share = low / (low - high) if low > 0 > high else float(low > 0)
    return share * RIGHT + (1 - share) * SETTINGS[setting][1]


def plot(curves: dict[tuple[str, str], Tensor], path: Path):
    """Expected reward in three settings, and where grpo's closed form ends."""
    finding = "GRPO and GSPO divide by length, and lose reward permanently in two of these worlds"
    figure = make_figure(finding, 3.0)
    axes = figure.subplots(1, len(PANELS), sharey=True)
    axes[0].set_ylim(0.15, 0.68)
    axes[0].set_ylabel("expected reward (best: 0.6)")
    for axis, (setting, title) in zip(axes, PANELS.items(), strict=True):
        draw_lines(axis, {name: curves[setting, name].tolist() for name in LINES})
        axis.axhline(predict_reward(setting), **line_style("grpo") | dict(linestyle=":"))
        axis.set_title(title, pad=12)  # the names of the lines stay below it
        axis.set_xlabel("batches; dotted: predicted end")
    figure.savefig(path)


def main(argv: list[str] | None = None):
    path = parse_plot(__doc__, argv)
    torch.set_num_threads(1)
    print(f"{'setting':24}lengths on A (right, wrong)   B is right   lengths on B")
    for setting, (A, chance, B) in SETTINGS.items():
        print(f"{setting:24}{A!s:29}{chance:<13}{B}")
    print("\nExpected reward at the end; 0.6 is the best. In brackets: the learning tax of a")
    print("batch's last update, mean of all batches\n")
    print_row("", [f"setting {setting[0]}" for setting in SETTINGS])
    curves, groups = {}, {setting: make_groups(setting) for setting in SETTINGS}
    for name in NAMES:
        cells = []
        for setting in SETTINGS:
            logits, tax = train(groups[setting], name)
            curves[setting, name] = expected_reward(setting, logits)
            cells.append(f"{float(curves[setting, name][-1]):.3f} ({tax:.3f})")
        print_row(name, cells)
    print_row("grpo, closed form", [f"{predict_reward(setting):.3f}" for setting in SETTINGS])
    save_picture(plot, curves, path=path)


if __name__ == "__main__":
    main()
