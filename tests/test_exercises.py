"""Every exercise fails blank and passes with the reference solution."""

import re
from pathlib import Path

import pytest

import verify

FOLDER = Path(verify.__file__).parent / "exercises"
FILES = sorted(FOLDER.glob("[0-9]*.py"))
SOLUTIONS = {
    "group_advantages": "import losses; return losses.group_advantages(rewards, group_size, scale)",
    "shared_token_gradient": "return rho / len(advantages) * sum(advantages)",
    "gate_is_open": "return not (A > 0 and r > 1 + eps_high or A < 0 and r < 1 - eps_low)",
    "left_at_a_shared_token": "return sum(rho * a for a in advantages if gate_is_open(rho, a, eps_low, eps_high))",
    "grpo_symmetric": "import losses; return losses.grpo_symmetric(batch, eps_low, eps_high)",
    "left_by_the_length": "return sum(a / T for a, T in zip(advantages, lengths)) / len(lengths)",
    "an_accident": "return [2, 2, 3, 3], [1.0, -1.0, 2.0, -2.0]",
    "min_replace": "return w.detach().amin(1, keepdim=True).expand_as(w)",
    "adv_orthogonal": "import losses; return losses.adv_orthogonal(w, adv)",
    "blind_spot": "return [3.0, 0.1, 0.1, 0.1], [1.0, 1.0, -1.0, -1.0], (0, 2)",
    "learning_tax": "import losses; return losses.learning_tax(coefficients, advantages, nodes, mask)",
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


def solved(path: Path, answers: dict) -> str:
    def fill(blank: re.Match) -> str:
        return f"{blank[1]}    {answers[blank[2]]}\n"

    return re.sub(
        r"(def (\w+)\((?:(?!\ndef ).)*?)    raise NotImplementedError\n",
        fill,
        path.read_text(),
        flags=re.DOTALL,
    )


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """The grader starts a process for each file, mostly to import torch; tests/test_verify.py
    covers that."""

    def grade(path, claims, seed):
        return verify.verify(verify.load(path), claims, verify.Draws(seed))

    monkeypatch.setattr(verify, "grade", grade)


def graded(path: Path, capsys) -> tuple[int, str]:
    code = verify.main(["--losses", str(path)])
    return code, capsys.readouterr().out


def test_there_are_ten_and_each_says_aim_hint_and_what_to_expect():
    assert [int(path.name[:2]) for path in FILES] == list(range(1, 11))
    for path in FILES:
        text = path.read_text()
        assert text.startswith(f'"""{int(path.name[:2])}. ') and all(
            f"{word}:" in text for word in ("Aim", "Hint")
        )
        assert "Hint" in text and "Expected: " in text and "raise NotImplementedError" in text
        promised = set(
            re.findall(
                r"\b(?:[MCNX]\d+[a-f]?|AUDIT)\b", text[text.index("Expected: ") :].split('"""')[0]
            )
        )
        there = verify.defined(str(path))
        about = {
            claim.id
            for claim in (*verify.CLAIMS, *verify.EXERCISES)
            if set(claim.functions) & there
        }
        assert promised & about, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_blank_it_is_not_yet_written_and_solved_it_passes(path, tmp_path, capsys):
    code, out = graded(path, capsys)
    assert (
        code == 1 and "NOT YET WRITTEN" in out and "not yet written" in out and "WRONG" not in out
    )
    copy = tmp_path / path.name
    copy.write_text(solved(path, SOLUTIONS))
    code, out = graded(copy, capsys)
    assert code == 0, out


def test_a_deleted_blank_is_missed(tmp_path, capsys):
    copy = tmp_path / "half.py"
    copy.write_text(
        "def gate_is_open(r, A, eps_low, eps_high):\n    " + SOLUTIONS["gate_is_open"] + "\n"
    )
    code, out = graded(copy, capsys)
    assert code == 1 and "left_at_a_shared_token: not yet written" in out and "1 of 2" in out


def test_a_blank_does_not_tell_its_solution(capsys):
    for path in FILES:
        _, out = graded(path, capsys)
        assert "sum_i A_i" not in out and "losses.py" not in out and "k_a n_a" not in out


@pytest.mark.parametrize(
    "path", [p for p in FILES if set(WRONG) & verify.defined(str(p))], ids=lambda path: path.stem
)
def test_a_tempting_mistake_is_told_apart(path, tmp_path, capsys):
    copy = tmp_path / path.name
    copy.write_text(solved(path, SOLUTIONS | WRONG))
    code, out = graded(copy, capsys)
    assert code == 1 and "WRONG" in out
