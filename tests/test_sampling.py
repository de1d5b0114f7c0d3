"""Answers are drawn from the policy's own distribution; each use of chance has its own draws."""

import itertools
from types import SimpleNamespace

import naive
import numpy as np
import pytest
import torch

import train
from llm.policy import fill_gaps, make_rows, read_prompts
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


@pytest.mark.parametrize("bf16", [False, True])
def test_the_cache_with_room_holds_bit_for_bit_what_transformers_own_holds(policy, bf16):
    """Also where rows leave, and in bf16, where rotary keys come as fp32."""
    model, gen = policy.model, torch.Generator().manual_seed(0)
    prompts, places = PROMPTS * 8, set()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        states = read_prompts(model, prompts)
        before = [layer.keys.clone() for layer in states.cache.layers]
        theirs, _, attention = states.of(torch.arange(24))
        ours, _, _ = states.to_sample()
        for t in range(24):
            if t in (0, 5, 6, 15):
                stays = torch.rand(len(attention), generator=gen) > 0.2
                index = fill_gaps(stays)
                assert sorted(index.tolist()) == stays.nonzero().flatten().tolist()
                for cache in (theirs, ours):
                    cache.reorder_cache(index)
                attention = attention[index]
            attention = torch.cat([attention, attention.new_ones(len(attention), 1)], 1)
            tokens = torch.randint(5, 99, (len(attention), 1), generator=gen)
            inputs = dict(attention_mask=attention.long(), use_cache=True)
            inputs["position_ids"] = attention.sum(1, keepdim=True) - 1
            hidden = [
                model.base_model(tokens, past_key_values=cache, **inputs).last_hidden_state
                for cache in (theirs, ours)
            ]
            assert torch.equal(*hidden)
            places.add(ours.layers[1].room[0].data_ptr())
    for own, layer in zip(theirs.layers, ours.layers, strict=True):
        assert layer.keys.dtype == layer.values.dtype == (torch.bfloat16 if bf16 else torch.float32)
        assert torch.equal(layer.keys, own.keys.to(layer.keys.dtype))
        assert torch.equal(layer.values, own.values.to(layer.keys.dtype))
    assert len(places) < 8  # most tokens are written in place
    assert all(map(torch.equal, before, [layer.keys for layer in states.cache.layers]))


def test_a_draw_is_exact_in_a_large_vocabulary():
    """Beside numpy in float64. Sums in fp32 would take other tokens."""
    gen = torch.Generator().manual_seed(0)
    logp = torch.randn(1, 150_000, generator=gen).log_softmax(-1)
    uniform = torch.rand(2000, 1, generator=gen, dtype=torch.float64)
    cdf = logp[0].exp().double().numpy().cumsum()
    expected = np.searchsorted(cdf, uniform[:, 0].numpy() * cdf[-1], side="right")
    assert [train.draw(logp, u[None]).item() for u in uniform[:200]] == expected[:200].tolist()


def test_few_rows_move_when_others_leave():
    assert fill_gaps(torch.tensor([True, False, True, False, False, True])).tolist() == [0, 5, 2]
    assert fill_gaps(torch.tensor([True, True, False])).tolist() == [0, 1]
    assert fill_gaps(torch.tensor([False, False, True])).tolist() == [2]
