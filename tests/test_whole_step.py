"""One exact test of the whole step: sample, score, learn, diagnose, and beside them naive.py.

In float64, so that "equal" means equal. The order of things and what is logged of them are written
out here, their parts in naive.py.
"""

import copy
import itertools

import naive
import pytest
import torch
from helpers import Letters, float64, random_policy

import train
from llm.runs import adamw
from losses import METHODS, kept_tokens

G, L, TEMPERATURE = 4, 7, 0.7


@pytest.fixture(scope="module")
def start():
    """The policy, and a reference that differs from it."""
    with float64():
        yield random_policy(37), random_policy(4)


@pytest.fixture(scope="module")
def first_answers(start):
    """The naive rollout of a step, and the generator after it."""
    task, gen = Letters(), train.rng(5, "sample", 2)
    prompts = [ids for ids in task.encode(start[0].tokenizer, task.train) for _ in range(G)]
    answers = naive.rollout(start[0], prompts, L, TEMPERATURE, gen)
    assert {1, 5, 9} < {answer[-1] for answer in answers} and len({*map(len, answers)}) > 3
    return answers, gen


def corrected(policy, task, rows, gen):
    """The second rollout of ibpo: which answers are repaired, and the tokens that stay in them."""
    items, prompts, answers, texts, rewards = rows
    wrong = [i for i, reward in enumerate(rewards) if reward == 0]
    problems = []
    for i in wrong:
        others = [*range(i + 1, i - i % G + G), *range(i - i % G, i)]
        right_first = [j for j in others if rewards[j] == 1] + [
            j for j in others if rewards[j] != 1
        ]
        problems.append(task.repair(items[i], texts[i], [texts[j] for j in right_first[:2]]))
    fixed = naive.rollout(policy, task.encode(policy.tokenizer, problems), L, TEMPERATURE, gen)
    repaired, kept = [False] * len(items), [[False] * len(answer) for answer in answers]
    for i, correction in zip(wrong, fixed, strict=True):
        repaired[i] = task.reward(naive.decode(policy, correction), items[i]) == 1
        a, b = torch.tensor([answers[i]]), torch.tensor([correction])
        kept[i] = kept_tokens(a, a == a, b, b == b)[0].tolist()
    return repaired, kept, sum(map(len, fixed))


def credit(config, old, kept, A, errors):
    """Each token's advantage, a tensor (T_i,) for each answer."""
    adv = [torch.full_like(row, a) for row, a in zip(old["logp"], A, strict=True)]
    if "reweighting" in config.method or config.method == "ar-lopti":
        return [(0.3 * p.exp() + 0.7) * a for p, a in zip(old["logp"], adv, strict=True)]
    if config.method == "ibpo":
        for a, row, repaired, tokens in zip(A, adv, old["repaired"], kept, strict=True):
            for t, stays in enumerate(tokens if repaired else []):
                row[t] = max(a, 0.0) if stays else min(a, 0.0)
        return adv
    if "nthr" not in config.method:
        return adv
    scores = naive.nthr_scores(errors, old["rewards"], G)
    chosen = naive.nthr_selected(scores, old["rewards"], G)
    draws = torch.rand(len(A), max(map(len, adv)), generator=train.rng(5, "credit", 2))
    for i, row in enumerate(chosen):
        hit = [t for t, selected in enumerate(row) if selected and A[i] < 0]
        group = old["rewards"][i - i % G : i - i % G + G]
        if config.method == "nthr-random":
            hit = draws[i, : len(row)].argsort()[: len(hit)]
        adv[i][hit] *= abs(1 - 2 * group.count(1) / G)
    return adv


def naive_step(start, first_answers, config, hyper):
    """The new policy, and what is to be logged."""
    policy, reference = copy.deepcopy(start[0]), start[1]
    task, method = Letters(), METHODS[config.method]
    items = [item for item in task.train for _ in range(G)]
    prompts = task.encode(policy.tokenizer, items)
    answers, gen = copy.deepcopy(first_answers[0]), first_answers[1].clone_state()
    texts = [naive.decode(policy, answer) for answer in answers]
    rewards = [task.reward(text, item) for text, item in zip(texts, items, strict=True)]
    n, tokens = len(items), sum(map(len, answers))
    log = {"step": 2, "tokens": tokens, "generated": tokens, "reward": sum(rewards) / n}
    shaped, repaired, kept = rewards, None, None
    if method.repair:
        rows = (items, prompts, answers, texts, rewards)
        repaired, kept, more = corrected(policy, task, rows, gen)
        shaped = [r + 0.3 * fixed for r, fixed in zip(rewards, repaired, strict=True)]
        log |= {"generated": tokens + more, "shaped_reward": sum(shaped) / n}
        log["repair_rate"] = sum(repaired) / rewards.count(0)

    with torch.no_grad():
        old = naive.log_probs(policy, prompts, answers, TEMPERATURE)
        ref = naive.log_probs(reference, prompts, answers, TEMPERATURE)
        full = [
            naive.read(policy, *row, TEMPERATURE)[0] for row in zip(prompts, answers, strict=True)
        ]
        errors = naive.prediction_errors(policy, prompts, answers, TEMPERATURE, G)
    A = naive.advantages(shaped, G, method.scale)
    known = {"logp": old, "rewards": rewards, "repaired": repaired}
    adv = credit(config, known, kept, A, errors)
    k3 = [(q - p).exp() - (q - p) - 1 for p, q in zip(old, ref, strict=True)]
    groups = [shaped[i : i + G] for i in range(0, n, G)]
    log |= {
        "equal_groups": sum(len(set(group)) == 1 for group in groups) / len(groups),
        "length": tokens / n,
        "truncated": sum(answer[-1] not in policy.eos for answer in answers) / n,
        "entropy": sum(float(-(p.exp() * p).sum()) for p in full) / tokens,
        "kl_start": sum(float(row.sum()) for row in k3) / tokens,
        "lr": config.lr * 2 / 3,
    }
    if method.credit:
        pairs = [(float(x), a) for row, a in zip(adv, A, strict=True) for x in row if a]
        log["reshaped"] = sum(x != a for x, a in pairs) / len(pairs)
        log["adv_left"] = sum(abs(x) for x, _ in pairs) / sum(abs(a) for _, a in pairs)

    def loss(loss_fn, now, rows):
        batch = [[x[i] for i in rows] for x in (old, adv, ref)]
        return naive.loss(loss_fn.__name__, now, *batch, G, L, **hyper)

    def coefficients(value, now):
        return [-len(now) * g for g in torch.autograd.grad(value, now, retain_graph=True)]

    live = []
    for loss_fn in method.passes:
        now = [row.clone().requires_grad_() for row in old]
        live.append([c != 0 for c in coefficients(loss(loss_fn, now, range(n)), now)])
    adam, gen = naive.Adam(policy.model, config.grad_clip), train.rng(5, "learn", 2)
    norms, clipped, taxes = [], [], []
    for _ in range(config.epochs):
        order = torch.randperm(n // G, generator=gen).chunk(config.minibatches)
        for (k, loss_fn), chunk in itertools.product(enumerate(method.passes), order):
            rows = [int(g) * G + j for g in chunk for j in range(G)]
            said, A_rows = [answers[i] for i in rows], [A[i] for i in rows]
            now = naive.log_probs(policy, [prompts[i] for i in rows], said, TEMPERATURE)
            value = loss(loss_fn, now, rows)
            c = coefficients(value, now)
            if config.project:
                c = naive.project(c, said, A_rows, G)
                value = -sum((x * y).sum() for x, y in zip(c, now, strict=True)) / len(rows)
            norms.append(adam.gradient(value))
            if any(x.any() for x in c):
                adam.step(config.lr * 2 / 3)
            of_rows = zip(rows, c, strict=True)
            gone = [x[live[k][i] & (adv[i] != 0)] == 0 for i, x in of_rows]
            if sum(map(len, gone)):
                clipped.append(float(torch.cat(gone).double().mean()))
                taxes.append(naive.tax(c, said, A_rows, G))
    log["grad_norm"] = sum(norms) / len(norms)
    log["clip_share"] = sum(clipped) / len(clipped)
    log["tax"] = sum(taxes) / len(taxes)
    right = [i for i in range(n) if rewards[i] == 1 and A[i]][:32]
    later = naive.log_probs(policy, prompts, answers, TEMPERATURE)
    log["delta"] = sum((later[i] - old[i]).sum().item() for i in right) / len(right)
    return policy, log, norms


EXCHANGEABLE = ("reinforce", "grpo-symmetric", "cispo", "dfpo-min")  # these never have a tax
STEEP = ("reinforce", "cispo", "ibpo")  # every gradient norm is above grad_clip
CASES = [(name, project, 2, 64, {}) for name in METHODS for project in (False, True)]
CASES += [
    ("grpo", False, 2, 5, {"kl": 0.1}),
    ("gspo", False, 1, 64, {"eps_low": 0.1, "eps_high": 0.2}),
]
CASES += [("lopti", True, 1, 5, {}), ("ibpo", False, 1, 3, {}), ("nthr", False, 1, 64, {})]


@pytest.mark.parametrize("method, project, minibatches, micro_rows, hyper", CASES, ids=str)
def test_a_step_is_the_naive_one(
    start, first_answers, method, project, minibatches, micro_rows, hyper
):
    config = train.Config(
        **dict(method=method, project=project, minibatches=minibatches, micro_rows=micro_rows),
        **dict(hyper=[f"{key}={value}" for key, value in hyper.items()], repair_references=2),
        **dict(prompts=4, group_size=G, max_tokens=L, temperature=TEMPERATURE, epochs=2),
        **dict(seed=5, steps=3, lr=0.02, grad_clip=0.51),
    )
    expected, log, norms = naive_step(start, first_answers, config, hyper)
    policy, reference = copy.deepcopy(start)
    optimizer = adamw(policy.model, 9.0)  # a step sets its own learning rate
    task = Letters()
    answers = train.sample(policy, task, task.train, 2, config)
    scored = train.score(policy, reference, answers, config)
    updates = train.learn(policy, optimizer, scored, config)
    metrics = train.diagnose(policy, answers, scored, updates, config)
    for (name, ours), theirs in zip(
        policy.model.named_parameters(), expected.model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=lambda m, n=name: n + m)
    assert metrics.keys() == log.keys() and metrics == pytest.approx(log, rel=1e-7, abs=1e-12)
    assert min(norms) < config.grad_clip < max(norms) or method in STEEP
    assert log.get("repair_rate", 1) > 0 and log.get("reshaped", 1) > 0
    assert log["tax"] < 1e-12 if project else log["tax"] > 0 or method in EXCHANGEABLE
