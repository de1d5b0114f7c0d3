"""toy/nthr.py and toy/lopti.py: a step and what is measured of it, beside a naive computation; and
what all figures share."""

import copy
import importlib.util
import math
from dataclasses import replace

import pytest
import torch

import train
from losses import METHODS, Batch, token_grpo
from toy import alike, drift, figure, ibpo, lopti, nthr, tax, tree
from toy.arithmetic import Arithmetic
from train import Config

SMALL = dict(group_size=4, max_tokens=8, width=8)


@pytest.fixture(scope="module")
def group():
    """A policy, its answers to three problems with tokens in every quarter, and what score says."""
    policy, task = train.load_policy(Config(**SMALL, seed=2), Arithmetic(), "scratch"), Arithmetic()
    policy.model.get_input_embeddings().weight.data *= 3
    policy.eos = torch.tensor([1, 5, 9])
    answers = train.sample(policy, task, task.test[:3], 5, Config(**SMALL))
    answers.rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 0])
    scored = train.score(policy, None, answers, Config(**SMALL))
    assert lopti.quarter_of(scored.batch)[answers.mask].bincount(minlength=4).amin() > 3
    return policy, answers, scored


def naive_log_probs(model, answers):
    """log pi of every token, answer by answer, without padding."""
    logps = []
    for i, keep in enumerate(answers.prompts.seen):
        prompt, answer = answers.prompts.ids[i][keep], answers.tokens[i][answers.mask[i]]
        logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        logps.append(logits.log_softmax(-1)[range(len(answer)), answer])
    return logps


def naive_step(model, answers, weigh, rate):
    """Climb sum weigh(i, logps[i]); returns the weights' gradient. No clipping."""
    goal = sum(weigh(i, logp) for i, logp in enumerate(naive_log_probs(model, answers)))
    weights = list(model.parameters())
    gradient = torch.autograd.grad(goal, weights)
    with torch.no_grad():
        for weight, g in zip(weights, gradient, strict=True):
            weight += rate * g
    return torch.cat([g.flatten() for g in gradient])


@pytest.mark.parametrize("kind", ["SGD", "SGD, one length"])
def test_delta_is_that_of_a_naive_step(group, kind, monkeypatch):
    policy, answers, _ = group
    monkeypatch.setattr(nthr, "RATES", {"SGD": 0.01, "SGD, one length": 0.01})
    answers = train.take(answers, torch.arange(4))
    monkeypatch.setattr(nthr, "Config", lambda **k: Config(**{**SMALL, "grad_clip": 1e9, **k}))
    measured = nthr.measure_delta(policy, answers, "grpo", kind)
    model = copy.deepcopy(policy.model)
    before = naive_log_probs(model, answers)
    A = 0.5 / (3**-0.5 + 1e-4)

    def weigh(i, logp):
        return (A if i in (0, 3) else -A) * logp.sum() / answers.mask.sum()

    rate = nthr.RATES[kind]
    if "one length" in kind:
        rate /= naive_step(copy.deepcopy(model), answers, weigh, 0.0).norm()
    naive_step(model, answers, weigh, rate)
    after = naive_log_probs(model, answers)
    expected = sum((after[i] - before[i]).sum().item() for i in (0, 3)) / 2
    assert measured == pytest.approx(expected, rel=2e-3) and abs(measured) > 1e-3


def test_gwhes_is_how_fast_the_output_layer_alone_lowers_the_right_answers(group):
    """(I) - (II) is the slope of a right answer's log pi along sum A_j log pi(y_j) in W (N3)."""
    policy, answers, _ = group
    answers = train.take(answers, torch.arange(4, 8))
    answers.rewards = torch.tensor([1.0, 0, 1, 1])
    W = policy.model.get_output_embeddings().weight.detach().clone().requires_grad_()
    logps = []
    for i, keep in enumerate(answers.prompts.seen):
        prompt, answer = answers.prompts.ids[i][keep], answers.tokens[i][answers.mask[i]]
        states = policy.model.base_model(torch.cat([prompt, answer])[None]).last_hidden_state[0]
        logits = states[len(prompt) - 1 : -1].detach() @ W.T
        logps.append(logits.log_softmax(-1)[range(len(answer)), answer].sum())
    right, sd = [0, 2, 3], 0.1875**0.5
    ascent = sum((0.25 if i in right else -0.75) / sd * logp for i, logp in enumerate(logps))
    mean = sum(logps[i] for i in right) / 3
    slopes = [torch.autograd.grad(x, W, retain_graph=True)[0] for x in (ascent, mean)]
    expected = -float((slopes[0] * slopes[1]).sum())
    assert nthr.measure_gwhes(policy, answers) == pytest.approx(expected, rel=1e-3)


def test_the_laziest_are_compared_with_the_highest_scores(capsys):
    delta = torch.arange(20.0).view(2, 10)
    deltas = {(kind, "grpo"): delta for kind in nthr.RATES}
    nthr.show_laziest(deltas, -delta + 100 * (delta == 19))  # 19 is scored highest, then 0 to 8
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-3:]] == ["9"] * 3


def test_the_control_has_the_eta_of_what_it_controls():
    for name in ("nthr", "nthr, eta 0"):
        method, hyper = nthr.METHODS[name]
        random, same = nthr.METHODS[name.replace("nthr", "random")]
        assert (method, random) == ("nthr", "nthr-random") and hyper == same
    credit = Config(method="nthr-random", hyper=same).chosen_method.credit
    assert credit.keywords == {"eta": 0.0}


def test_questions_are_mixed_and_the_start_learns_from_worked_solutions(monkeypatch):
    warmed = []
    monkeypatch.setattr(Arithmetic, "reward", lambda self, text, item: text.count("1") % 2 * 1.0)
    monkeypatch.setattr(nthr, "warm_start", lambda policy, task, config: warmed.append(task.train))
    monkeypatch.setattr(nthr, "QUESTIONS", 3)
    monkeypatch.setattr(nthr, "Config", lambda **k: Config(**k, width=8))
    policy, task = nthr.make_start(0, direct=0)
    nthr.make_start(0, direct=6)
    whole = Arithmetic().train
    nthr.make_start(0, direct=1)
    assert warmed[0] == [item for item in whole if "+" in item.demo] and warmed[2] == whole
    assert 2.2 < len(whole) / len(warmed[1]) < 3 and {*warmed[0]} < {*warmed[1]}
    questions = nthr.find_questions(policy, task, 0)
    assert [len({*answers.items}) for answers in questions] == [1, 1, 1]
    assert len({answers.items[0] for answers in questions} & {*task.test}) == 3
    assert all(0 < answers.rewards.sum() < 8 for answers in questions)
    monkeypatch.setattr(Arithmetic, "reward", lambda *_: 1.0)
    task.test = task.test[:5]
    with pytest.raises(SystemExit, match="^error: start 4: only 0 of 3 questions"):
        nthr.find_questions(policy, task, 4)


def test_quarters_part_the_tokens(group):
    _, answers, scored = group
    p = torch.tensor([[0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1.0]]).expand(2, 7)
    edges = Batch(p.log(), p.log(), p, p >= 0, group_size=2, max_tokens=7)
    assert lopti.quarter_of(edges).tolist() == [[0, 0, 1, 2, 2, 3, 3]] * 2
    batch = replace(scored.batch, logp=scored.batch.logp.clone().requires_grad_())
    parts = []
    for q in range(4):
        parts += torch.autograd.grad(lopti.only(q)(batch), batch.logp)
        assert not parts[q][lopti.quarter_of(batch) != q].any()
    (whole,) = torch.autograd.grad(token_grpo(batch), batch.logp)
    assert torch.allclose(sum(parts), whole) and whole.any()


PASSES = METHODS["lopti"].passes
ORDERS = {
    "lopti": PASSES,
    "reversed": PASSES[::-1],
    "grpo twice": (lopti.half_grpo, lopti.half_grpo),
}


@pytest.mark.parametrize("name", ORDERS)
def test_two_steps_of_sgd_are_those_made_by_hand(group, name, monkeypatch):
    monkeypatch.setattr(lopti, "Config", lambda: Config(micro_rows=5))
    policy, answers, scored = group
    after, norm = lopti.climb(policy, scored, "SGD", ORDERS[name])
    model = copy.deepcopy(policy.model)
    before = [logp.detach() for logp in naive_log_probs(model, answers)]
    sides = {"lopti": (True, False), "reversed": (False, True), "grpo twice": (None, None)}
    norms = []
    for improbable in sides[name]:

        def weigh(i, logp, improbable=improbable):
            r, A = (logp - before[i]).exp(), scored.advantages[i]
            goal = torch.minimum(r * A, r.clamp(0.8, 1.24) * A) / sum(map(len, before))
            chosen = (before[i].exp() < 0.5) == improbable
            return goal.sum() / 2 if improbable is None else goal[chosen].sum()

        norms.append(float(naive_step(model, answers, weigh, rate=0.1).norm()))
    assert norms[0] < 1  # so the gradient clip does not act
    expected = torch.cat(naive_log_probs(model, answers))
    assert torch.allclose(after[answers.mask], expected, atol=1e-4)
    assert norm == pytest.approx(norms[0], rel=1e-3)


def test_adamw_has_no_history_and_a_reset_takes_it_away_before_the_second_step(group, monkeypatch):
    policy, _, scored = group
    made = []

    def make_optimizer(*args):
        made.append(nthr.make_optimizer(*args))
        return made[-1]

    monkeypatch.setattr(lopti, "make_optimizer", make_optimizer)
    for kind, count in {"AdamW": 1, "AdamW, reset": 2}.items():
        made.clear()
        lopti.climb(policy, scored, kind, PASSES)
        assert [type(optimizer) for optimizer in made] == [torch.optim.AdamW] * count
        steps = [{int(state["step"]) for state in o.state.values()} for o in made]
        assert steps == [{3 - count}] * count and made[0].defaults["lr"] == lopti.RATES[kind]


def count_tokens(scored, after):
    """By quarter: tokens, their |move|, tokens with an advantage, those that move its way."""
    counts = torch.zeros(4, 4, dtype=torch.float64)
    for i, t in scored.answers.mask.nonzero().tolist():
        old, new = float(scored.batch.logp_old[i, t]), float(after[i, t])
        q = min(3, int(math.exp(old) // 0.25))
        A = float(scored.advantages[i])
        row = (1, abs(math.exp(new) - math.exp(old)), A != 0, (new > old) == (A > 0) and A != 0)
        counts[:, q] += torch.tensor(row)
    return counts


def test_what_is_measured_is_counted_token_by_token(group):
    policy, _, scored = group
    measures = lopti.measure(policy, scored)
    close = dict(rtol=1e-5, atol=1e-7, equal_nan=True)
    after, whole = lopti.climb(policy, scored, "SGD", [token_grpo])
    counts = count_tokens(scored, after)
    shares = measures[lopti.GRADIENT, "share of the tokens"]
    assert torch.allclose(shares.double(), counts[0] / counts[0].sum(), **close)
    for q, part in enumerate(measures[lopti.GRADIENT, "gradient, of all = 1"].tolist()):
        norm = lopti.climb(policy, scored, "SGD", [lopti.only(q)])[1]
        assert part == pytest.approx(norm / whole, rel=1e-5)
    for kind in ("SGD", "AdamW"):
        for name, loss in (("all", token_grpo), ("only p > .75", lopti.only(3))):
            counts = count_tokens(scored, lopti.climb(policy, scored, kind, [loss])[0])
            moved = measures[lopti.MOVES + kind, name]
            assert torch.allclose(moved, counts[1] / counts[0], **close)
    for kind in lopti.RATES:
        right = {}
        for name, losses in ORDERS.items():
            counts = count_tokens(scored, lopti.climb(policy, scored, kind, losses)[0])
            right[name] = counts[3] / counts[2]
        lines = {name: values for (table, name), values in measures.items() if table.endswith(kind)}
        assert torch.allclose(lines["grpo twice"], right["grpo twice"], **close)
        for line in ("lopti - grpo twice", "reversed - lopti"):
            name, _, control = line.partition(" - ")
            assert torch.allclose(lines[line], right[name] - right[control], **close)


def test_the_commands_print_and_draw(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Arithmetic, "reward", lambda self, text, item: text.count("1") % 2 * 1.0)
    monkeypatch.setattr(nthr, "WARM", dict(warm_steps=2, warm_rows=4))
    monkeypatch.setattr(nthr, "QUESTIONS", 1)
    monkeypatch.setattr(nthr, "LAZIEST", 1)
    tiny = dict(width=8, prompts=2, max_tokens=6)
    for module, name in ((nthr, "nthr"), (lopti, "lopti")):
        monkeypatch.setattr(module, "STARTS", 2)
        monkeypatch.setattr(module, "Config", lambda **k: Config(**k, **tiny))
        module.main(["--plot", str(tmp_path / f"{name}.svg")])
        assert "</svg>" in (tmp_path / f"{name}.svg").read_text()
        out = capsys.readouterr().out
        lines = nthr.METHODS if module is nthr else ("all", "only p > .75")
        times = len(nthr.RATES) if module is nthr else 2
        assert all(out.count(f"\n{line} ") == times for line in lines if "," not in line)
    lines = ("grpo twice", "lopti - grpo twice", "reversed - lopti")
    assert all(out.count(f"\n{line} ") == len(lopti.RATES) for line in lines)


def test_studies_have_a_row_for_each_start_and_take_unseen_problems(monkeypatch):
    task, made = Arithmetic(), []

    def make_start(seed, direct):
        made.append(direct)
        return float(seed), task

    def sample(policy, task, items, step, config):
        assert items == task.test[:32] and config.seed == policy
        return policy

    for module in (nthr, lopti):
        monkeypatch.setattr(module, "STARTS", 2)
        monkeypatch.setattr(module, "make_start", make_start)
    monkeypatch.setattr(nthr, "QUESTIONS", 2)
    monkeypatch.setattr(nthr, "find_questions", lambda policy, task, seed: [seed + 2, seed + 4])
    monkeypatch.setattr(nthr, "measure_gwhes", lambda policy, answers: policy + answers)
    monkeypatch.setattr(nthr, "measure_delta", lambda policy, answers, *_: 10 * answers)
    deltas, gwhes = nthr.study()
    assert gwhes.tolist() == [[2, 4], [4, 6]]
    assert deltas["SGD", "nthr"].tolist() == [[20, 40], [30, 50]] and len(deltas) == 21
    monkeypatch.setattr(lopti, "sample", sample)
    monkeypatch.setattr(lopti, "score", lambda policy, reference, answers, config: answers)
    monkeypatch.setattr(lopti, "measure", lambda policy, x: {("a", "b"): torch.full((4,), x)})
    assert lopti.study()["a", "b"].tolist() == [[0] * 4, [1] * 4] and made == [0, 0, 6, 6]


def test_a_row_of_nthr_has_its_differences_and_shares(capsys):
    values = {"grpo": [1.0, 3.0], "nthr": [2.0, -1.0], "random": [0.0, 0.0]}
    rows = {name: torch.tensor([values.get(name, [0.0, 0.0])] * 2) for name in nthr.METHODS}
    nthr.show({(kind, name): row for kind in nthr.RATES for name, row in rows.items()})
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    row = "nthr 0.500 +- 0.000 -1.500 +- 0.000 +0.500 +- 0.000 50% 50%"
    assert out.count(row) == len(nthr.RATES)


def test_the_last_panel_of_lopti_has_the_probable_tokens(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(lopti, "draw_differences", lambda axis, x: drawn.append(x))
    line = (lopti.RIGHT + "SGD", "lopti - grpo twice")
    tables = {(lopti.GRADIENT, "a"): 1.0, (lopti.MOVES + "SGD", "b"): 1.0, line: 1.0}
    measures = {key: torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]) for key in tables}
    lopti.plot(measures, tmp_path / "a.svg")
    assert drawn == [{"SGD:\nlopti - grpo twice": [4.0, 8.0]}]


# ---------------- what all figures share


@pytest.mark.parametrize("module", [alike, drift, ibpo, lopti, nthr, tax, tree])
def test_a_wrong_flag_is_one_line_before_anything_is_computed(module):
    for flags in ("--stats 3", "--plot", "--plot a.pdf", "--plot no/a.png"):
        with pytest.raises(SystemExit, match="^error: [^\n]+$"):
            module.main(flags.split())


def test_a_picture_is_drawn_or_says_in_one_line_why_not(monkeypatch, tmp_path):
    (tmp_path / "a.png").mkdir()
    axis = figure.make_figure("what was found", 2)
    with pytest.raises(SystemExit, match="^error: .*a.png cannot be written[^\n]+$"):
        figure.save_picture(axis.savefig, path=tmp_path / "a.png")
    figure.save_picture(axis.savefig, path=None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="^error: .*matplotlib[^\n]+$"):
        figure.parse_plot("doc", ["--plot", "a.png"])


def test_names_stand_at_the_ends_of_their_lines_and_keep_a_distance():
    axis = figure.make_figure("", 2).subplots()
    ends = {"grpo": 0.0, "cispo": 1.0, "dfpo-min": 0.99, "dfpo-min eps 0.2": 0.98, "gspo": 0.5}
    ends["dr-grpo"] = 0.01
    figure.draw_lines(axis, {name: [0.5, end] for name, end in ends.items()})
    places = {text.get_text(): text.xy[1] for text in axis.texts}
    assert sorted(places, key=places.get) == sorted(ends, key=ends.get)
    assert places["grpo"] == 0.0 and places["gspo"] == 0.5 and places["dr-grpo"] > 0.06
    crowd = sorted(places.values())[3:]
    assert crowd[1] - crowd[0] == pytest.approx(crowd[2] - crowd[1]) and crowd[1] > crowd[0] + 0.05
    assert crowd[2] <= axis.get_ylim()[1]


def test_a_difference_is_drawn_as_its_mean_and_interval():
    axis = figure.make_figure("", 2).subplots()
    figure.draw_differences(axis, {"a": [1.0, 2.0, 0.0], "b": [4.0, 4.0]})
    (first, second) = (container[2][0].get_segments()[0] for container in axis.containers)
    half = 4.303 / 3**0.5  # of three values with a deviation of 1
    assert first.tolist() == [pytest.approx([x, 0], abs=1e-3) for x in (1 - half, 1 + half)]
    assert second.tolist() == [[4, -1], [4, -1]]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a", "b"]
