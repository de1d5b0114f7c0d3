"""The grader tells a student what is wrong, and survives whatever a file does.

Students fill the files in exercises/ in place, so no test here expects a blank in them.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import losses
from exercises import grader, grading
from exercises.grading import answer, judge
from exercises.questions import EXERCISES, WEIGHT, numbers, start_alike

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
numbered = pytest.mark.parametrize("number", EXERCISES)


def verdict_of(name: str, function) -> grading.Verdict:
    """The verdict on a function, without the child process."""
    question = QUESTIONS[name]
    right = [answer(question.right, x) for x in question.inputs] if question.right else []
    return judge(question, [answer(function, x) for x in question.inputs], right)


@pytest.fixture
def grade(tmp_path, capsys):
    """Grade a file with this source, as on the command line: the exit code and the output."""

    def run(source: str | bytes) -> tuple[int, str]:
        path = tmp_path / "mine.py"
        path.write_bytes(source if isinstance(source, bytes) else source.encode())
        code = grader.main([str(path)])
        return code, capsys.readouterr().out

    return run


def solution(number: int) -> str:
    """The functions of one exercise."""
    blocks = re.findall(r"^def \w+.*?(?=^def |\Z)", SOLUTIONS, re.DOTALL | re.MULTILINE)
    wanted = {question.function for question in EXERCISES[number].questions}
    return "import torch\n\n" + "".join(x for x in blocks if x[4 : x.index("(")] in wanted)


# ---------------- what a student is told


def test_every_blank_has_the_parameters_that_it_is_called_with():
    titles = grader.read_titles()
    assert list(titles) == list(EXERCISES)
    for number, (path, _) in titles.items():
        for question in EXERCISES[number].questions:
            pattern = (
                rf"def {question.function}\(([^)]*)\)(?:(?!\ndef ).)*?raise NotImplementedError"
            )
            for blank in re.findall(pattern, path.read_text(), re.DOTALL):
                assert re.findall(r"(\w+)(?:: [^,=]+)?(?: = [^,]+)?(?:,|$)", blank.strip()) == (
                    question.names.split()
                )


@numbered
def test_a_right_solution_passes_and_names_the_next_exercise(number, grade):
    code, out = grade(solution(number))
    assert code == 0 and out.count("PASS") == len(EXERCISES[number].questions), out
    titles = grader.read_titles()
    if number + 1 in titles:
        assert f"Next: {number + 1}. {titles[number + 1][1]}, in exercises/" in out
        assert f"make exercise N={number + 1}\n" in out


@numbered
def test_a_blank_is_blank(number, grade):
    names = [question.function for question in EXERCISES[number].questions]
    blanks = "".join(f"def {name}(*x):\n    raise NotImplementedError\n" for name in names)
    code, out = grade(blanks)
    assert code == 1 and out.count("  blank\n") == len(names) and "PASS" not in out


@numbered
def test_every_mistake_gets_its_own_hint_and_no_other(number):
    rows = [(q, row) for q in EXERCISES[number].questions for row in q.mistakes]
    hints = [hint for _, (_, _, hint) in rows]
    assert len(rows) >= 3 and len(set(hints)) == len(hints)
    for question, (name, mistake, hint) in rows:
        verdict = verdict_of(question.function, mistake)
        assert verdict.state == "NOT YET", name
        assert [line for line in verdict.lines if line in hints] == [hint], name


def population_std_and_no_guard(rewards, size, scale):
    groups = rewards.view(-1, size)
    adv = groups - groups.mean(1, keepdim=True)
    std = groups.std(1, keepdim=True, correction=0) + 1e-4
    return (adv / std if scale == "std" else adv).view(-1)


def no_guard(rewards, size, scale):
    return torch.cat(
        [(R - R.mean()) / (R.std() + 1e-4 if scale == "std" else 1) for R in rewards.split(size)]
    )


def losers_swapped(r, A, low, high):
    return r < 1 + high if A < 0 else r > 1 - low


def left_without_rho(rho, A, low, high):
    winners = sum(a for a in A if a > 0)
    return -winners if rho > 1 + high else winners if rho < 1 - low else 0


def surrogate(batch):
    ratio = (batch.logp - batch.logp_old).masked_fill(~batch.mask, 0).exp()
    return ratio.clamp(0.8, 1.4) * batch.adv.masked_fill(~batch.mask, 0)


def project_away(w, adv, norm):
    return w - (w * adv).sum(1, keepdim=True) / norm * adv


def tax_by_hand(c, adv, nodes, mask, credit=True, least=2, zeros=False):
    tax = size = 0.0
    for node in set(nodes[mask].tolist()):
        here = (nodes == node) & mask & ((adv[:, None] != 0) | zeros)
        A, x = adv[:, None].expand_as(mask)[here], c[here]
        if len(x) >= least:
            tax += abs(x.sum() - credit * (x / A).mean() * A.sum())
            size += x.abs().sum()
    return tax / size if size else 0.0


@pytest.mark.parametrize(
    "name, function, hint",
    [
        ("group_advantages", population_std_and_no_guard, "Your std divides by G."),
        ("group_advantages", no_guard, "Ask whether max equals min."),
        ("shared_token_gradient", lambda rho, A: sum(A) / len(A), "without rho"),
        ("shared_token_gradient", lambda rho, A: sum(A) * rho, "without the 1/G"),
        ("gate_is_open", losers_swapped, "winners and losers the wrong way round"),
        ("gate_is_open", lambda r, A, *_: abs(r - 1.0) < 0.2 or (r > 1) != (A > 0), "always 0.2"),
        ("left_at_a_shared_token", lambda *x: 0, "You leave nothing"),
        ("left_at_a_shared_token", left_without_rho, "rho is missing"),
        (
            "grpo_symmetric",
            lambda b, *_: surrogate(b).sum() / len(b.adv) / b.max_tokens,
            "return -J",
        ),
        (
            "grpo_symmetric",
            lambda b, *_: -(surrogate(b).sum(1) / b.mask.sum(1).clamp(1)).mean(),
            "its own length",
        ),
        ("left_by_the_length", lambda T, A: sum(A) / len(A), "The lengths do not occur"),
        ("min_replace", lambda w, adv: w.min(1)[0][:, None] + 0 * w, "without detach"),
        ("min_replace", lambda w, adv: 0 * w.detach() + w.min().item(), "the whole batch"),
        ("min_replace", lambda w, adv: w.detach().min(1, True)[0], "one number a group"),
        ("adv_orthogonal", lambda w, A: project_away(w.detach(), A, 1), "do not divide by ||A||^2"),
        (
            "adv_orthogonal",
            lambda w, A: project_away(w.detach(), A, A.norm(dim=1, keepdim=True)),
            "You divide by ||A||.",
        ),
        ("learning_tax", lambda *x: tax_by_hand(*x, credit=False), "the whole sum of c"),
        ("learning_tax", lambda *x: tax_by_hand(*x, least=1), "counts all nodes"),
        ("learning_tax", lambda *x: tax_by_hand(*x, zeros=True), "An answer with A = 0"),
        ("change_of_log_odds", lambda a, b, n, m, x: a - b, "Eq. 5 itself"),
        ("change_of_log_odds", lambda a, b, n, m, x: a * n - b * m, "x does not occur"),
        ("weight", lambda s, adv: torch.ones_like(s), "This is REINFORCE"),
        ("weight", lambda s, adv: s.amin(1)[:, None].expand_as(s), "Min-Replace itself"),
        ("weight", lambda s, adv: s * 1, "the sequence ratio as it is"),
        ("grpo_on_policy", lambda A, T: (-sum(A) / len(A), sum(A)), "1/T_i of its answer"),
        (
            "grpo_on_policy",
            lambda A, T: (sum(A) / len(A), QUESTIONS["grpo_on_policy"].right(A, T)[1]),
            "the value of J",
        ),
        (
            "dr_grpo_on_policy",
            lambda A, T, L: (QUESTIONS["dr_grpo_on_policy"].right(A, T, L)[0], 0),
            "write it for any",
        ),
        ("dr_grpo_on_policy", lambda A, T, L: (-sum(A) / len(A) / L, sum(A) / L), "T_i tokens"),
        ("nothing_is_learned", lambda R: abs(sum(R)) < 1e9, "always sum to 0"),
    ],
)
def test_the_hint_speaks_of_the_mistake_that_was_made(name, function, hint):
    """The functions here are a student's, and share no code with the rows."""
    verdict = verdict_of(name, function)
    hints = [row[2] for row in QUESTIONS[name].mistakes]
    (said,) = [line for line in verdict.lines if line in hints]
    assert verdict.state == "NOT YET" and hint in said


def test_the_smallest_input_is_shown_with_yours_beside_expected():
    assert verdict_of("min_replace", lambda w, adv: 1 * w.amin(1, True).expand_as(w)).lines[:3] == [
        "with      w = [[0.5, 2.0]], adv = [[1.0, -1.0]]",
        "yours     [[0.5, 0.5]], with a gradient",
        "expected  [[0.5, 0.5]], detached",
    ]
    assert verdict_of("grpo_symmetric", losses.dr_grpo).lines[:3] == [
        "with      r = [[1.5], [1.5]], A = [1.0, -1.0], L = 1, eps_low = 0.2, eps_high = 0.4",
        "yours     loss 0.05, coefficients [[0.0], [-1.5]]",
        "expected  loss 0.0, coefficients [[0.0], [0.0]]",
    ]
    near = verdict_of("group_advantages", lambda *x: losses.group_advantages(*x) * (1 + 1e-8))
    assert near.lines[1:3] == ["yours     [0.500000005, -0.500000005]", "expected  [0.5, -0.5]"]


@pytest.mark.parametrize(
    "name, function",
    [
        ("min_replace", lambda w, adv: losses.min_replace(w, adv).tolist()),
        ("min_replace", lambda w, adv: w.detach().min(dim=1)),
        ("min_replace", lambda w, adv: losses.min_replace(w, adv) * (w.numel() < 9)),
        ("min_replace", lambda w, adv: w.detach().clamp_(max=w.min().item())),
        ("min_replace", lambda w, adv: losses.min_replace(w, adv).to(torch.complex64)),
        ("gate_is_open", lambda *x: None),
        ("gate_is_open", lambda *x: float("nan")),
        ("shared_token_gradient", lambda *x: "half"),
        ("shared_token_gradient", lambda *x: 10**400),
        ("grpo_symmetric", lambda *x: losses.grpo_symmetric(*x).detach()),
        ("learning_tax", lambda *x: losses.learning_tax(*x) + 1e-8),
        ("learning_tax", lambda c, A, nodes, mask: losses.learning_tax(c, A, nodes, mask | True)),
        ("weight", lambda s, adv: s.amax(1)),
        ("weight", lambda s, adv: s * float("nan")),
        ("weight", lambda s, adv: "mean"),
        ("weight", lambda s, adv: None),
    ],
)
def test_no_other_value_type_shape_or_gradient_passes(name, function):
    verdict = verdict_of(name, function)
    assert verdict.state == "NOT YET" and verdict.lines


def test_other_ways_to_write_a_right_answer_pass():
    for name, function in {
        "gate_is_open": lambda *x: torch.tensor(float(QUESTIONS["gate_is_open"].right(*x))),
        "min_replace": lambda w, adv: losses.min_replace(w.detach().mul_(1.0), adv),
        "weight": lambda s, adv: s.mean(1, keepdim=True) + 0 * s,
    }.items():
        assert verdict_of(name, function).state == "PASS", name


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("an_accident", ([2, 2, 2, 2], [1, -1, 2, -2]), "All lengths are equal"),
        ("an_accident", ([2, 2, 3, 3], [1, -1, 2, -1]), "sum to 1, not to 0."),
        ("an_accident", ([2, 2, 3, 3], [1, -1, 0, 0]), "Every |A| must be at least 0.1."),
        ("an_accident", ([0, 2, 3, 3], [1, -1, 1, -1]), "A length is a whole number, at least 1."),
        ("an_accident", ([1, 2, 3, 3], [1, -1, 1, -1]), "sum A/T, is 0.5, not 0."),
        ("an_accident", ([2, 2, 3, 3], [float("nan"), -1, 2, -1]), "Every |A|"),
        ("an_accident", None, "Lists of four lengths and four advantages are asked for."),
        ("blind_spot", ([1, 1, 1, 1], [1, 1, -1, -1], (0, 2)), "The pair is left with 0:"),
        ("blind_spot", ([1.05, 1, 1, 1], [1, 1, -1, -1], (0, 2)), "that is not more than 0.1."),
        ("blind_spot", ([3, 1, 1, 1], [1, 1, -1, 1], (0, 2)), "sum to 2, not to 0."),
        ("blind_spot", ([3, 1, 1, 1], [1, 1, -1, -1], (0, 1)), "The pair's advantages sum to 2"),
        ("blind_spot", ([3, 1, 1, 1], [1, 1, -1, -1], (1, 4)), "from 0 to 3"),
        ("blind_spot", ([3, 1, 1, 1], [1, 1, -1, -1]), "two places, 0 to 3, are asked for."),
        ("counterexample", [0.4, 0.4, 0.2], "the log-odds change by 0 per eta"),
        ("counterexample", [0.5, 0.2, 0.2], "The probabilities sum to 0.9, not 1."),
        ("counterexample", [0.5, 0.5, 0.0], "A list of three positive probabilities is asked for."),
    ],
)
def test_where_many_answers_are_right_a_wrong_one_is_told_what_it_lacks(name, value, message):
    verdict = verdict_of(name, lambda: value)
    assert verdict.state == "NOT YET" and message in " ".join(verdict.lines)


# ---------------- whatever a file does

GOOD = solution(3).partition("def left")[0]


@pytest.mark.parametrize(
    "source, lines",
    [
        ("while True: pass\ndef min_replace(w, adv): ...", ["no answer: stopped after 3 s"]),
        ("def min_replace(w, adv):\n    while True: pass", ["no answer: stopped after 3 s"]),
        ("import os\ndef min_replace(w, adv): os._exit(3)", ["the process ended (exit code 3)"]),
        (
            "def min_replace(w, adv): raise SystemExit(7)",
            ["SystemExit: 7 (line 1, in min_replace)"],
        ),
        ("exit()\ndef min_replace(w, adv): ...", ["SystemExit: None (line 1, in <module>)"]),
        ("def min_replace(w, adv):\n    return (w", ["SyntaxError: '(' was never closed, line 2"]),
        ("import nothing_such\ndef min_replace(w, adv): ...", ["ModuleNotFoundError: ", "line 1"]),
        ("def min_replace(w, adv):\n    return 1 / 0", ["ZeroDivisionError", "(line 2, in min_r"]),
        ("min_replace = 3", ["TypeError: 'int' object is not callable"]),
        ("def min_replace(w, adv): return input()", ["EOFError"]),
        (GOOD, ["gate_is_open  PASS", "The file has no function left_at_a_shared_token."]),
        (
            GOOD + "def left_at_a_shared_token(*x):\n    return 0 if x[0] == 1 else print()",
            ["gate_is_open  PASS", "Your function returns nothing. Did you print"],
        ),
        (
            "def gate_is_open(*x):\n    while x[0] == 0.5: pass\n    return True\n",
            ["with      r = 1.5, A = 1.0", "yours     True"],
        ),
        (
            "def gate_is_open(r, A, *x):\n    while True: pass\ndef left_at_a_shared_token(): ...",
            ["with      r = 1.0, A = 1.0", "no answer: stopped after 3 s", "not tried: an earlier"],
        ),
    ],
)
def test_trouble_is_one_clear_line(source, lines, grade, monkeypatch):
    monkeypatch.setattr(grading.grade_file, "__defaults__", (3,))
    begin = time.monotonic()
    code, out = grade(source)
    assert code == 1 and all(line in out for line in lines), out
    assert time.monotonic() - begin < 30  # after 3 s, and the start of the child
    assert "Traceback" not in out


def test_the_command_shows_the_verdict_and_nothing_that_the_file_prints(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "print('heard?')\ndef min_replace(w, adv):\n    print('heard?')\n    return w\n"
    )
    command = [sys.executable, "-m", "exercises.grader", str(path)]
    result = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)
    assert result.returncode == 1 and "expected  [[0.5, 0.5]], detached" in result.stdout
    assert "heard?" not in result.stdout + result.stderr


CHEAT = """
import sys, torch, losses
from exercises import grading, questions
losses.min_replace = losses.group_advantages = lambda *x: x[0]
losses.dr_grpo = lambda batch, **_: 0 * batch.logp.sum()
grading.agree = lambda *x: True
questions.EXERCISES[6].questions[0].__dict__["right"] = lambda w, adv: w
torch.Tensor.amin = torch.Tensor.sum

def min_replace(w, adv):
    return w
def shared_token_gradient(rho, advantages):
    return 0.0
"""


def test_a_file_cannot_change_what_it_is_compared_with(tmp_path):
    path = tmp_path / "cheat.py"
    path.write_text(CHEAT)
    (verdict,) = grading.grade_file(str(path), 6)
    assert verdict.state == "NOT YET" and verdict.lines[2] == "expected  [[0.5, 0.5]], detached"
    (verdict,) = grading.grade_file(str(path), 2)
    assert verdict.state == "NOT YET"
    path.write_text(solution(6))
    (verdict,) = grading.grade_file(str(path), 6)
    assert verdict.state == "PASS"


# ---------------- the command line


def test_progress_has_a_line_for_each_exercise(tmp_path, monkeypatch, capsys):
    for number, (path, title) in grader.read_titles().items():
        source = {2: solution(2), 3: GOOD, 6: "def min_replace(w, adv): return w"}.get(number, "")
        (tmp_path / path.name).write_text(f'"""\n# {number}. {title} (5 minutes)\n"""\n{source}')
    monkeypatch.setattr(grader, "FOLDER", tmp_path)
    assert grader.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    states = [re.search(r"PASS|NOT YET|blank", line)[0] for line in lines[:11]]
    assert states == ["blank", "PASS", "NOT YET", *["blank"] * 2, "NOT YET", *["blank"] * 5]
    assert lines[2].endswith("1 of 2 functions pass")
    assert lines[-1] == "1 of 11 pass. Next: make exercise N=1"


@pytest.mark.parametrize("argument", ["12", "²", "9" * 5000, "nothing.py", ".", "pyproject.toml"])
def test_a_wrong_command_line_ends_with_2(argument, capsys):
    with pytest.raises(SystemExit) as stopped:
        grader.main([argument])
    assert stopped.value.code == 2 and capsys.readouterr().out == ""


# ---------------- what is said elsewhere


def test_the_right_change_of_the_log_odds_is_autograds():
    for seed in range(5):
        gen = torch.Generator().manual_seed(seed)
        z = torch.randn(4, generator=gen, dtype=torch.float64, requires_grad=True)
        k = torch.randn(2, generator=gen, dtype=torch.float64)
        a, b = (torch.autograd.grad(z.log_softmax(0)[i], z)[0] for i in (0, 1))
        change = (a - b) @ (k[0] * a + k[1] * b)
        arguments = [float(x) for x in (k[0], k[1], a @ a, b @ b, a @ b)]
        assert QUESTIONS["change_of_log_odds"].right(*arguments) == pytest.approx(float(change))


def test_the_race_gives_the_unbiased_weights_a_cosine_of_1():
    rows = WEIGHT.check([(s.prod(1, keepdim=True) + 0 * s).tolist() for s, _ in WEIGHT.inputs])
    table = {row[:16].strip(): row[16:].split() for row in rows}
    assert table["yours"] == ["0.0000", "1.0000"]
    assert float(table["s itself"][0]) > 0.1 and table["s itself"][1] == "1.0000"
    assert table["Min-Replace"][0] == "0.0000" and float(table["Adv-Orthogonal"][0]) > 0.1


def test_verify_explains_what_the_exercises_and_the_sheet_send_to():
    texts = [exercise.why for exercise in EXERCISES.values()]
    texts += [path.read_text().split('"""')[1] for path, _ in grader.read_titles().values()]
    texts += [(FOLDER / name).read_text() for name in ("README.md", "sheet.html")]
    claims = sorted(set(re.findall(r"\bC\d+\b", " ".join(texts))))
    command = [sys.executable, "verify.py", "--explain", *claims]
    result = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def read_rows(kind: str) -> list[list[str]]:
    """The cells of one table of the sheet."""
    text = (FOLDER / "sheet.html").read_text()
    table = re.search(rf'<table class="{kind}">(.*?)</table>', text, re.DOTALL)[1]
    rows = [re.split(r"<td[^>]*>", row)[1:] for row in table.splitlines() if "<td" in row]
    return [[re.sub("<[^>]+>", "", cell).strip() for cell in row] for row in rows]


def test_the_sheets_figures_are_computed_from_the_losses():
    rewards = numbers(1, 0, 1, 0)
    others = numbers(1.15, 0.9, 0.95, 1.05)[:, None].log()
    regimes = [([4] * 4, 1, 0), ([4, 6, 3, 5], 1, 0), ([4] * 4, 1.1, 1), ([4] * 4, 2.5, 1)]
    rows = read_rows("figures")
    assert len(rows) >= 9
    for name, scale, _, _, *figures in rows:
        method = losses.METHODS[name]
        assert scale == method.scale
        clip = {"eps_low": 0.2, "eps_high": 0.28} if name == "gspo" else {}
        for figure, (lengths, ratio, moved) in zip(figures, regimes, strict=True):
            adv = losses.group_advantages(rewards, 4, scale).tolist()
            batch = start_alike(ratio, adv, lengths, budget=6)
            batch.logp_old[:, 1:] -= moved * others
            (loss,) = method.passes
            c = losses.token_coefficients(loss(batch, **clip), batch.logp)[:, 0]
            left = float(c.sum().abs() / c.abs().sum()) if c.any() else 0.0
            assert float(figure) == pytest.approx(left, abs=5e-4), name


def test_the_sheets_group_is_computed_from_the_losses():
    lengths, adv, grpo, dr_grpo = ([float(x) for x in row[1:] if x] for row in read_rows("group"))
    assert adv[:4] == pytest.approx(losses.group_advantages(numbers(1, 0, 1, 0), 4), abs=5e-4)
    exact = losses.group_advantages(numbers(1, 0, 1, 0), 4).tolist()
    for row, loss in ((grpo, losses.grpo), (dr_grpo, losses.dr_grpo)):
        batch = start_alike(1.0, exact, [int(T) for T in lengths], budget=6)
        c = losses.token_coefficients(loss(batch), batch.logp)[:, 0]
        expected = [*c.tolist(), float(c.sum()), loss(batch).item()]
        assert row == pytest.approx(expected, abs=5e-4)
