"""To a student: a wrong answer is told what is wrong with it. To a teacher: a PASS may be trusted.

Students fill the files in exercises/ in place, so no test expects a blank in them.
"""

import re
from pathlib import Path

import pytest
import torch

import losses
import verify
from exercises import grader, solutions
from exercises.questions import EXERCISES, first_coefficients, load_worlds, start_alike

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


def test_the_crumb_by_hand():
    """Seven answers earn 0.1. The right answers are from losses.py, with the 1e-4 taken out."""
    lone, expected = (QUESTIONS[x].right for x in ("lone_advantage", "expected_advantages"))
    assert [lone(R, 0.1, 8) for R in (1.0, 0.11, 0.0)] == pytest.approx(
        [7 / 8**0.5, 7 / 8**0.5, -7 / 8**0.5]
    )
    assert lone(0.1, 0.1, 8) == 0
    assert expected(0.45, 0.1, 8) == pytest.approx([-0.247487, 0.30625], abs=1e-6)


@pytest.mark.parametrize("number", EXERCISES)
def test_solutions_pass_and_blanks_do_not(number, grade):
    code, out = grade(number, SOLUTIONS)
    count = len(EXERCISES[number].questions)
    assert code == 0 and out.count("  PASS") == count, out
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


WRONG = (Path(__file__).parent / "wrong_answers.txt").read_text().split("\n## ")[1:]


@pytest.mark.parametrize("block", WRONG, ids=lambda block: block.partition("\n")[0])
def test_a_students_wrong_answer_gets_a_fitting_hint(block):
    """They are written as a student writes, not as edits of a solution."""
    source, hint = block.partition("\n")[2].split("=> ")
    verdict = judge(source, re.search(r"def (\w+)", source)[1])
    assert verdict.state == "NOT YET" and hint.strip() in " ".join(verdict.lines)


@pytest.mark.parametrize(
    "name, source, line",
    [
        ("an_accident", "(): return [2] * 4, [1, -1, 1, -1]", "All lengths are equal"),
        ("an_accident", "(): return [2, 2, 3, 3], [1, -1, 2, -1]", "sum to 1, not to 0."),
        ("an_accident", "(): return [1, 2, 3, 3], [1, -1, 1, -1]", "sum A/T, is 0.5, not 0."),
        ("blind_spot", "(): return [1] * 4, [1, 1, -1, -1], (0, 2)", "leaves 0 there"),
        ("blind_spot", "(): return [3, 1, 1, 1], [1, 1, -1, -1], (1, 4)", "from 0 to 3"),
        ("a_better_way_that_loses", "(): return 0.45, 0.01", "earns 0.0222 times the crumb"),
        ("a_better_way_that_loses", "(): return 0.02, 0.6", "expects A = 0.495, not below 0"),
        ("a_better_way_that_loses", "(): return 0, 0.4", "between 0 and 1 are asked for"),
        ("weight", "(s, adv): return s", "share a token leave 57.7"),
        ("weight", "(s, adv): return torch.ones_like(s)", "the cosine is 0.9008"),
        ("weight", "(s, adv): return s / adv", "nan or inf"),
        ("min_replace", "(w, adv): return w.detach().min(1).expand_as(w)", "Try amin."),
        ("min_replace", "(w, adv): return w.detach().flip(0)", "result[0][1] is 2, not 0.5."),
        ("prefix_baseline", "(c, r): c.clear(); return c", "c = [3, 1], r = [1, 1]"),
        ("shared_token_gradient", "(r, A): return r * sum(A) / (len(A) + 1e-3)", "nearly right"),
    ],
)
def test_another_wrong_answer_is_told_what_it_lacks(name, source, line):
    verdict = judge(f"def {name}{source}", name)
    assert verdict.state == "NOT YET" and line in " ".join(verdict.lines)


def test_a_mistake_in_any_case_is_found_and_small_cases_alone_do_not_pass():
    lesson = LESSONS["min_replace"]
    (last, _), small = lesson.cases[-1], [w for w, _ in lesson.cases[: -grader.RANDOM_CASES]]
    for wrong in (f"w.tolist() == {last}", f"w.tolist() not in {small}"):
        source = lesson.solution.replace("return", f"return w if {wrong} else")
        assert judge(source, "min_replace").state == "NOT YET"
    drawn = lesson.cases[-grader.RANDOM_CASES :]
    assert {len(w[0]) for w, _ in drawn} == {2, 3, 4, 5}
    assert grader.read_lessons.__wrapped__() == LESSONS  # a student sees the same case again


@pytest.mark.parametrize(
    "name, source",
    [
        (
            "left_at_a_shared_token",  # where A sums to 0
            "(r, A, a, b): return r * sum(x for x in A if x > 0) * ((r < 1 - a) - (r > 1 + b))",
        ),
        ("gate_is_open", "(r, A, a, b): return r * A <= min(max(r, 1 - a), 1 + b) * A"),
        ("lone_advantage", "(R, c, G): return ((R > c) - (R < c)) * (G - 1) / math.sqrt(G)"),
        ("min_replace", "(w, adv): return torch.ones_like(w) * w.detach().sort(1).values[:, :1]"),
        (
            "over_all_pairs",  # C22: the expected push stays
            "(pi, q, c):\n    m = sum(x * y for x, y in zip(q, c))\n"
            "    return [x * y - p * m for p, x, y in zip(pi, q, c)], 0",
        ),
    ],
)
def test_another_right_answer_passes(name, source):
    assert judge(f"def {name}{source}", name).state == "PASS"


@pytest.mark.parametrize(
    "source, line",
    [
        (
            "def prefix_baseline(c, r):\n    while True: pass",
            "no answer after 1 s (line 2, in prefix_baseline)",
        ),
        (
            "import time\ndef prefix_baseline(c, r):\n try: time.sleep(9)\n except Exception: 0",
            "no answer",
        ),
        ("exit()", "SystemExit: None (line 1, in <module>)"),
        ("def prefix_baseline(c, r):\n    return (c", ", line 2"),
        (
            "def prefix_baseline(c, r):\n    return c[9]",
            "IndexError: list index out of range (line 2, in",
        ),
        ("def prefix_baseline(c, r):\n    print('here', c)", "printed   here [3.0, 1.0]"),
        (
            "def prefix_baseline(c, r):\n    print(c)",
            "Your function returns nothing. Did you print?",
        ),
        ("", "The file has no function of this name."),
    ],
)
def test_trouble_is_one_clear_line_and_the_other_function_is_graded(
    source, line, grade, monkeypatch
):
    monkeypatch.setattr(grader, "LIMIT", 1)
    code, out = grade(12, f"{source}\n\n{LESSONS['over_all_pairs'].solution}")
    assert code == 1 and line in out
    assert "over_all_pairs  PASS" in out or out.count(line) == 2  # the file itself is broken


def test_a_wrong_function_is_not_held_against_the_next(grade):
    wrong = "def prefix_baseline(c, r):\n    return [0 * x for x in c]\n\n"
    solution = LESSONS["over_all_pairs"].solution
    calls = re.sub(r"x, y = .*", "x, y = prefix_baseline([c[a], c[b]], [r[a], r[b]])", solution)
    _, out = grade(12, wrong + calls)
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


def test_progress_says_pass_only_where_all_functions_do(tmp_path, monkeypatch, capsys):
    one, two = tmp_path / "1.py", tmp_path / "3.py"
    one.write_text(SOLUTIONS)
    two.write_text(LESSONS["gate_is_open"].solution)
    monkeypatch.setattr(grader, "find_files", lambda: {1: one, 3: two})
    assert grader.main([]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == [f"{1:<32} PASS", f"{3:<32} NOT YET"]


# ---------------- what is said elsewhere


def test_the_weight_without_bias_points_along_the_exact_gradient():
    worlds = load_worlds()
    assert worlds.measure(worlds.s)[0] == pytest.approx(1)
    bound = worlds.measure(losses.min_replace(worlds.s, worlds.adv))[0]
    assert f"{bound:.4f}." in grader.find_files()[10].read_text()


def test_verify_explains_what_the_exercises_and_the_sheet_send_to():
    texts = [
        path.read_text() for path in FOLDER.iterdir() if path.suffix in (".py", ".md", ".html")
    ]
    assert verify.main(["--explain", *sorted({*re.findall(r"\bC\d+\b", " ".join(texts))})]) == 0


def test_the_sheet_says_what_the_losses_leave():
    lines = (FOLDER / "sheet.html").read_text().splitlines()
    rows = [row for row in (line.split("<td") for line in lines) if len(row) == 9]
    assert len(rows) == 9
    equal, unequal = [4] * 4, [4, 6, 3, 5]
    settings = [(1.0, equal), (1.0, unequal), (1.1, equal), (2.5, equal)]
    for row in rows:
        name, scale, _, _, *cells = [cell.partition(">")[2] for cell in row[1:]]
        adv = losses.group_advantages(torch.tensor([1.0, 0, 1, 0]), 4, scale).tolist()
        clip = {"eps_low": 0.2, "eps_high": 0.28} if name == "gspo" else {}
        left = []
        for ratio, lengths in settings:
            batch = start_alike(ratio, adv, lengths, budget=6)
            if ratio != 1:  # the ratios of the other tokens differ
                batch.logp_old[:, 1:] -= torch.tensor([[1.15], [0.9], [0.95], [1.05]]).log()
            c = first_coefficients(losses.METHODS[name].passes[0], batch, **clip)
            left.append("0" if c.sum().abs() < 1e-6 * c.abs().sum() + 1e-12 else "left")
        assert cells == left, name
