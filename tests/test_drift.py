"""toy/drift.py: exact sums, and a shared token that stays where it was, or does not."""

import math

import pytest
import torch

from losses import METHODS
from toy import drift

STAYS = {"reinforce", "grpo-symmetric", "cispo", "dfpo-min", "dfpo-min eps 0.2", "dfpo-orthogonal"}
STAYS |= {"grpo+proj", "dr-grpo+proj", "gspo+proj"}


@pytest.fixture(scope="module")
def curves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "STEPS", 5)
        patch.setattr(drift, "SEEDS", 2)
        yield drift.study()


def test_the_start_policy_ends_each_branch_where_it_must_and_its_answers_have_probability_one():
    start, answers = drift.draw(3)
    found = list(start.answers(drift.PROMPT))
    assert sum(p for _, p in found) == pytest.approx(1, abs=1e-12)
    for y, p in found:
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
    right = sum(p for y, p in after.items() if drift.reward(y))
    assert seen["reward"] == pytest.approx(right / opener)
    logit = [math.log(x / (1 - x)) for x in (opener, before)]
    assert seen["drift"] == pytest.approx(logit[0] - logit[1]) and seen["kl"] > 0
    share = [sum(p for y, p in after.items() if drift.reward(y) and y[1] == b) for b in (1, 2)]
    share = [x / sum(share) for x in share]
    assert seen["solutions"] == pytest.approx(-sum(x * math.log(x) for x in share))


@pytest.mark.parametrize("name", drift.NAMES)
def test_the_shared_token_stays_exactly_where_it_was_where_the_theory_says_so(curves, name):
    curve, other = curves[name]
    assert curve != other
    assert curve[0]["drift"] == 0 and len(curve) == 6 and curve[-1]["reward"] > curve[0]["reward"]
    if name in STAYS:
        assert max(abs(point["drift"]) for point in curve) < 1e-12
    if name in ("grpo", "gspo", "pos-only"):
        assert max(abs(point["drift"]) for point in curve) > 0.01
    if name.endswith("+proj"):
        assert max(point["tax"] for point in curve) < 1e-12
    assert name.partition("+")[0].split()[0] in METHODS


def test_the_command_prints_the_table_and_draws(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "STEPS", 2)
    monkeypatch.setattr(drift, "SEEDS", 1)
    drift.main(["--plot", str(tmp_path / "drift.svg")])
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in drift.NAMES)
    assert (tmp_path / "drift.svg").stat().st_size > 10_000
