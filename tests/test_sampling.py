"""Answers are drawn from the policy's own distribution; each use of chance has its own draws."""

import itertools
from types import SimpleNamespace

import naive
import pytest
import torch

import train
from llm.policy import make_rows
from toy.arithmetic import Arithmetic

PROMPTS = [[5, 60, 61, 62], [70], [80, 81, 82, 83, 84, 85, 86]]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 3.0])
def test_answers_are_those_of_token_by_token_sampling_without_cache_or_padding(policy, temperature):
    """Nothing of the model's own generation config (top_k = 1 in one of them) shapes them."""
    prompts = [prompt for prompt in PROMPTS for _ in range(6)]
    gens = [train.rng(1) for _ in range(2)]
    expected = naive.rollout(policy, prompts, 12, temperature, gens[0])
    rows, logp = train.generate(policy, prompts, 12, temperature, gens[1])
    assert [y[m].tolist() for y, m in zip(rows.tokens, rows.mask, strict=True)] == expected
    lengths = [len(answer) for answer in expected]
    assert rows.mask.tolist() == [[t < n for t in range(max(lengths))] for n in lengths]
    again = naive.log_probs(policy, prompts, expected, temperature or 1.0)
    torch.testing.assert_close(logp[rows.mask], torch.cat(again), rtol=1e-4, atol=1e-4)
    assert (logp[~rows.mask] == 0).all() and not logp.requires_grad
    assert rows.prompts == prompts and torch.equal(*(gen.get_state() for gen in gens))


def test_each_of_several_eos_ids_ends_an_answer(policy):
    rows, _ = train.generate(policy, PROMPTS * 100, 30, 3.0, train.rng(0))
    last = rows.tokens.gather(1, rows.mask.sum(1, keepdim=True) - 1)
    assert {*last.flatten().tolist()} > {*policy.eos.tolist()}  # and some answers are cut off
    assert (
        torch.isin(rows.tokens, policy.eos)[rows.mask].sum() == torch.isin(last, policy.eos).sum()
    )


def test_decoding_drops_the_eos_and_hides_nothing_else(scratch):
    ids = scratch.tokenizer.encode("so #8<pad>5", add_special_tokens=False)
    rows = make_rows([[2]], [[*ids, scratch.tokenizer.eos_token_id, 5]], torch.device("cpu"))
    rows.mask[0, -1] = False
    assert train.decode(scratch, rows) == ["so #8<pad>5"]


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


def test_every_step_and_seed_draws_answers_of_its_own(scratch):
    task, texts = Arithmetic(), set()
    for step, seed in ((1, 0), (2, 0), (1, 1), (2, 1)):
        config = train.Config(group_size=3, seed=seed, max_tokens=8)
        texts.add(tuple(train.sample(scratch, task, task.train[:2], step, config).texts))
    assert len(texts) == 4
    uses = ("sample", "credit", "learn", "warm", "order", "evaluate")
    keys = list(itertools.product(range(3), uses, range(100)))
    assert len({train.rng(*key).initial_seed() for key in keys}) == len(keys)


def test_without_a_wrong_answer_nothing_is_corrected(scratch, monkeypatch):
    monkeypatch.setattr(Arithmetic, "reward", lambda self, text, item: 1.0)
    task, config = Arithmetic(), train.Config(method="ibpo", group_size=3, max_tokens=8)
    answers = train.sample(scratch, task, task.train[:2], 1, config)
    assert answers.repaired.tolist() == [False] * 6 and not answers.kept_mask.any()
    assert answers.generated == answers.rows.mask.sum() and answers.shaped.tolist() == [1.0] * 6
    assert (train.score(scratch, None, answers, config).batch.adv == 0).all()


def test_few_training_items_are_those_with_the_shortest_solutions():
    lengths = sorted(len(item.demo) for item in Arithmetic().train)
    task = train.load_task(train.Config(train_items=40))
    assert [len(item.demo) for item in task.train] == lengths[:40] and lengths[0] < lengths[-1]
