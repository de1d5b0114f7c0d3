"""To whoever trains: no step learns from a wrong batch, or from a number that is not finite.

What is sampled, what an update must not do, and how much it holds. The values: test_step.py.
"""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import Letters, load, refused

import train
from losses import METHODS
from toy.arithmetic import Arithmetic

# ---------------- what is sampled


def test_prompts_walk_through_the_whole_training_split_before_any_repeats():
    task = SimpleNamespace(train=list(range(10)))
    batches = train.prompt_batches(task, train.Config(prompts=4, steps=10))
    others = train.prompt_batches(task, train.Config(prompts=4, steps=10, seed=1))
    seen, orders = sum(batches + others, []), set()
    assert [len(batch) for batch in batches] == [4] * 10
    for epoch in range(8):  # four of each seed, each in an order of its own
        orders.add(tuple(seen[10 * epoch : 10 * epoch + 10]))
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert len(orders) == 8
    longer = train.prompt_batches(task, train.Config(prompts=4, steps=13))
    assert longer[:10] == batches  # more steps change no earlier one


def test_every_step_seed_and_use_has_draws_of_its_own(scratch):
    task, texts = Arithmetic(), set()
    for step, seed in ((1, 0), (2, 0), (1, 1), (2, 1)):
        config = train.Config(group_size=3, seed=seed, max_tokens=8)
        texts.add(tuple(train.sample(scratch, task, task.train[:2], step, config).texts))
    assert len(texts) == 4
    uses = ("sample", "repair", "credit", "learn", "warm", "order", "evaluate")
    keys = list(itertools.product(range(3), uses, range(100)))
    assert len({train.rng(*key).initial_seed() for key in keys}) == len(keys)


def test_the_verifier_reads_an_answer_without_its_end_and_nothing_else_is_hidden(scratch):
    text, policy = "so #8<pad>5", copy.copy(scratch)
    ids = policy.tokenizer.encode(text, add_special_tokens=False)
    tokens = torch.tensor([[*ids, policy.tokenizer.eos_token_id, 5]])
    mask = torch.tensor([[True] * (len(ids) + 1) + [False]])
    policy.sampler = lambda *_: (tokens, mask, torch.zeros(tokens.shape))
    task = Arithmetic()
    task.reward = lambda said, item: 0.25 * (said == text)
    answers = train.ask(policy, task, task.train[:1], train.Config(), train.rng(0))
    assert answers.texts == [text] and answers.rewards.tolist() == [0.25]
    assert answers.generated == len(ids) + 1


def test_a_prompt_may_hold_any_id_and_must_fit_the_context(scratch):
    """Id 0 is padding elsewhere, but not in a prompt."""
    task, config = Letters(), train.Config(max_tokens=2)
    task.encode = lambda tokenizer, items: [[0, 7, 0], [8]]
    answers = train.ask(scratch, task, task.train[:2], config, train.rng(0))
    assert answers.prompts.tolist() == [[0, 7, 0], [-1, -1, 8]]
    task.encode = lambda tokenizer, items: [[7] * 1023]
    assert "1024" in refused(train.ask, scratch, task, task.train[:1], config, train.rng(0))


# ---------------- what an update must not do, and how much it holds


@pytest.fixture
def policy():
    return load("scratch", layers=1, width=16)


def prepare(policy, method="grpo", **options):
    """A scored rollout batch of 4 x 3 answers in which every group has a winner, and a step."""
    task, config = Arithmetic(), train.Config(prompts=4, group_size=3, max_tokens=8, **options)
    answers, method = train.sample(policy, task, task.train[:4], 1, config), train.bind(method, {})
    answers.rewards = torch.tensor([1.0, 0.0, 0.0] * 4)

    def learn(scored, lr=0.01):
        return train.learn(policy, train.adamw(policy.model, lr), scored, method, config)

    return train.score(policy, answers, method, config, None), learn, method, config


def weights(policy):
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


GRPO = METHODS["grpo"].passes[0]
BAD = {
    "loss nan": lambda batch: (batch.logp * 0).sum() + math.nan,  # its gradient is finite
    "loss inf": lambda batch: (batch.logp * 0).sum() + math.inf,
    "gradient": lambda batch: GRPO(batch) + (batch.logp - batch.logp.detach()).sqrt().sum(),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_number_that_is_not_finite_stops_before_the_weights_change(policy, bad):
    scored, _, method, config = prepare(policy)
    optimizer, before = train.adamw(policy.model, 1.0), weights(policy)
    method.passes = (BAD[bad],)
    assert "step 1" in refused(train.learn, policy, optimizer, scored, method, config)
    assert torch.equal(weights(policy), before)


def test_a_warm_start_that_diverges_is_one_line(policy):
    config, grpo = train.Config(warm_lr=1e30, warm_steps=30, warm_rows=2), train.bind("grpo", {})
    assert "--warm-lr" in refused(train.warm_start, policy, Arithmetic(), grpo, config)


def test_a_batch_without_signal_leaves_the_weights_to_no_momentum(policy):
    scored, _, method, config = prepare(policy, lr=0.01, schedule="constant")
    optimizer, before = train.adamw(policy.model, 0.01), weights(policy)
    scored.batch.adv = 1e-6 * scored.batch.adv  # a faint signal is one
    train.learn(policy, optimizer, scored, method, config)
    assert not torch.equal(weights(policy), before)
    before, scored.batch.adv = weights(policy), 0 * scored.batch.adv
    train.learn(policy, optimizer, scored, method, config)
    assert torch.equal(weights(policy), before)


def test_the_budget_is_the_configs_however_short_the_answers_are(policy):
    scored, _, method, config = prepare(policy)
    config.max_tokens = 11
    batch = train.score(policy, scored.answers, method, config, None).batch
    assert batch.max_tokens == 11 > batch.logp.shape[1]


def test_a_group_without_signal_is_one_whose_rewards_are_all_equal(policy):
    scored, learn, method, config = prepare(policy)
    scored.answers.rewards = torch.tensor([1.0, 0.5, 0.0] * 2 + [0.5] * 6)  # 0.5 is a mean, twice
    scored = train.score(policy, scored.answers, method, config, None)
    log = train.diagnose(policy, scored, learn(scored), method, config)
    assert log["equal_groups"] == 0.5


def test_no_more_than_micro_rows_answers_are_in_the_model_at_once(policy):
    sizes = []
    policy.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(args[0] if args else kwargs["input_ids"])),
        with_kwargs=True,
    )
    scored, learn, *_ = prepare(policy, method="nthr", micro_rows=5, epochs=2, minibatches=1)
    sampled = sizes.index(5)  # until then, answers are sampled
    learn(scored)
    assert set(sizes[sampled:]) == {5, 2}


def test_a_minibatch_that_fits_is_read_once_an_update(policy):
    calls, real = [], policy.scorer
    policy.scorer = lambda *args: calls.append(len(args[1].tokens)) or real(*args)
    scored, learn, *_ = prepare(policy, minibatches=2)
    learn(scored)
    assert calls == [12, 6, 6]  # scored once, then once an update


@pytest.mark.parametrize("gap", [0.01, -0.01, math.nan])
def test_the_gap_between_sampler_and_scorer_is_that_of_the_worst_token(policy, gap):
    scored, learn, method, config = prepare(policy)
    assert 0 < scored.max_logp_gap < 1e-5
    old, _ = train.log_probs_in_pieces(policy, scored.answers, config)
    assert torch.equal(scored.batch.logp_old, old)
    first = learn(scored)[0]
    assert torch.equal(first.batch.logp, old[first.rows])  # its ratios are exactly 1
    scored.answers.logp[0, 0] -= gap  # a single token
    assert "step 1" in refused(train.score, policy, scored.answers, method, config, None)
    train.check_gap(0.01, 1, 0.05, torch.device("cpu"))  # rounding is 20 times as large there
