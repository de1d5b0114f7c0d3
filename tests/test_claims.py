"""To whoever reads a verdict of verify.py: a broken loss is refused, and tables have the numbers
that pages quote.

All claims are run by `python verify.py`, which `make test` calls after the tests.

Run: python -m pytest -q tests/test_claims.py
"""

import functools
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import losses
import verify
from claims import CLAIMS, Claim, Evidence, examine, random_draws
from claims.evidence import Draw, examine_on
from claims.formulas import FORMULAS
from llm import credit as neighbours
from toy.policy import Policy, kl

# ---------------- verdicts

ROWS = """
gspo 0 0.075 0.007 0.348
grpo 0.983 0.670
cispo 1.000 0.969
earns nothing; right 0.9 0.640 0.480 0.480
good strategy, taken with 0.1; right 0.9, other 0.1 0.410 0.787 2.952
"""


def test_the_tables_have_the_rows_that_pages_quote(capsys):
    assert verify.main(["--only", *verify.TABLES]) == 0
    flat = re.sub("[ |]+", " ", capsys.readouterr().out)
    assert [row for row in ROWS.split("\n") if row not in flat] == []


def test_a_claim_must_agree_fail_without_its_condition_and_hold_on_extreme_trees():
    def is_refused(predicted, otherwise=1.0, draws=()):
        def check(name, draws, evidence):
            evidence.equal(predicted, 1)
            evidence.equal(0, sum(max(draw.T) > 256 for draw in draws))
            evidence.record_otherwise(otherwise)

        return bool(examine(Claim("X", check, ("grpo",)), "grpo", list(draws)).message)

    assert not is_refused(1 + 1e-11) and is_refused(1 + 1e-9) and is_refused(math.nan)
    assert is_refused(1, otherwise=1e-12) and is_refused(1, otherwise=math.nan)
    assert is_refused(1, draws=random_draws(0, 2))  # one of them is long
    hollow = Claim("X", lambda name, draws, evidence: evidence.equal([], []), ("grpo",))
    assert examine(hollow, "grpo", []).message
    with pytest.raises(ValueError):
        Evidence().equal([1.0, 2.0], [1.0])


def test_what_is_wrong_is_printed_and_is_the_exit_code(capsys, monkeypatch):
    monkeypatch.setattr(losses, "cispo", functools.partial(spoil, losses.cispo))
    assert verify.main(["--only", "C7", "C9"]) == 1
    out = capsys.readouterr().out
    assert re.findall(r"^C\d+ +\w+", out, re.MULTILINE) == ["C7    WRONG", "C9    HOLDS"]


ROOT = Path(verify.__file__).parent
PLACES = [  # where each block of claims/README.md goes: the file, and above what
    ("losses.py", "def cispo("),
    ("losses.py", '    "cispo": Method('),
    ("claims/formulas.py", "def cispo("),
    ("claims/formulas.py", '    "cispo": (cispo'),
    ("claims/audit.py", '    "cispo": "0000"'),
]


def test_a_method_is_added_as_claims_readme_says(tmp_path):
    """In a copy, block by block, with the commands that it prints."""
    for name in ("losses.py", "verify.py", "claims", "toy", "llm"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    _, recipe = (ROOT / "claims" / "README.md").read_text().split("## A method that is to stay")
    blocks = re.findall("```python\n(.*?)```", recipe, re.S)
    commands, said = re.findall("`python (verify.py --only [^`]*)`", recipe), []
    for block, (file, above) in zip(blocks, PLACES, strict=True):
        text = (tmp_path / file).read_text()
        assert text.count(above) == 1
        (tmp_path / file).write_text(text.replace(above, block + "\n\n" * ("def" in block) + above))
        if block in (blocks[1], blocks[-1]):
            command = [sys.executable, *commands.pop(0).split()]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            said.append((done.returncode, re.sub("[ |]+", " ", done.stdout)))
    assert said[0][0] == 1 and "! luspo: no claim checks luspo" in said[0][1]
    assert said[1][0] == 0 and "luspo 0 0 0.007 0.348" in said[1][1]


# ---------------- a fault is noticed


def spoil(right, *args, **hyper):
    """A millionth more of what a function returns. A loss keeps its value: its pushes are a
    millionth more, and it also pushes the first token."""
    result = right(*args, **hyper)
    if isinstance(result, tuple):
        result = torch.stack(result)
    if right.__name__ in FORMULAS:
        more = 1e-6 * (result + args[0].logp[0, 0])
        return result + more - more.detach()
    return (1 + 1e-6) * result


FAULTS = [
    # The identity of C13 holds for any pushes.
    *((claim.id, claim.names[0], spoil) for claim in CLAIMS if claim.id != "C13"),
    ("M1", "grpo", lambda right, batch, **hyper: right(batch, **hyper) + 1e-6),
    ("C10", "adv_orthogonal", lambda right, s, adv: right(s, adv) + 0.01 * adv),
    ("C16", "grpo", lambda right, batch: -right(batch)),
    ("C22", "prefix_baseline", lambda right, loss, batch, nodes: loss),
    (
        "C30",
        "group_advantages",
        lambda right, R, G, scale: right(R, G, scale) + 0.01 * (R == 1) * (scale == "std"),
    ),
]


@pytest.mark.parametrize("id_, function, fault", FAULTS)
def test_a_claim_notices_a_fault(id_, function, fault, monkeypatch):
    [claim] = [claim for claim in CLAIMS if claim.id == id_]
    trees = [Draw(0, k) for k in range(4)]
    name = function if function in claim.names else claim.names[0]
    assert not examine_on(trees, claim, name).message
    module = neighbours if function == "nthr_scores" else losses
    right = getattr(module, function)
    faulty = functools.wraps(right)(functools.partial(fault, right))
    monkeypatch.setattr(module, function, faulty)
    assert examine_on(trees, claim, name).message


def test_kl_is_of_the_new_policy_against_the_old_one():
    """C13 would not notice the other KL, because to second order it is the same."""
    new, old = (
        Policy(torch.tensor([[p], [1 - p]]).log(), lambda h: torch.ones(1), 1) for p in (0.5, 0.2)
    )
    assert kl(new, old, ()) == pytest.approx(math.log(1.25))  # ln .5 - (ln .2 + ln .8) / 2
