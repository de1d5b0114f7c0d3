"""To whoever trains: no step learns from a wrong batch, or from a number that is not finite.

What is sampled, what an update must not do, and how much it holds. The values: test_step.py.
"""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import load, refused
from torch.nn.utils import parameters_to_vector

import train
from losses import METHODS
from toy.arithmetic import Arithmetic

# ---------------- what is sampled


def test_prompts_walk_through_the_whole_training_split_before_any_repeats():
    def order(steps, seed=0):
        return train.prompt_batches(task, train.Config(prompts=4, steps=steps, seed=seed))

    task = SimpleNamespace(train=list(range(10)))
    batches = order(10)
    assert [len(batch) for batch in batches] == [4] * 10
    assert order(13)[:10] == batches  # more steps change no earlier one
    seen = sum(batches + order(10, seed=1), [])
    epochs = [tuple(seen[i : i + 10]) for i in range(0, 80, 10)]  # four of each seed
    assert all(sorted(epoch) == task.train for epoch in epochs) and len({*epochs}) == 8


def test_every_seed_use_and_step_has_random_numbers_of_its_own():
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


def test_a_prompt_and_its_answer_must_fit_the_context(scratch):
    task, config = Arithmetic(), train.Config(max_tokens=2)
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

    def learn(scored):
        return train.learn(policy, train.adamw(policy.model, 0.01), scored, method, config)

    return train.score(policy, answers, method, config, None), learn, method, config


def weights(policy):
    return parameters_to_vector(policy.model.parameters()).detach()


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
    policy = load("scratch", layers=1, width=16)
    next(policy.model.parameters()).register_hook(lambda grad: grad * 1e30)  # its norm is inf
    config.warm_lr = 1e-3
    assert "--warm-lr" in refused(train.warm_start, policy, Arithmetic(), grpo, config)


def test_a_group_without_signal_is_one_whose_rewards_are_all_equal(policy):
    scored, learn, method, config = prepare(policy)
    scored.answers.rewards = torch.tensor([1.0, 0.5, 0.0] * 2 + [0.5] * 6)  # 0.5 is a mean, twice
    scored = train.score(policy, scored.answers, method, config, None)
    log = train.diagnose(policy, scored, learn(scored), method, config)
    assert log["equal_groups"] == 0.5


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(minibatches=2, micro_rows=6), [6, 6, 6, 6]),  # scored, then read once an update
        # scored, hidden states, first update, second update: before it, and in it
        (dict(method="nthr", epochs=2, minibatches=1, micro_rows=5), 5 * [5, 5, 2]),
    ],
)
def test_how_many_answers_are_in_the_model_at_once(policy, options, expected):
    scored, learn, method, config = prepare(policy, **options)
    sizes = []
    policy.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(args[0] if args else kwargs["input_ids"])),
        with_kwargs=True,
    )
    learn(train.score(policy, scored.answers, method, config, None))
    assert sizes == expected


@pytest.mark.parametrize("gap", [0.01, -0.01, math.nan])
def test_the_gap_between_sampler_and_scorer_is_that_of_the_worst_token(policy, gap):
    scored, learn, method, config = prepare(policy)
    old, _ = train.log_probs_in_pieces(policy, scored.answers, config)
    assert torch.equal(scored.batch.logp_old, old) and 0 < scored.max_logp_gap < 1e-5
    scored.answers.logp[0, 0] -= gap  # a single token
    assert "step 1" in refused(train.score, policy, scored.answers, method, config, None)
    train.check_gap(0.01, 1, 0.05, torch.device("cpu"))  # rounding is 20 times as large there
    train.check_gap(8e-4, 1, 2.0, torch.device("cpu"))  # and as large here as at 1
    config.trace = True
    first, *_, last = learn(scored)
    assert torch.equal(first.batch.logp, old[first.rows])  # its ratios are exactly 1
    now, _ = train.log_probs_in_pieces(policy, train.take(scored.answers, last.rows), config)
    assert torch.equal(last.after, now)
