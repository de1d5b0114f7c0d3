"""To a student: a wrong answer is told what is wrong with it. To a teacher: a PASS may be trusted.

Students fill the files in exercises/ in place, so no test expects a blank in them.
"""

import re
from pathlib import Path

import pytest
import torch

import losses
from claims.audit import AUDIT
from exercises import grader, solutions
from exercises.questions import EXERCISES

FOLDER = Path(grader.__file__).parent
LESSONS = grader.read_lessons()
QUESTIONS = {q.function: q for exercise in EXERCISES.values() for q in exercise.questions}
SOLUTIONS = Path(solutions.__file__).read_text()


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
def float64():
    """As the grader has it."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def judge(source: str, name: str) -> grader.Verdict:
    return grader.judge(QUESTIONS[name], grader.load(f"import math, torch\n{source}")[name])


@pytest.mark.parametrize("number", EXERCISES)
def test_solutions_pass_and_blanks_do_not(number, grade):
    code, out = grade(number, SOLUTIONS)
    count = len(EXERCISES[number].questions)
    assert code == 0 and out.count("  PASS") == count and "Why it is so:" in out
    blank = re.sub(
        r"^( +).*\n( +.*\n|\n(?= ))*", r"\1raise NotImplementedError\n", SOLUTIONS, flags=re.M
    )
    code, out = grade(number, blank)
    assert code == 1 and out.count("  NOT YET (blank)\n") == count
    asked = grader.find_files()[number].read_text()
    assert all(f"def {question.function}(" in asked for question in EXERCISES[number].questions)


@pytest.mark.parametrize("name", LESSONS)
def test_every_known_mistake_gets_its_hint(name):
    for edits, hint in LESSONS[name].mistakes.items():
        verdict = grader.judge(QUESTIONS[name], grader.make_mistakes(LESSONS[name], edits))
        assert verdict.state == "NOT YET" and hint in verdict.lines, hint


ANSWERS = (Path(__file__).parent / "answers.txt").read_text().split("\n## ")[1:]


@pytest.mark.parametrize("block", ANSWERS, ids=lambda block: block.partition("\n")[0])
def test_a_students_answer_gets_what_it_deserves(block):
    """They are written as a student writes, not as edits of a solution."""
    source, said = block.partition("\n")[2].strip().split("=> ")
    verdict = judge(source, re.search(r"def (\w+)", source)[1])
    assert verdict.state == ("PASS" if said == "PASS" else "NOT YET")
    assert said == "PASS" or said in " ".join(verdict.lines)


def test_a_student_sees_the_same_cases_again():
    assert grader.read_lessons.__wrapped__() == LESSONS


TROUBLE = [
    ("    while True: pass", "YET\n    Stopped: no answer after 1 s (line 2, in prefix_baseline)"),
    (" 0\nwhile True: pass", "no answer after 1 s (line 3, in <module>)"),
    (" import time\n try: time.sleep(9)\n except Exception: 0", "no answer"),
    (" 0\nexit()", "SystemExit: None (line 3, in <module>)"),
    ("    return (c", ", line 2"),
    (" 0\ndel prefix_baseline", "The file has no function of this name."),
]


@pytest.mark.parametrize("body, line", TROUBLE, ids=lambda text: text.strip())
def test_trouble_is_one_clear_line_and_the_other_function_is_graded(body, line, grade, monkeypatch):
    monkeypatch.setattr(grader, "LIMIT", 1)
    source = f"def prefix_baseline(c, r):\n{body}\n\n{LESSONS['over_all_pairs'].solution}"
    code, out = grade(11, source)
    assert code == 1 and line in out
    assert "over_all_pairs  PASS" in out or out.count(line) == 2  # the file itself is broken


def test_a_wrong_function_is_not_held_against_the_next(grade):
    wrong = "def prefix_baseline(c, r):\n    return [0 * x for x in c]\n\n"
    solution = LESSONS["over_all_pairs"].solution
    calls = re.sub(r"x, y = .*", "x, y = prefix_baseline([c[a], c[b]], [r[a], r[b]])", solution)
    _, out = grade(11, wrong + calls)
    assert "prefix_baseline  NOT YET" in out and "over_all_pairs  PASS" in out


def test_a_tensor_of_an_answers_own_loses_no_digit(grade):
    torch.set_default_dtype(torch.float32)
    mine = "import torch\ndef left_by_the_length(T, A):\n    "
    mine += "return (torch.tensor(A) / torch.tensor(T)).mean()"
    assert "left_by_the_length  PASS" in grade(5, mine)[1]


def test_the_command_says_what_the_readme_shows(grade):
    code, out = grade(6, "def min_replace(w, adv):\n    return w.sort(1)[0][:, :1].expand_as(w)")
    readme = (FOLDER / "README.md").read_text()
    assert code == 1 and re.search(r"  min_replace  NOT YET\n.*?(?=```)", readme, re.S)[0] in out


# ---------------- what is said elsewhere


def test_the_sheets_table_is_the_audits():
    rows = [line.split("<td") for line in (FOLDER / "sheet.html").read_text().splitlines()]
    cells = [[cell.partition(">")[2] for cell in row[1:]] for row in rows if len(row) == 9]
    assert len(cells) == 9
    for name, scale, _, _, *left in cells:
        assert scale == losses.METHODS[name].scale
        assert "".join("0" if x == "0" else "x" for x in left) == AUDIT[name.replace("-", "_")]
