"""toy/ibpo.py a second time, answer by answer; the signs of a step; what counts as its price."""

import itertools
import math

import pytest
import torch

from losses import kept_tokens
from toy import ibpo
from toy.ibpo import DIGITS, LETTERS, G, Setting

DIGIT = [letter % 10 for letter in range(LETTERS)]
SETTINGS = [Setting("sign", 4), Setting("correction", 5, temperature=0.6, shown=20.0)]
SETTINGS += [Setting("grpo", 4, temperature=0.7), Setting("sign", 4, mend=0.3, spread=1.0)]


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def pick(weights, u):
    total = 0.0
    for digit, weight in enumerate(weights):
        total += weight
        if u * sum(weights) < total:
            return digit


def naive_rollout(W, s, gen, groups):
    """Words, answers, corrections (None: there is none), and how many tokens were written."""
    words = torch.randint(LETTERS, (groups, s.length), generator=gen).tolist()
    words = [word for word in words for _ in range(G)]
    u = torch.rand(2, groups * G, s.length, generator=gen, dtype=torch.float64).tolist()
    answers, fixed = [], []
    for word, draws in zip(words, u[0], strict=True):
        odds = [[math.exp(x / s.temperature) for x in W[letter].tolist()] for letter in word]
        answers.append([pick(row, x) for row, x in zip(odds, draws, strict=True)])
    right = [[DIGIT[letter] for letter in word] for word in words]
    for i, word in enumerate(words):
        if answers[i] == right[i] or s.reading == "grpo":
            fixed.append(None)
            continue
        siblings = [i - i % G + (i + k) % G for k in range(1, G)]
        shown = next((j for j in siblings if answers[j] == right[j]), siblings[0])
        fixed.append([])
        for t, (a, b, x) in enumerate(zip(answers[i], answers[shown], u[1][i], strict=True)):
            logits = W[word[t]].tolist()
            odds = [
                math.exp((y + math.log(s.shown) * ((d == a) + (d == b))) / s.temperature)
                for d, y in enumerate(logits)
            ]
            digit = pick(odds, x)
            if s.mend is not None:
                digit = right[i][t] if a != b and x < s.mend else a
            fixed[-1].append(digit)
    written = sum(s.length * (1 + (row is not None)) for row in fixed)
    return words, answers, fixed, written


def naive_gradient(W, s, words, answers, fixed):
    """Of the mean of A'_i / K log pi over the tokens that a reading gives credit to."""
    right = [[DIGIT[letter] for letter in word] for word in words]
    plain = [float(row == good) for row, good in zip(answers, right, strict=True)]
    repaired = [
        row == good and reward == 0 and s.reading != "grpo"
        for row, good, reward in zip(fixed, right, plain, strict=True)
    ]
    shaped = [0.3 if ok else x for x, ok in zip(plain, repaired, strict=True)]
    found = torch.zeros_like(W)
    for i, word in enumerate(words):
        group = torch.tensor(shaped[i - i % G : i - i % G + G], dtype=torch.float64)
        A = float((shaped[i] - group.mean()) / (group.std() + 1e-4))
        row, other = answers[i], fixed[i]
        if repaired[i] and s.reading == "correction":
            row, other = other, row
        kept = [False] * s.length
        if repaired[i]:
            a, b = torch.tensor([row]), torch.tensor([other])
            kept = kept_tokens(a, a == a, b, b == b)[0].tolist()
        for letter, digit, stays in zip(word, row, kept, strict=True):
            if repaired[i] and s.reading in ("changed", "correction") and stays:
                continue
            if repaired[i] and s.reading == "sign" and stays == (A < 0):
                continue
            c = A / (s.temperature * s.length * len(words))
            found[letter] -= c * (W[letter] / s.temperature).softmax(0)
            found[letter, digit] += c
    return found


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.reading}-{s.length}-{s.mend}")
def test_a_rollout_is_that_of_a_loop_with_the_same_draws(setting):
    tables = ibpo.start_tables(setting, generators(3, 4))
    found = ibpo.sample(tables, setting, generators(5, 6), 6)
    rows = zip(
        *(x.tolist() for x in (found.run, found.words, found.answers, found.fixed)), strict=1
    )
    for k, seed in enumerate((5, 6)):
        words, answers, fixed, written = naive_rollout(
            tables[k].detach(), setting, *generators(seed), 6
        )
        expected = [
            ([k], *row[:2], row[1] if row[2] is None else row[2])
            for row in zip(words, answers, fixed, strict=True)
        ]
        assert [*itertools.islice(rows, 6 * G)] == expected
        assert found.generated[k] == written
        assert {None} < {*map(str, fixed)} | {None} or setting.reading == "grpo"


@pytest.mark.parametrize("reading", ibpo.LENGTHS)
def test_the_loss_gives_credit_to_the_tokens_of_its_reading_in_each_run(reading):
    setting = Setting(reading, 3, temperature=0.8, spread=0.5)
    tables = ibpo.start_tables(setting, generators(1, 2))
    rollout = ibpo.sample(tables, setting, generators(1, 2), 6)
    ibpo.loss(tables, rollout, setting).backward()
    for k, W in enumerate(tables.detach()):
        rows = rollout.run[:, 0] == k
        lists = [x[rows].tolist() for x in (rollout.words, rollout.answers, rollout.fixed)]
        expected = naive_gradient(W, setting, *lists)
        torch.testing.assert_close(-tables.grad[k], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("reading, optimizer, rate", [("grpo", "sgd", 400), ("sign", "adamw", 0.8)])
def test_training_counts_all_tokens_until_the_goal_and_seeds_do_not_meet(
    reading, optimizer, rate, monkeypatch
):
    monkeypatch.setattr(ibpo, "PROMPTS", 5)
    setting, found = Setting(reading, 4, optimizer=optimizer), []
    for seed in (7, 8):
        gens = generators(seed)
        W, m, v = ibpo.start_tables(setting, gens)[0].detach(), 0.0, 0.0
        used, step = 0, 0
        while (W.softmax(1)[range(LETTERS), DIGIT].mean() ** 4) < 0.5:
            *rows, written = naive_rollout(W, setting, gens[0], 5)
            g, used, step = naive_gradient(W, setting, *rows), used + written, step + 1
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            size = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            W = W + rate * (g if optimizer == "sgd" else size)
        found.append(used)
    assert ibpo.train(setting, range(7, 9), rate).tolist() == found


def test_the_share_of_repairs_is_the_sum_over_all_answers_siblings_and_corrections():
    setting = Setting("sign", 6)
    tables = ibpo.start_tables(setting, generators(0))
    p = [0.63] + [0.37 / 9] * 9  # of digit 0 for letter 0
    assert tables.detach()[0, 0].softmax(0).tolist() == pytest.approx(p)
    place = dict.fromkeys(itertools.product((True, False), repeat=2), 0.0)
    for a, b in itertools.product(range(DIGITS), repeat=2):
        odds = [p[d] * 6 ** ((d == a) + (d == b)) for d in range(DIGITS)]
        place[a == 0, b == 0] += p[a] * p[b] * odds[0] / sum(odds)
    both, first, second = place[True, True], place[True, False], place[False, True]
    # An answer and its sibling that are wrong, and a correction that is right at all places.
    repaired = sum(place.values()) ** 6 - (both + first) ** 6 - (both + second) ** 6 + both**6
    rollout = ibpo.sample(tables, setting, generators(1), 1500)
    wrong, failed = (
        (x != ibpo.DIGIT[rollout.words]).any(1).view(-1, G)
        for x in (rollout.answers, rollout.fixed)
    )
    share = 1 - float(failed[wrong.all(1)].double().mean())
    assert share == pytest.approx(repaired / (1 - 0.63**6) ** 2, abs=0.012)
    differ = (1 - 0.63**2 - 0.37**2 / 9, first + second + place[False, False])
    agree_wrong = 9 * p[1] ** 2 * p[0] / (p[0] + 36 * p[1] + 8 * p[1])
    assert (differ[1] - agree_wrong) / differ[0] == pytest.approx(0.8, abs=0.02)  # of the docstring


def test_the_chance_of_a_right_answer_is_the_mean_over_all_words():
    tables = ibpo.start_tables(Setting(spread=1.0), generators(0, 1))
    for W, found in zip(tables.detach(), ibpo.chance(tables, 2), strict=True):
        p = [float(W[letter].softmax(0)[DIGIT[letter]]) for letter in range(LETTERS)]
        assert sum(a * b for a in p for b in p) / LETTERS**2 == pytest.approx(float(found))
    noise = (tables - ibpo.start_tables(Setting(), generators(0, 1))).detach()
    assert float(noise.std()) == pytest.approx(1, abs=0.1) and float(noise.mean().abs()) < 0.1
    assert float(ibpo.chance(ibpo.start_tables(Setting(), generators(0)), 8)) == pytest.approx(
        0.63**8
    )


def test_a_step_on_all_wrong_groups_moves_what_the_naive_step_moves():
    setting = Setting("sign", optimizer="sgd")
    gens = generators(9)
    W = ibpo.start_tables(setting, gens)[0].detach()
    *rows, _ = naive_rollout(W, setting, gens[0], 128)
    groups = [[*zip(*(x[i : i + G] for x in rows), strict=True)] for i in range(0, 128 * G, G)]
    wrong = [g for g in groups if all(None not in row for row in g)][:32]
    words, answers, fixed = zip(*itertools.chain(*wrong), strict=True)
    moved = (W + 50 * naive_gradient(W, setting, words, answers, fixed)).log_softmax(1)
    moved -= W.log_softmax(1)
    right = sum(float(moved[letter, DIGIT[letter]]) for letter in range(LETTERS)) / LETTERS * 8
    slips = [
        float(moved[letter, a])
        for word, row, other in zip(words, answers, fixed, strict=True)
        if other == [DIGIT[letter] for letter in word]
        for letter, a, b in zip(word, row, other, strict=True)
        if a != b
    ]
    expected = (right, sum(slips) / len(slips))
    assert ibpo.one_step(setting, 9) == pytest.approx(expected)


def test_the_step_on_changed_tokens_rewards_mistakes_and_the_others_do_not():
    for optimizer in ibpo.STEP_RATES:
        steps = {
            reading: [ibpo.one_step(Setting(reading, optimizer=optimizer), seed) for seed in (0, 1)]
            for reading in ibpo.LENGTHS
        }
        assert steps["grpo"] == [(0.0, 0.0)] * 2
        for reading in ("sign", "correction"):
            assert all(right > 0.1 and slips < 0 for right, slips in steps[reading])
        assert all(right < -0.1 and slips > 0 for right, slips in steps["changed"])


def test_the_rate_is_chosen_on_other_seeds_and_runs_that_fail_count_as_the_limit(monkeypatch):
    rates, calls = (1, 2, 3), []
    costs = {1: [10.0, math.inf], 2: [9e4, 9e4], 3: [2e5, 0.0]}

    def train(setting, seeds, rate):
        calls.append((seeds, rate))
        return torch.tensor(costs[rate]) if seeds == ibpo.TUNING_SEEDS else torch.tensor([rate])

    monkeypatch.setattr(ibpo, "train", train)
    monkeypatch.setattr(ibpo, "RATES", {"adamw": rates})
    assert ibpo.tokens_to_goal(Setting()).tolist() == [2]
    assert calls == [(ibpo.TUNING_SEEDS, rate) for rate in rates] + [(ibpo.SEEDS, 2)]
    assert not {*ibpo.SEEDS} & {*ibpo.TUNING_SEEDS} and len(ibpo.SEEDS) == 12
    monkeypatch.setattr(ibpo, "LIMIT", 4000)
    assert ibpo.cell(torch.tensor([1000.0] * 6 + [math.inf] * 6)) == "2.5 +- 1.0 (6)"


def test_rows_are_readings_and_their_difference_is_paired(monkeypatch, capsys):
    costs = {"grpo": [9e3] * 11 + [math.inf], "sign": [7e3] * 12}
    monkeypatch.setattr(ibpo, "LENGTHS", dict.fromkeys(costs, (4,)))
    monkeypatch.setattr(
        ibpo, "tokens_to_goal", lambda setting: torch.tensor(costs[setting.reading])
    )
    curves = ibpo.study({}, ("grpo", "sign"))
    assert {reading: rows[4].tolist() for reading, rows in curves.items()} == costs
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0][:2] == ["grpo", "33.2"] and rows[0][-1] == "(1)" and rows[1][1] == "7.0"
    assert rows[2][:4] == ["sign", "minus", "grpo", "-26.2"]


def test_a_run_that_never_succeeds_stops_at_the_limit(monkeypatch):
    steps, sample = [], ibpo.sample
    monkeypatch.setattr(ibpo, "sample", lambda *args: steps.append(1) or sample(*args))
    monkeypatch.setattr(ibpo, "LIMIT", 6000)
    assert ibpo.train(Setting("grpo", 20), range(2), 0.1).tolist() == [math.inf] * 2
    assert len(steps) == 3  # of 16 x 8 x 20 tokens


def test_the_command_prints_both_tables_and_draws(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(ibpo, "SEEDS", range(2))
    monkeypatch.setattr(ibpo, "TUNING_SEEDS", range(100, 101))
    monkeypatch.setattr(ibpo, "RATES", {"adamw": (1.6,), "sgd": (800,)})
    monkeypatch.setattr(ibpo, "LENGTHS", {name: (4,) for name in ibpo.LENGTHS})
    monkeypatch.setattr(ibpo, "VARIANTS", {"SGD": ibpo.VARIANTS["SGD"]})
    ibpo.main(["--plot", str(tmp_path / "ibpo.png")])
    out = capsys.readouterr().out
    assert all(out.count(f"\n{name} ") >= 2 for name in ibpo.LENGTHS)
    assert (tmp_path / "ibpo.png").stat().st_size > 10_000
    ibpo.main(["--variants"])
    out = capsys.readouterr().out
    assert all(f"\n{name}\n" in out for name in ibpo.VARIANTS)
    assert out.count("sign minus grpo") == len(ibpo.VARIANTS)
