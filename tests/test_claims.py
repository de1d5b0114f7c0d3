"""To whoever reads a verdict of verify.py: all claims come out as expected, a loss that is broken
is refused, and `--explain` finds what it is asked for.

Run: python -m pytest -q tests/test_claims.py
"""

import functools
import math
import re

import pytest
import torch

import losses
import verify
from claims import CLAIMS, Claim, Evidence, examine, formulas, random_draws
from claims.evidence import Draw, examine_on
from llm import neighbours

# ---------------- verdicts

# Rows of verify.py's tables, some of which README, claims/ and toy/ print.
ROWS = """
gspo 0 0.075 0.007 0.348
grpo 0.983 0.793 0.670 0.708
cispo 1.000 0.772 0.969 0.775
earns nothing; right .9 0.640 0.480 0.480
a good way, taken with .1; right .9, else .1 0.410 0.787 2.952
1.5 0.040 1.280 1.097
K, std 2.313 2.177 1.895 1.735 1.895 2.177
"""


def test_every_claim_comes_out_as_expected_and_every_condition_is_needed(capsys):
    assert verify.main([]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"\n{len(CLAIMS)} of {len(CLAIMS)} claims came out as expected.\n")
    left = [float(line[54:63]) for line in out.splitlines() if line[6:19] == "HOLDS ONLY IF"]
    assert len(left) == sum(bool(claim.condition) for claim in CLAIMS)
    flat = re.sub("[ |]+", " ", out)
    assert [row for row in ROWS.split("\n") if row not in flat] == []


def test_a_claim_must_agree_leave_something_and_hold_on_extreme_trees():
    def look(predicted, left=1.0, long=0, draws=()):
        def check(name, draws, evidence):
            evidence.equal(predicted, 1)
            evidence.equal(long, sum(draw.kind == "long" for draw in draws))
            evidence.record_left(left)

        return examine(Claim("X", check, ("grpo",)), "grpo", list(draws)).message

    assert not look(1 + 1e-11) and look(1 + 1e-9) and look(math.nan)
    assert look(1, left=1e-12) == "what must differ here is the same"
    assert look(1, draws=random_draws(0, 2)).endswith("(on extreme trees)")  # one of them is long
    with pytest.raises(ValueError, match="shape"):
        Evidence().equal([1.0, 2.0], [1.0])


def test_padding_holds_garbage_and_extreme_trees_are_extreme():
    *_, steep, wide, long = draws = random_draws(0)
    assert all(draw.batch().logp[~draw.mask].min() > 1e3 for draw in draws)
    assert steep.tokens.max() > 2**16 and wide.adv.abs().max() < 1e-5 and max(long.T) > 2**8


# ---------------- a fault is noticed


def spoilt(right, *args, **hyper):
    """A millionth more of what a function returns. Of a loss, the first answer of the batch is also
    pushed up, and the last one down."""
    result, tilt = right(*args, **hyper), torch.zeros(())
    if isinstance(result, tuple):
        return [spoilt(lambda x=x: x) for x in result]
    for batch in args:
        if isinstance(batch, losses.Batch) and result.dim() == 0:
            tilt = 1e-6 * (batch.logp[0, 0] - batch.logp[-1, 0])
    return result * (1 + 1e-6) + tilt - tilt.detach()  # the tilt leaves the value as it is


def attached(right, w, adv):
    return right(w, adv) + 0 * w


FAULTS = [
    # The identity of C13 holds for any pushes.
    *((claim.id, claim.names[0], spoilt) for claim in CLAIMS if claim.id != "C13"),
    ("C9", "min_replace", attached),
    ("C10", "adv_orthogonal", attached),
    ("C10", "adv_orthogonal", lambda right, w, adv: right(w, adv) + 0.01 * adv),
    ("C22", "prefix_baseline", lambda right, loss, batch, nodes: loss),
    ("M6", "nthr_random", lambda right, adv, old, **hyper: adv),
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


def test_what_holds_is_not_printed_for_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(losses, "cispo", functools.partial(spoilt, losses.cispo))
    assert verify.main(["--only", "C7", "C9"]) == 1
    out = capsys.readouterr().out
    assert re.findall(r"^C\d+ +\w+", out, re.MULTILINE) == ["C7    WRONG", "C9    HOLDS"]
    assert "! C7: cispo: expected" in out and "1 of 2 claims came out as expected." in out


def test_a_method_of_ones_own_needs_a_formula_and_claims_and_must_ascend(capsys, monkeypatch):
    def mine(batch):
        return -losses.reinforce(batch)

    method = losses.Method((mine,), credit=losses.lengths)
    monkeypatch.setattr(losses, "mine", mine, raising=False)
    monkeypatch.setattr(losses, "METHODS", {"mine": method})
    assert verify.main(["--only", "M1"]) == 1
    out = capsys.readouterr().out
    assert "! M1: mine: ValueError: there is no row for it in FORMULAS" in out
    assert "! mine: no claim checks lengths" in out
    row = (lambda y, t, hyper: (-y.adv[t] * y.logp[t], -y.adv[t])), "budget"
    monkeypatch.setitem(formulas.FORMULAS, "mine", row)
    assert verify.main(["--only", "M1", "C16"]) == 1
    out = capsys.readouterr().out
    assert "! C16: mine: whether it ascends" in out and "! M1" not in out


# ---------------- explanations


def test_each_claim_has_a_proof_that_states_it():
    assert [*verify.proofs()] == ["Notation", *(claim.id for claim in CLAIMS)]
    out = verify.explain(["c18"])
    assert out.startswith("C18\n") and "\nMeasured: " in out and "**For good.**" in out
    assert "## " not in out


@pytest.mark.parametrize(
    "words, found",
    [
        (["gspo"], {"M1", "C4", "C8", "C16", "Q1"}),
        (["Eq.", "17"], {"C9", "C11"}),
        (["lopti"], {"A2", "A4"}),
    ],
)
def test_explain_finds_the_claims_about_a_method_or_an_equation(words, found):
    out = verify.explain(words)
    assert found <= {*re.findall(r"^(\w+) +\S", out.partition("Claims;")[2], re.MULTILINE)}


def test_an_unknown_claim_is_named_and_so_are_the_others():
    with pytest.raises(SystemExit, match="no claim D1; accepted: M1 .*C14"):
        verify.explain(["D1"])
    assert [claim.id for claim in verify.select(["c22"])] == ["C22", "C22b", "C22c"]
