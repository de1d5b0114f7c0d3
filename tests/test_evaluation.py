"""Evaluation and warm start, beside the naive trainer. In float64, so that "equal" means equal."""

import copy
import itertools
import math

import naive
import pytest
import torch
from helpers import Letters, float64, random_policy

import train
from llm.policy import Policy
from toy.arithmetic import Arithmetic


@pytest.fixture(scope="module")
def policy():
    """Its output layer has a bias."""
    with float64():
        policy = random_policy(37)
        head = policy.model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(head.weight)))
        yield policy


@pytest.mark.parametrize("eval_items, k", [(3, 4), (5, 2), (99, 1), (2, 9)])
def test_evaluation_is_the_naive_one(policy, monkeypatch, eval_items, k):
    """On the first held-out items, in batches of as many rows as a rollout has."""
    monkeypatch.setattr(train, "prefix_probabilities", lambda *args: {"prefixes": args[2]})
    task = Letters()
    task.test *= 7 if k == 1 else 1
    real = task.reward
    task.reward = lambda text, item: max(0.25, real(text, item))  # no answer earns 0
    config = train.Config(eval_items=eval_items, eval_samples=k, seed=2, max_tokens=7)
    config.temperature, config.prompts, config.group_size = 0.8, 2, 4
    metrics, lines = train.evaluate(policy, task, config)
    gen, greedy, sampled, shown = train.rng(2, "evaluate"), [], [], []
    items, at_once = task.test[:eval_items], max(1, 8 // k)
    for start in range(0, len(items), at_once):
        some = items[start : start + at_once]
        prompts = task.encode(policy.tokenizer, some)
        for answer, item in zip(naive.rollout(policy, prompts, 7, 0.0, gen), some, strict=True):
            greedy.append(task.reward(naive.decode(policy, answer), item))
        copies = [prompt for prompt in prompts for _ in range(k)]
        texts = [naive.decode(policy, y) for y in naive.rollout(policy, copies, 7, 0.8, gen)]
        for i, item in enumerate(some):
            sampled.append([task.reward(text, item) for text in texts[i * k : i * k + k]])
            shown.append(f"{item.prompt} -> {texts[i * k]}  [{sampled[-1][0]:g}]")
    assert metrics == {
        "greedy": sum(greedy) / len(items),
        "sampled": sum(map(sum, sampled)) / len(items) / k,
        f"pass@{k}": sum(1 in rewards for rewards in sampled) / len(items),
        "prefixes": items[:32],
    }
    assert lines == shown[: min(3, at_once)] and 0 < metrics["sampled"] < 1


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            hits = [any(i < c for i in subset) for subset in itertools.combinations(range(n), k)]
            assert math.isclose(train.pass_at_k(n, c, k), sum(hits) / len(hits), abs_tol=1e-12)


def test_prefix_probabilities_are_those_of_the_sets(policy):
    task, config = Arithmetic(), train.Config(temperature=0.7)
    items = task.test[:2]
    found = train.prefix_probabilities(policy, task, items, config)
    expected = dict.fromkeys(found, 0.0)
    for item in items:
        for name, texts in task.prefixes(item).items():
            prompt, *answers = policy.tokenizer([item.prompt, *texts])["input_ids"]
            logp = naive.log_probs(policy, [prompt] * len(texts), answers, 0.7)
            expected[name] += sum(row.sum().exp().item() for row in logp) / 2
    assert len(found) == 6 and found == pytest.approx(expected, rel=1e-9)
    other = task.make_tokenizer()
    other.add_tokens(["so #"])  # now a text has several encodings
    stranger = Policy(policy.model, other, policy.eos)
    assert train.prefix_probabilities(stranger, task, items, config) == {}


@pytest.mark.parametrize("method", ["grpo", "ibpo"])
def test_the_warm_start_is_the_naive_one(policy, method):
    """Its loss is the mean over the demonstrations' tokens, their ends included. The learning rate
    rises for 20 steps and then falls to 0. With ibpo 30 % of the demonstrations are corrections."""
    sizes = dict(warm_steps=25, warm_rows=10, warm_lr=0.1, seed=4, repair_references=2)
    config, task = train.Config(method=method, temperature=0.7, **sizes), Arithmetic()
    task.train = task.train[:20]
    ours, theirs = copy.deepcopy(policy), copy.deepcopy(policy)
    train.warm_start(ours, task, config)
    adam, norms, end = naive.Adam(theirs.model, 1.0), [], policy.tokenizer.eos_token_id
    for step in range(25):
        picks = torch.randint(20, (10,), generator=train.rng(4, "warm", step)).tolist()
        items = [task.train[i] for i in picks]
        if method == "ibpo":
            items[:3] = [task.correction(item, 2) for item in items[:3]]
        prompts = task.encode(policy.tokenizer, items)
        demos = [[*policy.tokenizer(item.demo)["input_ids"], end] for item in items]
        logp = torch.cat(naive.log_probs(theirs, prompts, demos, 1.0))
        norms.append(adam.gradient(-logp.mean()))
        adam.step(0.1 * min((step + 1) / 20, 1 - step / 25))
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert min(norms) < 1 < max(norms)  # clipped, but not always


def test_a_warm_start_that_diverges_says_so(policy, capsys):
    config = train.Config(warm_steps=3, warm_rows=2, warm_lr=1e300)
    with pytest.raises(SystemExit) as stopped:
        train.warm_start(copy.deepcopy(policy), Arithmetic(), config)
    assert stopped.value.code == 2
    assert "error: --warm-lr 1e+300: the warm start diverged" in capsys.readouterr().err
