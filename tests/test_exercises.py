"""The grader tells a student what is wrong, and survives whatever a file does.

Students fill the files in exercises/ in place, so no test here expects a blank in them.
"""

import inspect
import json
import os
import re
import types
from pathlib import Path

import pytest
import torch

import losses
import verify
from claims import CLAIMS, Draws
from exercises import contract, grader, process
from exercises.mistakes import (
    EXERCISES,
    find_visits,
    no_node_is_shared,
    norm_without_square,
    numbers,
    population_std,
    tax_of,
)

FOLDER = Path(grader.__file__).parent
QUESTIONS = {q.function: q for exercise in EXERCISES.values() for q in exercise.questions}
ANY_OF_MANY = {  # a right answer where there are several
    "an_accident": lambda: ([2, 2, 3, 3], [1.0, -1.0, 2.0, -2.0]),
    "blind_spot": lambda: ([3.0, 0.1, 0.1, 0.1], [1.0, 1.0, -1.0, -1.0], (0, 2)),
    "counterexample": lambda: [0.6, 0.3, 0.1],
    "weight": lambda s, adv: s.mean(1, keepdim=True).expand_as(s),
}
RIGHT = {name: question.right or ANY_OF_MANY[name] for name, question in QUESTIONS.items()}
numbered = pytest.mark.parametrize("number", EXERCISES)


class InThisProcess:
    """Functions in the place of a student's file, without the second process that imports torch."""

    def __init__(self, functions: dict, broken: str = ""):
        self.module = types.SimpleNamespace(__file__="", **functions)
        self.broken = broken

    def ask(self, path, **request):
        if self.broken:
            raise RuntimeError(f"{path}: {self.broken}")
        request = json.loads(json.dumps(request))
        return json.loads(json.dumps(process.call(self.module, **request))) if request else {}

    def stop(self):
        pass


def verdict_of(name: str, function) -> grader.Verdict:
    student = grader.Student("file", InThisProcess({name: function}))
    return grader.grade(student, QUESTIONS[name])


@pytest.fixture
def grade(monkeypatch, capsys):
    """Grade an exercise with these functions: exit code and output."""

    def run(functions: dict, *arguments: str, broken: str = "") -> tuple[int, str]:
        fake = InThisProcess(functions, broken)
        monkeypatch.setattr(grader, "SecondProcess", lambda: fake)
        code = grader.main(list(arguments))
        return code, capsys.readouterr().out

    return run


# ---------------- the files


def read_cells(path: Path) -> list[tuple[str, str]]:
    """(kind, text) of the cells, as VS Code and jupytext divide a file."""
    cells = re.split(r"^# %%(.*)\n", path.read_text(), flags=re.MULTILINE)[1:]
    pairs = zip(cells[::2], cells[1::2], strict=True)
    return [(kind.strip() or "code", text.strip()) for kind, text in pairs]


def check_files(folder: Path) -> int:
    """How many blanks there are. Every file has its cells; a blank has the right parameters."""
    files = sorted(folder.glob("[0-9]*.py"))
    assert [int(path.name[:2]) for path in files] == list(EXERCISES) == list(range(1, 11))
    blanks = 0
    for number, path in enumerate(files, 1):
        (kind, text), *rest = read_cells(path)
        assert kind == "[markdown]" and text[:3] == text[-3:] == '"""' and text.count('"""') == 2
        for part in (f"# {number}. ", "**Aim:** ", "**Hint:** ", f"`make exercise N={number}`"):
            assert part in text, path
        for question in EXERCISES[number].questions:
            cell = next(
                x for kind, x in rest if kind == "code" and f"def {question.function}(" in x
            )
            if cell.endswith("raise NotImplementedError"):
                blanks += 1
                module = types.ModuleType("cell")
                blank = cell[cell.index(f"def {question.function}(") :]
                exec(blank, {"torch": torch}, vars(module))
                given = inspect.signature(getattr(module, question.function)).parameters
                right = inspect.signature(RIGHT[question.function]).parameters
                assert list(given) == list(right)
                assert [x.default for x in given.values()] == [x.default for x in right.values()]
    return blanks


def test_every_file_opens_as_cells_and_its_blanks_have_the_right_parameters():
    check_files(FOLDER)


def test_files_that_are_solved_in_place_pass_the_tests_of_the_files(tmp_path):
    for path in FOLDER.glob("[0-9]*.py"):
        text = path.read_text().replace("raise NotImplementedError", "x=1;return  x")
        (tmp_path / path.name).write_text(text)
    assert check_files(tmp_path) == 0
    settings = (FOLDER.parent / "pyproject.toml").read_text()
    assert 'extend-exclude = ["exercises/[0-9]*.py"]' in settings  # for ruff


# ---------------- what a student is told


@numbered
def test_a_blank_is_blank_and_the_right_solution_passes_and_names_the_next(number, grade):
    names = [question.function for question in EXERCISES[number].questions]
    code, out = grade({}, str(number))
    assert code == 1 and out.count("blank") == len(names) and "PASS" not in out
    code, out = grade({name: RIGHT[name] for name in names}, str(number))
    assert code == 0 and out.count("PASS") == len(names), out
    assert f"python verify.py --explain {EXERCISES[number].claim}" in out
    assert "NOT YET" not in out and "HOLDS" not in out and "WRONG" not in out
    if number < 10:
        assert f"Next: {number + 1}. {grader.title_of(number + 1)}, in exercises/" in out
        assert f"make exercise N={number + 1}\n" in out
    else:
        assert "This was the last exercise." in out


@numbered
def test_every_tempting_mistake_gets_its_own_hint_and_no_other(number):
    pairs = [(q, mistake) for q in EXERCISES[number].questions for mistake in q.mistakes]
    hints = [mistake.__doc__ for _, mistake in pairs]
    assert len(pairs) >= 3 and len(set(hints)) == len(hints)
    for question, mistake in pairs:
        verdict = verdict_of(question.function, mistake)
        assert verdict.state == "NOT YET", mistake.__name__
        assert [line for line in verdict.lines if line in hints] == [mistake.__doc__]


@pytest.mark.parametrize(
    "name, answer, message",
    [
        ("an_accident", ([2, 2, 2, 2], [1, -1, 2, -2]), "All lengths are equal"),
        ("an_accident", ([2, 2, 3, 3], [1, -1, 2, -1]), "sum to 1, not to 0."),
        ("an_accident", ([2, 2, 3, 3], [1, -1, 0, 0]), "Every |A| must be at least 0.1."),
        ("an_accident", ([0, 2, 3, 3], [1, -1, 1, -1]), "A length is at least 1."),
        ("an_accident", ([1, 2, 3, 3], [1, -1, 1, -1]), "sum A/T, is 0.5, not 0."),
        ("an_accident", None, "Lists of four lengths and four advantages are asked for."),
        ("blind_spot", ([1, 1, 1, 1], [1, 1, -1, -1], (0, 2)), "The pair is left with 0:"),
        ("blind_spot", ([3, 1, 1, 1], [1, 1, -1, 1], (0, 2)), "sum to 2, not to 0."),
        ("blind_spot", ([3, 1, 1, 1], [1, 1, -1, -1], (0, 1)), "The pair's advantages sum to 2"),
        (
            "blind_spot",
            ([3, 1, 1, 1], [1, 1, -1, -1], (1, 4)),
            "places are different, and from 0 to 3",
        ),
        ("blind_spot", ([3, 1, 1, 1], [1, 1, -1, -1]), "two places, 0 to 3, are asked for."),
        ("blind_spot", (numbers(3, 1, 1, 1), [1, 1, -1, -1], (0, 2)), "Lists of four weights"),
        ("an_accident", (torch.full((4,), 2), numbers(1, -1, 2, -2)), "Lists of four lengths"),
        ("counterexample", [0.4, 0.4, 0.2], "the log-odds change by 0 per eta"),
        ("counterexample", [0.5, 0.2, 0.2], "The probabilities sum to 0.9, not 1."),
        ("counterexample", [0.5, 0.5, 0.0], "A list of three positive probabilities is asked for."),
    ],
)
def test_where_many_answers_are_right_a_wrong_one_is_told_what_it_lacks(name, answer, message):
    verdict = verdict_of(name, lambda: answer)
    assert verdict.state == "NOT YET" and message in " ".join(verdict.lines)


def test_a_mistake_is_recognised_beside_another_one():
    def two_mistakes(rewards, group_size, scale):
        return population_std(rewards, max(group_size, 2), scale)

    def unknown_and_integers(rewards, group_size, scale):
        adv = losses.group_advantages(rewards.double(), group_size, scale)
        return 3 * adv if scale == "mean" else adv

    lines = verdict_of("group_advantages", two_mistakes).lines
    assert lines[-1].startswith("Your std divides by G.")
    lines = verdict_of("group_advantages", unknown_and_integers).lines
    assert lines[-1] == "expected  [0.5, -0.5]"  # the integers' hint does not belong here


def test_what_is_right_on_small_inputs_only_does_not_pass():
    def small_only(w, adv):
        return losses.min_replace(w, adv) * (w.numel() < 9)

    verdict = verdict_of("min_replace", small_only)
    assert verdict.state == "NOT YET"
    assert verdict.lines[0].startswith("Small inputs are right. On random ones claim C9 fails: ")


def without_the_norms_square(w, adv):
    w = w.detach()
    return w - (adv * w).sum(1, keepdim=True) / adv.norm(dim=1, keepdim=True) * adv


def test_a_missing_guard_does_not_hide_the_hint_of_another_mistake():
    lines = verdict_of("adv_orthogonal", without_the_norms_square).lines
    assert lines[-1] == norm_without_square.__doc__


def counts_zeros_as_weight_0(c, adv, nodes, mask):
    tax = size = 0.0
    for node in set(nodes[mask].tolist()):
        here = (nodes == node) & mask
        A = adv[:, None].expand_as(mask)[here]
        w = torch.where(A == 0, 0.0, c[here] / torch.where(A == 0, 1.0, A))
        if len(A) > 1:
            tax += abs(((w - w.mean()) * A).sum())
            size += (c[here] * (A != 0)).abs().sum()
    return tax / size if size else 0.0


def counts_visitors_before_it_drops_zeros(c, adv, nodes, mask):
    tax, size = [], []
    for visitors in find_visits(c, adv, nodes, mask, with_zeros=True):
        kept = [visit for visit in visitors if visit[1] != 0]
        if len(visitors) > 1 and kept:
            tax.append(abs(tax_of(kept)))
            size.append(sum(abs(c) for c, _ in kept))
    return sum(tax) / sum(size) if sum(size) else 0.0


def takes_four_rows_for_a_group(c, adv, nodes, mask):
    group = torch.arange(len(c))[:, None] // 4
    return losses.learning_tax(c, adv, nodes + 1000 * group, mask)


@pytest.mark.parametrize(
    "name, function",
    [
        ("learning_tax", counts_zeros_as_weight_0),
        ("learning_tax", counts_visitors_before_it_drops_zeros),
        ("learning_tax", takes_four_rows_for_a_group),
        ("min_replace", lambda w, adv: losses.min_replace(w, adv).clamp(max=1)),
        ("gate_is_open", lambda r, A, low, high: RIGHT["gate_is_open"](r, A, 0.2, high)),
    ],
)
def test_a_mistake_fails_on_a_small_input_already(name, function):
    verdict = verdict_of(name, function)
    assert verdict.state == "NOT YET" and verdict.lines[0].startswith("with ")


def test_what_is_blank_says_why_and_an_error_names_the_function_it_is_in(tmp_path):
    path = tmp_path / "student.py"
    path.write_text(
        "def above():\n    raise NotImplementedError\n    return 1\n\n"
        'def blank():\n    """What."""\n    raise NotImplementedError\n\n'
        "def broken():\n    return (1\n\ndef wrong():\n    return 1 / 0\n\n"
        "def calls(name):\n    return globals()[name]()\n"
    )
    module = process.load(str(path))
    above = "raise NotImplementedError still stands above your code."
    assert process.call(module, "above", [], {}) == {"blank": above}
    assert process.call(module, "blank", [], {}) == {"blank": ""}
    missing = {"blank": "The file has no function renamed."}
    assert process.call(module, "renamed", [], {}) == missing
    for name, message in {
        "blank": "NotImplementedError (line 7, in blank)",
        "broken": "SyntaxError: '(' was never closed, line 10 (in broken)",
        "wrong": "ZeroDivisionError: division by zero (line 13, in wrong)",
    }.items():
        assert process.call(module, "calls", [name], {}) == {"error": message}
    assert verdict_of("blind_spot", lambda: module.above()).state == "blank"
    student = grader.Student("file", InThisProcess({}))
    for name in ("gate_is_open", "blind_spot"):
        assert grader.grade(student, QUESTIONS[name]).lines == [f"The file has no function {name}."]


def test_a_file_without_its_import_does_not_load(tmp_path):
    path = tmp_path / "student.py"
    path.write_text("def min_replace(w: torch.Tensor): ...\n")
    with pytest.raises(NameError, match="torch"):
        process.load(str(path))


def test_torchs_nan_is_recognised_as_pythons_division_by_zero():
    def nan_instead(*arguments):
        try:
            return no_node_is_shared(*arguments)
        except ZeroDivisionError:
            return torch.tensor(float("nan"))

    assert verdict_of("learning_tax", nan_instead).lines[-1] == no_node_is_shared.__doc__


def test_what_is_blank_for_some_inputs_only_has_begun():
    def half(rewards, group_size, scale):
        if scale == "std":
            raise NotImplementedError
        return losses.group_advantages(rewards, group_size, scale)

    verdict = verdict_of("group_advantages", half)
    assert verdict.state == "NOT YET" and verdict.lines[1] == "yours     NotImplementedError"


def test_other_ways_to_write_the_right_solution_pass():
    def with_a_loop(coefficients, advantages, nodes, mask):
        tax = size = 0.0
        for node in set(nodes[mask].tolist()):
            here = (nodes == node) & mask & (advantages[:, None] != 0)
            A, c = advantages[:, None].expand_as(mask)[here], coefficients[here]
            if len(c) > 1:
                tax += abs(c.sum() - (c / A).mean() * A.sum())
                size += c.abs().sum()
        return tax / size if size else 0.0

    def from_lists(w, adv):
        return torch.tensor([[min(row)] * len(row) for row in w.tolist()], dtype=w.dtype)

    def as_a_number(r, A, eps_low, eps_high):
        return torch.tensor(float(RIGHT["gate_is_open"](r, A, eps_low, eps_high)))

    for name, function in {
        "learning_tax": with_a_loop,
        "min_replace": from_lists,
        "gate_is_open": as_a_number,
    }.items():
        assert verdict_of(name, function).state == "PASS"


@pytest.mark.parametrize(
    "name, function, hint",
    [
        ("min_replace", lambda w, adv: w.tolist(), "A tensor is asked for."),
        ("min_replace", lambda w, adv: 2 * w, "Your result has a gradient. Return it detached."),
        (
            "min_replace",
            lambda w, adv: losses.min_replace(w, adv).float(),
            "Your result is torch.float32, but the input is torch.float64.",
        ),
        (
            "shared_token_gradient",
            lambda rho, adv: RIGHT["shared_token_gradient"](rho, adv) + 1e-8,
            "The two are nearly the same. Did you add an epsilon, or is a part float32?",
        ),
        (
            "group_advantages",
            lambda rewards, G, scale: losses.group_advantages(rewards, max(G, 2), scale),
            "The exercise asks to refuse this with a ValueError: group_size must be at least 2 "
            "(an answer and a sibling), not 1.",
        ),
        (
            "min_replace",
            lambda w, adv: w.detach().min(dim=1),
            "This is no tensor. w.min(dim=1) gives a pair (values, indices): take its .values.",
        ),
        (
            "gate_is_open",
            lambda *_: None,
            "Your function returns nothing. Did you print instead of return?",
        ),
        *(
            (
                name,
                lambda *x, f=RIGHT[name]: f(*x).double(),
                "Your result is torch.float64, but the input is torch.float32.",
            )
            for name in ("group_advantages", "min_replace", "adv_orthogonal")
        ),
    ],
)
def test_an_unknown_mistake_may_have_a_plain_reason(name, function, hint):
    assert verdict_of(name, function).lines[-1] == hint


# ---------------- the five findings of those who tried the exercises as students


def test_integer_rewards_are_asked_for_and_their_message_speaks_of_them(capsys):
    def torch_error(rewards, group_size, scale):
        rewards.mean()
        return losses.group_advantages(rewards, group_size, scale)

    assert "if the rewards are not floats" in grader.path_of(1).read_text().replace("\n", " ")
    lines = verdict_of("group_advantages", torch_error).lines
    assert lines[0] == 'with      rewards = [1, 0], group_size = 2, scale = "std"'
    assert re.match("yours     (Runtime|NotImplemented)Error: mean", lines[1])  # by torch's version
    assert lines[2:] == [
        "expected  a ValueError",
        "The exercise asks to refuse this with a ValueError: "
        "rewards: torch.int64 of shape (2,), not whole groups of 2 floats.",
    ]
    claims = [claim for claim in CLAIMS if claim.id == "M3"]
    module = types.SimpleNamespace(group_advantages=torch_error)
    verify.show(claims, list(verify.verify(module, claims, Draws(0))), grading=True)
    out = capsys.readouterr().out
    assert re.search(r"^M3 +WRONG +GRPO", out, re.MULTILINE)  # no numbers that agree
    assert "must refuse with a ValueError, not RuntimeError" in out


def test_a_message_shows_its_input_and_two_mistakes_do_not_look_alike():
    def with_population_std(rewards, group_size, scale):
        groups = rewards.view(-1, group_size)
        adv = groups - groups.mean(1, keepdim=True)
        if scale == "std":
            adv = adv / (groups.std(1, keepdim=True, correction=0) + 1e-4)
        return adv.view(-1)

    def divide(coefficients, advantages, nodes, mask):
        w = [float(c) / float(a) for c, a in zip(coefficients[:, 0], advantages, strict=True)]
        return w and losses.learning_tax(coefficients, advantages, nodes, mask)

    assert verdict_of("group_advantages", with_population_std).lines == [
        'with      rewards = [1.0, 0.0], group_size = 2, scale = "std"',
        "yours     [0.9998, -0.9998]",
        "expected  [0.707, -0.707]",
        "Your std divides by G. The unbiased one divides by G - 1, as torch's std does by default.",
    ]
    assert verdict_of("min_replace", lambda w, adv: w.amin(1)[:, None].expand_as(w)).lines == [
        "with      w = [[0.5, 2.0]], adv = [[1.0, -1.0]]",
        "yours     [[0.5, 0.5]], with a gradient",
        "expected  [[0.5, 0.5]], detached",
        "This is what you get without detach. The loss would then learn to lower a ratio.",
    ]
    *_, hint = verdict_of("learning_tax", divide).lines
    assert hint == "An answer with A = 0 has no w: c / A divides by 0. Leave it out."
    assert verdict_of("grpo_symmetric", losses.dr_grpo).lines[:3] == [
        "with      r = [[1.5], [1.5]], A = [1.0, -1.0], L = 1, eps_low = 0.2, eps_high = 0.4",
        "yours     loss 0.05, coefficients [[0.0], [-1.5]]",
        "expected  loss 0.0, coefficients [[0.0], [0.0]]",
    ]
    near = verdict_of("group_advantages", lambda *x: losses.group_advantages(*x) * (1 + 1e-8))
    assert near.lines[1:3] == ["yours     [0.500000005, -0.500000005]", "expected  [0.5, -0.5]"]
    gate = verdict_of("gate_is_open", lambda r, A, low, high: 1 - low < r < 1 + high)
    assert gate.lines[:3] == [
        "with      r = 1.5, A = -1.0, eps_low = 0.1, eps_high = 0.4",
        "yours     False",
        "expected  True",
    ]


@pytest.mark.parametrize("name, said", [("min_replace", "no answer: "), ("weight", "")])
def test_a_function_that_hangs_costs_its_own_verdict_only(name, said, monkeypatch):
    def hang(*_, **__):
        raise process.CutOff("cut off after 10 s")

    student = grader.Student("file", InThisProcess({}))
    monkeypatch.setattr(student, "answer", hang)
    verdict = grader.grade(student, QUESTIONS[name])
    assert verdict.state == "NOT YET"
    assert f"{said}cut off after 10 s" in verdict.lines[-1].replace("Cut", "cut")


def test_progress_has_a_line_for_each_exercise(grade):
    functions = {name: RIGHT[name] for name in ("shared_token_gradient", "gate_is_open")}
    functions["min_replace"] = lambda w, adv: w
    code, out = grade(functions)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 12
    states = [re.search(r"PASS|NOT YET|blank", line)[0] for line in lines[:10]]
    assert states[1:6] == ["PASS", "NOT YET", "blank", "blank", "NOT YET"]
    assert {states[0], *states[6:]} == {"blank"}
    assert lines[2].endswith("1 of 2 functions pass")
    assert lines[-1] == "1 of 10 pass. Next: make exercise N=1"
    code, out = grade({}, broken="SyntaxError: oh")
    assert out.count("NOT YET  SyntaxError: oh") == 10


@pytest.mark.parametrize(
    "argument, message",
    [
        ("11", "there is no exercise 11; accepted: 1 to 10, or a file"),
        ("²", "there is no exercise ²; accepted"),
        ("9" * 5000, "cannot read 999"),
        ("--fast", "--fast"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(argument, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        grader.main([argument])
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
    assert message in captured.err


def test_values_come_back_from_json_as_they_were():
    values = [
        None,
        True,
        3,
        0.1,
        float("inf"),
        "std",
        [[1.5], []],
        torch.tensor([[1, 2]]),
        torch.zeros(0, 2),
        torch.tensor(0.1, dtype=torch.float64),
        numbers(0.1, 1e300, -0.0, grad=True),
        torch.tensor([True]),
    ]
    back = process.decode(json.loads(json.dumps(process.encode(values))))
    for x, y in zip(values, back, strict=True):
        assert type(x) is type(y)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and x.requires_grad == y.requires_grad
            assert torch.equal(x, y)
        else:
            assert x == y
    batch = QUESTIONS["grpo_symmetric"].inputs[0][0]
    back = process.decode(json.loads(json.dumps(process.encode(batch))))
    assert torch.equal(batch.logp, back.logp) and back.logp.requires_grad
    assert back.max_tokens == batch.max_tokens and back.mask.dtype == torch.bool
    assert process.decode(process.encode(numbers)).type == "function"


# ---------------- the second process

CHEAT = """
import torch
import losses
import sys
losses.dfpo_min = losses.reinforce = losses._dfpo = lambda *_, **__: 0.0
losses.Batch.logp = 0
sys.modules["losses"].learning_tax = lambda *_: 0.0

def weight(s, adv):
    print("heard?")
    return s

def min_replace(w, adv):
    from losses import min_replace
    return min_replace(w, adv)

def shared_token_gradient(rho, advantages):
    return sum(advantages) / (2 - 2 * rho

def learning_tax(coefficients, advantages, nodes, mask):
    return losses.learning_tax(coefficients, advantages, nodes, mask)

def group_advantages(rewards, group_size, scale="std"):
    groups = rewards.view(-1, group_size)
    return torch.tensor([[float(x[0] - x[1])] for x in groups])
"""


def test_a_file_cannot_reach_the_reference(tmp_path, capfd):
    path = tmp_path / "cheat.py"
    path.write_text(CHEAT)
    second_process = process.SecondProcess()
    try:
        verdicts = [
            verdict
            for number in (10, 6, 8, 2, 1)
            for verdict in grader.grade_file(second_process, number, str(path))
        ]
    finally:
        second_process.stop()
    assert all(verdict.state == "NOT YET" for verdict in verdicts)
    said = {verdict.function: " ".join(verdict.lines) for verdict in verdicts}
    assert re.search(r"min_replace +0.000 +0.9501 ", said["weight"])
    assert "Your weights have a tax of 0.0271" in said["weight"]
    assert "losses.min_replace is not here: a graded file may use Batch" in said["min_replace"]
    assert "(line 14)" in said["min_replace"]
    assert "yours     0.0" in said["learning_tax"]
    assert "SyntaxError: '(' was never closed, line 18 expected" in said["shared_token_gradient"]
    assert "yours     [[1.0]] " in said["group_advantages"]
    assert "float32" not in said["group_advantages"]
    assert "heard?" not in capfd.readouterr().out


# ---------------- claims on a file: verify.py --losses

STUDENT = """
import os, time, torch
from losses import budget_mean, seq_mean, clipped

def reinforce(batch):
    print("heard?")
    return -budget_mean(batch.adv * batch.logp, batch)

def grpo(batch, eps_low=0.2, eps_high=0.2, kl=0.0):
    time.sleep(99)

def dr_grpo(batch, eps_low=0.2, eps_high=0.2):
    raise KeyError("oops")

def dapo(batch, eps_low=0.2, eps_high=0.28):
    raise NotImplementedError

def gspo(batch, eps_low=3e-4, eps_high=4e-4):
    return sum(range(10**15))

def dfpo_min(batch, ratio="geometric"):
    os._exit(3)

def dfpo_orthogonal(batch, ratio="geometric"):
    return (batch.logp

def pos_only(batch, eps_low=0.2, eps_high=0.2):
    return -seq_mean(clipped(batch, eps_low, eps_high), batch)

def cispo(batch, eps_low=1.0, eps_high=4.0):
    return torch.ones(2, device="meta").tolist()

def grpo_symmetric(batch, eps=0.2):
    raise NotImplementedError("todo")
"""


def test_the_grader_survives_whatever_a_function_does(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(contract, "PATIENCE", 6)
    path = tmp_path / "student.py"
    path.write_text(STUDENT)
    assert verify.main(["--only", "M1", "M3", "--losses", str(path)]) == 1
    out = capfd.readouterr().out  # of both processes
    assert "heard?" not in out and "are not in this file" in out
    score = out[out.index("\nscore") :].splitlines()
    score = {line.split()[0]: line for line in score if " of " in line}
    for function, message in {
        "grpo": "cut off after 6 s",
        "dr_grpo": "KeyError: 'oops'",
        "dapo": "not yet written",
        "gspo": "cut off after 6 s",
        "dfpo_min": "the process died",
        "dfpo_orthogonal": "SyntaxError: '(' was never closed, line 25",
        "pos_only": "expected 0, got",
        "cispo": "NotImplementedError: Cannot copy out of meta tensor",
        "grpo_symmetric": "NotImplementedError: todo",
    }.items():
        assert message in score[function] and "0 of  1" in score[function]
    assert "1 of  1" in score["reinforce"] and "1 of 10" in score["all"]


def test_a_function_that_another_one_needs_is_named_and_not_taken_from_losses(tmp_path):
    module = types.SimpleNamespace(__file__="")
    module.dfpo_min = lambda batch: contract.Written(module).sequence_ratio(batch)
    reply = contract.examine_here(module, "C12", "dfpo_min", 0)
    assert contract.read_outcome(reply).message == "needs sequence_ratio, not yet written"


def test_a_file_that_cannot_be_loaded_is_one_clear_line(tmp_path, capfd):
    path = tmp_path / "student.py"
    path.write_text("import no_such_module_at_all\n\ndef group_advantages(): ...\n")
    assert verify.main(["--only", "M3", "--losses", str(path)]) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "error: " in captured.err and "No module named 'no_such_module_at_all'" in captured.err


def test_a_file_about_something_else_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "other.py"
    path.write_text("x = 1\n")
    with pytest.raises(SystemExit) as stopped:
        verify.main(["--losses", str(path)])
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
    assert f"error: {path} defines none of the functions" in captured.err


def test_a_syntax_error_is_confined_to_its_function_and_the_line_numbers_stay(tmp_path):
    source = "def decorator(f): return f\n\n@decorator\ndef good(a):\n    return a\n\n"
    source += "def bad():\ndef fine():\n    return 2\ny = 3\n"
    mended = process.mend(source)
    assert mended.count("\n") == source.count("\n")
    assert mended.splitlines()[7:] == source.splitlines()[7:]
    path = tmp_path / "student.py"
    path.write_text(source)
    module = process.load(str(path))
    assert module.good(4) == 4 and module.fine() == 2 and module.y == 3
    with pytest.raises(SyntaxError, match="line 7|line 8"):
        module.bad()


# ---------------- a file has a process of its own, and what comes from there is checked

VANDAL = """
import losses
import torch
torch.set_grad_enabled(False)
torch.Tensor.clamp = torch.Tensor.amin = losses.budget_mean = None

def group_advantages(rewards, group_size, scale="std"):
    return rewards
"""
MIN_REPLACE = """
def min_replace(w, adv):
    return w.amin(1, keepdim=True).expand_as(w).detach()
"""
TROUBLE = """
import os
import sys
import time

import torch

class Mute(Exception):
    def __str__(self):
        return self.no_such_text

def find_pipe():
    frame = sys._getframe()
    while "pipe" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["pipe"]

def send_half():
    os.write(find_pipe().fileno(), bytes([0, 0, 0, 4]))
    time.sleep(99)

def send_huge_length():
    os.write(find_pipe().fileno(), bytes([255] * 4 + [127] + [255] * 7))

def send_deep():
    find_pipe().send_bytes(b"[" * 10**5)

def send_number():
    find_pipe().send_bytes(b"5")

def die():
    os._exit(3)

def return_complex():
    return torch.tensor(1j)

def return_large_number():
    return 10**6000

def raise_mute():
    raise Mute

def find_output():
    return [os.fstat(descriptor).st_rdev for descriptor in (1, 2)]
"""


@pytest.fixture
def second_process():
    process_ = process.SecondProcess()
    yield process_
    process_.stop()


def test_a_file_does_not_change_the_grade_of_the_next(tmp_path, second_process):
    for name, source in {"vandal": VANDAL, "good": MIN_REPLACE}.items():
        (tmp_path / f"{name}.py").write_text(source)
    bad, good = (str(tmp_path / f"{name}.py") for name in ("vandal", "good"))
    assert grader.grade_file(second_process, 1, bad)[0].state == "NOT YET"
    assert grader.grade_file(second_process, 6, good)[0].state == "PASS"


def test_trouble_in_the_second_process_is_one_line_in_the_first(tmp_path, second_process):
    path = tmp_path / "trouble.py"
    path.write_text(TROUBLE)

    def ask(function):
        return second_process.ask(str(path), function=function, arguments=[], options={})

    for function, error in {
        "return_complex": "TypeError: Object of type complex is not JSON serializable",
        "return_large_number": "ValueError: Exceeds the limit",
        "raise_mute": "Mute: its text cannot be shown (line 41)",
    }.items():
        assert ask(function)["error"].startswith(error)
        assert second_process.worker.is_alive()
    assert ask("find_output")["value"] == [os.stat(os.devnull).st_rdev] * 2
    for function, trouble in {
        "send_huge_length": "sent no answer",
        "send_deep": "sent no answer",
        "send_number": "sent no answer",
        "die": "the process died",
        "send_half": "cut off after 0.3 s",
    }.items():
        second_process.ask(str(path))  # to load it does not count
        second_process.patience = 0.3 if function == "send_half" else 10
        with pytest.raises(process.CutOff, match=trouble):
            ask(function)
        assert not second_process.worker


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"blank": 1, "error": "x"},
        {"error": 5},
        {"error": ["x"]},
        {"error": "", "value": 1, "gradient": None},
        {"value": {"tensor": 1}, "gradient": None},
        {"value": {"batch": {"x": 1}}, "gradient": None},
        {"value": 1.0, "gradient": "x"},
        {"value": json.loads("[" * 600 + "]" * 600), "gradient": None},
    ],
)
@pytest.mark.parametrize("name", ["min_replace", "weight"])
def test_a_reply_that_is_no_answer_is_not_yet(name, reply):
    fake = types.SimpleNamespace(ask=lambda path, **request: reply)
    verdict = grader.grade(grader.Student("file", fake), QUESTIONS[name])
    assert verdict.state == "NOT YET" and "ent no answer" in verdict.lines[-1]


@pytest.mark.parametrize("reply", [{"error": ""}, {"value": 10**400, "gradient": None}])
def test_a_strange_answer_is_wrong(reply):
    fake = types.SimpleNamespace(ask=lambda path, **request: reply)
    verdict = grader.grade(grader.Student("file", fake), QUESTIONS["min_replace"])
    assert verdict.state == "NOT YET" and "expected  " in verdict.lines[2]


def test_no_hint_is_looked_for_in_a_function_that_hangs(monkeypatch):
    def hang(*_):
        raise process.CutOff("cut off after 10 s")

    student = grader.Student("file", InThisProcess({}))
    monkeypatch.setattr(student, "call", lambda function, s, adv: 0 * s)
    monkeypatch.setattr(student, "answer", hang)
    assert grader.grade(student, QUESTIONS["weight"]).state == "NOT YET"


def test_no_outcome_of_a_claim_is_cut_off():
    for reply in ({}, {"evidence": 5}, {"evidence": {}, "error": "x"}):
        with pytest.raises(process.CutOff, match="sent no answer"):
            contract.read_outcome(reply)


def test_a_refusal_needs_no_message(tmp_path, second_process):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n\n"
        "def min_replace(w, adv):\n    raise ValueError\n\n"
        "def group_advantages(rewards, group_size, scale):\n"
        "    if not rewards.is_floating_point() or scale not in ('std', 'mean'):\n"
        "        raise ValueError\n"
        "    if group_size < 2 or len(rewards) % group_size:\n        raise ValueError\n"
        "    groups = rewards.view(-1, group_size)\n"
        "    adv = groups - groups.mean(1, keepdim=True)\n"
        "    if scale == 'std':\n        adv = adv / (groups.std(1, keepdim=True) + 1e-4)\n"
        "    same = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)\n"
        "    return adv.masked_fill(same, 0.0).view(-1)\n"
    )
    assert grader.grade_file(second_process, 1, str(path))[0].state == "PASS"


def test_what_torch_has_not_implemented_is_no_blank():
    def read_meta(*_):
        return torch.ones(2, device="meta").tolist()

    verdict = verdict_of("min_replace", read_meta)
    assert verdict.state == "NOT YET"
    assert verdict.lines[1].startswith("yours     NotImplementedError: ")
    assert verdict_of("weight", read_meta).state == "NOT YET"


def test_a_text_that_is_no_unicode_is_shown(grade):
    def fail(*_):
        raise RuntimeError(chr(0xD800))

    code, out = grade({"min_replace": fail}, "06")
    assert code == 1 and "RuntimeError: " in out and "ud800" in out


def test_a_file_that_is_not_utf_8_is_one_clear_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "06_latin.py"
    path.write_bytes(b"def min_replace(w, adv): ... # \xe9\n")
    assert grader.main([str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: UnicodeDecodeError: ") and error.count("\n") == 1
    monkeypatch.setattr(grader, "FOLDER", tmp_path)
    assert grader.title_of(6) == "06_latin"
    with pytest.raises(SystemExit, match="2"):
        grader.title_of(7)
    assert "there is no exercises/07_*.py" in capsys.readouterr().err
