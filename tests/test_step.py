"""To whoever changes train.py: a step, an evaluation and a warm start give the naive numbers.

naive.py is the trainer a second time, one answer at a time, without cache, padding or batches. In
float64, so that "equal" means equal. The order of things and what is logged of them are written out
here, their parts in naive.py, the losses in claims/formulas.py.
"""

import copy
import itertools
import math
from statistics import fmean

import naive
import pytest
import torch
from conftest import Letters, float64, random_policy

import train
from claims.formulas import Rows, defaults, formula
from llm.neighbours import correct, kept_tokens
from losses import METHODS
from toy.arithmetic import Arithmetic

G, L, TEMPERATURE = 4, 7, 0.7
BUDGET = 9  # which no answer reaches: they are cut off at L


@pytest.fixture(scope="module")
def start():
    """The policy, the same one with --fast, and a reference that differs from it."""
    with float64():
        yield random_policy(37), random_policy(37, fast=True), random_policy(4)


@pytest.fixture(scope="module")
def first_answers(start):
    """The naive rollout of a step."""
    task, gen = Letters(), train.rng(5, "sample", 2)
    prompts = [ids for ids in task.encode(start[0].tokenizer, task.train) for _ in range(G)]
    answers = naive.rollout(start[0], prompts, L, TEMPERATURE, gen)
    assert {0, 5, 9} < {answer[-1] for answer in answers} and len({*map(len, answers)}) > 3
    return answers


def corrected(policy, task, rows):
    """The second rollout of ibpo: which answers are repaired, and the tokens that stay in them."""
    items, answers, texts, rewards = rows
    wrong, gen = [i for i, reward in enumerate(rewards) if reward == 0], train.rng(5, "repair", 2)
    problems = []
    for i in wrong:
        others = [*range(i + 1, i - i % G + G), *range(i - i % G, i)]
        right_first = sorted(others, key=lambda j: rewards[j] != 1)
        problems.append(task.repair(items[i], texts[i], [texts[j] for j in right_first[:2]]))
    fixed = naive.rollout(policy, task.encode(policy.tokenizer, problems), L, TEMPERATURE, gen)
    repaired, kept = [False] * len(items), [[False] * len(answer) for answer in answers]
    for i, correction in zip(wrong, fixed, strict=True):
        repaired[i] = task.reward(naive.decode(policy, correction), items[i]) == 1
        rows = ([0 if t in (5, 9) else t for t in row] for row in (answers[i], correction))
        a, b = (torch.tensor([row]) for row in rows)  # one end is like another
        kept[i] = kept_tokens(a, a == a, b, b == b)[0].tolist()
    return repaired, kept, sum(map(len, fixed))


def credit(method, old, kept, A, chosen):
    """Each token's advantage, a list for each answer."""
    adv = [[a] * len(row) for row, a in zip(old["logp"], A, strict=True)]
    if "reweighting" in method or method == "ar-lopti":
        for p, row in zip(old["logp"], adv, strict=True):
            row[:] = [(0.3 * float(x.exp()) + 0.7) * a for x, a in zip(p, row, strict=True)]
    if method == "ibpo":
        for a, row, repaired, tokens in zip(A, adv, old["repaired"], kept, strict=True):
            for t, stays in enumerate(tokens if repaired else []):
                row[t] = max(a, 0.0) if stays else min(a, 0.0)
    if "nthr" in method:
        draws = torch.rand(len(A), max(map(len, adv)), generator=train.rng(5, "credit", 2))
        for i, row in enumerate(chosen):
            hit = [t for t, selected in enumerate(row) if selected and A[i] < 0]
            group = old["rewards"][i - i % G : i - i % G + G]
            if method == "nthr-random":
                hit = draws[i, : len(row)].argsort()[: len(hit)].tolist()
            for t in hit:
                adv[i][t] *= abs(1 - 2 * group.count(1) / G)
    return adv


def naive_step(start, first_answers, config, hyper):
    """The new policy, what is to be logged, the gradients' norms, and the KL to the reference."""
    policy, _, reference = copy.deepcopy(start)
    task, method = Letters(), METHODS[config.method]
    items = [item for item in task.train for _ in range(G)]
    prompts, answers = task.encode(policy.tokenizer, items), first_answers
    texts = [naive.decode(policy, answer) for answer in answers]
    rewards = [task.reward(text, item) for text, item in zip(texts, items, strict=True)]
    n, tokens = len(items), sum(map(len, answers))
    log = {"step": 2, "generated": tokens, "reward": sum(rewards) / n}
    shaped, repaired, kept = rewards, None, None
    if method.repair:
        repaired, kept, more = corrected(policy, task, (items, answers, texts, rewards))
        shaped = [r + 0.3 * fixed for r, fixed in zip(rewards, repaired, strict=True)]
        log |= {"generated": tokens + more, "repair_rate": sum(repaired) / rewards.count(0)}

    def log_probs(policy, rows=range(n)):
        rows = [[x[i] for i in rows] for x in (prompts, answers)]
        return naive.log_probs(policy, *rows, TEMPERATURE)

    with torch.no_grad():
        old, ref = log_probs(policy), log_probs(reference)
        rows = [(x, y, TEMPERATURE) for x, y in zip(prompts, answers, strict=True)]
        full, chosen = [naive.read(policy, *row) for row in rows], None
        if method.needs_scores:
            chosen = naive.nthr_selected(policy, rows, rewards, G, hyper["self_term"])
    A = naive.advantages(shaped, G, method.scale)
    known = {"logp": old, "rewards": rewards, "repaired": repaired}
    adv = credit(config.method, known, kept, A, chosen)
    k3 = [(q - p).exp() - (q - p) - 1 for p, q in zip(old, ref, strict=True)]
    groups = [shaped[i : i + G] for i in range(0, n, G)]
    log |= {
        "equal_groups": sum(len(set(group)) == 1 for group in groups) / len(groups),
        "length": tokens / n,
        "truncated": sum(answer[-1] not in policy.eos for answer in answers) / n,
        "entropy": sum(float(-(p.exp() * p).sum()) for p in full) / tokens,
    }
    adam, gen = naive.adam(policy.model), train.rng(5, "learn", 2)
    losses, norms, outside, taxes = [], [], [], []
    for _ in range(config.epochs):
        order = torch.randperm(n // G, generator=gen).chunk(config.minibatches)
        for loss_fn, chunk in itertools.product(method.passes, order):
            rows = [int(g) * G + j for g in chunk for j in range(G)]
            now, its_answers = log_probs(policy, rows), [answers[i] for i in rows]
            lists = [[x.tolist() for x in now]]
            lists += [[torch.as_tensor(x[i]).tolist() for i in rows] for x in (old, adv, ref)]
            value, c = formula(loss_fn.__name__, Rows(*lists, G, BUDGET), **hyper)
            r = [(x.detach() - old[i]).exp().tolist() for x, i in zip(now, rows, strict=True)]
            if config.cancel:
                c = naive.cancel(c, r, its_answers, G)
            pushed = -sum(torch.tensor(x) @ y for x, y in zip(c, now, strict=True)) / len(rows)
            norms.append(naive.gradient(policy.model, pushed, config.grad_clip))
            losses.append(value)
            if any(any(x) for x in c):
                naive.descend(adam, config.lr * (2 / 3 if config.schedule == "linear" else 1))
            clip = defaults(loss_fn) | hyper
            if "eps_low" in clip:
                if config.method == "gspo":
                    r = [[math.prod(x) ** (1 / len(x))] * len(x) for x in r]
                low, high = 1 - clip["eps_low"], 1 + clip["eps_high"]
                out = [not low <= x <= high for row in r for x in row]
                outside.append(sum(out) / len(out))
            taxes.append(naive.tax(c, its_answers, [A[i] for i in rows], G))
    log["loss"] = sum(losses) / len(losses)
    log["grad_norm"] = sum(norms) / len(norms)
    log["tax"] = sum(taxes) / len(taxes)
    if outside:
        log["clip_share"] = sum(outside) / len(outside)
    return policy, log, norms, sum(float(row.sum()) for row in k3) / tokens


CASES = [dict(method=name, cancel=cancel) for name in METHODS for cancel in (False, True)]
CASES += [
    dict(method="grpo", kl=0.1, micro_rows=5),
    dict(method="gspo", eps_low=0.1, eps_high=0.2, minibatches=1, schedule="constant"),
    dict(method="lopti", cancel=True, minibatches=1, micro_rows=5),
    dict(method="ibpo", minibatches=1, micro_rows=3),
    dict(method="nthr", minibatches=1, fast=True),
    dict(method="ibpo", micro_rows=5, fast=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_the_naive_one(start, first_answers, case):
    flags = set(train.Config.__dataclass_fields__)
    hyper = {key: x for key, x in case.items() if key not in flags}
    if "nthr" in case["method"]:
        hyper = {"self_term": case.get("cancel", False)}
    common = dict(prompts=4, group_size=G, max_tokens=L, temperature=TEMPERATURE, epochs=2)
    common |= dict(seed=5, steps=3, lr=0.02, grad_clip=0.51, repair_references=2, minibatches=2)
    config = train.Config(**common | {key: x for key, x in case.items() if key in flags})
    expected, log, norms, divergence = naive_step(start, first_answers, config, hyper)
    plain, fast, reference = copy.deepcopy(start)
    policy, method = fast if config.fast else plain, train.bind(config.method, hyper)
    optimizer = train.adamw(policy.model, 9.0)  # a step sets its own learning rate
    task = Letters()
    answers = train.sample(policy, task, task.train, 2, config)
    if method.repair:
        gen = train.rng(5, "repair", 2)
        correct(
            answers, task, config, lambda x: train.ask(policy, task, x, config, gen), policy.eos
        )
    config.max_tokens = BUDGET
    scored = train.score(policy, answers, method, config, reference)
    assert train.divergence(reference, scored, config) == pytest.approx(divergence, rel=1e-9)
    updates = train.learn(policy, optimizer, scored, method, config)
    metrics = train.diagnose(policy, scored, updates, method, config)
    for (name, ours), theirs in zip(
        policy.model.named_parameters(), expected.model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=lambda m, n=name: n + m)
    assert metrics.pop("max_logp_gap") < 1e-9
    assert metrics == pytest.approx(log, rel=1e-7, abs=1e-12)
    assert 0 < log["truncated"] < 1 and log.get("repair_rate", 1) > 0
    if case == {"method": "grpo", "cancel": False}:  # in some updates the gradient is clipped
        assert min(norms) < config.grad_clip < max(norms)
        assert 0 < log["equal_groups"] < 1 and log["tax"] > 0 and log["clip_share"] > 0


# ---------------- evaluation and warm start


@pytest.fixture(scope="module")
def biased():
    """Its output layer has a bias. Of the ids that end an answer, the tokenizer's is not the
    first."""
    with float64():
        pair = random_policy(37), random_policy(37, fast=True)
        for policy in pair:
            policy.eos = torch.tensor([0, 1, 9])
            head = policy.model.get_output_embeddings()
            head.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(head.weight)))
        yield pair


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("eval_items, k", [(3, 4), (5, 2), (99, 1), (2, 9)])
def test_evaluation_is_the_naive_one(biased, eval_items, k, fast):
    """On the first held-out items, in batches of as many rows as a rollout has."""
    task, policy = Letters(), biased[fast]
    task.test *= 7 if k == 1 else 1
    real = task.reward
    task.reward = lambda text, item: max(0.25, real(text, item))  # no answer earns 0
    task.shares = lambda items, texts: {"shares": [*zip(items, texts, strict=True)]}
    config = train.Config(eval_items=eval_items, eval_samples=k, seed=2, max_tokens=7)
    config.temperature, config.prompts, config.group_size = 0.8, 2, 4
    metrics = train.evaluate(policy, task, config)
    gen, greedy, sampled = train.rng(2, "evaluate"), [], []
    items, at_once = task.test[:eval_items], max(1, 8 // k)
    for start in range(0, len(items), at_once):
        some = items[start : start + at_once]
        for copies, temperature, found in ((1, 0.0, greedy), (k, 0.8, sampled)):
            asked = [item for item in some for _ in range(copies)]
            prompts = task.encode(policy.tokenizer, asked)
            answers = naive.rollout(policy, prompts, 7, temperature, gen)
            found += [(x, naive.decode(policy, y)) for x, y in zip(asked, answers, strict=True)]
    rewards = [task.reward(text, item) for item, text in sampled]
    firsts = zip(sampled[::k], rewards[::k], strict=True)
    examples = [f"{item.prompt} -> {text}  [{reward:g}]" for (item, text), reward in firsts]
    assert metrics == {
        "greedy": fmean(task.reward(text, item) for item, text in greedy),
        "sampled": fmean(rewards),
        f"pass@{k}": fmean(1 in rewards[i : i + k] for i in range(0, len(rewards), k)),
        "shares": sampled,
        "examples": examples[: min(3, at_once)],
    }
    assert 0 < metrics["sampled"] < 1


@pytest.mark.parametrize("method", ["grpo", "ibpo"])
def test_the_warm_start_is_the_naive_one(biased, method):
    """Its loss is the mean over the demonstrations' tokens, their ends included. The learning rate
    rises for 20 steps and then falls to 0. With ibpo 30 % of the demonstrations are corrections."""
    sizes = dict(warm_steps=25, warm_rows=10, warm_lr=0.1, seed=4, repair_references=2)
    config, task = train.Config(temperature=0.7, **sizes), Arithmetic()
    task.train = task.train[:20]
    ours, theirs = copy.deepcopy((biased[0], biased[0]))[0], copy.deepcopy(biased[0])
    train.warm_start(ours, task, train.bind(method, {}), config)
    adam, norms, end = naive.adam(theirs.model), [], theirs.tokenizer.eos_token_id
    for step in range(25):
        picks = torch.randint(20, (10,), generator=train.rng(4, "warm", step)).tolist()
        items = [task.train[i] for i in picks]
        if method == "ibpo":
            items[:3] = [task.correction(item, 2) for item in items[:3]]
        prompts = task.encode(theirs.tokenizer, items)
        demos = [[*theirs.tokenizer(item.demo)["input_ids"], end] for item in items]
        logp = torch.cat(naive.log_probs(theirs, prompts, demos, 1.0))
        norms.append(naive.gradient(theirs.model, -logp.mean(), 1.0))
        naive.descend(adam, 0.1 * min((step + 1) / 20, 1 - step / 25))
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert min(norms) < 1 < max(norms)  # clipped, but not always
