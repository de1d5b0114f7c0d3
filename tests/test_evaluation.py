"""Evaluation and warm start, beside the naive trainer. In float64, so that "equal" means equal."""

import copy

import naive
import pytest
import torch
from helpers import Letters, float64, random_policy

import train
from toy.arithmetic import Arithmetic


@pytest.fixture(scope="module")
def policy():
    """Its output layer has a bias. Of the ids that end an answer, the tokenizer's is not the
    first."""
    with float64():
        policy = random_policy(37)
        policy.eos = torch.tensor([0, 1, 9])
        head = policy.model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(head.weight)))
        yield policy


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("eval_items, k", [(3, 4), (5, 2), (99, 1), (2, 9)])
def test_evaluation_is_the_naive_one(policy, eval_items, k, fast):
    """On the first held-out items, in batches of as many rows as a rollout has."""
    task = Letters()
    task.test *= 7 if k == 1 else 1
    real = task.reward
    task.reward = lambda text, item: max(0.25, real(text, item))  # no answer earns 0
    task.shares = lambda items, texts: {"shares": [*zip(items, texts, strict=True)]}
    config = train.Config(eval_items=eval_items, eval_samples=k, seed=2, max_tokens=7)
    config.temperature, config.prompts, config.group_size = 0.8, 2, 4
    policy.fast = fast
    metrics = train.evaluate(policy, task, config)
    gen, greedy, sampled, said, shown = train.rng(2, "evaluate"), [], [], [], []
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
            said += [(item, text) for text in texts[i * k : i * k + k]]
            shown.append(f"{item.prompt} -> {texts[i * k]}  [{sampled[-1][0]:g}]")
    assert metrics == {
        "greedy": sum(greedy) / len(items),
        "sampled": sum(map(sum, sampled)) / len(items) / k,
        f"pass@{k}": sum(1 in rewards for rewards in sampled) / len(items),
        "shares": said,
        "examples": shown[: min(3, at_once)],
    }
    assert 0 < metrics["sampled"] < 1


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
