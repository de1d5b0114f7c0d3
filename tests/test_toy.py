"""Whoever quotes a figure of toy/README.md finds its published numbers when they run it again."""

import pytest
import torch

import losses
from toy import crumb, drift, gate, tax, tree, worlds

LONG, SHORT, WORSE = tax.SETTINGS


def reward_of_tax(setting: str, name: str) -> float:
    return float(tax.find_rewards(setting, name)[0][-1])


def share_of_tax(setting: str, name: str) -> float:
    return tax.find_rewards(setting, name)[1]


def tax_with_adam(setting: str, name: str) -> list[float]:
    """At the rates 0.01 and 0.1; from 0.3 on rounding decides."""
    return tax.find_adam_rewards(setting, name)[[0, 2]].tolist()


def best_of_gate(name: str) -> float:
    """Of 4 of the 21 rates, among which is each row's best."""
    return float(gate.sweep(name, gate.RATES[[6, 11, 16, 20]]).max())


def gate_with_adam(name: str) -> list[float]:
    rates = torch.tensor([0.03, 0.3, 3.0], dtype=torch.float64)
    return gate.sweep(name, rates, worlds.ADAM, 2).tolist()


def end_of_crumb(scale: str) -> list[float]:
    return crumb.train_rare(scale)[-1].tolist()


def end_of_three(scale: str) -> list[float]:
    """J from two starts, and the shares from the first."""
    shares = crumb.train_three(scale)[-1]
    return [*crumb.expected_reward(crumb.THREE_WAYS, shares).tolist(), *shares[0].tolist()]


def pull_of_crumb(scale: str) -> float:
    """The expected A of a rare answer less that of a usual one, at a share of 0.05."""
    logits = torch.tensor([[0.95, 0.05]], dtype=torch.float64).log().requires_grad_()
    groups = worlds.Groups(crumb.RARE_WAY, 8)
    loss = losses.grpo(groups.batch(worlds.way_log_probs(groups, logits), scale))
    (gradient,) = torch.autograd.grad(-loss, logits)
    return gradient[0, 1].item() / 0.05 / 0.95


def end_of_drift(name: str) -> list[float]:
    """The opener's drift, and the expected reward before and after."""
    return drift.measure(name).tolist()


PUBLISHED = [
    (reward_of_tax, LONG, "grpo", 0.596),
    (reward_of_tax, SHORT, "dr-grpo", 0.597),
    (reward_of_tax, WORSE, "gspo", 0.207),
    (share_of_tax, WORSE, "gspo", 0.535),
    (reward_of_tax, WORSE, worlds.BOTH, 0.205),
    (reward_of_tax, WORSE, worlds.LOCAL, 0.592),
    (tax_with_adam, SHORT, "grpo", [0.419, 0.427]),
    (best_of_gate, worlds.BOTH, 0.401),
    (best_of_gate, "gspo", 0.400),
    (best_of_gate, "grpo-symmetric", 0.5),
    (best_of_gate, "dfpo-min, eps 0.2", 0.5),
    (gate_with_adam, worlds.EXACT, [0.473, 0.5, 0.4]),
    (gate_with_adam, "grpo-symmetric", [0.473, 0.5, 0.5]),
    (end_of_crumb, "std", [0.1, 0.1, 0.45]),
    (end_of_crumb, "batch", [0.45, 0.45, 0.45]),
    (end_of_three, "std", [0.6485, 0.6485, 0.346, 0.264, 0.390]),
    (pull_of_crumb, "std", -0.082),  # so says the article, too
    (pull_of_crumb, "mean", 0.306),
    (pull_of_crumb, "batch", 2.269),  # 0.306 by the std of all rewards
    (end_of_drift, "grpo", [0.445, 0.287, 0.453]),
    (end_of_drift, worlds.LOCAL, [0, 0.287, 0.460]),
    (end_of_drift, "grpo, no clip", [2.397, 0.287, 0.949]),
    (end_of_drift, "gspo", [1.731, 0.287, 0.843]),
    (end_of_drift, "reinforce", [0, 0.287, 0.993]),
    (end_of_drift, "dfpo-min", [0, 0.287, 0.937]),
    (end_of_drift, "dfpo-min, eps 0.2", [0, 0.287, 0.453]),
]


@pytest.mark.parametrize(
    "row", PUBLISHED, ids=lambda row: " ".join([row[0].__name__, *map(str, row[1:-1])])
)
def test_a_number_is_as_published(row):
    find, *setting, number = row
    assert find(*setting) == pytest.approx(number, abs=0.0006)


def test_what_a_batch_shares_by_hand():
    """Four answers of 4, 5, 2 and 4 tokens share "so", and two of them "7+8=15"."""
    group = tree.toy_group("unequal", "1010")
    batch = {"step": 7, "group_size": 4, "max_tokens": 5, "logp_old": group.old}
    batch |= {key: getattr(group, key) for key in ("tokens", "mask", "rewards")}
    found = tree.what_is_shared(batch, tree.shown_methods(""))
    # On "so" 0.150 of 0.600 is left, and on "7+8=15" 0.025 of 0.225 (README's pushes).
    expected = {"step": 7, "shared": 6 / 15, "at place": 8 / 6, "others at": 30 / 9}
    left = 0.175 / 0.825
    expected |= {"tax of grpo": left, "tax of dr-grpo": 0, "tax of gspo": left}
    assert found == pytest.approx(expected, abs=1e-9)
    # The scale says how much a second group counts, in which only the first answer is right. There
    # 7+8=15 has a push of 0.1375; with equal weights it would be 0.1125.
    for key in ("logp_old", "tokens", "mask", "rewards"):
        batch[key] = torch.cat([batch[key], batch[key]])
    batch["rewards"][4:] = torch.tensor([1, 0, 0, 0])
    left = (0.150 + 0.025 + 0.050 + 0.025) / (0.600 + 0.225 + 0.425 + 0.2375)
    found = tree.what_is_shared(batch, tree.shown_methods("mean"))
    assert found["tax of grpo"] == pytest.approx(left, abs=1e-9)
