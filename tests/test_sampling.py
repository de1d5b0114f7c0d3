"""Which problems a step asks, with which draws, and what is read of the answers."""

import itertools
from types import SimpleNamespace

import torch

import train
from toy.arithmetic import Arithmetic


def test_prompts_walk_through_the_whole_training_split_before_any_repeats():
    task, config = SimpleNamespace(train=list(range(10))), train.Config(prompts=4, steps=10)
    batches = train.prompt_batches(task, config)
    others = train.prompt_batches(task, train.Config(prompts=4, steps=10, seed=1))
    seen, orders = sum(batches + others, []), set()
    assert [len(batch) for batch in batches] == [4] * 10
    for epoch in range(8):  # four of each seed, each in an order of its own
        orders.add(tuple(seen[10 * epoch : 10 * epoch + 10]))
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert len(orders) == 8
    longer = train.prompt_batches(task, train.Config(prompts=4, steps=13))
    assert longer[:10] == batches  # more steps change no earlier one
    assert [len(batch) for batch in longer[:13]] == [4] * 13


def test_every_step_seed_and_use_has_draws_of_its_own(scratch):
    task, texts = Arithmetic(), set()
    for step, seed in ((1, 0), (2, 0), (1, 1), (2, 1)):
        config = train.Config(group_size=3, seed=seed, max_tokens=8)
        texts.add(tuple(train.sample(scratch, task, task.train[:2], step, config).texts))
    assert len(texts) == 4
    uses = ("sample", "credit", "learn", "warm", "order", "evaluate")
    keys = list(itertools.product(range(3), uses, range(100)))
    assert len({train.rng(*key).initial_seed() for key in keys}) == len(keys)


def test_the_verifier_reads_an_answer_without_its_end_and_nothing_else_is_hidden(
    scratch, monkeypatch
):
    text = "so #8<pad>5"
    ids = scratch.tokenizer.encode(text, add_special_tokens=False)
    tokens = torch.tensor([[*ids, scratch.tokenizer.eos_token_id, 5]])
    mask = torch.tensor([[True] * (len(ids) + 1) + [False]])
    made = (tokens, mask, torch.zeros(tokens.shape))
    monkeypatch.setattr(train, "generate", lambda *_: made)
    task = Arithmetic()
    task.reward = lambda said, item: 0.25 * (said == text)
    answers = train.ask(scratch, task, task.train[:1], train.Config(), None)
    assert answers.texts == [text] and answers.rewards.tolist() == [0.25]
    assert answers.generated == len(ids) + 1


def test_without_a_wrong_answer_nothing_is_corrected(scratch, monkeypatch):
    monkeypatch.setattr(Arithmetic, "reward", lambda self, text, item: 1.0)
    task, config = Arithmetic(), train.Config(method="ibpo", group_size=3, max_tokens=8)
    answers = train.sample(scratch, task, task.train[:2], 1, config)
    assert answers.repaired.tolist() == [False] * 6 and not answers.kept_mask.any()
    assert answers.generated == answers.mask.sum()
    assert (train.score(scratch, None, answers, config).batch.adv == 0).all()


def test_few_training_items_are_those_with_the_shortest_solutions():
    lengths = sorted(len(item.demo) for item in Arithmetic().train)
    task = train.load_task(train.Config(train_items=40))
    assert [len(item.demo) for item in task.train] == lengths[:40] and lengths[0] < lengths[-1]
