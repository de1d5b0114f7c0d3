"""To a student: a wrong answer is told what is wrong with it. To a teacher: a PASS may be trusted.

Students fill the files in exercises/ in place, so no test expects a blank in them.
"""

import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

import losses
from exercises import call, grader, solutions, teacher

SOLUTIONS = Path(solutions.__file__)
pytestmark = pytest.mark.filterwarnings("ignore:std")  # of one number, a known mistake


@pytest.fixture(autouse=True)
def as_a_process_begins():
    yield
    torch.set_default_dtype(torch.float32)  # call.answer sets another


def grade(key: str, path: Path) -> dict:
    """As grader.grade, but in this process, to save time."""
    functions = grader.LESSONS[key]["functions"]
    answers = call.answer_all(path, functions)
    return {name: grader.judge(name, x, answers[name]) for name, x in functions.items()}


@pytest.mark.parametrize("key", grader.LESSONS)
def test_solutions_pass(key):
    assert {state for state, _ in grade(key, SOLUTIONS).values()} <= {*grader.DONE}


@pytest.mark.parametrize("name", teacher.FUNCTIONS)
def test_every_known_mistake_gets_its_hint(name):
    """Of results.json as python -m exercises.teacher writes it."""
    lesson = teacher.FUNCTIONS[name]
    assert grader.is_same(teacher.find_results(name, lesson), grader.RESULTS[name])
    assert teacher.find_problems(name, lesson) == []


SAME = {  # what losses.py says to the cases of a solution; the others' mistakes tell more
    "dr_grpo": lambda batch, eps: losses.dr_grpo(batch, eps, eps),
    "kl_penalty": lambda batch, beta: beta * losses.divide_by_constant(losses.k3(batch), batch),
}
for name in ("group_advantages", "grpo_symmetric", "adv_orthogonal", "learning_tax"):
    SAME[name] = getattr(losses, name)


@pytest.mark.parametrize("name", SAME)
def test_solutions_are_those_of_losses(name):
    lesson, (right, *_) = teacher.FUNCTIONS[name], grader.RESULTS[name]
    for case, result in zip(lesson["cases"], right, strict=True):
        found = call.answer(SAME[name], [*lesson["inputs"].values()], case)
        assert grader.is_same(found, result), case


# Written as a student writes, not as edits of a solution: the body, and what the grader says.
ANSWERS = [
    ("still_pushes(r, A, a=0.2, b=0.2)", "r * A <= min(max(r, 1 - a), 1 + b) * A", "PASS"),
    # A known mistake, and another one where the reward is the bonus.
    ("lone_advantage(R, c, G)", "(G - 1) / G**0.5", "The sign is lost"),
    # No known mistake: no hint is better than a wrong one.
    (
        "net_push_by_length(T, A)",
        "sum(a / t for a, t in zip(A, T)) / 3",
        r"expected  [\d.-]+$",
    ),
    ("net_push(r, A)", "r * B", r"NameError: name 'B' is not defined .*line 3"),
    (
        "grpo_symmetric(batch, a, b)",
        "1.0",
        r"batch = {'r': \[\[1.0\], .* expected  \[0.0, \[\[1.0\], \[-1.0\]\]\]",
    ),
    ("blind_spot()", "[1, 3, 0]", "4 numbers"),
    ("blind_spot()", "[1, 3, 0, 2]", "is not above 0.1"),
]


@pytest.mark.parametrize("head, body, said", ANSWERS)
def test_a_students_answer_gets_what_it_deserves(head, body, said, tmp_path):
    name, path = head.partition("(")[0], tmp_path / "mine.py"
    key = next(k for k, exercise in grader.LESSONS.items() if name in exercise["functions"])
    path.write_text(f"import torch\ndef {head}:\n    return {body}")
    state, lines = grade(key, path)[name]
    assert re.search(said, " ".join([state, *lines]))


def test_exercise_4_ends_where_its_text_says():
    """GRPO at the worse strategy (0.2), and Dr. GRPO at the better one (0.6)."""
    mine = call.load(f"{grader.FILES['ex04'].read_text()}\n{SOLUTIONS.read_text()}")
    ends = [fmean(mine["train"](name, 0)[-80:]) for name in ("grpo", "dr-grpo")]
    assert ends == pytest.approx([0.2, 0.6], abs=0.015)


def test_a_file_leaves_no_traces(tmp_path, capfd):
    """Whatever it does to torch, and even if it ends Python."""
    path = tmp_path / "mine.py"
    path.write_text(f"print('hello')\n{SOLUTIONS.read_text()}")
    assert grader.main("7", str(path)) == 0
    assert torch.get_default_dtype() == torch.float32
    path.write_text("import os\nos._exit(0)")
    assert grader.main("7", str(path)) == 1
    assert "Python ended too early" in capfd.readouterr().out


def test_half_an_exercise_is_no_pass(monkeypatch):
    ran = []
    monkeypatch.setattr(grader.subprocess, "run", ran.append)  # which trains after a pass
    for state, code in ("NOT YET", 1), ("NOTED", 0):
        verdicts = {"loss": ("PASS", []), "prediction": (state, [])}
        monkeypatch.setattr(grader, "grade", lambda *_, x=verdicts: x)
        assert grader.main("4") == code and len(ran) == 1 - code


def test_the_students_copy_grades_by_exit_code(tmp_path):
    """By what is stored. At first one function has a known mistake, and the other is blank."""
    teacher.write_copy(tmp_path / "class")
    assert b"sum(A / T for" not in b"".join(x.read_bytes() for x in tmp_path.rglob("*.*"))
    file = tmp_path / "class/exercises/02_the_net_push.py"
    mistaken = """
def net_push(rho, A): return -rho * sum(A)
def net_push_by_length(T, A): raise NotImplementedError
"""
    for source, code in (mistaken, 1), (SOLUTIONS.read_text(), 0):
        file.write_text(source)
        command = [sys.executable, "-m", "pytest", "exercises", "-k", "ex02"]
        done = subprocess.run(command, cwd=tmp_path / "class", capture_output=True)
        assert done.returncode == code
        for said in (b"The sign: J is what is maximised", b"net_push_by_length  NOT YET (blank)"):
            assert (said in done.stdout) == code
