"""toy/drift.py: exact sums, and a shared token that stays where it was, or does not."""

import math
import re
from functools import partial

import pytest
import torch

import losses
from toy import drift
from toy.policy import pad

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


def climb_by_hand(loss, seed: int) -> list[float]:
    """The expected reward after 0 to 5 steps of a loss, off-policy after the first."""
    policy, answers = drift.draw(seed)
    start, rewards, rate = policy, [], None
    tokens, mask = pad(answers)
    R = torch.tensor([drift.reward(y) for y in answers], dtype=torch.float64)
    adv = losses.group_advantages(R, 8)[:, None].expand(mask.shape)
    old = start.log_probs([drift.PROMPT] * 64, answers)[0]
    for _ in range(6):
        rewards.append(drift.measure(policy, start)["reward"])
        W = policy.W.clone().requires_grad_()
        policy = drift.Policy(W, start.phi, start.horizon)
        logp = policy.log_probs([drift.PROMPT] * 64, answers)[0]
        batch = losses.Batch(logp, old, adv, mask, group_size=8, max_tokens=5)
        (g,) = torch.autograd.grad(-loss(batch), W)
        rate = rate or 0.6 / g.norm()  # all methods' first step is equally long
        policy = policy.step(g, rate)
    return rewards


def test_a_curve_is_the_mean_of_its_starts_and_off_policy_after_the_first_step(curves):
    clipped = partial(losses.dfpo_min, eps=0.2)
    for name, loss in {"grpo": losses.grpo, "dfpo-min eps 0.2": clipped}.items():
        runs = [climb_by_hand(loss, seed) for seed in (0, 1)]
        expected = [sum(step) / 2 for step in zip(*runs, strict=True)]
        assert curves[name]["reward"] == pytest.approx(expected, abs=1e-12)
    assert curves["dfpo-min"]["reward"][5] > curves["dfpo-min eps 0.2"]["reward"][5] + 1e-3


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
