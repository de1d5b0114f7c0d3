"""toy/alike.py: the enumerated expectations are those of a naive loop over all ordered groups."""

import itertools
import math

import pytest

from toy import alike


def naive(kind, lengths, G, share, scale):
    """The expected push on the first way's logit; sum |tax| over sum |c| at shared nodes."""
    outcomes = [
        (way, reward, 1 / lengths[way][1 - reward], p * chance)
        for way, p in ((0, share), (1, 1 - share))
        for reward, chance in ((1, 0.6), (0, 0.4))
    ]
    sums, tax, size = [0.0, 0.0], 0.0, 0.0
    for group in itertools.product(outcomes, repeat=G):
        chance = math.prod(answer[3] for answer in group)
        mean = sum(answer[1] for answer in group) / G
        std = math.sqrt(sum((answer[1] - mean) ** 2 for answer in group) / (G - 1)) + 1e-4
        for way in (0, 1):
            visitors = [answer for answer in group if answer[0] == way]
            n = len(visitors)
            A = [(answer[1] - mean) / (std if scale == "std" else 1) for answer in visitors]
            w = [answer[2] for answer in visitors]
            if kind == "node mean" and n:
                w = [sum(w) / n] * n
            if kind == "unbiased" and n > 1:
                w = [sum(w) / n + (sum(w) / n - x) * (1 - n / G) / (n - 1) for x in w]
            sums[way] += chance * sum(x * a for x, a in zip(w, A, strict=True)) / G
            if n > 1:
                tax += chance * abs(sum((x - sum(w) / n) * a for x, a in zip(w, A, strict=True)))
                size += chance * sum(abs(x * a) for x, a in zip(w, A, strict=True))
    return sums[0] - share * sum(sums), tax / size


@pytest.mark.parametrize("lengths", [alike.ALIKE, alike.EXCHANGED, alike.UNLIKE], ids=str)
@pytest.mark.parametrize("kind", alike.KINDS)
def test_push_and_tax_are_those_of_the_naive_loop(kind, lengths):
    for G, share, scale in ((2, 0.7, "std"), (3, 0.4, "mean"), (4, 0.7, "std"), (4, 0.5, "mean")):
        measured = alike.expected_push(alike.make_groups(lengths, G), share, kind, scale)
        expected = naive(kind, lengths, G, share, scale)
        assert measured == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_training_climbs_the_logits(monkeypatch):
    monkeypatch.setattr(alike, "UPDATES", {3: 4})
    logits, taxes = [math.log(0.7), math.log(0.3)], []
    for _ in range(4):
        share = 1 / (1 + math.exp(logits[1] - logits[0]))
        push, tax = naive("unbiased", alike.UNLIKE, 3, share, "std")
        taxes.append(tax)
        logits = [logits[0] + 4 * push, logits[1] - 4 * push]
    expected = 1 / (1 + math.exp(logits[1] - logits[0])), sum(taxes) / 4
    groups = alike.make_groups(alike.UNLIKE, 3)
    assert alike.train(groups, 0.7, "unbiased") == pytest.approx(expected, rel=1e-9)


def test_the_command_prints_the_figures_that_the_readme_shows(capsys, monkeypatch):
    monkeypatch.setattr(alike, "UPDATES", {4: 20})
    monkeypatch.setattr(alike, "SIZES", (4, 8))
    alike.main([])
    pushes, shares = capsys.readouterr().out.split("Share")
    pushes = [float(x) for line in pushes.splitlines()[3:] for x in line.split()[-2:]]
    alike_ways = [0, 0, 0.00293, 0.00225, 0.00249, 0.00075]
    unlike_ways = [-0.00937, -0.01094, -0.00273, -0.00155, -0.00117, -0.00009]
    assert pushes == pytest.approx(alike_ways + unlike_ways, abs=1.1e-5)
    shares = [[float(x) for x in line.split()[-2:]] for line in shares.splitlines()[2:]]
    grpo, node_mean, unbiased = zip(shares[:3], shares[3:], strict=True)
    assert all(share == 0.7 and tax > 0.6 for share, tax in grpo)
    assert node_mean[0][0] > unbiased[0][0] > 0.75 and node_mean[1][0] < unbiased[1][0] < 0.65
    assert all(tax == 0 for _, tax in node_mean)
