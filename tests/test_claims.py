"""To whoever reads a verdict of verify.py: all claims come out as expected, and a loss that is
broken in any of these ways is refused.

Run: python -m pytest -q tests/test_claims.py
"""

import math

import pytest
import torch

import losses
import verify
from claims import CLAIMS, Claim, Evidence, examine, formulas, random_draws

# ---------------- verdicts


def test_every_claim_comes_out_as_expected(capsys):
    assert verify.main([]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"\n{len(CLAIMS)} of {len(CLAIMS)} claims came out as expected.\n")


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


# ---------------- a method of one's own


@pytest.mark.parametrize(
    "times, plus, average, said",
    [
        (1, 0, "answer", ""),
        (4, 0, "answer", "! M1: mine: a token's coefficient: expected"),
        (1, 3, "answer", "! M1: mine: the loss's value: expected"),
        (-1, 0, "answer", "! C16: mine: whether it ascends"),  # its formula descends, too
        (1, 0, None, "! M1: mine: ValueError: there is no row for it in FORMULAS"),
    ],
)
def test_a_method_of_ones_own_is_refused_where_it_is_broken(
    times, plus, average, said, capsys, monkeypatch
):
    def mine(batch, eps_low=3e-4, eps_high=4e-4):  # LUSPO: GSPO times T_i
        ratio, adv = losses.sequence_ratio(batch), losses.trajectory_advantage(batch)
        surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - eps_low, 1 + eps_high) * adv)
        return plus - times * (losses.lengths(batch) * surrogate).mean()

    def formula(y, t, hyper):
        value, slope = formulas.gspo(y, t, hyper)
        return math.copysign(y.T, times) * value, math.copysign(y.T, times) * slope

    monkeypatch.setattr(losses, "mine", mine, raising=False)
    monkeypatch.setattr(losses, "METHODS", {"mine": losses.Method((mine,))})
    if average:
        monkeypatch.setitem(formulas.FORMULAS, "mine", (formula, average))
    code = verify.main(["--only", "m1", "M2", "C16"])
    out = capsys.readouterr().out
    assert code == bool(said) and said in out and ("! " in out) == bool(said)


def test_a_credit_rule_that_no_claim_speaks_of_is_named(capsys, monkeypatch):
    method = losses.Method((losses.grpo,), credit=lambda adv, old: adv)
    monkeypatch.setattr(losses, "METHODS", {"mine": method})
    assert verify.main(["--only", "C9"]) == 1
    assert "! mine: no claim checks <lambda>" in capsys.readouterr().out


# ---------------- explanations


@pytest.mark.parametrize(
    "word, start, part",
    [
        ("c14", "C14  ", "Source: DFPO Cor. 3.2, Eq. 5 (S)"),
        ("symbols", "Notation", "(all arXiv)"),
        ("loss", "Why is the loss 0?", "Why does the loss rise?"),
        ("gspo", "", "\nC4  A sequence ratio"),
        ("ar-lopti", "M1", "\nA4  Lopti"),
    ],
)
def test_explain_finds_proofs_symbols_questions_and_claims(word, start, part, capsys):
    verify.main(["--explain", word])
    out = capsys.readouterr().out
    assert out.startswith(start) and part in out


@pytest.mark.parametrize("arguments", [["--only", "C99"], ["--explain", "D1"]])
def test_an_unknown_claim_is_named_and_so_are_the_others(arguments):
    with pytest.raises(SystemExit, match=f"no claim {arguments[1]}; accepted: M1 .*C14"):
        verify.main(arguments)
