"""The grader tells a student what is wrong, and survives whatever a file does.

Students fill the files in exercises/ in place, so no test here expects a blank in them.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import losses
import verify
from exercises import grader, grading
from exercises.questions import EXERCISES, WORLDS, first_coefficients, numbers, start_alike

FOLDER = Path(grader.__file__).parent
QUESTIONS = {q.function: q for exercise in EXERCISES.values() for q in exercise.questions}
SOLUTIONS = """
import torch

def group_advantages(rewards, group_size, scale="std"):
    out = []
    for k in range(0, len(rewards), group_size):
        R = rewards[k : k + group_size].tolist()
        m = sum(R) / len(R)
        std = (sum((x - m) ** 2 for x in R) / (len(R) - 1)) ** 0.5 + 1e-4
        out += [0.0 if max(R) == min(R) else (x - m) / (std if scale == "std" else 1) for x in R]
    return torch.tensor(out)

def shared_token_gradient(rho, advantages):
    return rho * sum(advantages) / len(advantages)

def gate_is_open(r, A, eps_low=0.2, eps_high=0.2):
    return not (A > 0 and r > 1 + eps_high or A < 0 and r < 1 - eps_low)

def left_at_a_shared_token(rho, advantages, eps_low=0.2, eps_high=0.2):
    winners = sum(A for A in advantages if A > 0)
    return -rho * winners if rho > 1 + eps_high else rho * winners if rho < 1 - eps_low else 0.0

def grpo_symmetric(batch, eps_low=0.2, eps_high=0.2):
    J = (batch.logp * 0).masked_fill(~batch.mask, 0.0).sum()
    for i, t in batch.mask.nonzero().tolist():
        r = (batch.logp[i, t] - batch.logp_old[i, t]).exp()
        J = J + r.clamp(1 - eps_low, 1 + eps_high) * batch.adv[i, t]
    return -J / len(batch.logp) / batch.max_tokens

def left_by_the_length(lengths, advantages):
    return sum(A / T for A, T in zip(advantages, lengths)) / len(lengths)

def an_accident():
    return [2, 2, 3, 3], [1, -1, 2, -2]

def min_replace(w, adv):
    return torch.tensor([[min(row)] * len(row) for row in w.tolist()])

def adv_orthogonal(w, adv):
    rows = []
    for w_i, A in zip(w.tolist(), adv.tolist()):
        norm = sum(a * a for a in A)
        k = sum(x * a for x, a in zip(w_i, A)) / norm if norm else 0
        rows.append([x - k * a for x, a in zip(w_i, A)])
    return torch.tensor(rows)

def blind_spot():
    return [3, 0.1, 0.1, 0.1], [1, 1, -1, -1], (0, 2)

def learning_tax(coefficients, advantages, nodes, mask):
    tax = size = 0.0
    for node in set(nodes[mask].tolist()):
        here = (nodes == node) & mask & (advantages[:, None] != 0)
        A, c = advantages[:, None].expand_as(mask)[here], coefficients[here]
        if len(c) > 1:
            tax += abs(c.sum() - (c / A).mean() * A.sum())
            size += c.abs().sum()
    return tax / size if size else 0.0

def counterexample():
    return [0.6, 0.3, 0.1]

def change_of_log_odds(k_a, k_b, n_a, n_b, x):
    return (k_a * n_a + k_b * x) - (k_a * x + k_b * n_b)

def weight(s, adv):
    return s.prod(1, keepdim=True).expand_as(s)

def grpo_on_policy(advantages, lengths):
    return -sum(advantages) / len(advantages), sum(A / T for A, T in zip(advantages, lengths))

def dr_grpo_on_policy(advantages, lengths, budget):
    total = sum(A * T for A, T in zip(advantages, lengths))
    return -total / len(advantages) / budget, sum(advantages) / budget

def nothing_is_learned(rewards):
    return len(set(rewards)) == 1
"""


def solution(number: int) -> str:
    """The functions of one exercise."""
    blocks = re.findall(r"^def \w+.*?(?=^def |\Z)", SOLUTIONS, re.DOTALL | re.MULTILINE)
    wanted = {question.function for question in EXERCISES[number].questions}
    return "import torch\n\n" + "".join(x for x in blocks if x[4 : x.index("(")] in wanted)


def verdict_of(name: str, function) -> grading.Verdict:
    """The verdict on a function, without the child process."""
    question = QUESTIONS[name]
    yours = []
    while len(yours) < len(question.inputs) and not (yours and yours[-1].error):
        yours.append(grading.answer(question, function, len(yours)))
    return grading.judge(question, yours)


@pytest.fixture
def grade(tmp_path, capsys):
    """Grade a file with this source, as on the command line: the exit code and the output."""

    def run(number: int, source: str) -> tuple[int, str]:
        path = tmp_path / "mine.py"
        path.write_text(source)
        code = grader.main([str(number), str(path)])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize("number", EXERCISES)
def test_a_right_solution_passes_and_names_the_next_exercise(number, grade):
    code, out = grade(number, solution(number))
    assert code == 0 and out.count("PASS") == len(EXERCISES[number].questions), out
    assert number == 11 or f"make exercise N={number + 1}\n" in out
    asked = grader.read_titles()[number][0].read_text()
    assert all(f"def {question.function}(" in asked for question in EXERCISES[number].questions)


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_mistake_gets_its_own_hint_and_no_other(name):
    for mistake, hint in QUESTIONS[name].mistakes:
        verdict = verdict_of(name, mistake)
        hints = {hint for question in QUESTIONS.values() for _, hint in question.mistakes}
        assert verdict.state == "NOT YET" and hints & {*verdict.lines} == {hint}, hint


@pytest.mark.parametrize(
    "name, function, line",
    [
        ("min_replace", lambda w, adv: losses.min_replace(w, adv).tolist(), "AttributeError"),
        ("gate_is_open", lambda *x: None, "Did you print?"),
        ("learning_tax", lambda *x: losses.learning_tax(*x) + 1e-8, "yours     1e-08"),
        ("learning_tax", lambda c, A, n, mask: losses.learning_tax(c, A, n, mask | True), "with"),
        ("dr_grpo_on_policy", lambda A, T, L: (-sum(A) / len(A) / L, sum(A) / L), "expected"),
        ("an_accident", lambda: ([2, 2, 2, 2], [1, -1, 2, -2]), "All lengths are equal"),
        ("an_accident", lambda: ([2, 2, 3, 3], [1, -1, 2, -1]), "sum to 1, not to 0."),
        ("an_accident", lambda: ([2, 2, 3, 3], [1, -1, 0, 0]), "Every |A| must be at least 0.1."),
        ("an_accident", lambda: ([0, 2, 3, 3], [1, -1, 1, -1]), "A length is a whole number"),
        ("an_accident", lambda: ([1, 2, 3, 3], [1, -1, 1, -1]), "sum A/T, is 0.5, not 0."),
        ("blind_spot", lambda: ([1] * 4, [1, 1, -1, -1], (0, 2)), "The pair is left with 0:"),
        ("blind_spot", lambda: ([3, 1, 1, 1], [1, 1, -1, 1], (0, 2)), "sum to 2, not to 0."),
        ("blind_spot", lambda: ([3, 1, 1, 1], [1, 1, -1, -1], (0, 1)), "pair's advantages sum"),
        ("blind_spot", lambda: ([3, 1, 1, 1], [1, 1, -1, -1], (1, 4)), "another form"),
        ("counterexample", lambda: [0.4, 0.4, 0.2], "the log-odds change by 0 per eta"),
        ("counterexample", lambda: [0.5, 0.2, 0.2], "The probabilities sum to 0.9, not 1."),
        ("counterexample", lambda: [0.5, 0.5, 0.0], "three positive probabilities"),
        ("weight", lambda s, adv: s.amax(1), "shape (21600,)"),
        ("weight", lambda s, adv: s * float("nan"), "share a token leave nan"),
        ("weight", lambda s, adv: torch.ones_like(s), "Shared tokens cancel. But the cosine"),
    ],
)
def test_another_wrong_answer_is_told_what_it_lacks(name, function, line):
    verdict = verdict_of(name, function)
    assert verdict.state == "NOT YET" and line in " ".join(verdict.lines)


def test_a_blank_is_blank_beside_a_solution(grade):
    solved = solution(11).partition("def dr_grpo")[0]
    blank = "def dr_grpo_on_policy(*x):\n    raise NotImplementedError"
    code, out = grade(11, solved + blank)
    assert code == 1 and out.count("  PASS\n") == 1 and out.count("  blank\n") == 2
    assert "The file has no function nothing_is_learned." in out


@pytest.mark.parametrize(
    "source, line",
    [
        ("def min_replace(w, adv):\n    while True: pass", "no answer: stopped after 1 s"),
        ("import os\ndef min_replace(w, adv): os._exit(3)", "no answer: the process has ended"),
        ("exit()", "SystemExit: None (line 1, in <module>)"),
        ("def min_replace(w, adv):\n    return (w", ", line 2"),
        ("import nothing_such", "ModuleNotFoundError: "),
        ("def min_replace(w, adv):\n    return 1 / 0", "(line 2, in min_replace)"),
        ("min_replace = 3", "TypeError: "),
        ("def min_replace(w, adv): raise NotImplementedError('of torch')", "Error: of torch"),
    ],
)
def test_trouble_is_one_clear_line(source, line, grade, monkeypatch):
    monkeypatch.setattr(grading.grade_file, "__defaults__", (1,))
    code, out = grade(6, source)
    assert code == 1 and out.count(line) == out.count("NOT YET") == 1, out


CHEAT = """
import torch, losses
from exercises import grading, questions
losses.min_replace = lambda *x: x[0]
grading.is_same = grading.judge = lambda *x: True
questions.EXERCISES[6].questions[0].__dict__["right"] = lambda w, adv: w
torch.Tensor.amin = torch.Tensor.sum

def min_replace(w, adv):
    print("heard?")
    return w.sort(1)[0][:, :1].expand_as(w)
"""


def test_the_command_says_what_the_readme_shows_and_is_not_changed_by_the_file(tmp_path):
    (tmp_path / "mine.py").write_text(CHEAT)
    command = [sys.executable, "-m", "exercises.grader", "6", str(tmp_path / "mine.py")]
    result = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)
    shown = re.search(
        r"  min_replace  NOT YET\n.*?(?=```)", (FOLDER / "README.md").read_text(), re.S
    )
    assert result.returncode == 1 and shown[0] in result.stdout
    assert "heard?" not in result.stdout + result.stderr


def test_progress_has_a_line_for_each_exercise(tmp_path, monkeypatch, capsys):
    titles = {number: (tmp_path / f"{number}.py", "title") for number in (1, 2, 3)}
    for number, source in ((1, ""), (2, solution(2)), (3, solution(3).partition("def left")[0])):
        titles[number][0].write_text(source)
    monkeypatch.setattr(grader, "read_titles", lambda: titles)
    assert grader.main([]) == 0
    *states, last = re.findall(r"blank|PASS|NOT YET|\d of 3.*", capsys.readouterr().out)
    assert states == ["blank", "PASS", "NOT YET"] and last.endswith("Next: make exercise N=1")


@pytest.mark.parametrize("arguments", [["12"], ["six"], ["6", "nothing.py"], ["6", "."]])
def test_a_wrong_command_line_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        grader.main(arguments)
    assert stopped.value.code == 2 and capsys.readouterr().out == ""


# ---------------- what is said elsewhere


def test_the_unbiased_weights_point_along_the_exact_gradient():
    assert WORLDS.cosine(WORLDS.s) == pytest.approx(1)
    bound = WORLDS.cosine(losses.min_replace(WORLDS.s, WORLDS.adv))
    assert f"{bound:.4f}." in grader.read_titles()[10][0].read_text()


def test_verify_explains_what_the_exercises_and_the_sheet_send_to():
    texts = [
        path.read_text() for path in FOLDER.iterdir() if path.suffix in (".py", ".md", ".html")
    ]
    assert verify.main(["--explain", *sorted({*re.findall(r"\bC\d+\b", " ".join(texts))})]) == 0


def test_the_sheets_numbers_are_computed_from_the_losses():
    text = re.sub("</?code>|<br>", "", (FOLDER / "sheet.html").read_text())
    rows = [
        re.split("<td[^>]*>", row)[1:] for row in text.splitlines() if row.startswith("<tr><td>")
    ]
    rows = {name: cells for name, *cells in rows}
    rewards, others = numbers([1, 0, 1, 0]), numbers([1.15, 0.9, 0.95, 1.05])[:, None].log()
    equal, unequal = [4] * 4, [4, 6, 3, 5]

    def coefficients(name: str, lengths, ratio=1.0) -> torch.Tensor:
        clip = {"eps_low": 0.2, "eps_high": 0.28} if name == "gspo" else {}
        adv = losses.group_advantages(rewards, 4, rows[name][0]).tolist()
        batch = start_alike(ratio, adv, lengths, budget=6)
        batch.logp_old[:, 1:] -= others * (ratio != 1)
        return first_coefficients(losses.METHODS[name].passes[0], batch, **clip)

    for name in losses.METHODS.keys() & rows.keys():
        settings = (equal, 1.0), (unequal, 1.0), (equal, 1.1), (equal, 2.5)
        for figure, setting in zip(rows[name][3:], settings, strict=True):
            c = coefficients(name, *setting)
            left = float(c.sum().abs() / c.abs().sum()) if c.any() else 0.0
            assert float(figure) == pytest.approx(left, abs=5e-4), name
    c = coefficients("grpo", unequal)
    shown = [float(x) for x in rows["c, mean per answer (GRPO)"]]
    assert shown == pytest.approx([*c.tolist(), float(c.sum()), 0.0], abs=5e-4)
