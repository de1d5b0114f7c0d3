"""toy/ibpo.py a second time, answer by answer; what a step moves; what counts as its price."""

import itertools
import math

import pytest
import torch

from toy import ibpo
from toy.ibpo import DIGITS, LETTERS, G

DIGIT = [letter % 10 for letter in range(LETTERS)]
READINGS = ("grpo", "sign", "none", "changed")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def naive_draw(odds, gen):
    """One digit for each place of each answer, from odds[answer][place][digit]."""
    places = torch.tensor([place for row in odds for place in row], dtype=torch.float64)
    return torch.multinomial(places, 1, generator=gen).view(len(odds), -1).tolist()


def naive_rollout(W, groups, K, temperature, gen):
    """Words, answers, corrections, and how many tokens the answers and corrections took."""
    words = torch.randint(LETTERS, (groups, K), generator=gen).tolist()
    words = [word for word in words for _ in range(G)]
    W = W.tolist()
    odds = [[[math.exp(x / temperature) for x in W[letter]] for letter in word] for word in words]
    answers = naive_draw(odds, gen)
    right = [[DIGIT[letter] for letter in word] for word in words]
    for i, word in enumerate(words):
        siblings = [i - i % G + (i + k) % G for k in range(1, G)]
        if answers[i] == right[i]:
            siblings.append(i)  # its correction is drawn, too, and goes nowhere
        shown = next((j for j in siblings if answers[j] == right[j]), siblings[0])
        for t, (a, b) in enumerate(zip(answers[i], answers[shown], strict=True)):
            for d in range(DIGITS):
                x = W[word[t]][d] + math.log(6) * ((d == a) + (d == b))
                odds[i][t][d] = math.exp(x / temperature)
    wrong = sum(row != good for row, good in zip(answers, right, strict=True))
    return words, answers, naive_draw(odds, gen), (K * len(answers), K * wrong)


def naive_gradient(W, temperature, reading, words, answers, fixed):
    """Of the mean of A'_i / K log pi over the tokens that a reading gives credit to."""
    W, rewards, repaired = W.detach().requires_grad_(), [], []
    for word, answer, other in zip(words, answers, fixed, strict=True):
        good = [DIGIT[letter] for letter in word]
        repaired.append(answer != good and other == good and reading != "grpo")
        rewards.append(1.0 if answer == good else 0.3 * repaired[-1])
    J = 0.0
    for i, word in enumerate(words):
        group = torch.tensor(rewards[i - i % G : i - i % G + G], dtype=torch.float64)
        A = float((rewards[i] - group.mean()) / (group.std() + 1e-4))
        for letter, digit, other in zip(word, answers[i], fixed[i], strict=True):
            if repaired[i] and reading == "changed" and digit == other:
                continue
            if repaired[i] and reading == "sign" and (digit == other) == (A < 0):
                continue
            logp = (W[letter] / temperature).log_softmax(0)[digit]
            J = J + A * logp / (len(word) * len(words))
    return torch.autograd.grad(J, W)[0]


@pytest.mark.parametrize("reading", READINGS)
def test_rollout_and_loss_are_those_of_loops_with_the_same_draws(reading):
    noise = torch.randn(LETTERS, DIGITS, generator=generator(1), dtype=torch.float64)
    table = (ibpo.start_table().detach() + 0.5 * noise).requires_grad_()
    rollout = ibpo.sample(table, 20, 3, 0.8, generator(1))
    words, answers, fixed, _ = naive_rollout(table.detach(), 20, 3, 0.8, generator(1))
    assert [x.tolist() for x in rollout] == [words, answers, fixed]
    ibpo.loss(table / 0.8, *rollout, reading).backward()
    expected = naive_gradient(table, 0.8, reading, words, answers, fixed)
    torch.testing.assert_close(-table.grad, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("reading, temperature", [("grpo", 0.7), ("sign", 0.7), ("sign", 1.0)])
def test_training_counts_all_tokens_until_the_goal(reading, temperature, monkeypatch):
    monkeypatch.setattr(ibpo, "PROMPTS", 5)
    W, gen = ibpo.start_table().detach(), generator(7)
    tokens = 0
    while (W.softmax(1)[range(LETTERS), DIGIT].mean() ** 5) < 0.5:
        *rollout, (first, second) = naive_rollout(W, 5, 5, temperature, gen)
        W = W + 60 * naive_gradient(W, temperature, reading, *rollout)
        tokens += first + second * (reading != "grpo")
    assert tokens >= 1000  # at least three steps
    assert ibpo.tokens_to_goal(reading, 5, temperature, 60, 7) == tokens
    monkeypatch.setattr(ibpo, "LIMIT", 1)
    assert 200 <= ibpo.tokens_to_goal(reading, 5, temperature, 60, 7) < tokens  # a single step


@pytest.mark.parametrize("K, share", [(4, 0.432), (8, 0.264), (20, 0.041)])
def test_the_share_of_repairs_is_the_sum_over_all_answers_siblings_and_corrections(K, share):
    p = [0.63] + [0.37 / 9] * 9  # of digit 0 for letter 0
    assert ibpo.start_table().detach()[0].softmax(0).tolist() == pytest.approx(p)
    place = dict.fromkeys(itertools.product((True, False), repeat=2), 0.0)
    for a, b in itertools.product(range(DIGITS), repeat=2):
        odds = [p[d] * 6 ** ((d == a) + (d == b)) for d in range(DIGITS)]
        place[a == 0, b == 0] += p[a] * p[b] * odds[0] / sum(odds)
    both, first, second = place[True, True], place[True, False], place[False, True]
    # An answer and its sibling that are wrong, and a correction that is right at all places.
    repaired = sum(place.values()) ** K - (both + first) ** K - (both + second) ** K + both**K
    assert repaired / (1 - 0.63**K) ** 2 == pytest.approx(share, abs=0.001)  # of toy/README.md
    words, answers, fixed = ibpo.sample(ibpo.start_table(), 1500, K, 1.0, generator(1))
    wrong = (answers != ibpo.DIGIT[words]).any(1).view(-1, G).all(1).repeat_interleave(G)
    found = (fixed == ibpo.DIGIT[words]).all(1)[wrong].double().mean()
    assert float(found) == pytest.approx(share, abs=0.03)


def test_a_step_on_all_wrong_groups_moves_what_the_naive_step_moves():
    W = ibpo.start_table().detach()
    *rows, _ = naive_rollout(W, 64, 8, 1.0, generator(9))
    groups = [[*zip(*(x[i : i + G] for x in rows), strict=True)] for i in range(0, 64 * G, G)]
    right = [[[DIGIT[letter] for letter in word] for word, _, _ in group] for group in groups]
    pairs = zip(groups, right, strict=True)
    wrong = [g for g, goods in pairs if all(row[1] != goods[0] for row in g)][:32]
    words, answers, fixed = zip(*itertools.chain(*wrong), strict=True)
    assert len(words) == 32 * G
    moved = (W + 50 * naive_gradient(W, 1.0, "sign", words, answers, fixed)).log_softmax(1)
    moved -= W.log_softmax(1)
    gain = sum(float(moved[letter, DIGIT[letter]]) for letter in range(LETTERS)) / LETTERS * 8
    slips = [
        float(moved[letter, a])
        for word, row, other in zip(words, answers, fixed, strict=True)
        if other == [DIGIT[letter] for letter in word]
        for letter, a, b in zip(word, row, other, strict=True)
        if a != b
    ]
    assert ibpo.one_step("sign", 9) == pytest.approx((gain, sum(slips) / len(slips)))


def test_the_tables_have_means_over_seeds_at_the_rate_that_is_best_on_others(
    capsys, tmp_path, monkeypatch
):
    def tokens_to_goal(reading, K, temperature, rate, seed):
        excess = 0 if rate == 3200 else 9 if seed >= 100 else -9  # the best on the other seeds
        return 1000 * (10 * K * temperature + (reading == "sign") + (-1) ** seed + excess)

    monkeypatch.setattr(ibpo, "tokens_to_goal", tokens_to_goal)
    monkeypatch.setattr(ibpo, "one_step", lambda reading, seed: (seed % 2, -1.0))
    ibpo.main(["--plot", str(tmp_path / "ibpo.svg")])
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "none 0.50 +- 0.22 -1.00 +- 0.00" in rows
    half = 2.0687 * (24 / 23) ** 0.5 / 24**0.5
    for name, first, second in [("grpo", 40, 80), ("ibpo", 41, 81), ("ibpo at 0.7", 29, 57)]:
        row = next(row for row in rows if row.startswith(f"{name} {first}.00"))
        assert row.startswith(f"{name} {first}.00 +- {half:.2f} {second}.00 +-")
    assert "</svg>" in (tmp_path / "ibpo.svg").read_text()
