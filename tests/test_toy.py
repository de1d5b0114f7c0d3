"""Whoever quotes a figure of toy/README.md finds its published numbers when they run it again.

test_report.py has those of GRPO and Dr. GRPO.
"""

import functools

import pytest
import torch

from losses import grpo
from toy import crumb, drift, tax, tree
from toy.worlds import LOCAL, MEAN, ROWS, Groups, Row, plain, train, way_log_probs

near = functools.partial(pytest.approx, abs=0.0006)


def test_what_a_learning_tax_costs(monkeypatch):
    path = tax.climb(ROWS["gspo"])
    assert tax.find_rewards(path)[2, -1].item() == near(0.207)
    assert tax.find_taxes(ROWS["gspo"], path)[2] == near(0.535)
    # With Adam; from a rate of 0.3 on rounding decides.
    monkeypatch.setattr(tax, "ADAM_RATES", torch.tensor([0.01, 0.1], dtype=torch.float64))
    _, short, _ = tax.SETTINGS
    assert tax.find_adam_rewards(short, ROWS[MEAN]).tolist() == near([0.419, 0.427])


def test_the_crumb():
    for scale, published in (("std", [0.1, 0.1, 0.45]), ("batch", [0.45, 0.45, 0.45])):
        assert crumb.train_rare(Row(grpo, scale))[-1].tolist() == near(published)
    # By these shares the expected reward is 0.6485.
    assert crumb.train_three("std")[-1].tolist() == near([0.346, 0.264, 0.390])
    # Adam hides a wrong divisor. R is 0.1 with probability 0.95, and 1 with probability 0.0225, so
    # its mean is 0.1175 and its mean square 0.032.
    std = (0.032 - 0.1175**2) ** 0.5
    groups = Groups([crumb.RARE_WAY], 8)
    logp = way_log_probs(groups, crumb.STARTS[1:2].log())
    undivided, divided = (groups.batch(logp, scale)[0].adv for scale in ("mean", "batch"))
    torch.testing.assert_close(divided, undivided / (std + 1e-4))


def test_a_token_that_earns_nothing():
    """The drift, and the expected reward before and after."""
    published = {
        LOCAL: [0, 0.287, 0.460],
        "grpo, no clip": [2.397, 0.287, 0.949],
        "gspo": [1.731, 0.287, 0.843],
        "reinforce": [0, 0.287, 0.993],
        "dfpo-min": [0, 0.287, 0.937],
    }
    for name, numbers in published.items():
        assert drift.measure(drift.METHODS[name]).tolist() == near(numbers), name


def test_a_kl_term_holds_a_policy_at_its_start():
    groups, start = Groups([crumb.RARE_WAY], 4), crumb.STARTS[2:].log()

    def move(kl: float) -> float:
        row, step = Row(functools.partial(grpo, kl=kl)), plain(0.3)
        path = train(row, groups, way_log_probs, start, updates=1, batches=50, step=step)
        return (path[-1] - start).norm().item()

    assert move(10.0) < move(0.0) / 10


def test_what_a_batch_shares_by_hand():
    """Four answers of 4, 5, 2 and 4 tokens share "so", and two of them "7+8=15".

    In the first group answers 1 and 3 are right, in the second answer 1 alone.
    """
    groups = [tree.toy_group("unequal", won) for won in ("1010", "1000")]
    batch = {"step": 7, "group_size": 4, "max_tokens": 5, "logp_old": torch.zeros(8, 5)}
    for key in ("tokens", "mask", "rewards"):
        batch[key] = torch.cat([getattr(group, key) for group in groups])
    # The tax on "so" is 0.150 of pushes of 0.600, and on "7+8=15" 0.025 of 0.225 (README's
    # pushes). In the second group 7+8=15 has a net push of 0.1375; with equal weights 0.1125.
    share = (0.150 + 0.025 + 0.050 + 0.025) / (0.600 + 0.225 + 0.425 + 0.2375)
    taxes = {"grpo": share, "dr-grpo": 0, "gspo": share}
    expected = {"step": 7, "shared": 6 / 15, "at place": 8 / 6, "others at": 30 / 9}
    expected |= {f"tax share of {name}": tax for name, tax in taxes.items()}
    found = tree.what_is_shared(batch, tree.shown_methods("mean"))
    assert found == pytest.approx(expected, abs=1e-9)
