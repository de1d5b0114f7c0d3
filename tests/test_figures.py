"""The figures of toy/: what their README says, in small; and a value of each by hand."""

import copy
import math
import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import float64
from torch.nn.functional import logsigmoid, pad

import losses
import train
from llm.neighbours import hidden_states
from losses import METHODS, Batch, group_advantages, learning_tax, prefix_nodes, project
from toy import alike, drift, gate, ibpo, lopti, nthr, tax
from toy.arithmetic import Arithmetic
from train import Config

HYPER = {"gspo": {"eps_low": 0.02, "eps_high": 0.02}, "dfpo-min eps 0.2": {"eps": 0.2}}


def near(places: int, *values):
    """Of which these digits were published."""
    return pytest.approx([*values], abs=0.501 * 10**-places)


def printed(capsys) -> list[str]:
    """The lines, with one space between words."""
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


# ---------------- all groups are enumerated: tax, gate, alike


def push_by_hand(outcomes: list[tuple], G: int, name: str, new, old) -> tuple:
    """The expected gradient of J by the log-odds `new` of choices, and the learning tax.

    From all ordered groups of answers, drawn at the log-odds `old`. An outcome of an answer: a sign
    for each choice (0: it has none), the chance of the rest, the reward, the length.
    """
    groups = [*product(outcomes, repeat=G)]
    rows = torch.tensor(groups, dtype=torch.float64).flatten(0, 1)
    signs, (chance, reward, length) = rows[:, :-3], rows[:, -3:].T
    new, logps = new.clone().requires_grad_(), []
    mask = torch.arange(int(length.max())) < length[:, None]
    for odds in (new, old):  # the rest of an answer has no choice
        choices = logsigmoid(signs * odds) * (signs != 0)
        logps.append(pad(choices, (0, mask.shape[1] - signs.shape[1])))
    p = (chance * logps[1].sum(1).exp()).view(-1, G).prod(1).repeat_interleave(G)
    tokens = torch.arange(9, 9 + mask.numel()).view(mask.shape)  # the rest is nobody else's
    shared = tokens[:, : signs.shape[1]]
    shared[signs != 0] = signs[signs != 0].long()
    method = METHODS[name.partition("+")[0].split()[0]]
    A = group_advantages(reward, G, method.scale) * p * len(groups)
    batch = Batch(*logps, A[:, None].expand(mask.shape), mask, G, mask.shape[1])
    loss, nodes = method.passes[0](batch, **HYPER.get(name, {})), prefix_nodes(tokens, mask, G)
    if name.endswith("+proj"):
        loss = project(loss, batch.logp, A, nodes, mask)
    c = losses.token_coefficients(loss, batch.logp)
    return torch.autograd.grad(-loss, new)[0], learning_tax(c, A, nodes, mask)


def climb_by_hand(outcomes: list[tuple], name: str, odds, rate=None) -> tuple:
    """Two batches of two updates. The log-odds after each, and the mean tax of the last updates."""
    path, taxes = [], []
    for _ in range(2):
        old = odds
        for _ in range(2):
            push, part = push_by_hand(outcomes, 4, name, odds, old)
            rate = rate or 0.7 / push.norm()  # the length of the first update
            odds = odds + rate * push
            path.append(odds)
        taxes.append(part)
    return path, sum(taxes) / 2


def test_tax_prints_where_the_push_of_all_ordered_groups_leads(capsys, monkeypatch):
    short = dict(BATCHES=2, UPDATES=2, SIZE=0.7)
    short["SETTINGS"] = {"6: unequal": ((16, 7), 0.2, (4, 24))}
    for name, value in short.items():
        monkeypatch.setattr(tax, name, value)
    tax.main([])
    rows = printed(capsys)
    outcomes = [(1, 1, 0.6, 1, 16), (1, 1, 0.4, 0, 7), (1, -1, 1, 0, 7)]  # way A, plan, ...
    outcomes += [(-1, 0, 0.2, 1, 4), (-1, 0, 0.8, 0, 24)]
    for name in tax.NAMES:
        path, part = climb_by_hand(outcomes, name, torch.tensor([2.0, 0.0], dtype=torch.float64))
        way, plan = path[-1].sigmoid().tolist()
        assert f"{name} {way * plan * 0.6 + (1 - way) * 0.2:.3f} ({part:.3f})" in rows


def test_dividing_by_length_costs_reward_in_settings_3_and_5():
    for k, name, *published in ((3, "grpo", 0.411, 0.601), (5, "gspo", 0.207, 0.535)):
        setting = [*tax.SETTINGS][k - 1]
        path, size = tax.train(tax.make_groups(setting), name)
        assert [float(tax.expected_reward(setting, path)[-1]), size] == near(3, *published)
    ends = [tax.predict_reward(setting) for setting in tax.SETTINGS]
    assert ends == near(3, 0.6, 0.6, 0.414, 0.6, 0.2)


def test_gate_climbs_the_push_of_all_ordered_groups_at_each_rate_alone():
    outcomes = []
    for a, b in product((1, -1), repeat=2):
        right = 0.4 + 0.05 * (a + b)
        outcomes += [(a, b, right, 1, 2), (a, b, 1 - right, 0, 2)]
    start, rates = torch.tensor([[0.5, 0.05], [3.0, 50.0]], dtype=torch.float64)
    for name in ("grpo", "dr-grpo", "gspo", "grpo+proj", "dfpo-min eps 0.2"):
        path = torch.stack(gate.train(gate.Setting((0.5, 0.05), 2, 2), name, rates)[1:])
        for k, rate in enumerate(rates):  # both logits move
            expected, _ = climb_by_hand(outcomes, name, start.logit(), 2 * rate)
            odds = path[:, k, :, 0] - path[:, k, :, 1]
            torch.testing.assert_close(odds, torch.stack(expected), atol=1e-9, rtol=0)
        reward = gate.expected_reward(path[-1])[1]
        torch.testing.assert_close(reward, 0.3 + 0.1 * expected[-1].sigmoid().sum())


def test_grpos_min_undoes_a_first_update_and_a_symmetric_clip_does_not():
    assert gate.GOOD == (0.5, 0.001)
    for M, name, best in ((1, "grpo", 0.5), (2, "grpo", 0.401), (2, "grpo-symmetric", 0.5)):
        rewards = gate.sweep(gate.Setting(gate.GOOD, M, 120), name, gate.RATES[2::8])
        assert float(rewards.max()) == pytest.approx(best, abs=1.1e-3), (M, name)
    (_, _, first), (winners, losers, _) = gate.sum_by_sign("grpo")
    assert winners == 0 and losers < -6 * first < 0


def test_gates_many_sampled_groups_are_the_expectation(monkeypatch):
    monkeypatch.setattr(gate, "LAST", 2)
    setting, rates = gate.Setting((0.5, 0.05), 2, 2), torch.tensor([3.0]).double()
    expected = gate.train(setting, "grpo", rates)
    setting = setting._replace(sampled=100_000)
    sampled = gate.train(setting, "grpo", rates)
    torch.testing.assert_close(sampled[-1], expected[-1], atol=0.06, rtol=0)
    ends = [gate.expected_reward(sampled[k]) for k in (2, 4)]  # of both batches
    torch.testing.assert_close(gate.sweep(setting, "grpo", rates), sum(ends) / 2)


def test_gates_limits_compare_methods_at_the_rate_that_is_best_on_other_seeds(monkeypatch, capsys):
    def sweep(setting, name, rates):
        return (rates == 4) * 1.0 if setting.seed else rates / 10 + 0.1 * (name == "recentred")

    monkeypatch.setattr(gate, "sweep", sweep)
    gate.show_limits()
    assert {*printed(capsys)} >= {
        "grpo 4 0.400 +- 0.000 0.000 +- 0.000",
        "recentred 4 0.500 +- 0.000 0.100 +- 0.000",
    }


def test_where_nothing_speaks_for_a_way_only_a_projection_moves_the_shares(capsys):
    alike.main([])
    assert {*printed(capsys)} >= {
        "alike, 0.7: grpo 0.00000 0.00000 0.00000",
        "alike, 0.7: node mean 0.00293 0.00225 0.00163",
        "alike, 0.7: unbiased 0.00249 0.00075 0.00019",
        "unlike, 0.5: grpo -0.00937 -0.01094 -0.01146",
        "unlike, 0.5: node mean -0.00273 -0.00155 -0.00104",
        "alike: grpo 0.700 0.610",
        "alike: node mean 0.993 0.000",
        "exchanged: node mean 0.500 0.000",
        "exchanged: unbiased 0.500 0.125",
    }


# ---------------- sampled groups: drift, ibpo


def test_a_token_that_earns_nothing_stays_where_the_theory_says_so(monkeypatch, capsys):
    monkeypatch.setattr(drift, "STEPS", 5)
    monkeypatch.setattr(drift, "SEEDS", 2)
    groups = [(1, 1, 1, 0), (1, 1, 2, 0), (1, 2, 3, 1, 0), (1, 2, 2, 3, 0)] + [(1, 3, 0)] * 4
    groups += [(1, 2, 1, 1, 0), (1, 1, 1, 0)] * 2 + [(1, 1, 3, 0)] * 4
    starts = [(drift.start_policy(random.Random(seed)), groups * 4) for seed in (0, 1)]
    monkeypatch.setattr(drift, "draw", starts.__getitem__)
    curves = drift.study()
    moved = {name for name in drift.NAMES if max(curves[name]["drift"]) > 1e-12}
    assert moved == {"grpo", "gspo", "pos-only"}
    assert all(curves[name]["tax"] == pytest.approx([0] * 6) for name in curves if "+" in name)
    drift.show(curves)
    assert {*printed(capsys)} >= {
        "grpo 0.2260 0.6333 0.2976 0.1026",
        "gspo+proj 0 0.5662 0.4269 0",
        "dfpo-min eps 0.2 0 0.5812 0.3034 0",
    }


def test_drift_measures_sums_over_all_answers():
    start, answers = drift.draw(0)
    chances = dict(start.answers((0,)))
    assert len({*answers}) > 9 and min(chances[y] for y in answers) > 1e-6
    mixed = torch.tensor([drift.reward(y) for y in answers]).view(8, 8).mean(1) % 1
    assert mixed.all()
    step = torch.randn(start.W.shape, generator=torch.Generator().manual_seed(0)).double()
    policy, first, right = start.step(step, 0.1), [Counter(), Counter()], Counter()
    for chances, x in zip(first, (policy, start), strict=True):
        for y, p in x.answers((0,)):  # those that do not begin with the opener, too
            chances[y[0]] += p
            if x is policy and y[0] == 1 and y[1] != 3 and [a for a in y if a][-1] == 1:
                right[y[1]] += p
    odds = [math.log(x[1] / (1 - x[1])) for x in first]
    total = right[1] + right[2]
    assert drift.measure(policy, start) == pytest.approx(
        {
            "drift": abs(odds[0] - odds[1]),
            "solutions": -sum(x / total * math.log(x / total) for x in right.values()),
            "reward": total / first[0][1],
        }
    )


def test_ibpo_pays_as_published(monkeypatch):
    monkeypatch.setattr(ibpo, "LIMIT", 20_000)  # a broken loss never gets there
    names = "grpo", "ibpo", "ibpo, 3 siblings", "grpo at 0.7", "ibpo at 0.7"
    costs = [ibpo.measure_cost(ibpo.METHODS[name], 8) for name in names]
    assert [sum(x) / 24 for x in costs] == pytest.approx([1.01, 1.12, 1.28, 0.61, 0.83], rel=0.2)


@pytest.mark.parametrize("count", [1, 3])
def test_a_correction_has_6_times_the_odds_for_each_answer_it_sees(count, monkeypatch):
    seen = []

    def draw(logits, gen):  # answer i is wrong by 1 + i everywhere, but answer 3 is right
        seen.append(logits)
        wrong = torch.tensor([1, 2, 3, 0, 5, 6, 7, 8] + [1, 2, 3, 4, 5, 6, 7, 8])
        return (logits.argmax(2) + wrong[:, None]) % 10

    monkeypatch.setattr(ibpo, "draw", draw)
    method = ibpo.Method(True, 0.7, count)
    words, answers, _ = ibpo.sample(ibpo.start_table(), 2, 2, method, torch.Generator())
    expected = torch.full((16, 2, 10), 0.37 / 9, dtype=torch.float64)
    expected.scatter_(2, words[..., None] % 10, 0.63)
    for i in range(16):
        turn = [i - i % 8 + (i + k) % 8 for k in range(1, 9)]
        siblings = sorted(turn, key=lambda j: j != 3)[:count]  # the right one, then the next
        for t in range(2):
            for j in (i, *siblings):
                expected[i, t, answers[j, t]] *= 6
    chances = (expected.log() / 0.7).softmax(2)
    torch.testing.assert_close(seen[1].softmax(2), chances)


# ---------------- nthr and lopti

TINY = dict(group_size=4, max_tokens=8, width=8)


@pytest.fixture
def group():
    """A policy, its answers to three problems with tokens in every quarter, and what score says."""
    with float64():
        task = Arithmetic()
        policy = train.load_policy(Config(**TINY, seed=2), task, "scratch")
        policy.model.get_input_embeddings().weight.data *= 3
        policy.eos = torch.tensor([1, 5, 9])
        answers = train.sample(policy, task, task.test[:3], 5, Config(**TINY))
        answers.rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 0])
        yield policy, answers, train.score(policy, None, answers, Config(**TINY))


def step_by_hand(policy, answers, weights, rate) -> tuple[torch.Tensor, float]:
    """Log pi after a step up the mean of weights * log pi over the tokens; the gradient's norm."""
    model = copy.deepcopy(policy.model)
    trial, parameters = replace(policy, model=model), list(model.parameters())
    logp, _ = train.log_probs(trial, answers, Config())
    J = (weights * logp).sum() / answers.mask.sum()
    gradient = torch.autograd.grad(J, parameters)
    for p, g in zip(parameters, gradient, strict=True):
        p.data += rate * g
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    return train.log_probs(trial, answers, Config())[0].detach(), float(norm)


@pytest.mark.parametrize("kind", ["SGD", "SGD, one length"])
def test_nthrs_delta_is_that_of_one_step(group, kind, monkeypatch):
    policy, answers, scored = group
    answers = train.take(answers, torch.arange(4))
    monkeypatch.setitem(nthr.RATES, kind, 0.01)
    monkeypatch.setattr(nthr, "Config", lambda **k: Config(**TINY, **k))
    A = torch.tensor([[0.5], [-0.5], [-0.5], [0.5]]) / (3**-0.5 + 1e-4)
    _, norm = step_by_hand(policy, answers, A, 0.0)
    after, _ = step_by_hand(policy, answers, A, 0.01 / norm if "one" in kind else 0.01)
    moved = (after - scored.batch.logp_old[:4]).sum(1)[[0, 3]].mean()
    assert nthr.measure_delta(policy, answers, "grpo", kind) == pytest.approx(float(moved))
    assert abs(moved) > 1e-3


def test_gwhes_is_how_fast_the_output_layer_alone_lowers_the_right_answers(group):
    """(I) - (II) is the slope of a right answer's log pi along sum A_j log pi(y_j) in W (N3)."""
    policy, answers, _ = group
    answers = train.take(answers, torch.arange(4, 8))
    answers.rewards = torch.tensor([1.0, 0, 1, 1])
    W = policy.model.get_output_embeddings().weight.detach().requires_grad_()
    logp = (hidden_states(policy, answers, Config()) @ W.T).log_softmax(2)
    logp = (logp.gather(2, answers.tokens[..., None])[..., 0] * answers.mask).sum(1)
    A = torch.tensor([0.25, -0.75, 0.25, 0.25]) / 0.1875**0.5
    mean = (logp * (A > 0)).sum() / 3
    slopes = [torch.autograd.grad(x, W, retain_graph=True)[0] for x in ((A * logp).sum(), mean)]
    expected = -float((slopes[0] * slopes[1]).sum())
    assert nthr.measure_gwhes(policy, answers) == pytest.approx(expected, rel=1e-6)


def test_nthrs_rows_have_their_differences_and_shares(capsys):
    values = {"grpo": [1.0, 3.0], "nthr": [2.0, 1.0], "random": [0.0, 0.0]}
    rows = {name: torch.tensor([values.get(name, [0.0, 0.0])] * 2) for name in nthr.METHODS}
    nthr.show({(kind, name): row for kind in nthr.RATES for name, row in rows.items()})
    row = "nthr 1.500 +- 0.000 -0.500 +- 0.000 +1.500 +- 0.000 50%"
    assert printed(capsys).count(row) == len(nthr.RATES)
    delta = torch.arange(20.0).view(2, 10)
    deltas = {(kind, "grpo"): delta for kind in nthr.RATES}
    nthr.show_laziest(deltas, -delta + 100 * (delta == 19))  # 19 is scored highest, then 0 to 8
    assert [row.split()[-1] for row in printed(capsys)[-3:]] == ["9"] * 3


def test_lopti_measures_what_naive_steps_do(group):
    policy, answers, scored = group
    measures, old, A = lopti.measure(policy, scored), scored.batch.logp_old, scored.batch.adv
    quarter = (4 * old.exp()).int().clamp(max=3).masked_fill(~answers.mask, 9)

    def by_quarter(values):
        found = [values[(quarter == q) & values.isfinite()].double().mean() for q in range(4)]
        return pytest.approx([float(x) for x in found], rel=1e-6, nan_ok=True)

    everything, norm = step_by_hand(policy, answers, A, 0.1)
    parts = [step_by_hand(policy, answers, A * (quarter == q), 0.1) for q in range(4)]
    ratios = [part[1] / norm for part in parts]
    assert norm < 1  # the gradient clip is idle
    assert measures[lopti.GRADIENT, "gradient, of all = 1"].tolist() == pytest.approx(ratios)
    shares = [float((quarter == q).sum() / answers.mask.sum()) for q in range(4)]
    assert measures[lopti.GRADIENT, "share of the tokens"].tolist() == pytest.approx(shares)
    ends = {"all": everything, "only p < .25": parts[0][0], "only p > .75": parts[3][0]}
    for name, end in ends.items():
        moved = (end.exp() - old.exp()).abs()
        assert measures[lopti.MOVES + "SGD", name].tolist() == by_quarter(moved)
    low, high = METHODS["lopti"].passes
    for kind in lopti.RATES:
        ends = [[lambda batch: losses.token_grpo(batch) / 2] * 2, [low, high], [high, low]]
        ends = [lopti.climb(policy, scored, kind, passes)[0] for passes in ends]
        right = [((end - old) * A > 0).double() / (A != 0) for end in ends]  # nan where A is 0
        lines = {"grpo twice": right[0], "lopti - grpo twice": right[1] - right[0]}
        for name, values in (lines | {"reversed - lopti": right[2] - right[1]}).items():
            assert measures[lopti.RIGHT + kind, name].tolist() == by_quarter(values)


# ---------------- whole commands

SMALL = {
    drift: dict(STEPS=1, SEEDS=2),
    tax: dict(BATCHES=1, UPDATES=1),
    gate: dict(G=3, BATCHES=1, NAMES=[*gate.LINES]),
    ibpo: dict(LENGTHS=(2,), SEEDS=range(2), TUNING_SEEDS=range(1), RATES=(400,)),
    nthr: dict(STARTS=2, QUESTIONS=2, LAZIEST=1),
    lopti: dict(STARTS=2),
}


@pytest.mark.parametrize("module", SMALL, ids=lambda module: module.__name__)
def test_a_command_prints_a_row_for_each_method_and_draws(
    module, monkeypatch, capsys, tmp_path, easy
):
    seen, tiny = [], dict(width=8, prompts=2, max_tokens=6)
    monkeypatch.setattr(nthr, "warm_start", lambda policy, task, config: seen.append(task.train))
    for name, value in SMALL[module].items():
        monkeypatch.setattr(module, name, value)
    if module in (nthr, lopti):
        for owner in (nthr, lopti):
            monkeypatch.setattr(owner, "Config", lambda **k: Config(**k, **tiny))
    path = tmp_path / "figure.svg"
    module.main(["--plot", str(path)])
    rows, names = printed(capsys), {ibpo: ibpo.METHODS, nthr: nthr.METHODS}
    names[lopti] = ("grpo twice", "lopti - grpo twice")
    names = names[module] if module in names else module.NAMES
    assert path.exists() and all(any(row.startswith(f"{x} ") for row in rows) for x in names)
    whole = Arithmetic().train
    if module is nthr:
        assert seen[0] == seen[1] == [item for item in whole if "+" in item.demo]
    if module is lopti:  # a sixth of the direct demonstrations, too
        assert 2.2 < len(whole) / len(seen[0]) < 3 and {*seen[0]} < {*whole}
