"""toy/drift.py: exact sums, and a shared token that stays where it was, or does not."""

import math
import re

import pytest
import torch

from toy import drift

STAYS = {"reinforce", "grpo-symmetric", "cispo", "dfpo-min", "dfpo-min eps 0.2", "dfpo-orthogonal"}
STAYS |= {"grpo+proj", "dr-grpo+proj", "gspo+proj"}


@pytest.fixture(scope="module")
def curves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "STEPS", 5)
        patch.setattr(drift, "SEEDS", 2)
        yield drift.study()


def test_the_start_policy_ends_each_branch_where_it_must_and_its_groups_are_mixed():
    start, answers = drift.draw(3)
    for y, p in start.answers(drift.PROMPT):
        if p > 1e-6:
            assert len(y) == {1: 4, 2: 5, 3: 3}[y[1]] and y[-1] == 0
    assert len(answers) == 64 and {y[0] for y in answers} == {drift.OPENER}
    assert {y[1] for y in answers} == {1, 2, 3}
    for k in range(0, 64, 8):
        assert 0 < sum(map(drift.reward, answers[k : k + 8])) < 8


def test_what_is_measured_is_what_all_answers_say():
    start, _ = drift.draw(1)
    g = torch.Generator().manual_seed(0)
    moved = start.step(torch.randn(start.W.shape, generator=g, dtype=torch.float64), 0.3)
    after = {y: p for y, p in moved.answers(drift.PROMPT) if y[0] == drift.OPENER}
    opener = sum(after.values())
    before = sum(p for y, p in start.answers(drift.PROMPT) if y[0] == drift.OPENER)
    seen = drift.measure(moved, start)
    right = {y: p for y, p in after.items() if y[1] != 3 and [a for a in y if a][-1] == 1}
    assert seen["reward"] == pytest.approx(sum(right.values()) / opener)
    logit = [math.log(x / (1 - x)) for x in (opener, before)]
    assert seen["drift"] == pytest.approx(abs(logit[0] - logit[1])) and seen["kl"] > 0
    share = sum(p for y, p in right.items() if y[1] == 1) / sum(right.values())
    entropy = -sum(x * math.log(x) for x in (share, 1 - share))
    assert seen["solutions"] == pytest.approx(entropy)


@pytest.mark.parametrize("name", drift.NAMES)
def test_the_shared_token_stays_exactly_where_it_was_where_the_theory_says_so(curves, name):
    curve = curves[name]
    assert curve["drift"][0] == 0 and len(curve["drift"]) == 6
    assert curve["reward"][-1] > curve["reward"][0]
    if name in STAYS:
        assert max(curve["drift"]) < 1e-12
    if name in ("grpo", "gspo", "pos-only"):
        assert max(curve["drift"]) > 0.01
    if name.endswith("+proj"):
        assert max(curve["tax"]) < 1e-12


def test_the_first_step_is_equally_long_for_all_and_a_curve_is_the_mean_of_its_starts(monkeypatch):
    monkeypatch.setattr(drift, "STEPS", 1)
    monkeypatch.setattr(drift, "NAMES", ("grpo", "dr-grpo"))
    lengths, climb = [], drift.Policy.step

    def step(policy, direction, eta):
        lengths.append(float((eta * direction).norm()))
        return climb(policy, direction, eta)

    monkeypatch.setattr(drift.Policy, "step", step)
    curves = drift.study()
    assert lengths[::2] == pytest.approx([0.6] * 2 * drift.SEEDS)
    ends = [drift.descend("grpo", *drift.draw(seed))[-1]["tax"] for seed in range(drift.SEEDS)]
    assert curves["grpo"]["tax"][-1] == pytest.approx(sum(ends) / len(ends))


def test_the_table_has_the_ends_of_the_curves_and_the_mean_tax(curves, capsys, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "study", lambda: curves)
        drift.main(["--plot", str(tmp_path / "drift.svg")])
    out = capsys.readouterr().out
    for name, curve in curves.items():
        ends = [curve[key][-1] for key in ("drift", "kl", "solutions", "reward")]
        row = [float(x) for x in re.search(rf"\n{re.escape(name)} +(\d.*)", out)[1].split()]
        assert row == pytest.approx([*ends, sum(curve["tax"]) / 6], abs=6e-5)
    assert "</svg>" in (tmp_path / "drift.svg").read_text()
