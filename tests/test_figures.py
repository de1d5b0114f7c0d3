"""toy/nthr.py and toy/lopti.py: a step and what is measured of it, beside a naive computation."""

import copy
import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from helpers import random_policy
from matplotlib import rcParams
from matplotlib.figure import Figure

from losses import METHODS, Batch, token_grpo
from toy import alike, drift, ibpo, lopti, nthr, tax
from toy.arithmetic import Arithmetic
from toy.figure import draw_differences, parse_plot, save_picture
from train import Config, sample, score

SMALL = dict(group_size=4, max_tokens=8)


@pytest.fixture(scope="module")
def group():
    """A policy, its answers to three problems with tokens in every quarter, and what score says."""
    policy, task = random_policy(2), Arithmetic()
    policy.model.get_input_embeddings().weight.data *= 2
    answers = sample(policy, task, task.test[:3], 5, Config(prompts=3, **SMALL))
    answers.rewards = answers.shaped = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 0])
    scored = score(policy, None, answers, Config(**SMALL))
    assert lopti.quarter_of(scored.batch)[scored.rows.mask].bincount(minlength=4).amin() > 5
    return policy, answers, scored


def naive_log_probs(model, rows):
    """log pi of every token, answer by answer, without cache or padding."""
    logps = []
    for prompt, tokens, mask in zip(rows.prompts, rows.tokens, rows.mask, strict=True):
        answer = tokens[mask].tolist()
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logps.append(logits.log_softmax(-1)[range(len(answer)), answer])
    return logps


def adam_direction(gradients):
    """AdamW's step (betas 0.9, 0.95), from all gradients of a weight since it began."""
    mean = square = 0.0
    for g in gradients:
        mean = 0.9 * mean + 0.1 * g
        square = 0.95 * square + 0.05 * g**2
    n = len(gradients)
    return mean / (1 - 0.9**n) / ((square / (1 - 0.95**n)).sqrt() + 1e-8)


def naive_step(model, rows, weigh, rate, history=None):
    """Climb sum weigh(i, logps[i]); returns the weights' gradient. No clipping.

    With a history, the gradients of earlier steps, by AdamW.
    """
    logps = naive_log_probs(model, rows)
    goal = sum(weigh(i, logp) for i, logp in enumerate(logps))
    weights = list(model.parameters())
    gradient = torch.autograd.grad(goal, weights)
    if history is not None:
        history.append(gradient)
    with torch.no_grad():
        for k, weight in enumerate(weights):
            adam = history and adam_direction([step[k] for step in history])
            weight += rate * (gradient[k] if history is None else adam)
    return torch.cat([g.flatten() for g in gradient])


@pytest.mark.parametrize("kind", nthr.RATES)
@pytest.mark.parametrize("name", ["grpo", "pos-only"])
def test_delta_is_that_of_a_naive_step(group, name, kind, monkeypatch):
    policy, answers, _ = group
    monkeypatch.setattr(nthr, "RATES", {"SGD": 0.01, "SGD, one length": 0.01, "AdamW": 1e-4})
    first = {key: getattr(answers, key)[:4] for key in ("items", "logp", "rewards", "shaped")}
    answers = replace(answers, rows=answers.rows[torch.arange(4)], **first)
    monkeypatch.setattr(nthr, "Config", lambda **k: Config(**k, **SMALL, grad_clip=1e9))
    measured = nthr.measure_delta(policy, answers, name, kind)
    model = copy.deepcopy(policy.model)
    before = naive_log_probs(model, answers.rows)
    A = 0.5 / (3**-0.5 + 1e-4)

    def weigh(i, logp):
        a = A if i in (0, 3) else -A * (name == "grpo")
        return a * logp.mean() / 4

    rate = nthr.RATES[kind]
    if "one length" in kind:
        rate /= naive_step(copy.deepcopy(model), answers.rows, weigh, 0.0).norm()
    naive_step(model, answers.rows, weigh, rate, [] if kind == "AdamW" else None)
    after = naive_log_probs(model, answers.rows)
    expected = sum((after[i] - before[i]).sum().item() for i in (0, 3)) / 2
    assert measured == pytest.approx(expected, rel=2e-3) and abs(measured) > 1e-3


def test_the_control_has_the_eta_of_what_it_controls():
    for name in ("nthr", "nthr, eta 0"):
        method, hyper = nthr.METHODS[name]
        random, same = nthr.METHODS[name.replace("nthr", "random")]
        assert (method, random) == ("nthr", "nthr-random") and hyper == same
    credit = Config(method="nthr-random", hyper=same).chosen_method.credit
    assert credit.keywords == {"eta": 0.0}


def test_questions_are_mixed_and_the_start_learns_from_worked_solutions(easy, monkeypatch, capsys):
    warmed = []
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
    with pytest.raises(SystemExit):
        nthr.find_questions(policy, task, 4)
    assert capsys.readouterr().err.startswith("error: start 4: only 0 of 3 questions")


def test_quarters_part_the_tokens(group):
    _, _, scored = group
    p = torch.tensor([[0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1.0]]).expand(2, 7)
    edges = Batch(p.log(), p.log(), p, p >= 0, 2, 7)
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


def climb_by_hand(policy, scored, kind, name):
    """log pi of every answer after two steps, and the gradient of the first."""
    model, old = copy.deepcopy(policy.model), scored.batch
    before = [logp.detach() for logp in naive_log_probs(model, scored.rows)]
    count = sum(map(len, before))
    sides = {"lopti": (True, False), "reversed": (False, True), "grpo twice": (None, None)}
    gradients, history = [], None if kind == "SGD" else []
    for improbable in sides[name]:
        if "reset" in kind:
            history = []

        def weigh(i, logp, improbable=improbable):
            r, A = (logp - before[i]).exp(), old.adv[i, 0]
            goal = torch.minimum(r * A, r.clamp(0.8, 1.24) * A) / count
            chosen = (before[i].exp() < 0.5) == improbable
            return goal.sum() / 2 if improbable is None else goal[chosen].sum()

        gradients.append(naive_step(model, scored.rows, weigh, lopti.RATES[kind], history))
    return naive_log_probs(model, scored.rows), gradients


@pytest.mark.parametrize("kind", lopti.RATES)
@pytest.mark.parametrize("name", ORDERS)
def test_two_steps_are_those_made_by_hand(group, kind, name):
    policy, _, scored = group
    after, norm = lopti.climb(policy, scored, kind, ORDERS[name])
    expected, gradients = climb_by_hand(policy, scored, kind, name)
    measured = [logp[mask] for logp, mask in zip(after, scored.rows.mask, strict=True)]
    assert torch.allclose(torch.cat(measured), torch.cat(expected), atol=1e-4)
    assert norm == pytest.approx(float(gradients[0].norm()), rel=1e-3)


def count_tokens(scored, after):
    """By quarter: tokens, their |move|, tokens with an advantage, those that move its way."""
    counts = torch.zeros(4, 4, dtype=torch.float64)
    for i, t in scored.rows.mask.nonzero().tolist():
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
            assert torch.allclose(
                measures[lopti.MOVES + kind, name], counts[1] / counts[0], **close
            )
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


def test_the_commands_print_and_draw(easy, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(nthr, "WARM", dict(warm_steps=2, warm_rows=4))
    monkeypatch.setattr(nthr, "QUESTIONS", 1)
    tiny = dict(width=8, prompts=2, max_tokens=6)
    for figure, name in ((nthr, "nthr"), (lopti, "lopti")):
        monkeypatch.setattr(figure, "STARTS", 2)
        monkeypatch.setattr(figure, "Config", lambda **k: Config(**k, **tiny))
        figure.main(["--plot", str(tmp_path / f"{name}.svg")])
        assert (tmp_path / f"{name}.svg").stat().st_size > 9_000
        out = capsys.readouterr().out
        lines = nthr.METHODS if figure is nthr else ("all", "only p > .75")
        times = len(nthr.RATES) if figure is nthr else 2
        assert all(out.count(f"\n{line} ") == times for line in lines if "," not in line)
    lines = ("grpo twice", "lopti - grpo twice", "reversed - lopti")
    assert all(out.count(f"\n{line} ") == len(lopti.RATES) for line in lines)


@pytest.mark.parametrize("figure", [alike, drift, ibpo, lopti, nthr, tax])
@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--stats 3", "unrecognized arguments: --stats 3"),
        ("--plot", "--plot: expected one argument"),
        ("--plot a.pdf", "a.pdf: a name that ends in .svg or .png is expected"),
        ("--plot no/a.png", "no/a.png: there is no folder no"),
    ],
)
def test_a_wrong_flag_is_one_line_before_anything_is_computed(figure, flags, reason, capsys):
    if figure is alike and "--plot" in flags:
        reason = "unrecognized arguments: --plot"
    with pytest.raises(SystemExit) as end:
        figure.main(flags.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert reason in error


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(SystemExit):
        save_picture(lambda path: Figure().savefig(path), path=tmp_path / "a.png")
    assert capsys.readouterr().err.endswith("a.png cannot be written: Is a directory\n")


def test_a_picture_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse_plot("doc", ["--plot", "a.png"])
    assert "it needs matplotlib (pip install -e '.[plot]')\n" in capsys.readouterr().err


def test_the_means_are_those_of_the_starts(group, monkeypatch):
    values = torch.tensor([[1.0, 3.0], [2.0, 6.0], [0.0, 6.0]])
    assert nthr.format_mean(values, "+") == "+3.000 +- 2.484"  # 4.303 / 3^.5
    policy, answers, scored = group
    seeds = []
    monkeypatch.setattr(lopti, "STARTS", 3)

    def make_start(seed, direct):
        assert direct == 6
        return policy, Arithmetic()

    def take(policy, task, items, step, config):
        assert items == task.test[:32]
        seeds.append(config.seed)
        return answers

    monkeypatch.setattr(lopti, "make_start", make_start)
    monkeypatch.setattr(lopti, "sample", take)
    monkeypatch.setattr(lopti, "measure", lambda *_: {("a", "b"): torch.full((4,), seeds[-1])})
    monkeypatch.setattr(lopti, "score", lambda *_: scored)
    assert lopti.study()["a", "b"].tolist() == [[0] * 4, [1] * 4, [2] * 4]


def test_a_row_of_nthr_has_its_differences_and_shares(capsys):
    values = {"grpo": [1.0, 3.0], "nthr": [2.0, -1.0], "random": [0.0, 0.0]}
    rows = {name: torch.tensor([values.get(name, [0.0, 0.0])] * 2) for name in nthr.METHODS}
    nthr.show({(kind, name): row for kind in nthr.RATES for name, row in rows.items()})
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    row = "nthr 0.500 +- 0.000 -1.500 +- 0.000 +0.500 +- 0.000 50% 50%"
    assert out.count(row) == len(nthr.RATES)
    assert [line.split(" Delta")[0] for line in out if " Delta minus" in line] == [
        "SGD 0.02",
        "SGD, one length 0.02",
        "AdamW 0.0003",
    ]


def test_the_last_panel_of_lopti_has_the_probable_tokens(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(lopti, "draw_differences", lambda axis, x: drawn.append(x))
    line = (lopti.RIGHT + "SGD", "lopti - grpo twice")
    tables = {(lopti.GRADIENT, "a"): 1.0, (lopti.MOVES + "SGD", "b"): 1.0, line: 1.0}
    measures = {key: torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]) for key in tables}
    lopti.plot(measures, tmp_path / "a.svg")
    assert drawn == [{"SGD:\nlopti - grpo twice": [4.0, 8.0]}]


def test_pictures_have_one_style():
    sizes = []
    save_picture(lambda path: sizes.append(rcParams["legend.fontsize"]), path="a.png")
    assert sizes == [8.0] and rcParams["legend.fontsize"] != 8.0


def test_a_difference_is_drawn_as_its_mean_and_interval():
    axis = Figure().subplots()
    draw_differences(axis, {"a": [1.0, 2.0, 0.0], "b": [4.0, 4.0]})
    (first, second) = (container[2][0].get_segments()[0] for container in axis.containers)
    assert first.tolist() == [pytest.approx([x, 0], abs=1e-3) for x in (1 - 2.484, 1 + 2.484)]
    assert second.tolist() == [[4, -1], [4, -1]]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a", "b"]
    assert axis.get_yticks().tolist() == [0, -1]
