"""toy/nthr.py and toy/lopti.py: a step and what is measured of it, beside a naive computation."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from helpers import random_policy

from losses import Batch, token_grpo
from toy import lopti, nthr
from toy.arithmetic import Arithmetic
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


def naive_step(model, rows, weigh, rate, adam=False):
    """Climb sum weigh(i, logps[i]); returns the weights' gradient. No clipping."""
    logps = naive_log_probs(model, rows)
    goal = sum(weigh(i, logp) for i, logp in enumerate(logps))
    weights = list(model.parameters())
    gradient = torch.autograd.grad(goal, weights)
    with torch.no_grad():
        for weight, g in zip(weights, gradient, strict=True):
            weight += rate * (g / (g.abs() + 1e-8) if adam else g)
    return torch.cat([g.flatten() for g in gradient])


@pytest.mark.parametrize("kind", nthr.RATES)
@pytest.mark.parametrize("name", ["grpo", "pos-only"])
def test_delta_is_that_of_a_naive_step(group, name, kind, monkeypatch):
    policy, answers, _ = group
    monkeypatch.setattr(nthr, "RATES", {"SGD": 0.01, "AdamW": 1e-4})
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

    naive_step(model, answers.rows, weigh, nthr.RATES[kind], kind == "AdamW")
    after = naive_log_probs(model, answers.rows)
    expected = sum((after[i] - before[i]).sum().item() for i in (0, 3)) / 2
    assert measured == pytest.approx(expected, rel=2e-3) and abs(measured) > 1e-3


def test_the_control_has_the_eta_of_what_it_controls():
    for name in ("nthr", "nthr, eta 0"):
        (method, hyper, *_), (random, same, *_) = (
            nthr.METHODS[key] for key in (name, name.replace("nthr", "random"))
        )
        assert (method, random) == ("nthr", "nthr-random") and hyper == same
    credit = Config(method="nthr-random", hyper=same).chosen_method.credit
    assert credit.keywords == {"eta": 0.0}


def test_questions_are_mixed_and_the_start_learns_from_worked_solutions(easy, monkeypatch, capsys):
    warmed = []
    monkeypatch.setattr(nthr, "warm_start", lambda policy, task, config: warmed.append(task.train))
    monkeypatch.setattr(nthr, "QUESTIONS", 3)
    policy, task = nthr.make_start(Config(width=8), direct=0)
    nthr.make_start(Config(width=8), direct=6)
    whole = Arithmetic().train
    nthr.make_start(Config(width=8), direct=1)
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


def climb_by_hand(policy, scored, kind, name):
    """log pi of every answer after a route's two steps, and the gradient of the first."""
    model, old = copy.deepcopy(policy.model), scored.batch
    before = [logp.detach() for logp in naive_log_probs(model, scored.rows)]
    count = sum(map(len, before))
    sides = {"lopti": (True, False), "reversed": (False, True), "grpo twice": (None, None)}
    gradients = []
    for improbable in sides[name.removesuffix(", reset")]:

        def weigh(i, logp, improbable=improbable):
            r, A = (logp - before[i]).exp(), old.adv[i, 0]
            goal = torch.minimum(r * A, r.clamp(0.8, 1.24) * A) / count
            chosen = (before[i].exp() < 0.5) == improbable
            return goal.sum() if improbable is None else goal[chosen].sum()

        rate = lopti.RATES[kind] / (2 if (kind, name) == ("SGD", "grpo twice") else 1)
        gradients.append(naive_step(model, scored.rows, weigh, rate, kind == "AdamW"))
    return naive_log_probs(model, scored.rows), gradients


@pytest.mark.parametrize(
    ("kind", "name"),
    [("SGD", "lopti"), ("SGD", "reversed"), ("SGD", "grpo twice"), ("AdamW", "reversed, reset")],
)
def test_two_steps_are_those_made_by_hand(group, kind, name):
    policy, _, scored = group
    after, moves, norm = lopti.climb(policy, scored, kind, name)
    expected, gradients = climb_by_hand(policy, scored, kind, name)
    measured = [logp[mask] for logp, mask in zip(after, scored.rows.mask, strict=True)]
    assert torch.allclose(torch.cat(measured), torch.cat(expected), atol=1e-4)
    assert norm == pytest.approx(float(gradients[0].norm()), rel=1e-3)
    cosine = torch.nn.functional.cosine_similarity(*moves, dim=0)
    if kind == "SGD":
        expected = torch.nn.functional.cosine_similarity(*gradients, dim=0)
        assert float(cosine) == pytest.approx(float(expected), abs=1e-2)
    kept = lopti.climb(policy, scored, "AdamW", "reversed")[1]
    remembered = torch.nn.functional.cosine_similarity(*kept, dim=0)
    assert kind == "SGD" or remembered > cosine + 0.1  # the momentum of the first step


def test_what_is_measured_is_counted_token_by_token(group, monkeypatch):
    policy, answers, scored = group
    names = ("grpo", "AR", "lopti")
    monkeypatch.setattr(lopti, "ROUTES", {name: lopti.ROUTES[name] for name in names})
    measures = lopti.measure(policy, scored, answers.rewards)
    after, _, norm = lopti.climb(policy, scored, "SGD", "grpo")
    counts = torch.zeros(4, 4, dtype=torch.float64)  # tokens, |move|, with a signal, right
    for i, t in scored.rows.mask.nonzero().tolist():
        old, new = float(scored.batch.logp_old[i, t]), float(after[i, t])
        q = min(3, int(math.exp(old) // 0.25))
        A = float(scored.advantages[i])
        row = (1, abs(math.exp(new) - math.exp(old)), A != 0, (new > old) == (A > 0) and A != 0)
        counts[:, q] += torch.tensor(row)
    close = dict(rtol=1e-5, atol=1e-7, equal_nan=True)
    assert torch.allclose(measures["share",], counts[0] / counts[0].sum(), **close)
    assert torch.allclose(measures["moved", "SGD", "grpo"], counts[1] / counts[0], **close)
    assert torch.allclose(measures["right", "SGD", "grpo"], counts[3] / counts[2], **close)

    def weigh(i, logp):
        p = logp.detach().exp()
        return ((0.3 * p + 0.7) * float(scored.advantages[i]) * logp).sum() / counts[0].sum()

    gradient = naive_step(copy.deepcopy(policy.model), scored.rows, weigh, 0.0)
    assert float(measures["norm", "SGD", "AR"]) == pytest.approx(float(gradient.norm()), rel=1e-3)
    assert float(measures["norm", "SGD", "grpo"]) == norm
    assert ("cosine", "AdamW", "lopti") in measures and ("cosine", "SGD", "grpo") not in measures


def test_the_commands_print_and_draw(easy, monkeypatch, capsys, tmp_path):
    small = dict(warm_steps=2, warm_rows=4)
    monkeypatch.setattr(nthr, "WARM", small)
    monkeypatch.setattr(nthr, "QUESTIONS", 1)
    tiny = dict(width=8, prompts=2, max_tokens=6)
    monkeypatch.setattr(nthr, "Config", lambda **k: Config(**k, **tiny))
    nthr.main(["--starts", "2", "--plot", str(tmp_path / "nthr.svg")])
    out = capsys.readouterr().out
    assert all(out.count(f"\n{name} ") == 2 for name in nthr.METHODS if "," not in name)
    monkeypatch.setattr(lopti, "SHORT", small)
    monkeypatch.setattr(lopti, "Config", lambda **k: Config(**k, **tiny))
    lopti.main(["--starts", "2", "--plot", str(tmp_path / "lopti.svg")])
    out = capsys.readouterr().out
    assert all(f"\n{name} (to {control})" in out for name, control in lopti.CONTROLS.items())
    assert all(out.count(f"\n{name} ") == 2 for name in lopti.MOVERS)
    assert all((tmp_path / f"{name}.svg").stat().st_size > 9_000 for name in ("nthr", "lopti"))


@pytest.mark.parametrize("figure", [nthr, lopti], ids=["nthr", "lopti"])
@pytest.mark.parametrize("flag", [["--starts", "1"], ["--starts", "x"], ["--stats", "3"]], ids=str)
def test_a_wrong_flag_is_one_line(figure, flag, capsys):
    with pytest.raises(SystemExit) as end:
        figure.main(flag)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1


def test_the_means_are_those_of_the_starts():
    values = torch.tensor([[1.0, 3.0], [2.0, 6.0], [0.0, 6.0]])
    assert nthr.format_mean(values, "+") == "+3.000 +- 2.484"  # 4.303 / 3^.5
    norms = {
        ("norm", "SGD", f"only {name}"): torch.full((2, 1), q + 1.0)
        for q, name in enumerate(lopti.QUARTERS)
    }
    norms["norm", "SGD", "grpo"] = torch.tensor([[2.0], [4.0]])
    assert lopti.relative_norm(norms).tolist() == [[0.5, 1, 1.5, 2], [0.25, 0.5, 0.75, 1]]
    right = {
        ("right", "SGD", name): torch.full((2, 4), x)
        for name, x in (("lopti", 0.75), ("grpo twice", 0.5), ("grpo", 0.25))
    }
    assert lopti.gain(right, "SGD", "lopti").unique().tolist() == [0.25]
    assert lopti.gain(right, "SGD", "grpo twice").unique().tolist() == [0.25]
