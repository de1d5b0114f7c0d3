"""What an update must not do, and what it need not compute. Its values: test_whole_step.py."""

import copy
import math
from dataclasses import replace

import pytest
import torch

import train
from llm.runs import adamw
from losses import METHODS, group_advantages
from toy.arithmetic import Arithmetic

GRPO = METHODS["grpo"].passes[0]


@pytest.fixture
def policy(scratch):
    return copy.deepcopy(scratch)


def prepare(policy, **options):
    """A scored rollout batch of 4 x 3 answers in which every group has a winner."""
    task, config = Arithmetic(), train.Config(prompts=4, group_size=3, max_tokens=8, **options)
    answers = train.sample(policy, task, task.train[:4], 1, config)
    answers.shaped = answers.rewards = torch.tensor([1.0, 0.0, 0.0] * 4)
    return answers, train.score(policy, None, answers, config), config


def assert_unchanged(policy, before):
    pairs = zip(before.model.parameters(), policy.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_loss_stops_before_the_weights_change(policy, bad):
    _, scored, _ = prepare(policy, minibatches=1)
    optimizer, before = torch.optim.SGD(policy.model.parameters(), lr=1.0), copy.deepcopy(policy)
    with pytest.raises(FloatingPointError, match=str(bad)):
        bad_loss = lambda b: (b.logp * 0).sum() + bad  # noqa: E731  its gradient is finite
        train.update(optimizer, bad_loss, scored.batch, scored.logp, 1.0)
    assert_unchanged(policy, before)


def test_a_non_finite_gradient_stops_before_the_weights_change(policy):
    _, scored, _ = prepare(policy, minibatches=1)
    optimizer, before = torch.optim.SGD(policy.model.parameters(), lr=1.0), copy.deepcopy(policy)
    with pytest.raises(FloatingPointError, match="gradient norm nan"):
        scored.logp.register_hook(lambda grad: grad * math.nan)
        train.update(optimizer, GRPO, scored.batch, scored.logp, 1.0)
    assert_unchanged(policy, before)


def test_a_batch_without_signal_leaves_the_weights_to_no_momentum(policy):
    _, scored, config = prepare(policy, lr=0.01, schedule="constant")
    optimizer, before = adamw(policy.model, 0.01), copy.deepcopy(policy)
    scored.batch.adv = 1e-6 * scored.batch.adv  # a faint signal is one
    train.learn(policy, optimizer, scored, config)
    with pytest.raises(AssertionError):
        assert_unchanged(policy, before)
    before, scored.batch.adv = copy.deepcopy(policy), 0 * scored.batch.adv
    train.learn(policy, optimizer, scored, config)
    assert_unchanged(policy, before)


def test_minibatches_are_whole_groups_and_cover_every_row_once_an_epoch(policy):
    _, scored, config = prepare(policy, epochs=3, minibatches=2, method="lopti")
    updates = train.learn(policy, adamw(policy.model, 0.01), scored, config)
    assert [made.which_pass for made in updates] == [0, 0, 1, 1] * 3
    orders = set()
    for epoch in (updates[0:4], updates[4:8], updates[8:12]):
        for k in (0, 1):  # both passes go over the same minibatches
            assert torch.equal(epoch[k].index, epoch[k + 2].index)
        rows = torch.cat([epoch[0].index, epoch[1].index])
        assert sorted(rows.tolist()) == list(range(12))
        groups = rows.view(4, 3)
        assert torch.equal(groups, groups[:, :1] + torch.arange(3)) and not (groups[:, 0] % 3).any()
        orders.add(tuple(groups[:, 0].tolist()))
    assert len(orders) > 1  # each epoch has another order


@pytest.mark.parametrize(
    "epochs, minibatches, with_gradient, without", [(1, 1, 12, 0), (2, 1, 24, 0), (2, 2, 24, 12)]
)
def test_what_is_known_is_not_scored_again(
    policy, monkeypatch, epochs, minibatches, with_gradient, without
):
    """The first update has the graph of the old log-probs if it takes the whole batch."""
    made, real = [], train.log_probs
    spy = lambda *a: made.append((torch.is_grad_enabled(), len(a[1].mask))) or real(*a)  # noqa: E731
    monkeypatch.setattr(train, "log_probs", spy)
    _, scored, config = prepare(policy, epochs=epochs, minibatches=minibatches)
    train.learn(policy, adamw(policy.model, 0.01), scored, config)
    assert sum(n for grad, n in made if grad) == with_gradient
    assert sum(n for grad, n in made if not grad) == without


def test_a_credit_rule_sees_the_whole_batch_once(policy, monkeypatch):
    """It gets advantages of the shaped rewards, and beside them the rewards themselves."""
    seen = []

    def credit(adv, old):
        seen.append((adv, old))
        return adv * 0.5

    monkeypatch.setitem(METHODS, "ibpo", replace(METHODS["ibpo"], credit=credit))
    answers, scored, config = prepare(policy, method="ibpo", epochs=2)
    seen.clear()
    answers.shaped = torch.tensor([1.0, 0.3, 0.0] * 4)
    scored = train.score(policy, None, answers, config)
    train.learn(policy, adamw(policy.model, 0.01), scored, config)
    ((adv, old),) = seen
    mask = answers.rows.mask
    assert torch.equal(adv, group_advantages(answers.shaped, 3)[:, None] * mask)
    assert torch.equal(scored.batch.adv, adv * 0.5) and torch.equal(old.rewards, answers.rewards)
    assert torch.equal(old.tokens, answers.rows.tokens) and torch.equal(old.mask, mask)
    assert torch.equal(old.logp, scored.batch.logp) and not old.logp.requires_grad
    assert old.kept_mask is answers.kept_mask and old.repaired is answers.repaired
    assert old.hidden is None and old.group_size == 3


def test_the_budget_is_the_configs_however_short_the_answers_are(policy):
    answers, _, config = prepare(policy)
    rows = answers.rows
    answers.rows = replace(rows, tokens=rows.tokens[:, :5], mask=rows.mask[:, :5])
    answers.logp = answers.logp[:, :5]
    assert train.score(policy, None, answers, config).batch.max_tokens == 8


def test_delta_is_that_of_right_answers_which_have_an_advantage(policy):
    answers, _, config = prepare(policy)
    answers.shaped = answers.rewards = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0])
    scored = train.score(policy, None, answers, config)
    made = train.Update(torch.arange(12), 0, scored.batch.adv, 1.0, 0.1)
    right = torch.tensor([3, 9, 10])  # the first group's rewards are equal
    scored.batch.logp_old = scored.batch.logp_old - 5.0
    scored.batch.logp_old[right] += 6.0
    expected = -scored.rows.mask.shape[1]
    found = train.diagnose(policy, answers, scored, [made], config)["delta"]
    assert found == pytest.approx(expected, abs=1e-3)


def test_clip_share_leaves_out_the_kl_term_of_groups_without_an_advantage(policy):
    answers, scored, config = prepare(policy, hyper=["kl=0.1"])
    scored.batch.logp_ref = scored.batch.logp - 0.5
    scored.batch.adv[6:] = 0.0
    c = (scored.batch.adv == 0).float()  # all that has an advantage is clipped
    made = train.Update(torch.arange(12), 0, c, 1.0, 0.1)
    assert train.diagnose(policy, answers, scored, [made], config)["clip_share"] == 1
