"""toy/tax.py: the enumerated updates are those of all ordered groups, one after the other."""

import itertools
import math
import re

import pytest
import torch

from losses import METHODS, Batch, group_advantages, learning_tax, prefix_nodes, project
from toy import tax

SETTING = "5: B right is short"  # the only one in which all outcomes exist
LOGITS = (0.7, -0.4)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(tax, "G", 3)


def log_probs(outcome: tuple, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the way and the plan, and the mask; the rest of an answer has no choice. (24,) both."""
    (way, plan), T = outcome[0], outcome[3]
    row = torch.zeros(24, dtype=torch.float64)
    row[0] = torch.nn.functional.logsigmoid(logits[0] if way == "A" else -logits[0])
    if plan:
        row[1] = torch.nn.functional.logsigmoid(logits[1] if plan == "good" else -logits[1])
    return row, torch.arange(24) < T


def push_by_hand(name: str, old: tuple, new: tuple) -> list[float]:
    """The expected gradient of J in setting 5, over all ordered groups of 3 one by one."""
    on_a = [("A", "good"), 0.6, 1.0, 16], [("A", "good"), 0.4, 0.0, 16], [("A", "bad"), 1, 0.0, 16]
    outcomes = [*on_a, [("B", ""), 0.2, 1.0, 4], [("B", ""), 0.8, 0.0, 24]]
    old, new = (torch.tensor(x, dtype=torch.float64) for x in (old, new))
    new.requires_grad_()
    method = METHODS[name.partition("+")[0]]
    clip = {"eps_low": 0.02, "eps_high": 0.02} if name == "gspo" else {}
    J = 0.0
    for group in itertools.product(range(5), repeat=3):
        rows = [outcomes[k] for k in group]
        logp = torch.stack([log_probs(row, new)[0] for row in rows])
        logp_old, mask = map(torch.stack, zip(*(log_probs(row, old) for row in rows), strict=True))
        p = math.prod(row[1] for row in rows) * float(logp_old.sum().exp())
        A = group_advantages(torch.tensor([row[2] for row in rows]).double(), 3, method.scale)
        batch = Batch(logp, logp_old, A[:, None].expand(3, 24), mask, group_size=3, max_tokens=24)
        loss = method.passes[0](batch, **clip)
        if name.endswith("+proj"):
            ways = [[ord(way), len(plan), *range(22)] for (way, plan), *_ in rows]
            nodes = prefix_nodes(torch.tensor(ways), mask & (torch.arange(24) < 2), 3)
            loss = project(loss, logp, A, nodes, mask & (torch.arange(24) < 2))
        J = J - p * loss
    return torch.autograd.grad(J, new)[0].tolist()


@pytest.mark.parametrize("name", ["grpo", "gspo", "grpo+proj", "dr-grpo", "dfpo-min"])
def test_the_expected_push_is_that_of_all_ordered_groups_on_and_off_policy(name):
    groups, scale = tax.make_groups(SETTING), METHODS[name.partition("+")[0]].scale
    for old in (LOGITS, (1.2, -0.9), (-0.3, 0.4)):
        batch = tax.start_batch(groups, torch.tensor(old, dtype=torch.float64), scale)
        push, _ = tax.compute_push(groups, name, batch, torch.tensor(LOGITS, dtype=torch.float64))
        assert push.tolist() == pytest.approx(push_by_hand(name, old, LOGITS), abs=1e-12)


def test_training_climbs_from_batch_to_batch_at_the_rate_of_the_first_update(monkeypatch):
    monkeypatch.setattr(tax, "BATCHES", 2)
    monkeypatch.setattr(tax, "UPDATES", 2)
    groups = tax.make_groups(SETTING)
    path, mean_tax = tax.train(groups, "grpo")
    logits, rate, taxes = (2.0, 0.0), None, []
    for k in range(2):
        old = logits
        for _ in range(2):
            push = push_by_hand("grpo", old, logits)
            rate = rate or 0.1 / math.hypot(*push)
            last, logits = logits, [z + rate * x for z, x in zip(logits, push, strict=True)]
        assert path[k + 1].tolist() == pytest.approx(logits, abs=1e-9)
        batch = tax.start_batch(groups, torch.tensor(old, dtype=torch.float64), "std")
        c = tax.compute_push(groups, "grpo", batch, torch.tensor(last, dtype=torch.float64))[1]
        taxes.append(learning_tax(c, batch.adv[:, 0], groups.nodes, groups.mask))
    assert mean_tax == pytest.approx(sum(taxes) / 2) and abs(taxes[0] - taxes[1]) > 1e-5
    way, plan = (1 / (1 + math.exp(-z)) for z in logits)
    reward = way * plan * 0.6 + (1 - way) * 0.2
    assert float(tax.expected_reward(SETTING, path[-1])) == pytest.approx(reward)


@pytest.mark.parametrize("setting", tax.SETTINGS)
def test_the_closed_form_is_grpos_push_on_the_way_and_says_where_it_ends(setting):
    groups = tax.make_groups(setting)
    for share in (0.2, 0.8):
        logits = torch.tensor([share, 1.0], dtype=torch.float64).logit(eps=1e-12)
        batch = tax.start_batch(groups, logits, "mean")
        push = float(tax.compute_push(groups, "grpo", batch, logits)[0][0])
        measured = push / (share * (1 - share) * (1 - 1 / tax.G))
        assert measured == pytest.approx(tax.predict_difference(setting, share), rel=1e-9)
    share = (1 / 24) / (0.6 / 24 + 0.4 / 6 - 1 / 32)
    ends = {"1": 0.6, "2": 0.6, "3": 0.6 * share, "4": 0.6, "5": 0.2}
    assert tax.predict_reward(setting) == pytest.approx(ends[setting[0]])


def test_the_table_has_rewards_and_taxes_by_setting(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tax, "BATCHES", 1)
    monkeypatch.setattr(tax, "UPDATES", 2)
    tax.main(["--plot", str(tmp_path / "tax.svg")])
    out = capsys.readouterr().out
    for name in tax.NAMES:
        path, mean_tax = tax.train(tax.make_groups(SETTING), name)
        reward = float(tax.expected_reward(SETTING, path[-1]))
        assert re.search(f"\n{re.escape(name)} .*\\) +{reward:.3f} \\({mean_tax:.3f}\\) *\n", out)
    assert re.search("closed form +0.600 +0.600 +0.414 +0.600 +0.200 *\n", out)
    assert "</svg>" in (tmp_path / "tax.svg").read_text()
