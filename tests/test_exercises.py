"""To a student: a wrong answer is told what is wrong with it. To a teacher: a PASS may be trusted.

Students fill the files in exercises/ in place, so no test expects a blank in them.
"""

import re
from pathlib import Path

import pytest
import torch

from exercises import grader, solutions
from exercises.questions import EXERCISES

FOLDER = Path(grader.__file__).parent
LESSONS = grader.read_lessons()
QUESTIONS = {q.function: q for exercise in EXERCISES.values() for q in exercise.questions}
pytestmark = pytest.mark.filterwarnings("ignore:std")  # of one number, a known mistake


@pytest.fixture
def grade(tmp_path, capsys):
    """Grade a file with this source, as on the command line: the exit code and the output."""

    def run(number: int, source: str) -> tuple[int, str]:
        path = tmp_path / "mine.py"
        path.write_text(source)
        code = grader.main([str(number), str(path)])
        return code, capsys.readouterr().out

    return run


@pytest.fixture(autouse=True)
def as_a_process_begins():
    yield
    torch.set_default_dtype(torch.float32)  # the grader sets another


@pytest.mark.parametrize("number", EXERCISES)
def test_solutions_pass_and_blanks_do_not(number, grade, capsys):
    names = [question.function for question in EXERCISES[number].questions]
    code, out = grade(number, Path(solutions.__file__).read_text())
    assert code == 0 and "Why it is so:" in out
    grader.show_progress({number: Path(solutions.__file__)})
    assert capsys.readouterr().out.endswith(" PASS\n")
    blanks = [f"def {name}(*_):\n    raise NotImplementedError\n" for name in names]
    code, out = grade(number, "".join(blanks))
    assert code == 1 and out.count("  NOT YET (blank)\n") == len(names)
    asked = grader.find_files()[number].read_text()
    assert all(f"def {name}(" in asked for name in names)


@pytest.mark.parametrize("name", LESSONS)
def test_every_known_mistake_gets_its_hint(name):
    lesson = LESSONS[name]
    for (*_, hint), answers in zip(lesson.mistakes, lesson.mistaken, strict=True):
        assert grader.explain(lesson, answers)[-1] == hint


# Written as a student writes, not as edits of a solution: the body, and what the command says.
ANSWERS = [
    ("still_pushes(r, A, a=0.2, b=0.2)", "r * A <= min(max(r, 1 - a), 1 + b) * A", "pushes PASS"),
    # A tensor of one's own loses no digit.
    ("net_push_by_length(T, A)", "(torch.tensor(A) / torch.tensor(T)).sum()", "length PASS"),
    # A small number in the divisor is no mistake.
    (
        "group_advantages(R, G, scale)",
        "(R - R.view(-1, G).mean(1).repeat_interleave(G)) / "
        "((R.view(-1, G).std(1) + 1e-8).repeat_interleave(G) if scale == 'std' else 1)",
        "advantages PASS",
    ),
    # A known mistake, and another one where the reward is the bonus.
    ("lone_advantage(R, c, G)", "(G - 1) / G**0.5", "The sign is lost"),
    # No known mistake: no hint is better than a wrong one.
    (
        "net_push_by_length(T, A)",
        "sum(a / t for a, t in zip(A, T)) / 3",
        r"expected +[\d.-]+ \(If it calls your net_push, mend that one first.\)$",
    ),
    ("net_push(r, A)", "r * sum(A) / (1 + 1e-3)", "nearly right"),
    ("net_push(r, A)", "__import__('sys').exit()", "SystemExit"),
    ("prefix_baseline(c)", "c.clear() or c", r"with c = \[3, 1\] .* expected \[2, -2\]"),
    # The second number is a push: A/T, up for a winner.
    (
        "loss(log_pi, A, T, method)",
        "(A * log_pi).sum().item()",
        r"not a tensor expected \[0.5, \[0.25\]\] .* without item",
    ),
    ("prediction()", "(0.6, 60)", "between 0 and 1"),
    ("blind_spot()", "[1, 3, 0, 2]", "the sum is 0.000"),
    ("blind_spot()", "[0.1, 0.1, 3, 0.1]", "blind_spot PASS"),
    ("opposite_signs()", "(0.09, 0.45)", "It earns 5 times the bonus"),
    ("opposite_signs()", "(0.02, 0.6)", "mean A is 0.495, not below 0"),
]


@pytest.mark.parametrize("head, body, said", ANSWERS)
def test_a_students_answer_gets_what_it_deserves(head, body, said, grade):
    name = head.partition("(")[0]
    number = next(n for n, x in EXERCISES.items() if QUESTIONS[name] in x.questions)
    _, out = grade(number, f"import torch\ndef {head}:\n    return {body}")
    assert re.search(said, " ".join(out.split()))


def test_exercise_4_trains_after_a_prediction(grade, monkeypatch):
    """In one seed GRPO ends at the worse strategy (0.2), and Dr. GRPO at the better one (0.6)."""
    monkeypatch.setattr(grader, "SEEDS", (0,))
    source = grader.find_files()[4].read_text() + "\n" + LESSONS["loss"].solution
    _, out = grade(4, source + "\ndef prediction():\n    raise NotImplementedError\n")
    assert "Nothing is trained before" in out and "mean reward" not in out
    _, out = grade(4, source + "\ndef prediction():\n    return 0.5, 0.75\n")
    assert "prediction  NOTED" in out
    guesses, ends = zip(*re.findall(r"predicted (\S+), the seeds end at (\S+)", out), strict=True)
    assert guesses == ("0.50", "0.75")
    assert [*map(float, ends)] == pytest.approx([0.2, 0.6], abs=0.015)
