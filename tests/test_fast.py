"""Sampling and scoring, plain and fast, are those of whole unpadded forward passes.

Whatever makes llm/fast.py quick or small changes nothing: shared prompts, rows that leave, a cache
that grows in place, buckets, chunks. In float64 both ways draw the same tokens.
"""

import itertools
import weakref
from dataclasses import replace

import naive
import pytest
import torch
from conftest import TRANSFORMERS_4, build, load
from helpers import Letters, answer, float64, random_policy, refused, rows_of
from torch.utils._python_dispatch import TorchDispatchMode

import train
from llm import fast


@pytest.fixture
def in_float64():
    with float64():
        yield


PROMPTS = [[5, 60, 61, 62], [70], [80, 81, 82, 83, 84, 85, 86], [70]]


def gradient(policy, logp, weight):
    policy.model.zero_grad()
    (logp * weight).sum().backward()
    return {
        name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None
    }


def assert_same_gradient(ours, theirs, tolerance=1e-4):
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert (ours[name] - grad).norm() <= tolerance * grad.norm() + 1e-5, name


def assert_scored_like_whole_texts(policy, answers, prompts, temperature):
    """Log-probs, entropies and gradients."""
    mask, config = answers.mask, train.Config(temperature=temperature)
    pairs = zip(prompts, rows_of(answers), strict=True)
    full = torch.cat([naive.read(policy, *pair, temperature) for pair in pairs])
    expected = full.gather(1, answers.tokens[mask][:, None]).squeeze(1)
    logp, entropy = train.log_probs(policy, answers, config)
    torch.testing.assert_close(logp[mask], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy[mask], -(full.exp() * full).sum(-1), rtol=1e-4, atol=1e-4)
    assert (logp[~mask] == 0).all() and (entropy[~mask] == 0).all()
    assert logp.requires_grad and not entropy.requires_grad
    weight = torch.randn(mask.shape, generator=train.rng("weight"))
    theirs = gradient(policy, expected, weight[mask])
    assert_same_gradient(gradient(policy, logp, weight), theirs)


# ---------------- beside whole unpadded forward passes


@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0])
def test_answers_are_those_of_token_by_token_sampling(policy, temperature):
    """Nothing of the model's own generation config (top_k = 1 in one of them) shapes them."""
    prompts, gen = [prompt for prompt in PROMPTS for _ in range(4)], train.rng(1)
    expected = naive.rollout(policy, prompts, 12, temperature, gen)
    again = torch.cat(naive.log_probs(policy, prompts, expected, temperature or 1.0))
    lengths = [len(row) for row in expected]
    for quick in (False, True):
        its_gen = train.rng(1)
        answers = answer(replace(policy, fast=quick), prompts, 12, temperature, its_gen)
        assert rows_of(answers) == expected
        assert answers.mask.tolist() == [[t < n for t in range(max(lengths))] for n in lengths]
        torch.testing.assert_close(answers.logp[answers.mask], again, rtol=1e-4, atol=1e-4)
        assert (answers.logp[~answers.mask] == 0).all() and not answers.logp.requires_grad
        assert torch.equal(gen.get_state(), its_gen.get_state())


def test_scoring_is_the_log_softmax_of_the_unpadded_text(policy, monkeypatch):
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    answers = answer(policy, prompts, 12, 1.5, train.rng(0))
    assert_scored_like_whole_texts(policy, answers, prompts, 0.8)
    policy = replace(policy, fast=True)
    for padding in (0, 10_000):
        monkeypatch.setitem(fast.PADDING, "cpu", padding)
        assert_scored_like_whole_texts(policy, answers, prompts, 0.8)
    monkeypatch.setitem(fast.CHUNK, "cpu", 1)  # then 512 rows a chunk of logits
    many = [prompt for prompt in PROMPTS for _ in range(30)]
    answers = answer(policy, many, 12, 1.5, train.rng(0))
    assert answers.mask.sum() > 512
    assert_scored_like_whole_texts(policy, answers, many, 0.8)


LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0)
LLAMA3 |= dict(high_freq_factor=4.0, original_max_position_embeddings=32)
KINDS = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": dict(rope_parameters=LLAMA3),
    "gemma": dict(head_dim=8),
    "gemma3_text": dict(head_dim=8, sliding_window=4, layer_types=KINDS),
    "mistral": dict(sliding_window=4),
    "gpt_neox": {},
    "lfm2": dict(layer_types=["conv", "full_attention"]),  # its cache holds more than keys
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32),
    "mixtral": dict(num_local_experts=4),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_and_scores_what_its_forward_pass_says(family, tmp_path):
    """GPT-2, Llama and Qwen2 have the tests above. A text is longer than the sliding window, and
    than the first context of Llama 3's RoPE."""
    if TRANSFORMERS_4 and family in ("gemma3_text", "lfm2", "opt"):
        said = refused(lambda: load(build(family, tmp_path, **FAMILIES[family]), fast=True))
        assert "--no-fast" in said
        return
    policy = load(build(family, tmp_path, **FAMILIES[family]), fast=True)  # the trial lets it pass
    prompts = [prompt for prompt in ([5, 60, 61, 62], [70], [*range(80, 95)]) for _ in range(2)]
    expected = naive.rollout(policy, prompts, 24, 1.5, train.rng(1))
    for policy.fast in (False, True):
        answers = answer(policy, prompts, 24, 1.5, train.rng(1))
        assert rows_of(answers) == expected
        assert_scored_like_whole_texts(policy, answers, prompts, 1.5)


# ---------------- beside each other


@pytest.mark.parametrize("seed", range(12))
def test_both_ways_give_the_same_answers_and_numbers(seed, in_float64):
    """Prompts of any length, alike or not; caps; temperatures; one to many ids that end."""
    g = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=g))]

    different = [torch.randint(22, (pick(1, 2, 9),), generator=g).tolist() for _ in range(5)]
    prompts = [pick(*different) for _ in range(pick(1, 7, 24))]
    eos = torch.randperm(22, generator=g)[: pick(1, 3, 20)]
    cap, temperature = pick(1, 2, 30), pick(0.0, 0.3, 1.0, 2.0)
    made, exact = [], random_policy(37)
    for quick in (False, True):
        policy = replace(exact, eos=eos, fast=quick)
        answers = answer(policy, prompts, cap, temperature, train.rng(seed))
        logp, entropy = train.log_probs(policy, answers, train.Config(temperature=0.9))
        weight = torch.randn(logp.shape, generator=train.rng("weight"))
        made.append((answers, logp, entropy, gradient(policy, logp, weight)))
    (a, *numbers, grad), (b, *others, its_grad) = made
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.mask, b.mask)
    for x, y in zip((a.logp, *numbers), (b.logp, *others), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    for name in grad:
        torch.testing.assert_close(grad[name], its_grad[name], rtol=0, atol=1e-10)


def test_a_draw_is_exact_in_a_large_vocabulary(scratch, monkeypatch):
    """Sums in fp32 would take other tokens, the first time at the 372nd of these numbers."""
    gen = torch.Generator().manual_seed(0)
    logp = torch.randn(1, 150_000, generator=gen).log_softmax(-1)
    uniform = torch.rand(1, 2000, generator=gen, dtype=torch.float64)
    cdf = logp.double().exp().numpy().cumsum()
    expected = torch.from_numpy(cdf.searchsorted(uniform[0].numpy() * cdf[-1], side="right"))
    assert torch.equal(train.draw(logp, uniform)[0], expected)
    coarse = logp.exp().cumsum(-1)
    fp32 = torch.searchsorted(coarse, uniform.float() * coarse[:, -1:], right=True)[0]
    wrong = (fp32 != expected).nonzero().flatten()[:5]
    monkeypatch.setattr(fast, "output_logits", lambda _, hidden: logp.expand(len(hidden), -1))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: uniform[:, wrong].T)
    answers = answer(replace(scratch, fast=True), [[5]] * len(wrong), 1, 1.0, gen)
    assert len(wrong) and torch.equal(answers.tokens[:, 0], expected[wrong])


# ---------------- what fast is for


def test_each_prompt_is_read_once_and_ended_answers_leave(policy):
    sizes = []
    hook = policy.model.base_model.register_forward_pre_hook(
        lambda _, args: sizes.append(tuple(args[0].shape))
    )
    policy = replace(policy, fast=True, eos=torch.arange(60))
    prompts = [prompt for prompt in PROMPTS for _ in range(5)]
    answers = answer(policy, prompts, 12, 3.0, train.rng(0))
    alive = answers.mask.sum(0).tolist()
    assert sizes == [(3, 7), *((n, 1) for n in alive[1:])] and alive[-1] < 20
    sizes.clear()
    train.log_probs(policy, answers, train.Config())
    hook.remove()
    assert sizes == [(3, 7), (20, answers.mask.shape[1] - 1)]


def test_the_cache_with_room_is_bit_for_bit_transformers_own(policy):
    """Also where rows leave. What is written stays where it is, and what was read stays whole."""
    model, gen, places = policy.model, torch.Generator().manual_seed(0), set()
    with torch.no_grad():
        states = fast.read_prompts(model, answer(policy, PROMPTS * 6, 1, 1.0, gen).prompts)
        before = [layer.keys.clone() for layer in states.cache.layers]
        (theirs, _, seen), (ours, _, _) = (states.of(torch.arange(24)) for _ in range(2))
        ours.layers = [fast.RoomyLayer(layer) for layer in ours.layers]
        for t in range(24):
            if t in (0, 5, 6, 15):
                stays = torch.rand(len(seen), generator=gen) > 0.2
                index = fast.fill_gaps(stays)
                assert sorted(index.tolist()) == stays.nonzero().flatten().tolist()
                for cache in (theirs, ours):
                    cache.reorder_cache(index)
                seen = seen[index]
            seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
            inputs = dict(attention_mask=seen.long(), position_ids=seen.sum(1, keepdim=True) - 1)
            tokens = torch.randint(5, 99, (len(seen), 1), generator=gen)
            hidden = [
                model.base_model(tokens, past_key_values=x, use_cache=True, **inputs)[0]
                for x in (theirs, ours)
            ]
            assert torch.equal(*hidden)
            places.add(ours.layers[1].room[0].data_ptr())
    assert len(places) < 8
    for own, layer, old, x in zip(
        theirs.layers, ours.layers, before, states.cache.layers, strict=True
    ):
        assert torch.equal(layer.keys, own.keys) and torch.equal(layer.values, own.values)
        assert torch.equal(old, x.keys)
    assert fast.fill_gaps(torch.tensor([True, False, True, False, False, True])).tolist() == [
        0,
        5,
        2,
    ]


def test_buckets_hold_answers_of_like_length_and_each_once(monkeypatch):
    length = torch.randint(1, 13, (60,), generator=train.rng(0))
    mask = torch.arange(12) < length[:, None]
    for padding in (0, 3, 40, 10_000):
        monkeypatch.setitem(fast.PADDING, "cpu", padding)
        buckets = fast.length_buckets(mask)
        assert torch.cat(buckets).sort().values.tolist() == list(range(60))
        assert (length[torch.cat(buckets)].diff() <= 0).all()  # longest first
        for bucket, following in itertools.pairwise(buckets):  # one answer more would be too many
            more = torch.cat([bucket, following[:1]])
            waste = [int((length[bucket[0]] - length[rows]).sum()) for rows in (bucket, more)]
            assert waste[0] <= padding < waste[1]


class LiveRows(TorchDispatchMode):
    """The most rows in new tensors of so many columns that were alive at a time."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.now, self.most = columns, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        places = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == self.columns:
            if out.data_ptr() not in places:  # views and in-place results are no new rows
                self.now += len(out)
                self.most = max(self.most, self.now)
                weakref.finalize(out.untyped_storage(), self.end, len(out))
        return out

    def end(self, size):
        self.now -= size


def test_all_logits_never_exist_together(scratch, monkeypatch):
    n, V = 10_240, len(scratch.tokenizer)
    monkeypatch.setitem(fast.CHUNK, "cpu", 600 * V)  # then 600 rows a chunk
    hidden = torch.randn(n, 16, requires_grad=True)
    with LiveRows(V) as live:
        targets = torch.zeros(n, dtype=torch.long)
        logp, _ = fast.token_log_probs(scratch.model, hidden, targets, 0.7)
        logp.sum().backward()
    assert 600 <= live.most <= 6 * 600 < n / 2


# ---------------- the trial


def test_fast_is_refused_where_it_is_wrong_and_plain_is_right_there(tmp_path):
    """A model that caps its logits after the output layer."""
    options = dict(head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=0.5)
    path = build("gemma2", tmp_path, **options)
    said = refused(lambda: load(path, fast=True))
    assert "--fast" in said and "--no-fast" in said
    policy, prompts = load(path), [prompt for prompt in PROMPTS for _ in range(3)]
    answers = answer(policy, prompts, 12, 1.5, train.rng(1))
    assert rows_of(answers) == naive.rollout(policy, prompts, 12, 1.5, train.rng(1))
    assert_scored_like_whole_texts(policy, answers, prompts, 1.5)


@pytest.mark.parametrize("what", ["attention_mask", "position_ids"])
def test_the_trial_sees_prompts_that_are_read_with_their_padding(policy, monkeypatch, what):
    real, quick = fast.read_prompts, replace(policy, fast=True)

    def read_prompts(model, prompts):
        forward = model.base_model.forward
        with monkeypatch.context() as patch:
            changed = lambda *a, **k: forward(*a, **(k | {what: None}))  # noqa: E731
            patch.setattr(model.base_model, "forward", changed)
            return real(model, prompts)

    fast.trial(quick, Letters(), train.Config(), train.ask, train.log_probs)
    monkeypatch.setattr(fast, "read_prompts", read_prompts)
    refused(fast.trial, quick, Letters(), train.Config(), train.ask, train.log_probs)


@pytest.mark.parametrize("name", ["read_prompts", "generate", "log_probs"])
def test_the_trial_sees_what_fails_or_differs(policy, monkeypatch, name):
    real = getattr(fast, name)

    def wrong(*args):
        made = [*real(*args)] if name != "read_prompts" else []
        made[0 if name == "log_probs" else 2] += 0.01  # an IndexError for read_prompts
        return made

    monkeypatch.setattr(fast, name, wrong)
    quick = replace(policy, fast=True)
    refused(fast.trial, quick, Letters(), train.Config(), train.ask, train.log_probs)


def test_the_trial_is_done_where_fast_is_asked_for(scratch, monkeypatch):
    trials = []
    monkeypatch.setattr(fast, "trial", lambda *args: trials.append(args[0]))
    assert load("scratch").fast is False and trials == []
    assert load("scratch", fast=True).fast is True and len(trials) == 1
