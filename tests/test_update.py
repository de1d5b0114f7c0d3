"""What an update must not do, and how much it holds. Its values: test_whole_step.py."""

import copy
import math

import pytest
import torch
from helpers import refused

import train
from losses import METHODS
from toy.arithmetic import Arithmetic

GRPO = METHODS["grpo"].passes[0]


@pytest.fixture
def policy(scratch):
    return copy.deepcopy(scratch)


def prepare(policy, **options):
    """A scored rollout batch of 4 x 3 answers in which every group has a winner."""
    task, config = Arithmetic(), train.Config(prompts=4, group_size=3, max_tokens=8, **options)
    answers = train.sample(policy, task, task.train[:4], 1, config)
    answers.rewards = torch.tensor([1.0, 0.0, 0.0] * 4)
    return train.score(policy, None, answers, config), config


def is_unchanged(policy, before) -> bool:
    pairs = zip(before.model.parameters(), policy.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


BAD = {
    "loss nan": lambda batch: (batch.logp * 0).sum() + math.nan,  # its gradient is finite
    "loss inf": lambda batch: (batch.logp * 0).sum() + math.inf,
    "gradient": lambda batch: GRPO(batch) + (batch.logp - batch.logp.detach()).sqrt().sum(),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_number_that_is_not_finite_stops_before_the_weights_change(policy, bad):
    scored, config = prepare(policy)
    optimizer, before = train.adamw(policy.model, 1.0), copy.deepcopy(policy)
    said = refused(train.update, policy, optimizer, BAD[bad], scored, config)
    assert "step 1" in said and is_unchanged(policy, before)


def test_a_warm_start_that_diverges_is_one_line(policy):
    config = train.Config(warm_lr=1e30, warm_steps=9, warm_rows=2)
    assert "--warm-lr" in refused(train.warm_start, policy, Arithmetic(), config)


def test_a_batch_without_signal_leaves_the_weights_to_no_momentum(policy):
    scored, config = prepare(policy, lr=0.01, schedule="constant")
    optimizer, before = train.adamw(policy.model, 0.01), copy.deepcopy(policy)
    scored.batch.adv = 1e-6 * scored.batch.adv  # a faint signal is one
    train.learn(policy, optimizer, scored, config)
    assert not is_unchanged(policy, before)
    before, scored.batch.adv = copy.deepcopy(policy), 0 * scored.batch.adv
    train.learn(policy, optimizer, scored, config)
    assert is_unchanged(policy, before)


def test_the_budget_is_the_configs_however_short_the_answers_are(policy):
    scored, config = prepare(policy)
    config.max_tokens = 11
    answers = train.score(policy, None, scored.answers, config)
    assert answers.batch.max_tokens == 11 > answers.batch.logp.shape[1]


def test_a_group_without_signal_is_one_whose_rewards_are_all_equal(policy):
    scored, config = prepare(policy, lr=0.0)
    scored.answers.rewards = torch.tensor([1.0, 0.5, 0.0] * 2 + [0.5] * 6)  # 0.5 is a mean, twice
    scored = train.score(policy, None, scored.answers, config)
    updates = train.learn(policy, train.adamw(policy.model, 0.0), scored, config)
    assert train.diagnose(policy, scored, updates, config)["equal_groups"] == 0.5


def test_no_more_than_micro_rows_answers_are_in_the_model_at_once(policy):
    sizes = []
    policy.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(args[0] if args else kwargs["input_ids"])),
        with_kwargs=True,
    )
    scored, config = prepare(policy, micro_rows=5, epochs=2, minibatches=1, method="nthr")
    sampled = sizes.index(5)  # until then, answers are sampled
    train.learn(policy, train.adamw(policy.model, 0.01), scored, config)
    assert set(sizes[sampled:]) == {5, 2}


@pytest.mark.parametrize("gap", [0.01, math.nan])
def test_the_gap_between_sampler_and_scorer_is_that_of_the_worst_token(policy, gap):
    scored, config = prepare(policy)
    assert 0 < scored.max_logp_gap < 1e-5
    old, _ = train.in_pieces(policy, scored.answers, config)
    assert torch.equal(scored.batch.logp_old, old)  # so that the first ratios are exactly 1
    scored.answers.logp[0, 0] -= gap  # a single token
    assert "step 1" in refused(train.score, policy, None, scored.answers, config)
    config.temperature = 0.05  # log-probs, and with them their rounding, are 20 times as large
    train.check_gap(0.01, 1, config.temperature, torch.device("cpu"))
