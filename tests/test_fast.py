"""To whoever uses --fast: sampling and scoring, plain and fast, are whole unpadded forward passes.

Whatever makes llm/fast.py quick or small changes nothing: shared prompts, rows that leave, a cache
that grows in place, buckets, chunks. In float64 both ways draw the same tokens.
"""

from collections import Counter
from dataclasses import replace

import naive
import pytest
import torch
from conftest import TRANSFORMERS_4, Letters, build, float64, load, random_policy, refused
from transformers.cache_utils import DynamicLayer

import train
from llm import fast


def answer(policy, prompts: list[list[int]], max_tokens: int, temperature: float, gen):
    """Answers to prompts that belong to no task."""
    width = max(map(len, prompts))
    padded = torch.tensor([[-1] * (width - len(row)) + row for row in prompts])
    tokens, mask, logp = policy.sampler(policy, padded, max_tokens, temperature, gen)
    n = len(prompts)
    return train.Answers([None] * n, [""] * n, padded, tokens, mask, logp, torch.zeros(n), 0)


def numbers(policy, answers, temperature) -> list:
    """Sampled and scored log-probs, entropies, and a gradient."""
    logp, entropy = policy.scorer(policy, answers, temperature)
    assert logp.requires_grad and not entropy.requires_grad and not answers.logp.requires_grad
    policy.model.zero_grad()
    logp.backward(torch.randn(logp.shape, generator=train.rng("weight")))
    grads = [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]
    return [answers.logp, logp.detach(), entropy, *grads]


@pytest.fixture(scope="module")
def quick():
    """The toy's own model, in small."""
    return load("scratch", layers=1, width=16, fast=True)


KINDS = ["sliding_attention", "full_attention"]
FAMILIES = {
    "gpt2": {},
    "qwen2": {},
    "llama": {},
    "gemma": dict(head_dim=8),
    "gemma2": dict(head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=4.0),
    "gemma3_text": dict(head_dim=8, sliding_window=4, layer_types=KINDS),
    "mistral": dict(sliding_window=4),
    "lfm2": dict(layer_types=["conv", "full_attention"]),  # its cache holds more than keys
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_and_scores_what_its_forward_pass_says(family, tmp_path):
    """A text is longer than the sliding window. Nothing of a model's own generation config (top_k =
    1 in Qwen2's) shapes its answers. Gemma 2 caps its logits behind the output layer, so there only
    the plain way is right."""
    if TRANSFORMERS_4 and family in ("gemma3_text", "lfm2"):
        pytest.skip("transformers 4 hands out other caches for this family")
    path = build(family, tmp_path, **FAMILIES[family])
    policies = [load(path)]
    if family == "gemma2":
        assert "--fast false" in refused(lambda: load(path, fast=True))
    else:
        policies.append(load(path, fast=True))
    prompts = [prompt for prompt in ([5, 60, 61, 62], [70], [*range(80, 95)]) for _ in range(2)]
    for temperature in (0.0, 1.5):
        gen, made = train.rng(1), []
        expected = naive.rollout(policies[0], prompts, 24, temperature, gen)
        logp = torch.cat(naive.log_probs(policies[0], prompts, expected, temperature or 1.0))
        for policy in policies:
            its_gen = train.rng(1)
            answers = answer(policy, prompts, 24, temperature, its_gen)
            rows = zip(answers.tokens, answers.mask, strict=True)
            assert [y[mask].tolist() for y, mask in rows] == expected
            assert torch.equal(gen.get_state(), its_gen.get_state())
            made.append(numbers(policy, answers, temperature or 1.0))
            for ours in made[-1][:2]:
                torch.testing.assert_close(ours[answers.mask], logp, rtol=1e-4, atol=1e-4)
        for plain, quick in zip(made[0], made[-1], strict=True):
            assert (plain - quick).norm() <= 1e-4 * plain.norm() + 1e-5


@pytest.mark.parametrize("seed", range(12))
def test_both_ways_give_the_same_answers_and_numbers(seed, monkeypatch):
    """Prompts of any length, alike or not; caps; temperatures; one to many ids that end; buckets.
    In float64, so that "same" means same."""
    g = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=g))]

    different = [torch.randint(22, (pick(1, 2, 9),), generator=g).tolist() for _ in range(5)]
    prompts = [pick(*different) for _ in range(pick(1, 7, 24))]
    eos = torch.randperm(22, generator=g)[: pick(1, 3, 20)]
    cap, temperature = pick(1, 2, 30), pick(0.0, 0.3, 1.0, 2.0)
    monkeypatch.setitem(fast.PADDING, "cpu", pick(0, 3, 10_000))
    made = []
    with float64():
        for quick in (False, True):
            policy = replace(random_policy(37, quick), eos=eos)
            answers = answer(policy, prompts, cap, temperature, train.rng(seed))
            made.append([answers.tokens, answers.mask, *numbers(policy, answers, 0.9)])
    for x, y in zip(*made, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def test_a_draw_is_exact_in_a_large_vocabulary(quick, monkeypatch):
    """The numbers lie just above the edges of the tokens. Sums in fp32 would take others."""
    logp = torch.randn(1, 150_000, generator=train.rng(0)).log_softmax(-1)
    tokens = torch.arange(5000, 150_000, 5000)
    cdf = logp[0].double().exp().cumsum(0)
    uniform = cdf[tokens - 1] / cdf[-1] + 1e-11
    coarse = logp[0].exp().cumsum(0)
    assert (torch.searchsorted(coarse, uniform.float() * coarse[-1], right=True) != tokens).any()
    assert torch.equal(train.draw(logp, uniform[None])[0], tokens)
    monkeypatch.setattr(fast, "output_logits", lambda _, hidden: logp.expand(len(hidden), -1))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: uniform[:, None])
    answers = answer(quick, [[5]] * len(tokens), 1, 1.0, train.rng(0))
    assert torch.equal(answers.tokens[:, 0], tokens)


# ---------------- what fast is for


def test_each_prompt_is_read_once_and_ended_answers_leave(quick, monkeypatch):
    sizes, V = [], len(quick.tokenizer)
    hook = quick.model.base_model.register_forward_pre_hook(
        lambda _, args: sizes.append(tuple(args[0].shape))
    )
    policy = replace(quick, eos=torch.arange(V // 4))
    prompts = [prompt for prompt in ([5, 6, 7], [2], [*range(7)], [2]) for _ in range(5)]
    answers = answer(policy, prompts, 12, 3.0, train.rng(0))
    alive = answers.mask.sum(0).tolist()
    assert sizes == [(3, 7), *((n, 1) for n in alive[1:])] and alive[-1] < 20
    sizes.clear()
    policy.scorer(policy, answers, 1.0)
    monkeypatch.setitem(fast.PADDING, "cpu", 0)
    policy.scorer(policy, answers, 1.0)
    hook.remove()
    lengths = Counter(answers.mask.sum(1).tolist())
    buckets = [(lengths[n], n - 1) for n in sorted(lengths, reverse=True) if n > 1]
    assert sizes == [(3, 7), (20, answers.mask.shape[1] - 1), (3, 7), *buckets]


def test_the_cache_grows_in_place_and_few_rows_move():
    layer, sizes = DynamicLayer(), set()
    layer.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
    roomy = fast.RoomyLayer(layer)
    for t in range(100):
        keys, _ = roomy.update(*torch.full((2, 2, 1, 1, 4), float(t)))
        sizes.add(roomy.room[0].shape[2])
    assert keys[0, 0, 3:, 0].tolist() == [*range(100)] and len(sizes) < 20
    stays = torch.tensor([True, False, True, False, False, True])
    assert fast.fill_gaps(stays).tolist() == [0, 5, 2]


def test_chunks_of_logits_change_nothing_and_are_not_kept(scratch, monkeypatch):
    V, made, kept = len(scratch.tokenizer), [], []
    hidden = torch.randn(1500, 16, generator=train.rng(0)).requires_grad_()
    targets = torch.randint(V, (1500,), generator=train.rng(1))
    real = fast.output_logits
    monkeypatch.setattr(fast, "output_logits", lambda m, h: made.append(len(h)) or real(m, h))

    def score(rows_of_a_chunk):
        kept.clear()
        monkeypatch.setitem(fast.CHUNK, "cpu", rows_of_a_chunk * V)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            logp, entropy = fast.token_log_probs(scratch.model, hidden, targets, 0.7)
        (grad,) = torch.autograd.grad((logp * targets).sum(), hidden)
        return logp, entropy, grad

    whole = score(10_000)
    assert made == [1500] and (1500, V) in [x.shape for x in kept]
    for x, y in zip(score(600), whole, strict=True):
        torch.testing.assert_close(x, y)
    assert max(made[1:]) == 600
    assert all(x.shape[-1] != V for x in kept)


# ---------------- the check before a run


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("sampler", lambda tokens, mask, logp: (tokens, mask, logp + 0.01)),
        ("scorer", lambda logp, entropy: (logp + 0.01, entropy)),
        ("scorer", lambda logp, entropy: (logp - 0.01, entropy)),
        ("scorer", lambda logp, entropy: (logp * torch.nan, entropy)),
    ],
)
def test_the_check_sees_what_differs(quick, name, wrong):
    train.check_fast(quick, Letters(), train.Config())
    cold = replace(quick, scorer=lambda *args: (quick.scorer(*args)[0] + 0.01, None))
    train.check_fast(cold, Letters(), train.Config(temperature=0.05))  # rounding, there
    real = getattr(quick, name)
    broken = replace(quick, **{name: lambda *args: wrong(*real(*args))})
    assert "--fast" in refused(train.check_fast, broken, Letters(), train.Config())
