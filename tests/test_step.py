"""To whoever changes train.py: a step, an evaluation and a warm start give the naive numbers.

toy/plain.py, toy/plain_baseline.py, naive.py and this file are the trainer a second time, one
answer at a time, without cache, padding or batches, in float64, so that "equal" means equal. That
each loss is its formula is claim M1. The last section is what no twin sees: no step learns from a
wrong batch, or from a number that is not finite.
"""

import copy
import math
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import naive
import pytest
import torch
from conftest import TOY, Letters, float64, random_policy, timeless, weights_of
from torch.nn.utils import clip_grad_norm_

import losses
import train
from llm.neighbours import nthr_scores
from llm.start import warm_start
from tasks.arithmetic import Arithmetic
from toy import plain, plain_baseline

G, L, TEMPERATURE = 4, 7, 0.7
SIZES = dict(prompts=4, group_size=G, max_tokens=L, temperature=TEMPERATURE, seed=5, steps=3)


def tempered(policy):
    return naive.tempered(policy, TEMPERATURE)


def adam(model, lr):
    """AdamW without weight decay."""
    return torch.optim.Adam(model.parameters(), lr, betas=(0.9, 0.95))


@pytest.fixture(scope="module")
def start():
    """The policy, the same one with --fast, and a reference that differs from it."""
    with float64():
        policies = random_policy(37), random_policy(37, fast=True), random_policy(4)
        yield [replace(policy, eos=torch.tensor([0, 8, 16, 17])) for policy in policies]


def ask(policy, task, items, temperature, gen):
    """The naive answer to each item, a row each."""
    prompts, rows = task.encode(policy.tokenizer, items), []
    answers = naive.rollout(policy, prompts, L, temperature, gen)
    for item, prompt, answer in zip(items, prompts, answers, strict=True):
        row = SimpleNamespace(item=item, prompt=prompt, answer=answer, repaired=False)
        row.kept = [False] * len(answer)
        row.text = policy.tokenizer.decode([x for x in answer if x not in policy.eos])
        row.reward = task.reward(row.text, item)
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def rows(start):
    """The naive rollout of a step. Two of its prompts are equal."""
    task, gen = Letters(), train.rng(5, "sample", 2)
    rows = ask(start[0], task, [x for x in task.train for _ in range(G)], TEMPERATURE, gen)
    assert {0, 8, 16, 17} < {row.answer[-1] for row in rows}  # 8 where it would be cut off anyway
    assert len({len(row.answer) for row in rows}) > 3
    return rows


def padded(values: list) -> torch.Tensor:
    """Lists or tensors (T_i, ...) -> (N, L, ...). Some answer is L tokens long."""
    made = [torch.as_tensor(x) for x in values]
    return torch.stack([torch.cat([x, x.new_zeros(L - len(x), *x.shape[1:])]) for x in made])


GAP = 1e-4  # nats by which sampling rounds, as on a GPU; no number but max_logp_gap may show it


def sampled_and_assessed(policy, method, config, reference=None, gap=GAP) -> train.Rollout:
    rollout = train.sample(policy, Letters(), Letters().train, 2, config)
    rollout.logp_sampled = rollout.logp_sampled - gap * rollout.mask
    train.assess(policy, reference, rollout, method, config)
    return rollout


# ---------------- a step


STEPS = [
    dict(minibatches=2, epochs=3, prefix_baseline=True, micro_rows=5),
    # Some updates push nothing.
    dict(minibatches=4, epochs=2, fast=True, offload=True, schedule="constant"),
    dict(minibatches=1, epochs=1, micro_rows=3),  # learned from once, and not read apart
]


@pytest.mark.parametrize("flags", STEPS, ids=str)
def test_the_trainers_step_is_that_of_the_plain_algorithm(start, rows, monkeypatch, flags):
    """From the sampled answers to the weights; and what is logged on the way."""
    config = train.Config(**SIZES, lr=0.05, grad_clip=0.51, **flags)
    ours, theirs = copy.deepcopy(start[config.fast]), tempered(copy.deepcopy(start[0]))
    reference = start[2] if config.epochs > 1 else None
    rollout = sampled_and_assessed(ours, losses.bind("grpo", {}), config, reference)
    optimizer = train.adamw(ours.model, config.offload)  # a step sets its own learning rate
    updates = train.learn(ours, optimizer, rollout, losses.bind("grpo", {}), 2, config)
    metrics = train.diagnose(ours, rollout, updates, 2, config)

    gen, orders = train.rng(5, "learn", 2), []
    for _ in range(config.epochs):
        orders += torch.randperm(4, generator=gen).view(config.minibatches, -1).tolist()
    lr = 0.05 * (2 / 3 if config.schedule == "linear" else 1)
    entropy, kl, read, norms, far, log_probs = 0.0, 0.0, [], [], [], plain.log_probs
    for row in rows:
        logp = naive.all_log_probs(theirs, row.prompt, row.answer).detach()  # (T_i, V)
        entropy -= float((logp.exp() * logp).sum())
        other = naive.all_log_probs(tempered(start[2]), row.prompt, row.answer).detach()
        log_q = (other - logp)[range(len(row.answer)), row.answer]
        kl += float((log_q.exp() - log_q - 1).sum())

    def noted(*args):  # first the old log-probs of all rows, then update by update
        read.append(log_probs(*args))
        return read[-1]

    def end_of_update(parameters, _):
        part = [g * G + i for g in orders[len(norms)] for i in range(G)]
        ratios = torch.cat(read[-len(part) :]) - torch.cat([read[i] for i in part])
        far.append(((ratios.exp() - 1).abs() > 0.2).double().mean().item())
        norms.append(clip_grad_norm_(parameters, 0.51).item())
        return norms[-1]

    monkeypatch.setattr(plain, "log_probs", noted)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", end_of_update)
    learn = plain_baseline.learn if config.prefix_baseline else plain.learn
    learn(theirs, adam(theirs.model, lr), [rows[i : i + G] for i in range(0, 16, G)], orders)

    tokens, rewards = sum(len(row.answer) for row in rows), [row.reward for row in rows]
    if reference:
        assert metrics.pop("kl") == pytest.approx(kl / tokens)
    assert math.isfinite(metrics.pop("loss"))
    assert metrics == pytest.approx(
        {
            "step": 2,
            "lr": lr,
            "generated": tokens,
            "reward": fmean(rewards),
            "length": tokens / len(rows),
            "truncated": fmean(row.answer[-1] not in theirs.eos for row in rows),
            "equal_groups": fmean(len({*rewards[i : i + G]}) == 1 for i in range(0, 16, G)),
            "entropy": entropy / tokens,
            "max_logp_gap": GAP,
            "grad_norm": fmean(norms),
            "clip_share": fmean(far),
        },
        rel=1e-7,
    )
    assert 0.5 < metrics["truncated"] < 1 and 0 < metrics["equal_groups"] < 1
    if config.epochs > 1:
        assert min(norms) < 0.51 < max(norms) and metrics["clip_share"]  # clipped, but not always
    assert not torch.equal(weights_of(ours), weights_of(start[0]))
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-9)


def test_the_plain_algorithm_learns(capsys, monkeypatch):
    """To begin with "so", which a third of the demonstrations do; and answers learn to end."""
    for name, value in dict(PROMPTS=2, UPDATES=2, TOKENS=8).items():
        monkeypatch.setattr(plain, name, value)
    monkeypatch.setattr(Arithmetic, "reward", lambda _, text, item: float(text.startswith("so")))
    plain.main(seed=0, warm_steps=12, steps=10)
    said = capsys.readouterr().out
    last = float(said.splitlines()[-1].split()[3])  # a mean of nine steps
    assert last > 0.6 and "<eos>" in said


def test_a_loss_is_told_what_toy_plain_does_not_know(start):
    """Lopti's two losses take turns; L, which is longer than any answer; another scale of A; and
    the log-probs of a reference."""
    policy, seen, refs = copy.deepcopy(start[0]), [], []
    config = train.Config(**SIZES, minibatches=1, scale="mean")

    def spy(name, batch):
        seen.append((name, batch.max_tokens))
        refs.append(batch.logp_ref)
        return losses.reinforce(batch)

    passes = (lambda batch: spy("low", batch), lambda batch: spy("high", batch))
    method = replace(losses.bind("grpo", {}), passes=passes)
    rollout = sampled_and_assessed(policy, method, config)
    assert rollout.logp_old is not rollout.logp_sampled  # two passes are two updates
    groups = rollout.rewards.view(-1, G)
    assert torch.equal(rollout.adv[:, 0], (groups - groups.mean(1, keepdim=True)).flatten())
    train.assess(policy, start[2], rollout, method, config)
    config.minibatches, config.max_tokens = 2, 2 * L
    train.learn(policy, train.adamw(policy.model), rollout, method, 2, config)
    assert seen == [("low", 2 * L)] * 2 + [("high", 2 * L)] * 2
    assert torch.stack(refs).sum().item() == pytest.approx(2 * rollout.logp_ref.sum().item())


# ---------------- what neighbouring papers ask for


def corrections(policy, task, rows, references):
    """The second rollout of ibpo, of which the number of tokens is returned."""
    wrong, problems = [row for row in rows if row.reward != 1], []
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


@pytest.mark.parametrize("name, fast", [("ibpo", False), ("nthr", True)])
def test_a_credit_rule_knows_what_one_answer_at_a_time_would_tell(start, rows, name, fast):
    """And what it returns becomes the rollout's advantages, of every token."""
    config = train.Config(**SIZES, method=name, repair_references=3, micro_rows=5, scale="mean")
    policy, task, given = copy.deepcopy(start[fast]), Letters(), []
    method = losses.bind(name, {"beta": "1"} if name == "nthr" else {})
    spied = replace(method, credit=lambda adv, old: given.append((adv, old)) or adv * 2 + 1)
    rollout = sampled_and_assessed(policy, method, config)
    more = train.reshape_credit(policy, task, rollout, spied, 2, config)
    ((adv, old),) = given
    assert torch.equal(rollout.adv, adv * 2 + 1)
    still = SimpleNamespace(logp=old.logp, logp_old=old.logp, mask=old.mask)
    update = dict(gap=0.0, loss=0.0, grad_norm=0.0, batch=still)
    # Groups of equal rewards have an advantage now, as repairs give them.
    assert train.diagnose(policy, rollout, [update], 2, config)["equal_groups"] == 0

    rows = [copy.copy(row) for row in rows]
    rewards, log = [row.reward for row in rows], {}
    facts = dict(tokens=padded([row.answer for row in rows]), group_size=G)
    facts["mask"] = padded([[True] * len(row.answer) for row in rows])
    logps = [plain.log_probs(tempered(policy), row.prompt, row.answer) for row in rows]
    facts |= dict(logp=padded(logps).detach(), rewards=torch.tensor(rewards))
    expected = dict(facts)
    if name == "ibpo":
        tokens, wrong = sum(len(row.answer) for row in rows), sum(x != 1 for x in rewards)
        log["generated"] = tokens + corrections(policy, task, rows, config.repair_references)
        log["repair_rate"] = sum(row.repaired for row in rows) / wrong
        rewards = [row.reward + 0.3 * row.repaired for row in rows]
        expected["repaired"] = torch.tensor([row.repaired for row in rows])
        expected["kept_mask"] = padded([row.kept for row in rows])
        assert 0 < log["repair_rate"] < 1
    else:
        hidden = []
        for row in rows:
            read = policy.model.base_model(torch.tensor([row.prompt + row.answer]))
            hidden.append(read.last_hidden_state[0, len(row.prompt) - 1 : -1].detach())
        head = policy.model.get_output_embeddings().weight.detach()
        own = dict(hidden=padded(hidden), head=head, temperature=TEMPERATURE)
        expected["scores"], expected["own_scores"] = nthr_scores(**facts, **own)
        assert expected["scores"].any()
    assert more == pytest.approx(log)
    A = losses.group_advantages(torch.tensor(rewards), G, "mean")
    torch.testing.assert_close(adv, A[:, None].expand(-1, L), rtol=0, atol=1e-9)
    for key, value in expected.items():
        torch.testing.assert_close(getattr(old, key), value, rtol=0, atol=1e-8)


# ---------------- evaluation and warm start


# Of the ids that end an answer, the tokenizer's is not the first, and padding's is none.
ENDS = torch.tensor([9, 1, 5])


def test_evaluation_is_the_naive_one(start):
    """On the first held-out items, in batches of as many rows as a rollout has."""
    task, policy = Letters(), replace(start[0], eos=ENDS)
    task.shares = lambda items, texts: {"shares": [*zip(items, texts, strict=True)]}
    config = train.Config(eval_items=4, eval_samples=3, seed=1, max_tokens=L)
    config.temperature, config.prompts, config.group_size = 0.8, 2, 4
    metrics = timeless(train.evaluate(policy, task, config))
    items, gen = task.test[:4], train.rng(1, "evaluate")
    greedy = [row.reward for row in ask(policy, task, items, 0.0, gen)]
    sampled = ask(policy, task, [item for item in items for _ in range(3)], 0.8, gen)
    rewards = [row.reward for row in sampled]
    lines = [f"{row.item.prompt} -> {row.text}  [{row.reward:g}]" for row in sampled[::3]]
    assert metrics.pop("examples") == lines[:3]
    assert metrics.pop("shares") == [(row.item, row.text) for row in sampled]
    assert metrics == pytest.approx(
        {
            "greedy": fmean(greedy),
            "greedy_se": torch.tensor(greedy).std(correction=0).item() / 2,
            "sampled": fmean(rewards),
            "pass@3": fmean(1 in rewards[i : i + 3] for i in range(0, 12, 3)),
        }
    )
    assert 0 < metrics["sampled"] < 1


def test_the_warm_start_is_the_naive_one(start):
    """Its loss is the mean over the demonstrations' tokens, their ends included. The learning rate
    rises for 20 steps and then falls to 0. With ibpo 30 % of the demonstrations are corrections."""
    # With this seed some texts are as long as their step's average.
    sizes = dict(warm_steps=25, warm_rows=10, warm_lr=0.1, seed=33, repair_references=2)
    config, task = train.Config(grad_clip=0.3, **sizes), copy.copy(TOY)
    task.train = [replace(task.train[0], demo=""), *task.train[:20]]  # the first shows nothing
    ours, theirs = (replace(copy.deepcopy(start[0]), eos=ENDS) for _ in range(2))
    warm_start(ours, task, train.adamw(ours.model), losses.bind("ibpo", {}), config)
    optimizer, norms, end = adam(theirs.model, 0.1), [], theirs.tokenizer.eos_token_id
    for step in range(25):
        picks = torch.randint(20, (10,), generator=train.rng(33, "warm", step)).tolist()
        items = [task.train[1:][i] for i in picks]
        items[:3] = [task.correction(item, 2) for item in items[:3]]
        logps = []
        for item, prompt in zip(items, task.encode(theirs.tokenizer, items), strict=True):
            demo = [*theirs.tokenizer(item.demo)["input_ids"], end]
            logps.append(plain.log_probs(theirs, prompt, demo))
        optimizer.zero_grad()
        (-torch.cat(logps).mean()).backward()
        norms.append(clip_grad_norm_(theirs.model.parameters(), 1.0).item())
        optimizer.param_groups[0]["lr"] = 0.1 * min((step + 1) / 20, 1 - step / 25)
        optimizer.step()
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-9)
    assert min(norms) < 1 < max(norms)  # clipped, but not always


# ---------------- what no twin sees


def test_prompts_walk_through_the_whole_training_split_before_any_repeats():
    task, seen = SimpleNamespace(train=[*range(10)]), []
    for seed in (0, 1):
        seen += sum(train.prompt_batches(task, train.Config(prompts=5, steps=8, seed=seed)), [])
    walks = {tuple(seen[i : i + 10]) for i in range(0, 80, 10)}  # four of each seed
    assert all(sorted(walk) == task.train for walk in walks) and len(walks) == 8


def stops(policy, method, gap=GAP, **flags) -> bool:
    """Whether a step ends before its first update."""
    ours, config = copy.deepcopy(policy), train.Config(**SIZES, **flags)
    with pytest.raises(ValueError):
        rollout = sampled_and_assessed(ours, method, config, gap=gap)
        train.learn(ours, train.adamw(ours.model), rollout, method, 2, config)
    return torch.equal(weights_of(ours), weights_of(policy))


def sqrt_at_0(batch):
    """Its value is finite, and its gradient is not."""
    return (batch.logp - batch.logp.detach()).sqrt().sum() + batch.logp.sum()


@pytest.mark.parametrize("bad", [lambda batch: (batch.logp * 0).sum() + math.nan, sqrt_at_0])
def test_a_number_that_is_not_finite_stops_before_the_weights_change(start, bad):
    assert stops(start[0], losses.Method((bad,)))


@pytest.mark.parametrize("gap", [0.01, -0.01, math.nan])
@pytest.mark.parametrize("row, minibatches", [(14, 1), (0, 4)])
def test_a_sampler_that_is_not_the_scorer_stops(start, gap, row, minibatches):
    """A single token decides: of an answer that is pushed, or of one in a later update."""
    at = torch.zeros(16, L)
    at[row, 0] = gap
    assert stops(start[0], losses.bind("grpo", {}), at, minibatches=minibatches)


def test_a_reward_is_a_finite_number(start):
    task, config = Letters(), train.Config(max_tokens=2)
    task.reward = lambda text, item: math.inf
    with pytest.raises(ValueError, match="inf"):  # else an evaluation would show it
        train.ask(start[0], task, task.train[:1], config, 1.0, train.rng(0))


def test_a_prompt_and_its_answer_must_fit_the_context(start):
    task, config = Letters(), train.Config(max_tokens=2)
    task.encode = lambda tokenizer, items: [[7] * 1023]
    with pytest.raises(ValueError):  # else some models would read on, and be wrong
        train.ask(start[0], task, task.train[:1], config, 1.0, train.rng(0))
