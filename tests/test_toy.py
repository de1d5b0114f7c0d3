"""Whoever quotes a figure of toy/README.md finds its published numbers when they run it again."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import random_policy

import losses
from experiments import lopti, nthr
from toy import crumb, drift, gate, ibpo, luck, tax
from toy.worlds import Groups


def published(*values):
    return pytest.approx([*values], abs=0.0006)


def test_tax_cancelling_saves_nothing_and_one_divisor_everything():
    long, short, worse = tax.SETTINGS
    ends = {  # the reward, and the tax where it is published
        (long, "grpo"): (0.596, 0.583),
        (worse, "gspo"): (0.207, 0.535),
        (worse, tax.LOCAL): (0.592,),
        (short, tax.EXACT): (0.411,),
        (short, tax.BOTH): (0.411,),
        (short, "balanced"): (0.573, 0.557),
        (short, "dr-grpo"): (0.597,),
    }
    for (setting, name), end in ends.items():
        curve, left = tax.find_rewards(setting, tax.ROWS[name])
        assert [float(curve[-1]), left][: len(end)] == published(*end), name


def test_tax_survives_adam_at_ordinary_rates_and_one_divisor_saves_it(monkeypatch):
    _, short, worse = tax.SETTINGS
    monkeypatch.setattr(tax, "ADAM_RATES", (0.01, 0.1))  # from 0.3 on rounding decides
    ends = {(short, "grpo"): (0.419, 0.427), (worse, "grpo"): (0.2, 0.2)}
    ends |= {(short, "dr-grpo"): (0.6, 0.6)}
    for (setting, name), values in ends.items():
        assert tax.find_adam_rewards(setting, tax.ROWS[name]).tolist() == published(*values), name


def test_gate_grpos_min_costs_a_token_by_plain_ascent_and_with_adam_at_large_rates_only():
    best = {tax.EXACT: 0.401, tax.BOTH: 0.401, "grpo-symmetric": 0.5}
    rates = gate.RATES[[6, 11, 16, 20]]  # of the 21; the best of each row are among them
    found = {name: gate.sweep(gate.METHODS[name], rates) for name in best}
    assert {name: float(x.max()) for name, x in found.items()} == pytest.approx(best, abs=1.1e-3)
    torch.testing.assert_close(found[tax.EXACT], found[tax.BOTH])  # at every rate
    rates = torch.tensor([0.03, 0.3, 3.0], dtype=torch.float64)
    for name, ends in {tax.EXACT: (0.473, 0.5, 0.4), "grpo-symmetric": (0.473, 0.5, 0.5)}.items():
        found = gate.sweep(gate.METHODS[name], rates, tax.ADAM)
        assert found.tolist() == published(*ends), name


def test_crumb_the_groups_std_keeps_it_and_nothing_else_does():
    for scale in crumb.SCALES:
        ends = (0.1, 0.1, 0.45) if scale == "std" else (0.45, 0.45, 0.45)
        assert crumb.train_exact(scale)[-1].tolist() == published(*ends), scale
        runs, ends = (100, (0, 8, 54)) if scale == "std" else (20, (20, 20, 20))
        found = (crumb.train_sampled(scale, runs)[-1] > 0.4).sum(1).tolist()
        # Another torch draws the same numbers but may round otherwise.
        assert found == pytest.approx(ends, abs=3 if scale == "std" else 0), scale
    thresholds = [crumb.find_threshold(G) for G in (4, 8, 16)]
    assert thresholds == pytest.approx([0.2411, 0.0795, 0.0338], abs=6e-5)
    shares = crumb.train_three("std")[-1]
    assert shares[0].tolist() == published(0.346, 0.264, 0.390)
    ends = {"std": 0.6485, "mean": 0.7, "batch": 0.7}
    for scale, J in ends.items():
        found = crumb.expected_reward(crumb.THREE_WAYS, crumb.train_three(scale)[-1]).tolist()
        assert found == published(J, J), scale


def test_crumb_pulls_as_the_article_says():
    """The expected A of a rare answer less that of a usual one, at a share of 0.05."""
    logits = torch.tensor([[0.95, 0.05]], dtype=torch.float64).log().requires_grad_()
    # The last is 0.306 by the std of all rewards, 0.135.
    for scale, pull in {"std": -0.082, "mean": 0.306, "batch": 2.27}.items():
        loss = losses.grpo(crumb.enumerate_batch(Groups(crumb.RARE_WAY, 8), scale, logits))
        (gradient,) = torch.autograd.grad(-loss, logits)
        assert gradient[0, 1].item() / 0.05 / 0.95 == pytest.approx(pull, abs=0.003), scale


def test_drift_on_one_batch_is_a_push_and_over_fresh_ones_a_walk_as_wide_as_predicted():
    ends = {
        "grpo": (0.445, 0.453),
        tax.LOCAL: (0, 0.460),
        "grpo, no clip": (2.397, 0.949),
        "gspo": (1.731, 0.843),
        "dfpo-min, eps 0.2": (0, 0.453),
        "dfpo-min": (0, 0.937),
        "reinforce": (0, 0.993),
    }
    for name, values in ends.items():
        runs = [drift.repeat(drift.METHODS[name], seed)[-1] for seed in range(drift.SEEDS)]
        assert torch.stack(runs).mean(0).tolist() == published(*values), name
    for name, deviation in ((tax.EXACT, 0.151), (tax.BOTH, 0.156)):
        row = tax.ROWS[name]
        assert [drift.predict_deviation(row.prefix_baseline)] == published(deviation)
        assert float(drift.wander(row, runs=800).std()) == pytest.approx(deviation, rel=0.05)


def test_ibpo_needs_as_many_tokens_as_published(monkeypatch):
    monkeypatch.setattr(ibpo, "LIMIT", 20_000)  # a broken loss never gets there
    published = {
        ("grpo", 8): 1.01,
        ("ibpo", 16): 3.14,
        ("grpo at 0.7", 16): 1.22,
        ("ibpo at 0.7", 16): 2.01,
    }
    seen, loss = [], ibpo.loss  # the logits that are learnt are those that were sampled from
    monkeypatch.setattr(
        ibpo, "loss", lambda *x: seen.append(float(x[0].detach().max())) or loss(*x)
    )
    ibpo.tokens_to_goal(ibpo.Method(False, 0.7), 4, 400, seed=0)
    assert seen[0] == pytest.approx(math.log(0.63 / 0.37 * 9) / 0.7)
    costs = {key: ibpo.measure_cost(ibpo.METHODS[key[0]], key[1]) for key in published}
    # Another torch rounds otherwise, and a run that is sampled then takes another path.
    assert {key: sum(x) / 24 for key, x in costs.items()} == pytest.approx(published, rel=0.1)


def test_luck_a_baseline_at_every_prefix_pays_and_costs_what_is_published(monkeypatch):
    """After 5 batches. Another torch rounds otherwise, so a few of the 400 runs may differ."""
    shares = [luck.decided(world) for world in luck.WORLDS.values()]
    assert shares == pytest.approx([0.64, 0.16, 0, 0.64, 0.61], abs=0.005)
    monkeypatch.setattr(luck, "BATCHES", 5)
    ends = {
        "easy .9, hard .1": (0.689, 0.203),
        "no luck": (0.679, -0.049),
        "rare good way": (0.907, -0.092),
    }
    for name, (share, gain) in ends.items():
        without, with_baseline = luck.compare(luck.WORLDS[name], 8, "Adam")
        found = [float(without[-1].mean()), float((with_baseline - without)[-1].mean())]
        assert found == pytest.approx([share, gain], abs=0.005), name
    # The best that can be reached counts the choice between easy and hard, where there is one.
    (ends,) = luck.train(
        tax.ROWS["grpo"], luck.WORLDS["luck is chosen"], 8, "Adam", torch.tensor([4.0]), 9, 0
    )[-1]
    assert 0.9 < ends.min() and ends.max() <= 1


def test_luck_prints_what_is_learnt_after_5_and_after_20_batches(monkeypatch, capsys):
    shares = torch.arange(1, 21)[:, None].expand(20, 3) / 100  # k hundredths after k batches
    monkeypatch.setattr(luck, "compare", lambda *_: (shares, 2 * shares))
    monkeypatch.setattr("sys.argv", ["luck"])
    luck.main()
    rows = " ".join(capsys.readouterr().out.split())
    assert rows.count("0.050 +0.050 +- 0.000 0.200 +0.200 +- 0.000") == len(luck.CELLS)


def pretend(monkeypatch, module, direct: int, scored, move) -> list:
    """Makes up an experiment's start, and its steps: after the k-th log pi has moved by move(k).

    Returns what was learnt: rate, optimiser, method. Every step must begin with the same policy.
    """
    policy, steps = random_policy(0), []
    starts = {direct: (policy, SimpleNamespace(test=[]))}  # no others are asked for

    def learn(trial, optimizer, scored, method, config):
        assert trial.model is not policy.model and config.minibatches == 1
        steps.append((config.lr, type(optimizer).__name__, method))
        return [SimpleNamespace(grad_norm=len(steps)), SimpleNamespace(grad_norm=99)]

    old = scored.batch.logp_old
    monkeypatch.setattr(module, "make_start", lambda seed, direct: starts[direct])
    monkeypatch.setattr(module, "score", lambda *_, **__: scored)
    monkeypatch.setattr(module, "learn", learn)
    monkeypatch.setattr(module, "log_probs_in_pieces", lambda *_: (old + move(len(steps)), None))
    return steps


def test_nthrs_delta_is_that_of_the_right_answers(monkeypatch):
    answers = SimpleNamespace(rewards=torch.tensor([1.0, 0.0, 1.0]))
    scored = SimpleNamespace(batch=SimpleNamespace(logp_old=-torch.ones(3, 2)))
    moved = torch.tensor([[0.1, 0.2], [9.0, 9.0], [-0.1, 0.0]])
    steps = pretend(monkeypatch, nthr, 0, scored, lambda k: moved)
    monkeypatch.setattr(nthr, "find_questions", lambda *_: [answers] * nthr.QUESTIONS)
    deltas = [float(x) for table in nthr.study(starts=1).values() for x in table.values()]
    assert deltas == pytest.approx([0.1] * 8)
    kinds = [(0.02, "SGD")] * 4 + [(3e-4, "AdamW")] * 4
    assert [step[:2] for step in steps] == kinds * nthr.QUESTIONS
    taken = [(method.formula, method.hyper.get("eta")) for _, _, method in steps[:4]]
    rows = {"nthr": 1, "nthr ": -1, "nthr-random": -1, "pos-only": None}  # eta 1 softens nothing
    assert taken == [(losses.METHODS[name.strip()].formula, eta) for name, eta in rows.items()]


def test_loptis_quarters_and_orders_by_hand(monkeypatch):
    p = torch.tensor([[0.1, 0.2, 0.8, 0.9], [0.3, 0.76, 0.9, 0.99]])
    mask, A = p < 0.95, torch.tensor([[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, 0.0, 0.0]])
    scored = SimpleNamespace(batch=losses.Batch(p.log(), p.log(), A, mask, 2, 4), answers=None)
    # Two probable tokens should rise and one fall: all go up in step 6, down in 7, not at all in 8.
    steps = pretend(monkeypatch, lopti, 6, scored, lambda k: {6: 1, 7: -1}.get(k, 0))
    monkeypatch.setattr(lopti, "sample", lambda *_: None)
    quarters, effects = lopti.study(starts=1)
    expected = [2 / 7, 1 / 7, 0, 4 / 7, 1 / 5, 2 / 5, 3 / 5, 4 / 5]
    assert quarters.flatten().tolist() == pytest.approx(expected)
    assert [*map(float, effects.values())] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert {step[:2] for step in steps} == {(1e-3, "AdamW")}

    passes, low_high = [method.passes for *_, method in steps], losses.METHODS["lopti"].passes
    assert passes[6:] == [low_high, low_high[::-1]]
    parts = [(4 * p).floor() == k for k in range(4)] + [1, 0.5, 0.5]  # of the token mean's pushes
    for loss, part in zip(sum(passes[:6], ()), parts, strict=True):
        logp = p.log().requires_grad_()
        pushes = losses.token_coefficients(loss(replace(scored.batch, logp=logp)), logp)
        torch.testing.assert_close(pushes, A * mask * part * 2 / 7)
