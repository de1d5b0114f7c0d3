"""The exercises fail blank and pass solved; the grader survives whatever a file does."""

import re
from pathlib import Path

import pytest

import verify
from claims import CLAIMS, Draws
from exercises import grader

FOLDER = Path(grader.__file__).parent
FILES = sorted(FOLDER.glob("[0-9]*.py"))
GATE = "return not (A > 0 and r > 1 + eps_high or A < 0 and r < 1 - eps_low)"
SUM_OF_OPEN = "sum(rho * a for a in advantages if gate_is_open(rho, a, eps_low, eps_high))"
TAX = "return losses.learning_tax(coefficients, advantages, nodes, mask)"
SOLUTIONS = {
    "group_advantages": "import losses; return losses.group_advantages(rewards, group_size, scale)",
    "shared_token_gradient": "return rho / len(advantages) * sum(advantages)",
    "gate_is_open": GATE,
    "left_at_a_shared_token": f"return {SUM_OF_OPEN}",
    "grpo_symmetric": "import losses; return losses.grpo_symmetric(batch, eps_low, eps_high)",
    "left_by_the_length": "return sum(a / T for a, T in zip(advantages, lengths)) / len(lengths)",
    "an_accident": "return [2, 2, 3, 3], [1.0, -1.0, 2.0, -2.0]",
    "min_replace": "return w.detach().amin(1, keepdim=True).expand_as(w)",
    "adv_orthogonal": "import losses; return losses.adv_orthogonal(w, adv)",
    "blind_spot": "return [3.0, 0.1, 0.1, 0.1], [1.0, 1.0, -1.0, -1.0], (0, 2)",
    "learning_tax": f"import losses; {TAX}",
    "counterexample": "return [0.6, 0.3, 0.1]",
    "change_of_log_odds": "return k_a * n_a - k_b * n_b + (k_b - k_a) * x",
    "weight": "return s.mean(1, keepdim=True).expand_as(s)",
}
WRONG = {
    "min_replace": "return w.amin(1, keepdim=True).expand_as(w)",  # the stop-gradient forgotten
    "an_accident": "return [2, 2, 2, 2], [1.0, -1.0, 2.0, -2.0]",
    "blind_spot": "return [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, -1.0], (0, 2)",
    "counterexample": "return [0.4, 0.4, 0.2]",
    "weight": "return s",
    "learning_tax": "return 0.0",
    "gate_is_open": "return 1 - eps_low < r < 1 + eps_high",
}
TEMPTING = [path for path in FILES if set(WRONG) & grader.defined_names(str(path))]


def stem(path: Path) -> str:
    return path.stem


# ---------------- the exercises


def solved(path: Path, answers: dict) -> str:
    def fill(blank: re.Match) -> str:
        return f"{blank[1]}    {answers[blank[2]]}\n"

    pattern = r"(def (\w+)\((?:(?!\ndef ).)*?)    raise NotImplementedError\n"
    return re.sub(pattern, fill, path.read_text(), flags=re.DOTALL)


@pytest.fixture
def in_this_process(monkeypatch):
    """The grader starts a process for each file, mostly to import torch; see below for that."""

    def grade(path, claims, seed):
        return verify.verify(grader.load(path), claims, Draws(seed))

    monkeypatch.setattr(grader, "grade", grade)


def graded(path: Path, capsys) -> tuple[int, str]:
    code = verify.main(["--losses", str(path)])
    return code, capsys.readouterr().out


def test_there_are_ten_and_each_says_aim_hint_and_what_to_expect():
    assert [int(path.name[:2]) for path in FILES] == list(range(1, 11))
    for path in FILES:
        text = path.read_text()
        assert text.startswith(f'"""{int(path.name[:2])}. ')
        for part in ("Aim: ", "Hint: ", "Expected: ", "raise NotImplementedError"):
            assert part in text, path
        expected = text[text.index("Expected: ") :].split('"""')[0]
        promised = set(re.findall(r"\b(?:[MCNX]\d+[a-f]?|AUDIT)\b", expected))
        names = grader.defined_names(str(path))
        claims = (*CLAIMS, *grader.EXERCISES)
        assert promised & {claim.id for claim in claims if set(claim.functions) & names}, path


@pytest.mark.parametrize("path", FILES, ids=stem)
def test_blank_it_is_not_yet_written_and_solved_it_passes(path, tmp_path, capsys, in_this_process):
    code, out = graded(path, capsys)
    assert code == 1 and "WRONG" not in out
    assert "NOT YET WRITTEN" in out and "not yet written" in out
    copy = tmp_path / path.name
    copy.write_text(solved(path, SOLUTIONS))
    code, out = graded(copy, capsys)
    assert code == 0, out


def test_a_deleted_blank_is_missed(tmp_path, capsys, in_this_process):
    copy = tmp_path / "half.py"
    copy.write_text(f"def gate_is_open(r, A, eps_low, eps_high):\n    {GATE}\n")
    code, out = graded(copy, capsys)
    assert code == 1 and "left_at_a_shared_token: not yet written" in out and "1 of 2" in out


def test_a_blank_does_not_tell_its_solution(capsys, in_this_process):
    for path in FILES:
        _, out = graded(path, capsys)
        assert "sum_i A_i" not in out and "losses.py" not in out and "k_a n_a" not in out


@pytest.mark.parametrize("path", TEMPTING, ids=stem)
def test_a_tempting_mistake_is_told_apart(path, tmp_path, capsys, in_this_process):
    copy = tmp_path / path.name
    copy.write_text(solved(path, SOLUTIONS | WRONG))
    code, out = graded(copy, capsys)
    assert code == 1 and "WRONG" in out
    blamed = set(" ".join(re.findall(r"^    ! ([\w ]+):", out, re.MULTILINE)).split())
    assert set(WRONG) & grader.defined_names(str(path)) <= blamed


# ---------------- the grader

STUDENT = """
import os
from losses import budget_mean, seq_mean, clipped, group_advantages

def reinforce(batch):
    print("heard?")
    return -budget_mean(batch.adv * batch.logp, batch)

def grpo(batch, eps_low=0.2, eps_high=0.2, kl=0.0):
    while True:
        pass

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
"""


def test_the_grader_survives_whatever_a_function_does(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(grader, "PATIENCE", 3)
    path = tmp_path / "student.py"
    path.write_text(STUDENT)
    assert verify.main(["--only", "M1", "M3", "--losses", str(path)]) == 1
    out = capfd.readouterr().out  # of both processes
    assert "heard?" not in out and "are not in this file" in out
    score = out[out.index("\nscore") :].splitlines()
    score = {line.split()[0]: line for line in score if " of " in line}
    for function, message in {
        "grpo": "cut off after 3 s",
        "dr_grpo": "KeyError: 'oops'",
        "dapo": "not yet written",
        "gspo": "cut off after 3 s",
        "dfpo_min": "the process died",
        "dfpo_orthogonal": "SyntaxError: '(' was never closed, line 26",
        "pos_only": "expected 0, got",
    }.items():
        assert message in score[function] and "0 of  1" in score[function]
    assert "1 of  1" in score["reinforce"] and "1 of 8" in score["all"]


def test_a_function_that_another_one_needs_is_named_and_not_taken_from_losses(
    tmp_path, capsys, in_this_process
):
    path = tmp_path / "student.py"
    path.write_text("def dfpo_min(batch):\n    import losses; return losses.dfpo_min(batch)\n")
    assert verify.main(["--only", "C9", "C12", "--losses", str(path)]) == 1
    out = capsys.readouterr().out
    assert "dfpo_min: needs sequence_ratio, not yet written" in out
    assert re.search(r"^C9 +HOLDS", out, re.MULTILINE)


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
    mended = grader.mend(source)
    assert mended.count("\n") == source.count("\n")
    assert mended.splitlines()[7:] == source.splitlines()[7:]
    path = tmp_path / "student.py"
    path.write_text(source)
    module = grader.load(str(path))
    assert module.good(4) == 4 and module.fine() == 2 and module.y == 3
    with pytest.raises(SyntaxError, match="line 7|line 8"):
        module.bad()
