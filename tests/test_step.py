"""To whoever changes train.py: a step, an evaluation and a warm start give the naive numbers.

toy/plain.py, naive.py and this file are the trainer a second time, one answer at a time, without
cache, padding or batches, in float64, so that "equal" means equal. Losses, credit rules and the
baseline are losses.py's own here, because claims compare those with formulas. The last section is
what no twin sees: no step learns from a wrong batch, or from a number that is not finite.
"""

import copy
import math
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import naive
import pytest
import torch
from conftest import Letters, float64, load, random_policy, refused, weights_of

import losses
import train
from llm.neighbours import nthr_scores
from losses import METHODS, Batch, OldPolicy
from toy import plain
from toy.arithmetic import Arithmetic

G, L, TEMPERATURE = 4, 7, 0.7
BUDGET = 9  # which no answer reaches: they are cut off at L


def adam(model, lr):
    """AdamW without weight decay."""
    return torch.optim.Adam(model.parameters(), lr, betas=(0.9, 0.95))


def gradient(model, loss, grad_clip):
    """Leaves the clipped gradient in the weights. Returns its norm before that."""
    model.zero_grad()
    loss.backward()
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip))


@pytest.fixture(scope="module")
def start():
    """The policy, the same one with --fast, and a reference that differs from it."""
    with float64():
        policies = random_policy(37), random_policy(37, fast=True), random_policy(4)
        yield [replace(policy, eos=torch.tensor([0, 8, 16, 17])) for policy in policies]


def ask(policy, task, items, temperature, gen):
    """The naive answer to each item, a row each."""
    prompts, rows = task.encode(policy.tokenizer, items), []
    answers = plain.rollout(policy, prompts, L, temperature, gen)
    for item, prompt, answer in zip(items, prompts, answers, strict=True):
        row = SimpleNamespace(item=item, prompt=prompt, answer=answer, repaired=False)
        row.kept = [False] * len(answer)
        row.text = policy.tokenizer.decode([x for x in answer if x not in policy.eos])
        row.reward = task.reward(row.text, item)
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def first_rows(start):
    """The naive rollout of a step. Two of its prompts are equal."""
    task, gen = Letters(), train.rng(5, "sample", 2)
    rows = ask(start[0], task, [x for x in task.train for _ in range(G)], TEMPERATURE, gen)
    assert {0, 8, 16, 17} < {row.answer[-1] for row in rows}  # 8 where it would be cut off anyway
    assert len({len(row.answer) for row in rows}) > 3
    return rows


def repair(policy, task, rows, references):
    """The second rollout of ibpo, of which the number of tokens is returned."""
    wrong, problems = [row for row in rows if row.reward == 0], []
    for row in wrong:
        place = rows.index(row)
        first = place - place % G
        siblings = rows[place + 1 : first + G] + rows[first:place]
        siblings.sort(key=lambda x: x.reward != 1)  # right ones come first
        texts = [x.text for x in siblings[:references]]
        problems.append(task.repair(row.item, row.text, texts))
    fixed = ask(policy, task, problems, TEMPERATURE, train.rng(5, "repair", 2))
    ends = dict.fromkeys(policy.eos.tolist(), "end")  # one is like another
    for row, correction in zip(wrong, fixed, strict=True):
        row.repaired = correction.reward == 1  # half the reward is no repair
        row.kept = naive.kept(*([ends.get(t, t) for t in x.answer] for x in (row, correction)))
    return sum(len(x.answer) for x in fixed)


def padded(values: list) -> torch.Tensor:
    """Lists or tensors (T_i, ...) -> (N, L, ...). Some answer is L tokens long."""
    rows = [torch.as_tensor(x) for x in values]
    return torch.stack([torch.cat([x, x.new_zeros(L - len(x), *x.shape[1:])]) for x in rows])


def known(policy, rows, batch) -> OldPolicy:
    """What a credit rule knows, of naive rows. Hidden states are those of unpadded passes."""
    hidden = []
    for row in rows:
        read = policy.model.base_model(torch.tensor([row.prompt + row.answer]))
        hidden.append(read.last_hidden_state[0, len(row.prompt) - 1 : -1].detach())
    facts = dict(tokens=padded([row.answer for row in rows]), mask=batch.mask, logp=batch.logp)
    facts |= dict(rewards=torch.tensor([row.reward for row in rows]), group_size=G)
    head = policy.model.get_output_embeddings().weight.detach()
    own = dict(hidden=padded(hidden), head=head, temperature=TEMPERATURE)
    scores, own_scores = nthr_scores(**facts, **own)
    return OldPolicy(
        **facts,
        gen=train.rng(5, "credit", 2),
        scores=scores,
        own_scores=own_scores,
        repaired=torch.tensor([row.repaired for row in rows]),
        kept_mask=padded([row.kept for row in rows]),
    )


def naive_step(start, first_rows, config, method):
    """The new policy, what is to be logged, and the gradients' norms."""
    policy, _, reference = copy.deepcopy(start)
    rows = [copy.copy(row) for row in first_rows]
    tokens, rewards = sum(len(row.answer) for row in rows), [row.reward for row in rows]
    log = {"step": 2, "generated": tokens, "reward": fmean(rewards), "length": tokens / len(rows)}
    if method.repair:
        log["generated"] += repair(policy, Letters(), rows, config.repair_references)
        log["repair_rate"] = sum(row.repaired for row in rows) / rewards.count(0)
        rewards = [row.reward + 0.3 * row.repaired for row in rows]

    def log_probs(policy, rows):  # (n, L)
        made = [plain.log_probs(policy, row.prompt, row.answer, TEMPERATURE) for row in rows]
        return padded(made)

    # Before learning: log-probs and advantages.
    with torch.no_grad():
        old, ref = log_probs(policy, rows), log_probs(reference, rows)
        entropy = 0.0
        for row in rows:
            full = plain.all_log_probs(policy, row.prompt, row.answer, TEMPERATURE)  # (T_i, V)
            entropy -= float((full.exp() * full).sum())
    mask = padded([[True] * len(row.answer) for row in rows])
    A = losses.group_advantages(torch.tensor(rewards), G, config.scale or method.scale)
    batch = Batch(old, old, A[:, None] * mask, mask, G, BUDGET, ref)
    log["kl_start"] = losses.k3(batch).sum().item() / tokens
    if method.credit:
        batch.adv = method.credit(batch.adv, known(policy, rows, batch))
    nodes = losses.prefix_nodes(padded([row.answer for row in rows]), mask, G)
    log["equal_groups"] = fmean(len({*rewards[i : i + G]}) == 1 for i in range(0, len(rows), G))
    log["truncated"] = fmean(row.answer[-1] not in policy.eos for row in rows)
    log["entropy"] = entropy / tokens
    # Learning. What pushes each token is the loss's (claim M1) and the baseline's (C22).
    lr = config.lr * (2 / 3 if config.schedule == "linear" else 1)
    optimizer, gen = adam(policy.model, lr), train.rng(5, "learn", 2)
    groups, values, norms, outside = len(rows) // G, [], [], []
    for _ in range(config.epochs):
        order = torch.randperm(groups, generator=gen).chunk(config.minibatches)
        for loss_fn, chunk in [(f, chunk) for f in method.passes for chunk in order]:
            ids = [i for g in chunk.tolist() for i in range(g * G, g * G + G)]
            now, its = log_probs(policy, [rows[i] for i in ids]), mask[ids]
            part = Batch(now, old[ids], batch.adv[ids], its, G, BUDGET, ref[ids])
            loss = loss_fn(part)
            if config.prefix_baseline:
                loss = losses.prefix_baseline(loss, part, nodes[ids])
            pushed = losses.token_coefficients(loss, now).any()
            norms.append(gradient(policy.model, loss, config.grad_clip))
            values.append(loss.item())
            if pushed:
                optimizer.step()
            if "eps_low" in method.hyper:
                gap = now.detach() - old[ids]
                if config.method == "gspo":
                    gap = (gap.sum(1) / its.sum(1))[:, None].expand_as(gap)
                low, high = 1 - method.hyper["eps_low"], 1 + method.hyper["eps_high"]
                outside.append(fmean(not low <= x <= high for x in gap[its].exp().tolist()))
    log |= {"loss": fmean(values), "grad_norm": fmean(norms)}
    R = torch.tensor([row.reward for row in rows])
    log |= losses.decided(R, nodes, mask, G, old)
    if outside:
        log["clip_share"] = fmean(outside)
    return policy, log, norms


COMMON = dict(prompts=4, group_size=G, max_tokens=BUDGET, temperature=TEMPERATURE, seed=5, steps=3)


def make_step(policy, config, method, reference=None):
    """The trainer's step 2. Returns what is logged."""
    task, short = Letters(), replace(config, max_tokens=L)
    answers = train.sample(policy, task, task.train, 2, short)
    scored = train.score(policy, answers, method, config, reference)
    if method.credit:
        scored = train.reshape_credit(policy, task, scored, method, short)
    optimizer = train.adamw(policy.model, 9.0)  # a step sets its own learning rate
    updates = train.learn(policy, optimizer, scored, method, config)
    metrics = train.diagnose(policy, scored, updates, method, config)
    return metrics | train.divergence(scored, reference, config) if reference else metrics


# grpo is the second method, so it comes without the baseline. With one update a batch is learnt
# from once, at ratios of 1.
CASES = [(dict(method=name, prefix_baseline=i % 2 == 0), {}) for i, name in enumerate(METHODS)]
ONCE = dict(minibatches=1, epochs=1)
CASES += [
    (dict(method="grpo", micro_rows=5), dict(kl=0.1)),
    (dict(method="gspo", minibatches=1, schedule="constant", scale="mean"), dict(eps_high=0.2)),
    (dict(method="lopti", prefix_baseline=True, minibatches=1, micro_rows=5), {}),
    (dict(method="nthr", fast=True, **ONCE), dict(self_term=True)),
    (dict(method="grpo", **ONCE), dict(kl=0.1)),
    (dict(method="ibpo", micro_rows=5, fast=True, repair_references=1, **ONCE), {}),
]


@pytest.mark.parametrize("flags, hyper", CASES, ids=str)
def test_a_step_is_the_naive_one(start, first_rows, flags, hyper):
    own = dict(lr=0.02, grad_clip=0.51, repair_references=3, minibatches=2, epochs=2) | flags
    config = train.Config(**COMMON, **own)
    method = losses.bind(config.method, hyper)
    expected, log, norms = naive_step(start, first_rows, config, method)
    *policies, reference = copy.deepcopy(start)
    policy = policies[config.fast]
    metrics = make_step(policy, config, method, reference)
    torch.testing.assert_close(weights_of(policy), weights_of(expected), rtol=0, atol=1e-9)
    assert metrics.pop("max_logp_gap") < 1e-9
    assert metrics == pytest.approx(log, rel=1e-7, abs=1e-12)
    assert 0.5 < log["truncated"] < 1 and log.get("repair_rate", 1) > 0 and log["kl_start"] > 0
    if flags == dict(method="grpo", prefix_baseline=False):
        assert min(norms) < config.grad_clip < max(norms)  # some gradients are clipped
        assert 0 < log["equal_groups"] < 1 and log["decided"] and log["clip_share"] > 0


@pytest.mark.parametrize("baseline, minibatches", [(False, 4), (True, 2)])
def test_the_plain_algorithm_makes_the_trainers_step(
    start, first_rows, monkeypatch, baseline, minibatches
):
    """toy/plain.py, from the sampled answers to the weights. Of 4 updates some push nothing."""
    monkeypatch.setattr(plain.log_probs, "__defaults__", (TEMPERATURE,))
    own = dict(lr=0.05, schedule="constant", minibatches=minibatches, epochs=3)
    config = train.Config(**COMMON, **own, prefix_baseline=baseline)
    ours, theirs = copy.deepcopy(start[0]), copy.deepcopy(start[0])
    gen = train.rng(5, "learn", 2)
    make_step(ours, config, losses.bind("grpo", {}))
    orders = [torch.randperm(4, generator=gen).view(minibatches, -1).tolist() for _ in range(3)]
    rows = copy.deepcopy(first_rows)
    plain.learn(theirs, adam(theirs.model, 0.05), rows, sum(orders, []), baseline, G)
    assert not torch.equal(weights_of(ours), weights_of(start[0]))
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-9)


# ---------------- evaluation and warm start


# Of the ids that end an answer, the tokenizer's is not the first, and padding's is none.
ENDS = torch.tensor([9, 1, 5])


@pytest.mark.parametrize("eval_items, k, fast", [(5, 3, False), (2, 9, True)])
def test_evaluation_is_the_naive_one(start, eval_items, k, fast):
    """On the first held-out items, in batches of as many rows as a rollout has."""
    task, policy = Letters(), replace(start[fast], eos=ENDS)
    task.shares = lambda items, texts: {"shares": [*zip(items, texts, strict=True)]}
    config = train.Config(eval_items=eval_items, eval_samples=k, seed=1, max_tokens=L)
    config.temperature, config.prompts, config.group_size = 0.8, 2, 4
    metrics = train.evaluate(policy, task, config)
    gen, greedy, sampled = train.rng(1, "evaluate"), [], []
    items, at_once = task.test[:eval_items], max(1, 8 // k)
    for start in range(0, len(items), at_once):
        some = items[start : start + at_once]
        greedy += ask(policy, task, some, 0.0, gen)
        sampled += ask(policy, task, [item for item in some for _ in range(k)], 0.8, gen)
    rewards = [row.reward for row in sampled]
    lines = [f"{row.item.prompt} -> {row.text}  [{row.reward:g}]" for row in sampled[::k]]
    assert metrics == {
        "greedy": fmean(row.reward for row in greedy),
        "sampled": fmean(rewards),
        f"pass@{k}": fmean(1 in rewards[i : i + k] for i in range(0, len(rewards), k)),
        "shares": [(row.item, row.text) for row in sampled],
        "examples": lines[: min(3, at_once)],
    }
    assert 0 < metrics["sampled"] < 1


@pytest.mark.parametrize("method", ["grpo", "ibpo"])
def test_the_warm_start_is_the_naive_one(start, method):
    """Its loss is the mean over the demonstrations' tokens, their ends included. The learning rate
    rises for 20 steps and then falls to 0. With ibpo 30 % of the demonstrations are corrections."""
    sizes = dict(warm_steps=25, warm_rows=10, warm_lr=0.1, seed=4, repair_references=2)
    config, task = train.Config(temperature=0.7, grad_clip=0.3, **sizes), Arithmetic()
    task.train = task.train[:20]
    ours, theirs = (replace(copy.deepcopy(start[0]), eos=ENDS) for _ in range(2))
    train.warm_start(ours, task, losses.bind(method, {}), config)
    optimizer, norms, end = adam(theirs.model, 0.1), [], theirs.tokenizer.eos_token_id
    for step in range(25):
        picks = torch.randint(20, (10,), generator=train.rng(4, "warm", step)).tolist()
        items = [task.train[i] for i in picks]
        if method == "ibpo":
            items[:3] = [task.correction(item, 2) for item in items[:3]]
        logps = []
        for item, prompt in zip(items, task.encode(theirs.tokenizer, items), strict=True):
            demo = [*theirs.tokenizer(item.demo)["input_ids"], end]
            logps.append(plain.log_probs(theirs, prompt, demo))
        norms.append(gradient(theirs.model, -torch.cat(logps).mean(), 1.0))
        optimizer.param_groups[0]["lr"] = 0.1 * min((step + 1) / 20, 1 - step / 25)
        optimizer.step()
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-9)
    assert min(norms) < 1 < max(norms)  # clipped, but not always


# ---------------- what no twin sees


def test_prompts_walk_through_the_whole_training_split_before_any_repeats():
    task, seen = SimpleNamespace(train=[*range(10)]), []
    for seed in (0, 1):
        config = train.Config(prompts=4, steps=10, seed=seed)
        seen += sum(train.prompt_batches(task, config), [])
    walks = {tuple(seen[i : i + 10]) for i in range(0, 80, 10)}  # four of each seed
    assert all(sorted(walk) == task.train for walk in walks) and len(walks) == 8


@pytest.fixture
def prepared():
    """4 x 3 answers of a step 1, which learns in two updates."""
    task, policy = Arithmetic(), load("scratch", layers=1, width=16)
    sizes = dict(prompts=4, group_size=3, max_tokens=8, minibatches=2, micro_rows=5)
    config, method = train.Config(**sizes), losses.bind("grpo", {})
    answers = train.sample(policy, task, task.train[:4], 1, config)
    answers.rewards = torch.tensor([1.0, 0.0, 0.0] * 4)
    return policy, answers, method, config


def step(policy, answers, method, config):
    scored = train.score(policy, answers, method, config, None)
    scored.batch.logp_old.add_(1e-6)  # as if it had rounded otherwise than learning does
    return train.learn(policy, train.adamw(policy.model, 0.01), scored, method, config)


def stops(prepared) -> bool:
    """Whether the step ends in one line and leaves the weights as they are."""
    before = weights_of(prepared[0])
    return "step 1" in refused(step, *prepared) and torch.equal(weights_of(prepared[0]), before)


def sqrt_at_0(batch):
    """Its value is finite, and its gradient is not."""
    return (batch.logp - batch.logp.detach()).sqrt().sum() + batch.logp.sum()


@pytest.mark.parametrize("bad", [lambda batch: (batch.logp * 0).sum() + math.nan, sqrt_at_0])
def test_a_number_that_is_not_finite_stops_before_the_weights_change(prepared, bad):
    prepared[2].passes = (bad,)
    assert stops(prepared)


GAPS = [(0.01, 1), (-0.01, 1), (math.nan, 1), (0.03, 0.05), (0.01, 0.05)]


@pytest.mark.parametrize("gap, temperature", GAPS)
def test_a_sampler_that_is_not_the_scorer_stops(prepared, gap, temperature):
    """A single token decides. The limit is 0.001, and 0.02 at a temperature of 0.05."""
    policy, answers, _, config = prepared
    config.temperature = temperature
    answers.logp = train.log_probs(policy, answers, temperature)[0].detach()
    answers.logp[0, 0] -= gap
    if (gap, temperature) == (0.01, 0.05):
        assert len(step(*prepared)) == 2
    else:
        assert stops(prepared)


@pytest.mark.parametrize("micro_rows", [5, 64])
def test_first_ratios_are_1_and_a_forward_pass_has_micro_rows_answers(prepared, micro_rows):
    policy, _, _, config = prepared
    config.micro_rows, sizes = micro_rows, []
    policy.model.register_forward_hook(lambda *args: sizes.append(len(args[2].logits)))
    first, _ = step(*prepared)
    assert max(sizes) == min(micro_rows, 12)
    assert torch.equal(first.minibatch.batch.logp, first.minibatch.batch.logp_old)
    ids = policy.tokenizer([item.prompt for item in first.minibatch.answers.items])["input_ids"]
    assert first.minibatch.answers.prompts.tolist() == ids


def test_a_prompt_and_its_answer_must_fit_the_context(prepared):
    task, config = Arithmetic(), train.Config(max_tokens=2)
    task.encode = lambda tokenizer, items: [[7] * 1023]
    assert "1024" in refused(train.ask, prepared[0], task, task.train[:1], config, train.rng(0))
