"""Whoever quotes a neighbour's figure gets what its page says it measures."""

from types import SimpleNamespace

import pytest
import torch
from conftest import random_policy

import losses
import train
from experiments import neighbours
from tasks.arithmetic import Arithmetic


def test_every_step_begins_with_the_same_policy(easy):
    policy, task, config = random_policy(0), Arithmetic(), train.Config(minibatches=1)
    answers = train.sample(policy, task, task.test[:4], 1, config)
    first, second = (
        neighbours.step(policy, task, answers, losses.METHODS["grpo"], config)[0] for _ in range(2)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert (first * answers.adv)[answers.mask].sum() > 0.1


def test_nthr_pos_only_and_grpo_are_three_methods(easy, monkeypatch):
    # All answers to the first question are wrong, and all to the second one right: neither counts.
    short = neighbours.SHORT | {"warm_steps": 1, "group_size": 2}
    for name, value in dict(SHORT=short, STARTS=1, QUESTIONS=1).items():
        monkeypatch.setattr(neighbours, name, value)
    deltas = neighbours.measure_deltas()
    assert deltas.round(6).T.nunique().tolist() == [3]
    assert deltas[["grpo", "pos-only"]].min().min() > 0  # right answers get likelier


def test_lopti_by_hand(monkeypatch):
    p = torch.tensor([[0.1, 0.2, 0.8, 0.9], [0.3, 0.76, 0.9, 0.99]])
    adv = torch.tensor([[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, 0.0, 0.0]])
    answers = SimpleNamespace(logp_sampled=p.log(), adv=adv, mask=p < 0.95)

    def step(policy, task, answers, method, config):  # raises all tokens
        pushed = method.credit(adv, None) if method.credit else adv
        return torch.ones(2, 4), pushed.abs().sum().item()

    monkeypatch.setattr(neighbours, "step", step)
    found = [*neighbours.measure_tokens(None, None, answers, None).values()]
    shares_and_norms = [2 / 7, 2 / 6, 1 / 7, 1 / 6, 0, 0, 4 / 7, 3 / 6]
    # Of the tokens with p > .75, two have A > 0, one has A < 0, and one has no A.
    assert found == pytest.approx(shares_and_norms + [2 / 3] * 3)
