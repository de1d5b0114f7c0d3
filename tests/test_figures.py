"""The figures of toy/: a value of each by hand, in a naive loop; their rows, pairs and pictures."""

import copy
import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import float64

import losses
import train
from losses import METHODS, Batch, group_advantages, learning_tax, prefix_nodes, project
from toy import alike, drift, gate, ibpo, lopti, nthr, tax
from toy.arithmetic import Arithmetic
from toy.policy import pad
from train import Config


def printed(capsys) -> list[str]:
    """The lines, with one space between words."""
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# ---------------- drift

STAYS = {
    "reinforce",
    "grpo-symmetric",
    "cispo",
    "dfpo-min",
    "dfpo-min eps 0.2",
    "dfpo-orthogonal",
    "recentred",
}
STAYS |= {"grpo+proj", "dr-grpo+proj", "gspo+proj", "dr-grpo", "dapo"}


@pytest.fixture(scope="module")
def curves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "STEPS", 5)
        patch.setattr(drift, "SEEDS", 2)
        yield drift.study()


def test_drift_is_0_where_the_theory_says_so(curves):
    for name in drift.NAMES:
        assert (max(curves[name]["drift"]) < 1e-12) == (name in STAYS), name
    assert all(curves[name]["tax"] == pytest.approx([0] * 6) for name in STAYS if "+" in name)


def test_sampled_answers_follow_their_probabilities():
    start = drift.start_policy(random.Random(0))
    policy = replace(start, W=4 * start.W)
    exact, n = dict(policy.answers(drift.PROMPT)), 2000
    drawn = Counter(policy.sample(drift.PROMPT, n, torch.Generator().manual_seed(1)))
    assert drawn.keys() <= exact.keys()
    for y, p in exact.items():
        assert abs(drawn[y] / n - p) < 5 * math.sqrt(p * abs(1 - p) / n) + 1e-9


def measure_by_hand(policy, start) -> dict[str, float]:
    """Of the probabilities of all answers, those that do not begin with the opener, too."""
    p, q = Counter(), Counter()
    for first, x in ((p, policy), (q, start)):
        for y, chance in x.answers(drift.PROMPT):
            first[y[0]] += chance
    odds = [math.log(x[drift.OPENER] / (1 - x[drift.OPENER])) for x in (p, q)]
    right = {y: chance for y, chance in policy.answers(drift.PROMPT) if y[0] == drift.OPENER}
    right = {y: p for y, p in right.items() if y[1] != 3 and [a for a in y if a][-1] == 1}
    share = sum(chance for y, chance in right.items() if y[1] == 1) / sum(right.values())
    return {
        "drift": abs(odds[0] - odds[1]),
        "kl": sum(p[a] * math.log(p[a] / q[a]) for a in p),
        "solutions": -share * math.log(share) - (1 - share) * math.log(1 - share),
        "reward": sum(right.values()) / p[drift.OPENER],
    }


def drift_by_hand(loss, projected: bool, seed: int) -> list[dict[str, float]]:
    """After 0 to 5 steps, off-policy after the first."""
    policy, answers = start, _ = drift.draw(seed)
    tokens, mask = pad(answers)
    nodes, prompts = prefix_nodes(tokens, mask, 8), [drift.PROMPT] * 64
    R = torch.tensor([y[1] != 3 and [a for a in y if a][-1] == 1 for y in answers]).double()
    assert (R.view(8, 8).mean(1) % 1).all() and {y[0] for y in answers} == {drift.OPENER}
    A, old, points, rate = group_advantages(R, 8), start.log_probs(prompts, answers)[0], [], None
    for _ in range(6):
        policy.W.requires_grad_()
        logp = policy.log_probs(prompts, answers)[0]
        value = loss(Batch(logp, old.detach(), A[:, None].expand(mask.shape), mask, 8, 5))
        value = project(value, logp, A, nodes, mask) if projected else value
        c = losses.token_coefficients(value, logp)
        points.append(measure_by_hand(policy, start) | {"tax": learning_tax(c, A, nodes, mask)})
        g = torch.autograd.grad(-value, policy.W)[0]
        rate = rate or 0.6 / g.norm()  # the first step is equally long for all methods
        policy = replace(policy, W=policy.W.detach() + rate * g)
    return points


def test_drift_prints_means_over_start_policies_of_what_is_measured_by_hand(
    curves, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(drift, "study", lambda: curves)
    drift.main(["--plot", str(tmp_path / "drift.svg")])
    rows = printed(capsys)
    clipped = partial(losses.dfpo_min, eps=0.2)
    hand = {"grpo": losses.grpo, "grpo+proj": losses.grpo, "dfpo-min eps 0.2": clipped}
    for name, loss in hand.items():
        runs = [drift_by_hand(loss, "proj" in name, seed) for seed in (0, 1)]
        steps = [*zip(*runs, strict=True)]
        keys = runs[0][0]
        mean = {key: [sum(point[key] for point in step) / 2 for step in steps] for key in keys}
        for key in mean:
            assert curves[name][key] == pytest.approx(mean[key], abs=1e-8), key
        row = [mean[key][-1] for key in ("drift", "kl", "solutions", "reward")]
        row = [f"{x:.4f}" if x > 1e-9 else "0" for x in [*row, sum(mean["tax"]) / 6]]
        assert " ".join([name, *row]) in rows
    assert sum(row.startswith((*drift.NAMES,)) for row in rows) == len(drift.NAMES)


# ---------------- tax

# Of a setting with unequal lengths: 1 on way A, 1 with a good plan, chance, reward, length.
OUTCOMES = [(1, 1, 0.6, 1, 16), (1, 1, 0.4, 0, 7), (1, -1, 1, 0, 7), (-1, 0, 0.2, 1, 4)]
OUTCOMES += [(-1, 0, 0.8, 0, 24)]


def push_by_hand(name: str, old, new) -> tuple[torch.Tensor, float]:
    """The expected gradient of J and the learning tax, from all 625 ordered groups."""
    method = METHODS[name.partition("+")[0]]
    rows = torch.tensor([*itertools.product(OUTCOMES, repeat=4)]).double().flatten(0, 1)  # (N, 5)
    signs, (chance, reward, length) = rows[:, :2], rows[:, 2:].T
    new, logps = new.clone().requires_grad_(), []
    for logits in (new, old):  # the rest of an answer has no choice
        choices = torch.nn.functional.logsigmoid(signs * logits) * (signs != 0)
        logps.append(torch.nn.functional.pad(choices, (0, 22)))
    p = (chance * logps[1].sum(1).exp()).view(-1, 4).prod(1).repeat_interleave(4)
    A = group_advantages(reward, 4, method.scale) * p * 625
    mask = torch.arange(24) < length[:, None]
    tokens = torch.arange(9, 9 + mask.numel()).view(mask.shape)  # filler is nobody else's
    tokens[:, :2] = torch.where(signs != 0, signs.long(), tokens[:, :2])
    nodes = prefix_nodes(tokens, mask, 4)
    clip = {"eps_low": 0.02, "eps_high": 0.02} if name == "gspo" else {}
    loss = method.passes[0](Batch(*logps, A[:, None].expand(mask.shape), mask, 4, 24), **clip)
    if name.endswith("+proj"):
        loss = project(loss, logps[0], A, nodes, mask)
    c = losses.token_coefficients(loss, logps[0])
    push = torch.autograd.grad(logps[0], new, c / len(c))[0]
    return push, learning_tax(c, A, nodes, mask)


def test_tax_prints_where_the_push_of_all_ordered_groups_leads(capsys, monkeypatch):
    short = dict(BATCHES=2, UPDATES=2, SIZE=0.7)
    short["SETTINGS"] = {"6: unequal": ((16, 7), 0.2, (4, 24))}
    for name, value in short.items():
        monkeypatch.setattr(tax, name, value)
    tax.main([])
    rows = printed(capsys)
    for name in tax.NAMES:
        logits, rate, taxes = torch.tensor([2.0, 0.0], dtype=torch.float64), None, []
        for _ in range(2):
            old = logits
            for _ in range(2):
                push, part = push_by_hand(name, old, logits)
                rate = rate or 0.7 / push.norm()
                logits = logits + rate * push
            taxes.append(part)  # of the last update
        way, plan = map(sigmoid, logits.tolist())
        reward = way * plan * 0.6 + (1 - way) * 0.2
        assert f"{name} {reward:.3f} ({sum(taxes) / 2:.3f})" in rows


def test_tax_says_where_grpo_ends_and_draws(capsys, monkeypatch, tmp_path):
    share = (1 / 24) / (0.6 / 24 + 0.4 / 6 - 1 / 32)
    ends = [tax.predict_reward(setting) for setting in tax.SETTINGS]
    assert ends == pytest.approx([0.6, 0.6, 0.6 * share, 0.6, 0.2])
    monkeypatch.setattr(tax, "train", lambda groups, name: (torch.zeros(3, 2), 0.0))
    tax.main(["--plot", str(tmp_path / "tax.svg")])
    assert "grpo, closed form 0.600 0.600 0.414 0.600 0.200" in printed(capsys)


# ---------------- alike


def alike_by_hand(kind, lengths, G, share, scale):
    """The expected push on the first way's logit; sum |tax| over sum |c| at shared nodes."""
    outcomes = [
        (way, reward, 1 / lengths[way][1 - reward], p * chance)
        for way, p in ((0, share), (1, 1 - share))
        for reward, chance in ((1, 0.6), (0, 0.4))
    ]
    sums, tax, size = [0.0, 0.0], 0.0, 0.0
    for group in itertools.product(outcomes, repeat=G):
        chance = math.prod(answer[3] for answer in group)
        mean = sum(answer[1] for answer in group) / G
        std = math.sqrt(sum((answer[1] - mean) ** 2 for answer in group) / (G - 1)) + 1e-4
        for way in (0, 1):
            visitors = [answer for answer in group if answer[0] == way]
            n = len(visitors)
            A = [(answer[1] - mean) / (std if scale == "std" else 1) for answer in visitors]
            w = [answer[2] for answer in visitors]
            if kind == "node mean" and n:
                w = [sum(w) / n] * n
            if kind == "unbiased" and n > 1:
                w = [sum(w) / n + (sum(w) / n - x) * (1 - n / G) / (n - 1) for x in w]
            sums[way] += chance * sum(x * a for x, a in zip(w, A, strict=True)) / G
            if n > 1:
                tax += chance * abs(sum((x - sum(w) / n) * a for x, a in zip(w, A, strict=True)))
                size += chance * sum(abs(x * a) for x, a in zip(w, A, strict=True))
    return sums[0] - share * sum(sums), tax / size


def test_alike_prints_pushes_and_shares_of_the_naive_loop(capsys, monkeypatch):
    monkeypatch.setattr(alike, "SIZES", (2, 4))
    monkeypatch.setattr(alike, "UPDATES", {3: 9})
    alike.main([])
    rows = [row.rsplit(" ", 2) for row in printed(capsys) if row]
    rows = {name: numbers for name, *numbers in rows}
    alike_ways, exchanged, unlike = ((24, 4),) * 2, ((4, 24),) * 2, ((16, 16), (4, 24))
    for kind in ("grpo", "node mean", "unbiased"):
        for name, lengths, start in (("alike", alike_ways, 0.7), ("unlike", unlike, 0.5)):
            pushes = [alike_by_hand(kind, lengths, G, start, "mean")[0] for G in (2, 4)]
            cells = [float(x) for x in rows[f"{name}, from {start} {kind}"]]
            assert cells == pytest.approx(pushes, abs=5.1e-6)
        for name, lengths in (("alike, from 0.7", alike_ways), ("lengths exchanged", exchanged)):
            odds, taxes = math.log(0.7 / 0.3), []
            for _ in range(9):
                push, part = alike_by_hand(kind, lengths, 3, sigmoid(odds), "std")
                odds += 2 * 4.0 * push  # both logits move, at the rate 4
                taxes.append(part)
            cells = [float(x) for x in rows[f"{name} G = 3, 9 updates {kind}"]]
            assert cells == pytest.approx([sigmoid(odds), sum(taxes) / 9], abs=5.1e-4)


# ---------------- gate


def gate_by_hand(name, old, new):
    """At these log-odds of the good tokens, from all ordered groups: the expected gradient of
    J, and sum c of winners and of losers at the good token 1."""
    outcomes = itertools.product((1, -1), (1, -1), (1, 0))  # token 1 good, token 2 good, reward
    groups = [*itertools.product(outcomes, repeat=gate.G)]
    rows = torch.tensor(groups).double().flatten(0, 1)  # (N, 3)
    signs, reward, new = rows[:, :2], rows[:, 2], new.clone().requires_grad_()
    logp, logp_old = (torch.nn.functional.logsigmoid(signs * z) for z in (new, old))
    right = 0.4 + 0.05 * signs.sum(1)
    chance = torch.where(reward > 0, right, 1 - right) * logp_old.sum(1).exp()
    p = chance.view(-1, gate.G).prod(1).repeat_interleave(gate.G)
    method = METHODS[name.split("+")[0].split()[0]]
    A = group_advantages(reward, gate.G, method.scale) * p * 8**gate.G
    hyper = {"gspo": {"eps_low": 0.02, "eps_high": 0.02}, "dfpo-min eps 0.2": {"eps": 0.2}}
    batch = Batch(logp, logp_old, A[:, None].expand(signs.shape), signs < 9, gate.G, max_tokens=2)
    loss = method.passes[0](batch, **hyper.get(name, {}))
    if name.endswith("+proj"):
        nodes = prefix_nodes(signs.long() + 1, batch.mask, gate.G)
        loss = project(loss, logp, A, nodes, batch.mask)
    c = losses.token_coefficients(loss, logp) / len(rows)
    good = c[:, 0] * (signs[:, 0] > 0)
    sums = [float(good[side].sum()) for side in (A > 0, A < 0)]
    return torch.autograd.grad(logp, new, c)[0], sums


@pytest.mark.parametrize("name", gate.NAMES)
def test_gate_climbs_the_push_of_all_ordered_groups_at_each_rate_alone(name):
    world = gate.two_tokens(0.5, 0.05)
    rates = torch.tensor([3.0, 50.0], dtype=torch.float64)
    path = gate.train(gate.Setting(world, 2, 2), name, rates)
    for k, rate in enumerate(rates):
        odds = old = torch.tensor([0.5, 0.05], dtype=torch.float64).logit()
        for step in range(4):
            old = odds if step % 2 == 0 else old
            odds = odds + 2 * rate * gate_by_hand(name, old, odds)[0]  # both logits move
            logits = path[step + 1][k]
            torch.testing.assert_close(logits[:, 0] - logits[:, 1], odds, atol=1e-9, rtol=0)
    reward = gate.expected_reward(world, path[-1])[1]
    torch.testing.assert_close(reward, 0.3 + 0.1 * odds.sigmoid().sum())


def test_gates_many_sampled_groups_are_the_expectation():
    setting, rates = gate.Setting(gate.two_tokens(0.5, 0.05), 2, 1), torch.tensor([3.0]).double()
    exact = gate.train(setting, "grpo", rates)[-1]
    sampled = gate.train(setting._replace(sampled=100_000), "grpo", rates)[-1]
    torch.testing.assert_close(sampled, exact, atol=0.03, rtol=0)


def test_gate_prints_a_row_for_each_method_and_its_limits_and_draws(capsys, tmp_path, monkeypatch):
    small = dict(G=3, BATCHES=1, QUESTIONS=5, GROUPS=2, PAIRS=3, OTHERS=2)
    small |= dict(NAMES=[*gate.STYLES], FEWER=["grpo", "recentred"])
    for name, value in small.items():
        monkeypatch.setattr(gate, name, value)
    gate.main(["--limits", "--plot", str(tmp_path / "gate.svg")])
    rows = printed(capsys)
    world = gate.two_tokens(0.5, 0.001)
    for name in gate.NAMES:
        cells = []
        for M in (1, 2):
            end = gate.train(gate.Setting(world, M, 1), name, gate.RATES)[-1]
            rewards = gate.expected_reward(world, end)
            cells.append(f"{float(rewards.max()):.3f} ({int((rewards > 0.49).sum())})")
        assert " ".join([name, *cells]) in rows
    start = torch.tensor([0.5, 0.001]).double().logit()
    push, sums = gate_by_hand("grpo", start, start)
    after = gate_by_hand("grpo", start, start + 2 * 30 * push)[1]
    for k, (x, y) in enumerate((sums, after), 1):
        assert f"grpo, update {k} {x:+.5f} {y:+.5f} {x + y:+.5f}" in rows
    against_itself = [row for row in rows if row.startswith("grpo ") and "0.000 +- 0.000" in row]
    assert len(against_itself) == 6


# ---------------- ibpo

DIGIT = [letter % 10 for letter in range(26)]


def draw_by_hand(odds, gen):
    """One digit for each place of each answer, from odds[answer][place][digit]."""
    places = torch.tensor([place for row in odds for place in row], dtype=torch.float64)
    return torch.multinomial(places, 1, generator=gen).view(len(odds), -1).tolist()


def rollout_by_hand(W, groups, K, temperature, seed):
    """Words, answers, corrections, and how many tokens the answers and corrections took."""
    gen = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    words = torch.randint(26, (groups, K), generator=gen).tolist()
    words, W = [word for word in words for _ in range(8)], W.tolist()
    odds = [[[math.exp(x / temperature) for x in W[letter]] for letter in word] for word in words]
    answers = draw_by_hand(odds, gen)
    right = [[DIGIT[letter] for letter in word] for word in words]
    for i, word in enumerate(words):
        siblings = [i - i % 8 + (i + k) % 8 for k in range(1, 8)]
        if answers[i] == right[i]:
            siblings.append(i)  # its correction is drawn, too, and goes nowhere
        shown = next((j for j in siblings if answers[j] == right[j]), siblings[0])
        for t, (a, b) in enumerate(zip(answers[i], answers[shown], strict=True)):
            for d in range(10):
                x = W[word[t]][d] + math.log(6) * ((d == a) + (d == b))
                odds[i][t][d] = math.exp(x / temperature)
    wrong = sum(row != good for row, good in zip(answers, right, strict=True))
    return words, answers, draw_by_hand(odds, gen), (K * len(answers), K * wrong)


def ibpo_by_hand(W, temperature, reading, words, answers, fixed):
    """The gradient of the mean of A'_i / K log pi over the tokens that a reading credits."""
    W, rewards, repaired = W.detach().requires_grad_(), [], []
    for word, answer, other in zip(words, answers, fixed, strict=True):
        good = [DIGIT[letter] for letter in word]
        repaired.append(answer != good and other == good and reading != "grpo")
        rewards.append(1.0 if answer == good else 0.3 * repaired[-1])
    J = 0.0
    for i, word in enumerate(words):
        group = torch.tensor(rewards[i - i % 8 : i - i % 8 + 8], dtype=torch.float64)
        A = float((rewards[i] - group.mean()) / (group.std() + 1e-4))
        for letter, digit, other in zip(word, answers[i], fixed[i], strict=True):
            if repaired[i] and reading == "changed" and digit == other:
                continue
            if repaired[i] and reading == "sign" and (digit == other) == (A < 0):
                continue
            logp = (W[letter] / temperature).log_softmax(0)[digit]
            J = J + A * logp / (len(word) * len(words))
    return torch.autograd.grad(J, W)[0]


@pytest.mark.parametrize("reading", ["grpo", "sign", "none", "changed"])
def test_ibpos_step_on_all_wrong_groups_moves_what_the_naive_step_moves(reading):
    W = ibpo.start_table().detach()
    *rows, _ = rollout_by_hand(W, 64, 8, 1.0, 9)
    groups = [[*zip(*(x[i : i + 8] for x in rows), strict=True)] for i in range(0, 64 * 8, 8)]

    def right(word):
        return [DIGIT[letter] for letter in word]

    wrong = [g for g in groups if all(answer != right(word) for word, answer, _ in g)][:32]
    words, answers, fixed = zip(*itertools.chain(*wrong), strict=True)
    moved = (W + 50 * ibpo_by_hand(W, 1.0, reading, words, answers, fixed)).log_softmax(1)
    moved -= W.log_softmax(1)
    gain = sum(float(moved[letter, DIGIT[letter]]) for letter in range(26)) / 26 * 8
    slips = [
        float(moved[letter, a])
        for word, row, other in zip(words, answers, fixed, strict=True)
        if other == right(word)
        for letter, a, b in zip(word, row, other, strict=True)
        if a != b
    ]
    expected = gain, sum(slips) / len(slips)
    assert ibpo.one_step(reading, 9) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("reading, temperature", [("grpo", 0.7), ("sign", 0.7), ("sign", 1.0)])
def test_ibpo_counts_all_tokens_until_the_goal(reading, temperature):
    table, gen = ibpo.start_table(), torch.Generator().manual_seed(1)
    rollout = [x.tolist() for x in ibpo.sample(table, 20, 3, temperature, gen)]
    assert rollout == [*rollout_by_hand(table.detach(), 20, 3, temperature, 1)[:3]]
    W, gen, tokens = ibpo.start_table().detach(), torch.Generator().manual_seed(7), 0
    while (W.softmax(1)[range(26), DIGIT].mean() ** 5) < 0.5:
        *rollout, (first, second) = rollout_by_hand(W, 4, 5, temperature, gen)
        W = W + 60 * ibpo_by_hand(W, temperature, reading, *rollout)
        tokens += first + second * (reading != "grpo")
    assert ibpo.tokens_to_goal(reading, 5, temperature, 60, 7) == tokens


def test_ibpo_prints_means_over_seeds_at_the_rate_that_is_best_on_others(
    capsys, tmp_path, monkeypatch
):
    def tokens_to_goal(reading, K, temperature, rate, seed):
        excess = 0 if rate == 3200 else 9 if seed >= 100 else -9  # the best on the other seeds
        return 1000 * (10 * K * temperature + (reading == "sign") + (-1) ** seed + excess)

    monkeypatch.setattr(ibpo, "tokens_to_goal", tokens_to_goal)
    monkeypatch.setattr(ibpo, "one_step", lambda reading, seed: (seed % 2, -1.0))
    ibpo.main(["--plot", str(tmp_path / "ibpo.svg")])
    rows = printed(capsys)
    assert "none 0.50 +- 0.22 -1.00 +- 0.00" in rows
    for name, first, second in [("grpo", 40, 80), ("ibpo", 41, 81), ("ibpo at 0.7", 29, 57)]:
        found = [row for row in rows if row.startswith(f"{name} {first}.00 +- 0.43 {second}.00 +-")]
        assert len(found) == 1


# ---------------- nthr and lopti

SMALL = dict(group_size=4, max_tokens=8, width=8)


@pytest.fixture
def group():
    """A policy, its answers to three problems with tokens in every quarter, and what score says."""
    with float64():
        task = Arithmetic()
        policy = train.load_policy(Config(**SMALL, seed=2), task, "scratch")
        policy.model.get_input_embeddings().weight.data *= 3
        policy.eos = torch.tensor([1, 5, 9])
        answers = train.sample(policy, task, task.test[:3], 5, Config(**SMALL))
        answers.rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 0])
        yield policy, answers, train.score(policy, None, answers, Config(**SMALL))


def log_probs_by_hand(model, answers, W=None) -> list:
    """log pi of every token, by answer. With W, an output layer, hidden states are constants."""
    found = []
    for i, keep in enumerate(answers.prompts.seen):
        prompt, answer = answers.prompts.ids[i][keep], answers.tokens[i][answers.mask[i]]
        states = model.base_model(torch.cat([prompt, answer])[None]).last_hidden_state[0]
        states = states[len(prompt) - 1 : -1]
        logits = model.lm_head(states) if W is None else states.detach() @ W.T
        found.append(logits.log_softmax(-1)[range(len(answer)), answer])
    return found


def step_by_hand(model, answers, weigh, rate) -> float:
    """Climb sum weigh(i, log pi of answer i) without clipping; returns the gradient's norm."""
    goal = sum(weigh(i, logp) for i, logp in enumerate(log_probs_by_hand(model, answers)))
    weights = list(model.parameters())
    gradient = torch.autograd.grad(goal, weights)
    with torch.no_grad():
        for weight, g in zip(weights, gradient, strict=True):
            weight += rate * g
    return float(torch.cat([g.flatten() for g in gradient]).norm())


@pytest.mark.parametrize("kind", ["SGD", "SGD, one length"])
def test_delta_is_that_of_a_naive_step(group, kind, monkeypatch):
    policy, answers, _ = group
    monkeypatch.setattr(nthr, "RATES", {"SGD": 0.01, "SGD, one length": 0.01})
    answers = train.take(answers, torch.arange(4))
    monkeypatch.setattr(nthr, "Config", lambda **k: Config(**{**SMALL, "grad_clip": 1e9, **k}))
    measured = nthr.measure_delta(policy, answers, "grpo", kind)
    model = copy.deepcopy(policy.model)
    before = log_probs_by_hand(model, answers)
    A = 0.5 / (3**-0.5 + 1e-4)

    def weigh(i, logp):
        return (A if i in (0, 3) else -A) * logp.sum() / answers.mask.sum()

    length = step_by_hand(copy.deepcopy(model), answers, weigh, 0.0)
    step_by_hand(model, answers, weigh, 0.01 / length if "one length" in kind else 0.01)
    after = log_probs_by_hand(model, answers)
    expected = sum((after[i] - before[i]).sum().item() for i in (0, 3)) / 2
    assert measured == pytest.approx(expected, rel=1e-4) and abs(measured) > 1e-3


def test_gwhes_is_how_fast_the_output_layer_alone_lowers_the_right_answers(group):
    """(I) - (II) is the slope of a right answer's log pi along sum A_j log pi(y_j) in W (N3)."""
    policy, answers, _ = group
    answers = train.take(answers, torch.arange(4, 8))
    answers.rewards = torch.tensor([1.0, 0, 1, 1])
    W = policy.model.get_output_embeddings().weight.detach().clone().requires_grad_()
    logps = [logp.sum() for logp in log_probs_by_hand(policy.model, answers, W)]
    A = [x / 0.1875**0.5 for x in (0.25, -0.75, 0.25, 0.25)]
    ascent = sum(a * logp for a, logp in zip(A, logps, strict=True))
    mean = (logps[0] + logps[2] + logps[3]) / 3
    slopes = [torch.autograd.grad(x, W, retain_graph=True)[0] for x in (ascent, mean)]
    expected = -float((slopes[0] * slopes[1]).sum())
    assert nthr.measure_gwhes(policy, answers) == pytest.approx(expected, rel=1e-6)


def test_nthrs_rows_have_their_differences_and_shares(capsys):
    values = {"grpo": [1.0, 3.0], "nthr": [2.0, -1.0], "random": [0.0, 0.0]}
    rows = {name: torch.tensor([values.get(name, [0.0, 0.0])] * 2) for name in nthr.METHODS}
    nthr.show({(kind, name): row for kind in nthr.RATES for name, row in rows.items()})
    row = "nthr 0.500 +- 0.000 -1.500 +- 0.000 +0.500 +- 0.000 50% 50%"
    assert printed(capsys).count(row) == len(nthr.RATES)
    for name in ("nthr", "nthr, eta 0"):  # a control has the eta of what it controls
        assert nthr.METHODS[name][1] == nthr.METHODS[name.replace("nthr", "random")][1]
    delta = torch.arange(20.0).view(2, 10)
    deltas = {(kind, "grpo"): delta for kind in nthr.RATES}
    nthr.show_laziest(deltas, -delta + 100 * (delta == 19))  # 19 is scored highest, then 0 to 8
    assert [row.split()[-1] for row in printed(capsys)[-3:]] == ["9"] * 3


def climb_by_hand(policy, answers, A, *passes) -> tuple[list, float]:
    """Steps on a part of grpo's loss: its factor, and the range of the tokens' probabilities."""
    model = copy.deepcopy(policy.model)
    before = [logp.detach() for logp in log_probs_by_hand(model, answers)]
    norms = []
    for factor, low, high in passes:

        def weigh(i, logp, factor=factor, low=low, high=high):
            r, p = (logp - before[i]).exp(), before[i].exp()
            goal = torch.minimum(r * A[i], r.clamp(0.8, 1.24) * A[i]) / sum(map(len, before))
            return factor * goal[(low <= p) & (p < high)].sum()

        norms.append(step_by_hand(model, answers, weigh, rate=0.1))
        assert norms[-1] < 1  # so the gradient clip does not act
    return torch.cat(log_probs_by_hand(model, answers)).detach(), norms[0]


def test_lopti_measures_what_naive_steps_do(group):
    policy, answers, scored = group
    measures = lopti.measure(policy, scored)
    old = torch.cat(log_probs_by_hand(policy.model, answers)).detach()
    quarter = torch.tensor([min(3, int(4 * p)) for p in old.exp().tolist()])
    A = scored.advantages.repeat_interleave(answers.mask.sum(1))

    def by_quarter(values, among):
        means = [float(values[among & (quarter == q)].double().mean()) for q in range(4)]
        return pytest.approx(means, rel=1e-4, nan_ok=True)

    def climb(*passes):
        return climb_by_hand(policy, answers, scored.advantages, *passes)

    whole = (1, 0, 2)
    parts = [(1, 0, 0.25), (1, 0.25, 0.5), (1, 0.5, 0.75), (1, 0.75, 2)]
    ratios = [climb(part)[1] / climb(whole)[1] for part in parts]
    gradient = measures[lopti.GRADIENT, "gradient, of all = 1"].tolist()
    assert gradient == pytest.approx(ratios, rel=1e-4)
    shares = [float((quarter == q).double().mean()) for q in range(4)]
    assert measures[lopti.GRADIENT, "share of the tokens"].tolist() == pytest.approx(shares)
    for name, part in {"all": whole, "only p < .25": parts[0], "only p > .75": parts[3]}.items():
        moved = (climb(part)[0].exp() - old.exp()).abs()
        assert measures[lopti.MOVES + "SGD", name].tolist() == by_quarter(moved, A < 9)
    right, halves = [], [(1, 0, 0.5), (1, 0.5, 2)]
    for passes in ([(0.5, 0, 2)] * 2, halves, halves[::-1]):
        right.append(((climb(*passes)[0] - old) * A > 0).double())
    lines = {"grpo twice": right[0], "lopti - grpo twice": right[1] - right[0]}
    for name, values in (lines | {"reversed - lopti": right[2] - right[1]}).items():
        assert measures[lopti.RIGHT + "SGD", name].tolist() == by_quarter(values, A != 0)
    right, (low, high) = [], METHODS["lopti"].passes
    for passes in ((low, high), (high, low)):  # with SGD the order hardly matters
        after = lopti.climb(policy, scored, "AdamW", passes)[0][answers.mask]
        right.append(((after - old) * A > 0).double())
    reversed_order = measures[lopti.RIGHT + "AdamW", "reversed - lopti"].tolist()
    assert reversed_order == by_quarter(right[1] - right[0], A != 0)


def test_loptis_adamw_has_no_history_and_a_reset_takes_it_away_before_the_second_step(
    group, monkeypatch
):
    made, real = [], nthr.make_optimizer
    monkeypatch.setattr(lopti, "make_optimizer", lambda *args: made.append(real(*args)) or made[-1])
    for kind in ("AdamW", "AdamW, reset"):
        lopti.climb(group[0], group[2], kind, METHODS["lopti"].passes)
    steps = [{int(state["step"]) for state in optimizer.state.values()} for optimizer in made]
    assert steps == [{2}, {1}, {1}]


def test_starts_learn_from_worked_solutions_and_every_start_has_its_row(
    monkeypatch, capsys, tmp_path, easy
):
    seen = []
    monkeypatch.setattr(nthr, "warm_start", lambda policy, task, config: seen.append(task.train))
    monkeypatch.setattr(nthr, "QUESTIONS", 2)
    monkeypatch.setattr(nthr, "LAZIEST", 1)
    tiny = dict(width=8, prompts=2, max_tokens=6)
    for module, name in ((nthr, "nthr"), (lopti, "lopti")):
        monkeypatch.setattr(module, "STARTS", 2)
        monkeypatch.setattr(module, "Config", lambda **k: Config(**k, **tiny))
        module.main(["--plot", str(tmp_path / f"{name}.svg")])
        rows = printed(capsys)
        names = nthr.METHODS if module is nthr else ("grpo twice", "lopti - grpo twice")
        assert all(sum(row.startswith(f"{name} ") for row in rows) >= 3 for name in names)
    whole = Arithmetic().train
    assert seen[0] == seen[1] == [item for item in whole if "+" in item.demo]
    assert 2.2 < len(whole) / len(seen[2]) < 3 and {*seen[0]} < {*seen[2]} < {*whole}
    (first, task), (second, _) = nthr.make_start(0, 0), nthr.make_start(1, 0)
    assert not torch.equal(*(next(x.model.parameters()) for x in (first, second)))
    questions = [answers.items for answers in nthr.find_questions(first, task, 0)]
    assert len({item for items in questions for item in items} & {*task.test}) == 2
    deltas, gwhes = nthr.study()
    assert gwhes.shape == (2, 2) and len({*deltas["SGD", "grpo"].flatten().tolist()}) == 4
