"""To whoever uses --fast: sampling and scoring, plain and fast, are whole unpadded forward passes.

Whatever makes llm/fast.py quick or small changes nothing: shared prompts, rows that leave, buckets,
chunks, a row that is read alone. In float64: test_step.py.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import Letters, build, load
from naive import rollout, tempered

import train
from llm import fast
from toy import plain

# A task without text. The prompts of its items are ids.
IDS = SimpleNamespace(
    encode=lambda _, items: [x.prompt for x in items], rewards=lambda texts, _: [0.0] * len(texts)
)


def answer(policy, prompts: list[list[int]], max_tokens: int, temperature: float, gen):
    items = [SimpleNamespace(prompt=ids) for ids in prompts]
    return train.ask(policy, IDS, items, train.Config(max_tokens=max_tokens), temperature, gen)


PROMPTS = [[5, 6, 7], [2], [1, 0, *range(2, 9)], [2], [3, 0, 3]]
FAMILIES = {"qwen2": {}, "mistral": dict(sliding_window=4), "phi": {}}  # GPT-2: test_step.py


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_and_scores_what_its_forward_pass_says(family, tmp_path, monkeypatch):
    """A text is longer than the sliding window; Phi's output layer has a bias. Nothing of a model's
    own generation config (top_k = 1 in Qwen2's) shapes its answers. The fast way has several
    buckets, and chunks of logits."""
    monkeypatch.setitem(fast.PADDING, "cpu", 3)
    monkeypatch.setattr(fast, "CHUNK", 1)
    path, made = build(family, tmp_path, **FAMILIES[family]), []
    policies, prompts = [load(path), load(path, fast=True)], PROMPTS * 2
    expected = rollout(policies[0], prompts, 16, 1.5, train.rng(1))
    pairs = zip(prompts, expected, strict=True)
    logp = torch.cat([plain.log_probs(tempered(policies[0], 1.5), *pair) for pair in pairs])
    for policy in policies:
        answers = answer(policy, prompts, 16, 1.5, train.rng(1))
        rows = zip(answers.tokens, answers.mask, strict=True)
        assert [y[mask].tolist() for y, mask in rows] == expected
        scored = train.log_probs(policy, answers, 1.5)
        rows = [answers.of(torch.tensor([i])) for i in range(len(prompts))]
        alone = torch.cat([train.log_probs(policy, row, 1.5) for row in rows])
        for found in (answers.logp_sampled, scored, alone):
            torch.testing.assert_close(found[answers.mask], logp, rtol=1e-4, atol=1e-4)
        weight = torch.randn(scored.shape, generator=train.rng("weight"))
        for found in (scored, alone):
            grads = torch.autograd.grad((weight * found).sum(), policy.model.parameters())
            made.append([answers.entropy, *grads])
    for slow, *others in zip(*made, strict=True):
        for quick in others:
            assert (slow - quick).norm() <= 1e-4 * slow.norm() + 1e-5


def test_a_draw_is_exact_in_a_large_vocabulary(monkeypatch):
    """The numbers lie just above the edges of the tokens. Sums in fp32 would take others."""
    quick = load("scratch", layers=1, width=16, fast=True)
    logp = torch.randn(1, 150_000, generator=train.rng(0)).log_softmax(-1)
    tokens = torch.arange(5000, 150_000, 5000)
    cdf = logp[0].double().exp().cumsum(0)
    uniform = (cdf[tokens - 1] / cdf[-1] + 1e-11)[:, None]
    assert torch.equal(train.sample_token(logp.expand(len(tokens), -1), uniform), tokens)
    monkeypatch.setattr(fast, "output_logits", lambda _, hidden: logp.expand(len(hidden), -1))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: uniform)
    answers = answer(quick, [[5]] * len(tokens), 1, 1.0, train.rng(0))
    assert torch.equal(answers.tokens[:, 0], tokens)


# ---------------- the check before a run


WRONG = [  # a function, and what it returns of what it found
    ("generate", lambda found: (*found[:2], found[2] + 0.01, found[3])),
    ("log_probs", lambda found: found * torch.nan),
]


@pytest.mark.parametrize("name, wrong", WRONG)
def test_the_check_sees_what_differs(monkeypatch, name, wrong):
    config = train.Config(fast=True, width=16)
    train.load_policy(config, Letters(), "scratch")
    real = getattr(fast, name)
    monkeypatch.setattr(fast, name, lambda *args: wrong(real(*args)))
    with pytest.raises(ValueError):
        train.load_policy(config, Letters(), "scratch")
