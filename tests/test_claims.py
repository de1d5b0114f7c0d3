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
from claims.evidence import EXTREMES

# ---------------- verdicts


def test_every_claim_comes_out_as_expected_with_its_table(capsys):
    assert verify.main(["--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"\n{len(CLAIMS)} of {len(CLAIMS)} claims came out as expected.\n")
    for title, head in verify.TABLES.values():
        table = out.partition(title)[2].strip(":\n").splitlines()
        assert table[0].split("|")[1:-1] and table[0].count("|") == len(head) + 1
        assert len(table) > 5 and all(line.startswith("|") for line in table[:5])


def test_a_claim_must_agree_leave_something_and_hold_on_extreme_trees():
    def look(predicted, left=1.0, size=0, draws=()):
        def check(module, name, draws, evidence):
            evidence.equal(predicted, 1)
            evidence.equal(size, sum(draw.kind == "long" for draw in draws))
            evidence.record_left(left)

        return examine(losses, Claim("X", check, ("grpo",)), "grpo", list(draws)).state

    assert look(1 + 1e-11) == "ok" and look(1 + 1e-9) == "wrong" and look(math.nan) == "wrong"
    assert look(1, left=1e-12) == "wrong"
    assert look(1, draws=random_draws(0, 2)) == "wrong"  # it has one long tree
    with pytest.raises(ValueError, match="shape"):
        Evidence().equal([1.0, 2.0], [1.0])


def test_the_random_trees_are_as_varied_as_verify_says():
    draws = random_draws(0)
    ordinary, (steep, wide, long) = draws[:-3], draws[-3:]
    assert [draw.kind for draw in draws[-3:]] == list(EXTREMES)
    assert {draw.G for draw in ordinary} == {*range(2, 17)}
    assert {draw.N // draw.G for draw in ordinary} == {1, 2, 3}
    assert any(0 in draw.adv for draw in ordinary) and wide.G == 64 and len(long.shared) > 256
    shared = torch.cat([draw.at_shared(draw.log_ratio(0.6).exp())[:, 0] for draw in ordinary])
    for part in (shared > 1.28, shared < 0.8, (shared > 0.8) & (shared < 1.2)):
        assert part.sum() > 5
    assert steep.tokens[steep.mask].max() == 151_999 and steep.log_ratio(0.6).max().exp() > 10
    for draw in draws:
        batch = draw.batch(losses)
        for tensor in (batch.logp, batch.logp_old, batch.logp_ref, batch.adv):
            assert (tensor[~draw.mask].abs() >= 1e4).all() and not draw.mask.all()


# ---------------- a file of one's own

LUSPO = """
def luspo(batch, eps_low=3e-4, eps_high=4e-4):
    ratio, adv = sequence_ratio(batch), trajectory_advantage(batch)
    surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - eps_low, 1 + eps_high) * adv)
    return -(surrogate * lengths(batch)).mean()

METHODS["luspo"] = Method((luspo,))
"""
MIN = "def min_replace(w, adv):\n    return w.detach().amin(1, keepdim=True).expand_as(w)"


@pytest.mark.parametrize(
    "text, said",
    [
        (LUSPO, ""),
        (LUSPO.replace(".mean()", ".sum()"), "! M1: luspo: a token's coefficient: expected"),
        (LUSPO.replace(".mean()", ".mean() + 3"), "! M1: luspo: the loss's value: expected"),
        (
            LUSPO.replace(".mean()", ".sum() * (torch.tensor(1) / len(ratio))"),
            "a part may be float32",
        ),
        (LUSPO.replace("luspo", "other"), "! M1: other: there is no row for it in FORMULAS"),
        (LUSPO.replace("luspo", "typo"), "average 'token'; accepted: answer, budget, tokens,"),
        (LUSPO.replace("luspo", "down").replace("-(", "("), "! C16: down: whether it ascends"),
        ("def grpo(batch):\n    return -token_mean(clipped(batch, 0.2, 0.2), batch)", "! M1: grpo"),
        (MIN, ""),
        (MIN.replace("amin", "amax"), "! C9: min_replace: expected"),
        ("def min_replace(w, adv):\n    raise NotImplementedError", "not yet written"),
        ("def mine(adv, old): ...\nMETHODS['mine'] = Method((grpo,), credit=mine)", "! mine: no"),
        ("METHODS['mine'] = Method((lambda batch: 2 * grpo(batch),))", "! mine: no claim checks"),
    ],
)
def test_a_file_of_ones_own_is_refused_where_it_is_broken(
    text, said, tmp_path, capsys, monkeypatch
):
    def luspo(y, t, hyper, sign=1):
        value, slope = formulas.gspo(y, t, hyper)
        return sign * y.T * value, sign * y.T * slope

    def down(y, t, hyper):  # its formula has the wrong sign, too
        return luspo(y, t, hyper, -1)

    rows = {"luspo": (luspo, "answer"), "typo": (luspo, "token"), "down": (down, "answer")}
    for name, row in rows.items():
        monkeypatch.setitem(formulas.FORMULAS, name, row)
    file = tmp_path / "mine.py"
    file.write_text(text)
    code = verify.main(["--losses", str(file), "--only", "m1,M2", "C9", "C16"])
    out = capsys.readouterr().out
    assert code == bool(said) and said in out and ("! " in out) == bool(said)
    assert ("NOT YET WRITTEN" in out) == ("other" in text or "NotImpl" in text)


@pytest.mark.parametrize("text", [None, "def grpo(", "import no_such_module", "x = 1"])
def test_a_file_that_cannot_be_checked_is_one_clear_line(text, tmp_path):
    file = tmp_path / "mine.py"
    if text:
        file.write_text(text)
    with pytest.raises(SystemExit, match="error: .*mine.py"):
        verify.main(["--losses", str(file)])


# ---------------- explanations


@pytest.mark.parametrize(
    "word, start, part",
    [
        ("c14", "C14  ", "Source: DFPO Cor. 3.2, Eq. 5 (S)"),
        ("symbols", "Notation", "(all arXiv)"),
        ("all", "Notation", CLAIMS[-1].text[2].splitlines()[-1]),
        ("loss", "### Why is the loss 0?", "### Why does the loss rise?"),
        ("gspo", "### ", "\nC4  A sequence ratio"),
        ("ar-lopti", "M1", "\nA4  Lopti"),
    ],
)
def test_explain_finds_proofs_symbols_questions_and_claims(word, start, part, capsys):
    verify.main(["--explain", word])
    out = capsys.readouterr().out
    assert out.startswith(start.removeprefix("### ")) and part.removeprefix("### ") in out


@pytest.mark.parametrize("arguments", [["--only", "C99"], ["--explain", "D1"]])
def test_an_unknown_claim_is_named_and_so_are_the_others(arguments):
    with pytest.raises(SystemExit, match=f"no claim {arguments[1]}; accepted: M1 .*C14"):
        verify.main(arguments)
