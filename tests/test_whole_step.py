"""One exact test of the whole step: sample, score, learn, diagnose, and beside them naive.py.

In float64, so that "equal" means equal. The order of things and what is logged of them are written
out here, their parts in naive.py, the losses in claims/formulas.py.
"""

import copy
import itertools

import naive
import pytest
import torch
from helpers import Letters, float64, random_policy

import train
from claims.formulas import Rows, formula
from llm.neighbours import kept_tokens
from losses import METHODS

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
    items, answers, texts, rewards = rows
    wrong = [i for i, reward in enumerate(rewards) if reward == 0]
    problems = []
    for i in wrong:
        others = [*range(i + 1, i - i % G + G), *range(i - i % G, i)]
        right_first = sorted(others, key=lambda j: rewards[j] != 1)
        problems.append(task.repair(items[i], texts[i], [texts[j] for j in right_first[:2]]))
    fixed = naive.rollout(policy, task.encode(policy.tokenizer, problems), L, TEMPERATURE, gen)
    repaired, kept = [False] * len(items), [[False] * len(answer) for answer in answers]
    for i, correction in zip(wrong, fixed, strict=True):
        repaired[i] = task.reward(naive.decode(policy, correction), items[i]) == 1
        rows = ([1 if t in (1, 5, 9) else t for t in row] for row in (answers[i], correction))
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
    """The new policy, what is to be logged, and the gradients' norms."""
    policy, reference = copy.deepcopy(start[0]), start[1]
    task, method = Letters(), METHODS[config.method]
    items = [item for item in task.train for _ in range(G)]
    prompts = task.encode(policy.tokenizer, items)
    answers, gen = copy.deepcopy(first_answers[0]), first_answers[1].clone_state()
    texts = [naive.decode(policy, answer) for answer in answers]
    rewards = [task.reward(text, item) for text, item in zip(texts, items, strict=True)]
    n, tokens = len(items), sum(map(len, answers))
    log = {"step": 2, "generated": tokens, "reward": sum(rewards) / n}
    shaped, repaired, kept = rewards, None, None
    if method.repair:
        repaired, kept, more = corrected(policy, task, (items, answers, texts, rewards), gen)
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
        "kl_start": sum(float(row.sum()) for row in k3) / tokens,
    }

    def loss_and_coefficients(loss_fn, now, rows):
        lists = [[x.tolist() for x in now]]
        lists += [[torch.as_tensor(x[i]).tolist() for i in rows] for x in (old, adv, ref)]
        value, c = formula(loss_fn.__name__, Rows(*lists, G, L), **hyper)
        if config.project:
            c = naive.project(c, [answers[i] for i in rows], [A[i] for i in rows], G)
        return value, c

    adam, gen = naive.Adam(policy.model, config.grad_clip), train.rng(5, "learn", 2)
    losses, norms, clipped, taxes = [], [], [], []
    for _ in range(config.epochs):
        order = torch.randperm(n // G, generator=gen).chunk(config.minibatches)
        for loss_fn, chunk in itertools.product(method.passes, order):
            rows = [int(g) * G + j for g in chunk for j in range(G)]
            now = log_probs(policy, rows)
            value, c = loss_and_coefficients(loss_fn, now, rows)
            pairs = zip(c, now, strict=True)
            pushed = -sum(torch.tensor(x) @ y for x, y in pairs) / len(rows)
            norms.append(adam.gradient(pushed))
            losses.append(pushed.item() if config.project else value)
            if any(any(x) for x in c):
                adam.step(config.lr * 2 / 3)
            _, at_old = loss_and_coefficients(loss_fn, [old[i] for i in rows], rows)
            places = [(k, t) for k, i in enumerate(rows) for t in range(len(answers[i]))]
            gone = [c[k][t] == 0 for k, t in places if at_old[k][t] and adv[rows[k]][t]]
            if gone:
                clipped.append(sum(gone) / len(gone))
                taxes.append(naive.tax(c, [answers[i] for i in rows], [A[i] for i in rows], G))
    log["loss"] = sum(losses) / len(losses)
    log["grad_norm"] = sum(norms) / len(norms)
    log["clip_share"] = sum(clipped) / len(clipped)
    log["tax"] = sum(taxes) / len(taxes)
    return policy, log, norms


CASES = [dict(method=name, project=project) for name in METHODS for project in (False, True)]
CASES += [
    dict(method="grpo", kl=0.1, micro_rows=5),
    dict(method="gspo", eps_low=0.1, eps_high=0.2, minibatches=1),
    dict(method="lopti", project=True, minibatches=1, micro_rows=5),
    dict(method="ibpo", minibatches=1, micro_rows=3),
    dict(method="nthr", minibatches=1, fast=True),
    dict(method="ibpo", micro_rows=5, fast=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_the_naive_one(start, first_answers, case):
    fields = set(train.Config.__dataclass_fields__)
    hyper = {key: x for key, x in case.items() if key not in fields}
    if "nthr" in case["method"]:
        hyper = {"self_term": "project" in case and case["project"]}
    common = dict(prompts=4, group_size=G, max_tokens=L, temperature=TEMPERATURE, epochs=2)
    common |= dict(seed=5, steps=3, lr=0.02, grad_clip=0.51, repair_references=2, minibatches=2)
    common |= {key: x for key, x in case.items() if key in fields}
    config = train.Config(**common, hyper=[f"{key}={value}" for key, value in hyper.items()])
    expected, log, norms = naive_step(start, first_answers, config, hyper)
    policy, reference = copy.deepcopy(start)
    policy.fast = config.fast
    optimizer = train.adamw(policy.model, 9.0)  # a step sets its own learning rate
    task = Letters()
    answers = train.sample(policy, task, task.train, 2, config)
    scored = train.score(policy, reference, answers, config)
    updates = train.learn(policy, optimizer, scored, config)
    metrics = train.diagnose(policy, scored, updates, config)
    for (name, ours), theirs in zip(
        policy.model.named_parameters(), expected.model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=lambda m, n=name: n + m)
    assert metrics.pop("max_logp_gap") < 1e-9
    assert metrics == pytest.approx(log, rel=1e-7, abs=1e-12)
    assert 0 < log["truncated"] < 1 and log.get("repair_rate", 1) > 0
    assert not config.project or log["tax"] < 1e-12
    if case == {"method": "grpo", "project": False}:  # in some updates the gradient is clipped
        assert min(norms) < config.grad_clip < max(norms)
        assert 0 < log["equal_groups"] < 1 and log["tax"] > 0 and log["clip_share"] > 0
