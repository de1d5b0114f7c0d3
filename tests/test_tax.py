"""toy/tax.py: the enumerated updates are those of a naive loop over all ordered groups."""

import itertools
import math
import re

import pytest
import torch

from experiments import sampled_tax
from losses import learning_tax
from toy import tax

SETTING = "5: B right is short"  # the only one in which all outcomes exist
LOGITS = (0.7, -0.4)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(tax, "G", 3)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def outcomes(setting):
    """(way, plan or None, chance after these choices, reward, length)"""
    (right, wrong), q, (right_b, wrong_b) = tax.SETTINGS[setting]
    on_a = [("A", "good", 0.6, 1, right), ("A", "good", 0.4, 0, wrong), ("A", "bad", 1, 0, wrong)]
    return on_a + [("B", None, q, 1, right_b), ("B", None, 1 - q, 0, wrong_b)]


def log_prob(answer, logits):
    """Of the answer's choices; and their gradient, by hand."""
    way, plan = answer[:2]
    signs = [1 if way == "A" else -1, {"good": 1, "bad": -1, None: 0}[plan]]
    logp = [math.log(sigmoid(s * z)) if s else 0.0 for s, z in zip(signs, logits, strict=True)]
    return logp, [s * sigmoid(-s * z) for s, z in zip(signs, logits, strict=True)]


def weights(name, group, A, logits, old):
    """By answer: what multiplies A_i and the gradient of its two choices."""
    rows = []
    s = []
    for answer in group:
        new, was = log_prob(answer, logits)[0], log_prob(answer, old)[0]
        rows.append([math.exp(x - y) for x, y in zip(new, was, strict=True)])
        s.append(math.exp((sum(new) - sum(was)) / answer[4]))
    result = []
    for i, answer in enumerate(group):
        if name == "gspo":
            is_open = not (s[i] > 1.02 and A[i] > 0 or s[i] < 0.98 and A[i] < 0)
            result.append([is_open * s[i] / answer[4]] * 2)
        elif name.startswith("grpo"):
            low, high = 0.8, 1.2
            opened = [not (r > high and A[i] > 0 or r < low and A[i] < 0) for r in rows[i]]
            result.append([o * r / answer[4] for o, r in zip(opened, rows[i], strict=True)])
        else:  # dfpo-min, up to 1/L
            result.append([min(s)] * 2)
    return result


def project(group, w, A):
    """The node mean, over answers with A_i != 0 that share a choice and those before it."""
    result = [list(row) for row in w]
    for i, t in itertools.product(range(len(group)), (0, 1)):
        same = [j for j in range(len(group)) if group[j][: t + 1] == group[i][: t + 1] and A[j]]
        if same:
            result[i][t] = sum(w[j][t] for j in same) / len(same)
    return result


def naive_push(name, setting, logits, old):
    """The expected gradient, one ordered group after the other."""
    total = [0.0, 0.0]
    for group in itertools.product(outcomes(setting), repeat=tax.G):
        p = math.prod(a[2] * math.exp(sum(log_prob(a, old)[0])) for a in group)
        R = [a[3] for a in group]
        if not p or min(R) == max(R):
            continue
        mean = sum(R) / tax.G
        std = math.sqrt(sum((r - mean) ** 2 for r in R) / (tax.G - 1)) + 1e-4
        A = [(r - mean) / std for r in R]
        w = weights(name, group, A, logits, old)
        if name.endswith("+proj"):
            w = project(group, w, A)
        for a, A_i, w_i in zip(group, A, w, strict=True):
            for t, score in enumerate(log_prob(a, logits)[1]):
                total[t] += p * w_i[t] * A_i * score / tax.G
    return total


@pytest.mark.parametrize("name", ["grpo", "gspo", "grpo+proj", "dfpo-min"])
def test_the_expected_push_is_that_of_the_naive_loop_on_and_off_policy(name):
    groups = tax.make_groups(SETTING)
    for old in (LOGITS, (1.2, -0.9), (-0.3, 0.4)):
        batch = tax.start_batch(groups, torch.tensor([old], dtype=torch.float64), "std")
        push, _ = tax.compute_push(groups, name, batch, torch.tensor([LOGITS]).double())
        expected = naive_push(name, SETTING, LOGITS, old)
        if name == "dfpo-min":
            expected = [x / 24 for x in expected]  # L: no answer is longer
        assert push[0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_training_climbs_from_batch_to_batch_at_the_rate_of_the_first_update(monkeypatch):
    monkeypatch.setattr(tax, "BATCHES", 2)
    monkeypatch.setattr(tax, "UPDATES", 2)
    path, mean_tax = tax.train(tax.make_groups(SETTING), "grpo")
    logits, rate = [2.0, 0.0], None
    for batch in range(2):
        old = logits
        for _ in range(2):
            push = naive_push("grpo", SETTING, logits, old)
            rate = rate or 0.1 / math.hypot(*push)
            logits = [z + rate * x for z, x in zip(logits, push, strict=True)]
        assert path[batch + 1, 0].tolist() == pytest.approx(logits, abs=1e-9)
    assert path[0, 0].tolist() == [2.0, 0.0] and mean_tax > 0.01
    way, plan = map(sigmoid, logits)
    reward = way * plan * 0.6 + (1 - way) * 0.2
    assert float(tax.expected_reward(SETTING, path[-1])) == pytest.approx(reward)


def test_the_mean_tax_is_that_of_each_batchs_last_update(monkeypatch):
    monkeypatch.setattr(tax, "BATCHES", 2)
    monkeypatch.setattr(tax, "UPDATES", 1)
    groups = tax.make_groups(SETTING)
    path, mean_tax = tax.train(groups, "grpo")
    taxes = []
    for logits in path[:2]:
        batch = tax.start_batch(groups, logits, "std")
        c = tax.compute_push(groups, "grpo", batch, logits)[1]
        taxes.append(learning_tax(c, batch.adv[:, 0], groups.nodes, groups.mask))
    assert mean_tax == pytest.approx(sum(taxes) / 2) and taxes[0] != taxes[1]


def test_copies_are_policies_of_their_own():
    one, two = tax.make_groups(SETTING), tax.make_groups(SETTING, copies=2)
    logits = torch.tensor([LOGITS, (1.2, -0.9)]).double()
    both = tax.compute_push(two, "grpo+proj", tax.start_batch(two, logits, "std"), logits + 0.3)[0]
    for row, alone in zip(both, logits[:, None], strict=True):
        batch = tax.start_batch(one, alone, "std")
        push, _ = tax.compute_push(one, "grpo+proj", batch, alone + 0.3)
        torch.testing.assert_close(row, push[0], atol=1e-14, rtol=0)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_very_many_sampled_groups_are_the_expectation(kind, monkeypatch):
    monkeypatch.setattr(sampled_tax, "SAMPLED", 60_000)
    monkeypatch.setattr(sampled_tax, "LAST", 1)
    monkeypatch.setattr(tax, "BATCHES", 2)
    optimizer = sampled_tax.make_optimizers(SETTING, "grpo", kind)[0.1]
    rewards = sampled_tax.final_rewards(SETTING, "grpo", optimizer, runs=2, seed=0)
    if kind == "SGD":
        path, _ = tax.train(tax.make_groups(SETTING), "grpo")
        expected = float(tax.expected_reward(SETTING, path[-1]))
        assert rewards == pytest.approx([expected] * 2, abs=5e-3)
    assert rewards[0] != rewards[1] and rewards == pytest.approx(rewards[::-1], abs=5e-3)
    start = tax.expected_reward(SETTING, torch.tensor(tax.START))
    assert min(rewards) > start + 0.02


@pytest.mark.parametrize("setting", tax.SETTINGS)
def test_the_closed_form_is_grpos_push_on_the_way_and_says_where_it_ends(setting):
    groups = tax.make_groups(setting)
    for share in (0.2, 0.8):
        logits = torch.tensor([[share, 1.0]], dtype=torch.float64).logit(eps=1e-12)
        batch = tax.start_batch(groups, logits, "mean")
        push = float(tax.compute_push(groups, "grpo", batch, logits)[0][0, 0])
        measured = push / (share * (1 - share) * (1 - 1 / tax.G))
        assert measured == pytest.approx(tax.predict_difference(setting, share), rel=1e-9)
    share = (1 / 24) / (0.6 / 24 + 0.4 / 6 - 1 / 32)
    ends = {"1": 0.6, "2": 0.6, "3": 0.6 * share, "4": 0.6, "5": 0.2}
    assert tax.predict_reward(setting) == pytest.approx(ends[setting[0]])


def test_the_command_prints_the_table_and_draws(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tax, "BATCHES", 1)
    monkeypatch.setattr(tax, "UPDATES", 2)
    tax.main(["--plot", str(tmp_path / "tax.svg")])
    out = capsys.readouterr().out
    for name in tax.NAMES:
        path, mean_tax = tax.train(tax.make_groups(SETTING), name)
        reward = float(tax.expected_reward(SETTING, path[-1]))
        assert re.search(f"\n{re.escape(name)} .*\\) +{reward:.3f} \\({mean_tax:.3f}\\) *\n", out)
    assert re.search("closed form +0.600 +0.600 +0.414 +0.600 +0.200 *\n", out)
    assert (tmp_path / "tax.svg").stat().st_size > 10_000
