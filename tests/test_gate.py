"""toy/gate.py: its enumerated updates are those of a naive loop over all ordered groups."""

import itertools
import math

import pytest
import torch

import losses
from toy import gate

OLD, NEW = (0.4, -1.0), (1.1, -1.6)  # log-odds of the good tokens; both ratios leave the range
WORLD = gate.two_tokens(0.5, 0.05)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def probability(answer, odds):
    return [sigmoid(z if good else -z) for good, z in zip(answer[:2], odds, strict=True)]


def weights(name, group, A):
    """What multiplies the score of each token of each answer: c, but for 1/T."""
    r = []
    for answer in group:
        new, old = probability(answer, NEW), probability(answer, OLD)
        r.append([x / y for x, y in zip(new, old, strict=True)])
    s = [math.sqrt(a * b) for a, b in r]
    rows = []
    for i, a in enumerate(A):
        if name == "recentred":
            products = [x * y for x, y in r]
            row = [sum(products[i] * products[j] * (a - A[j]) for j in range(len(A))) / len(A)] * 2
        elif name == "dfpo-min":
            row = [min(s) * a] * 2
        elif name == "gspo":
            is_open = not (s[i] > 1.02 and a > 0 or s[i] < 0.98 and a < 0)
            row = [is_open * s[i] * a] * 2
        else:
            row = [0.0 if x > 1.2 and a > 0 or x < 0.8 and a < 0 else x * a for x in r[i]]
        rows.append(row)
    return rows


def naive_push(name):
    """On the log-odds of both good tokens."""
    outcomes = list(itertools.product((True, False), (True, False), (1.0, 0.0)))
    total = [0.0, 0.0]
    for group in itertools.product(outcomes, repeat=gate.G):
        chance = 1.0
        for answer in group:
            right = 0.3 + 0.1 * answer[0] + 0.1 * answer[1]
            chance *= math.prod(probability(answer, OLD)) * (right if answer[2] else 1 - right)
        mean = sum(R for *_, R in group) / gate.G
        std = math.sqrt(sum((R - mean) ** 2 for *_, R in group) / (gate.G - 1))
        size = 1.0 if name == "recentred" else std + 1e-4
        A = [(R - mean) / size if std else 0.0 for *_, R in group]
        for answer, row in zip(group, weights(name, group, A), strict=True):
            for t in (0, 1):
                score = answer[t] - sigmoid(NEW[t])
                total[t] += chance * row[t] * score / gate.G / 2
    return total


def logits(odds):
    return torch.tensor([[[z, 0.0] for z in odds]], dtype=torch.float64)


@pytest.mark.parametrize("name", ["grpo", "gspo", "dfpo-min", "recentred"])
def test_the_push_is_that_of_the_naive_loop_off_policy(name, monkeypatch):
    monkeypatch.setattr(gate, "G", 3)
    groups = gate.Groups(WORLD)
    p = groups.probabilities(logits(OLD))
    tokens, batch = groups.batch(name, logits(OLD), torch.arange(p.shape[1])[None], p)
    push = gate.push(name, tokens, batch, logits(NEW))[0]
    assert push[:, 0].tolist() == pytest.approx(naive_push(name), abs=1e-14)
    assert push.sum(1).tolist() == pytest.approx([0, 0], abs=1e-14)


def test_a_rate_trains_a_policy_of_its_own():
    rates = torch.tensor([3.0, 50.0], dtype=torch.float64)
    setting = gate.Setting(WORLD, 2, 3)
    both = gate.train(setting, "grpo", rates)
    for k, rate in enumerate(rates):
        alone = gate.train(setting, "grpo", rate[None])
        assert len(alone) == 7
        torch.testing.assert_close(both[-1][k], alone[-1][0], atol=1e-12, rtol=0)
    p = gate.Groups(WORLD).probabilities(both[0])
    tokens, batch = gate.Groups(WORLD).batch("grpo", both[0], torch.arange(330).expand(2, -1), p)
    first = both[0] + rates[:, None, None] * gate.push("grpo", tokens, batch, both[0])
    torch.testing.assert_close(first, both[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["grpo", "recentred"])
def test_very_many_sampled_groups_are_the_expectation(name):
    rates = torch.tensor([20.0], dtype=torch.float64)
    exact, sampled = (
        gate.train(gate.Setting(WORLD, 2, 1, sampled=n), name, rates)[-1] for n in (0, 200_000)
    )
    torch.testing.assert_close(exact, sampled, atol=0.05, rtol=0)


def test_after_one_update_the_min_undoes_more_than_it_and_a_blind_clip_nothing():
    rate = torch.tensor([50.0], dtype=torch.float64)
    share = {}
    for name in ("grpo", "grpo-symmetric"):
        path = gate.train(gate.Setting(WORLD, 2, 1), name, rate)
        share[name] = [float(z[0, 0].softmax(0)[0]) for z in path]
    assert share["grpo"][2] < 0.5 < share["grpo"][1] == share["grpo-symmetric"][1]
    assert share["grpo-symmetric"][2] == pytest.approx(share["grpo-symmetric"][1])
    best = gate.two_tokens(1 - 1e-9, 1 - 1e-9)
    assert float(gate.expected_reward(best, best.start)) == pytest.approx(0.5)


def test_recentred_stays_finite_where_a_product_of_ratios_overflows():
    logp = torch.zeros(3, 100, requires_grad=True)
    old = torch.tensor([-2.0, -2.0, 3.0])[:, None].expand(3, 100)  # e^200 is no float32
    adv = torch.tensor([1.0, -0.5, -0.5])[:, None].expand(3, 100)
    batch = losses.Batch(logp, old, adv, torch.ones(3, 100) > 0, 3, 100)
    c = losses.token_coefficients(losses.recentred(batch), logp)
    assert c.isfinite().all() and c[0, 0] > 0 and float(c.sum()) == 0
