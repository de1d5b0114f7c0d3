"""Whoever quotes a figure of toy/README.md finds its published numbers when they run it again.

test_report.py has those of GRPO and Dr. GRPO in the worlds of toy/tax.py.
"""

from functools import partial

import pytest
import torch

from losses import grpo
from toy import crumb, drift, tax
from toy.worlds import LOCAL, MEAN, ROWS, Groups, Row, way_log_probs

near = partial(pytest.approx, abs=0.0006)
TAX = {LOCAL: (0.596, 0.587, 0.592), "gspo": (0.596, 0.411, 0.207)}
CRUMB = {"std": (0.1, 0.1, 0.45), "batch": (0.45, 0.45, 0.45)}
DRIFT = {MEAN: (1.314, 0.974), LOCAL: (0, 0.973), "dr-grpo": (0, 0.973), "dfpo-min": (0, 0.986)}


def test_published_numbers():
    for name, ends in TAX.items():
        assert tax.find_rewards(tax.climb(ROWS[name]))[:, -1].tolist() == near(ends), name
    for scale, ends in CRUMB.items():
        assert crumb.train_rare(Row(grpo, scale))[-1].tolist() == near(ends), scale
    for name, numbers in DRIFT.items():
        assert drift.measure(ROWS[name]).tolist() == near(numbers), name


def test_the_batchs_std():
    """Adam hides a wrong divisor. R is 0.1 with probability 0.95, and 1 with probability 0.0225, so
    its mean is 0.1175 and its mean square 0.032."""
    std = (0.032 - 0.1175**2) ** 0.5
    groups = Groups([crumb.RARE_WAY], 8)
    logp = way_log_probs(groups, crumb.STARTS[1:2].log())
    undivided, divided = (groups.batch(logp, scale)[0].adv for scale in ("mean", "batch"))
    torch.testing.assert_close(divided, undivided / (std + 1e-4))


def test_a_kl_term_holds_a_policy_at_its_start():
    rewards = crumb.train_rare(Row(partial(grpo, kl=100.0)))
    assert rewards[-1].tolist() == near(rewards[0].tolist())
