"""verify.py: what its verdicts stand on, and the command line."""

import math
import sys

import pytest
import torch

import losses
import verify
from claims import CLAIMS, NOTATION, Draws, Evidence, examine
from claims.evidence import Claim
from claims.trees import EXTREMES, LARGE_IDS

# ---------------- a verdict


def look(check, functions=("grpo",), draws=()):
    claim = Claim("X", check, functions, "HOLDS", "", extremes=True)
    return examine(losses, claim, functions[0], list(draws))


@pytest.mark.parametrize(
    "predicted, left, state",
    [(1, 1.0, "ok"), (1 + 1e-11, 1.0, "ok"), (1 + 1e-9, 1.0, "wrong"), (1, 1e-12, "wrong")],
)
def test_a_claim_needs_agreement_and_something_left(predicted, left, state):
    def check(module, name, draws, evidence):
        evidence.equal(predicted, 1)
        evidence.record_left(left)

    assert look(check).state == state


@pytest.mark.parametrize(
    "error, state",
    [(KeyError("x"), "wrong"), (NotImplementedError(), "missing")],
)
def test_what_is_raised_is_the_functions_fault(error, state):
    def check(module, name, draws, evidence):
        raise error

    assert look(check).state == state


def test_a_claim_must_hold_on_extreme_trees_too():
    def check(module, name, draws, evidence):
        evidence.equal(0, sum(draw.kind == "long" for draw in draws))

    found = look(check, draws=Draws(0, 2))
    assert found.state == "wrong" and "extreme" in found.message
    assert look(check, draws=Draws(0, 2, kinds=())).state == "ok"


def test_evidence_keeps_the_worst_pair_and_does_not_swallow_nan_or_shapes():
    evidence = Evidence()
    evidence.equal([1.0, 100.0], [1.0, 100.0 + 1e-9])
    assert evidence.error == pytest.approx(1e-11, rel=1e-3) and evidence.excess < 1
    assert math.isnan(evidence.mean_left)
    evidence.equal(0, 2e-10)
    assert evidence.pair == (0, 2e-10) and evidence.excess == pytest.approx(2)
    evidence.equal(0, math.nan)
    assert evidence.error == math.inf
    with pytest.raises(ValueError, match="shape"):
        evidence.equal([1.0, 2.0], [1.0])


def test_the_verdicts_do_not_depend_on_the_seed():
    draws = Draws(1, 4)
    for claim in CLAIMS:
        for name in claim.names(losses):
            assert examine(losses, claim, name, draws).message == "", (claim.id, name)


# ---------------- the random trees


def test_the_draws_are_as_varied_as_verify_says():
    draws = Draws(0, kinds=())
    assert {2, 16} <= {draw.G for draw in draws}
    assert {draw.N // draw.G for draw in draws} == {1, 2, 3}
    assert {len(set(draw.T)) > 1 for draw in draws} == {True, False}
    assert any(0 in draw.adv for draw in draws)
    assert any(not any(draw.adv[-draw.G :]) for draw in draws)  # a whole group without advantages
    ratios = [draw.at_shared(draw.log_ratio(0.6).exp()) for draw in draws]
    assert all((rho == rho[:, :1]).all() for rho in ratios)  # one ratio at a shared token
    shared = torch.cat([rho[:, 0] for rho in ratios])
    for part in (shared > 1.28, shared < 0.8, (shared > 0.8) & (shared < 1.2)):
        assert part.sum() > 5
    for draw in draws:
        batch = draw.batch(losses)
        for tensor in (batch.logp, batch.logp_old, batch.logp_ref, batch.adv):
            assert (tensor[~draw.mask].abs() >= 1e4).all() and not draw.mask.all()


def test_extreme_draws_reach_where_users_are():
    steep, wide, long = Draws(0, 0)
    assert [draw.kind for draw in (steep, wide, long)] == list(EXTREMES)
    assert {*steep.tokens[steep.mask].tolist()} <= {*LARGE_IDS} and max(LARGE_IDS) == 151_999
    far, near = (steep.log_ratio(spread)[steep.mask] for spread in (0.6, 0.3))
    assert far.max().exp() > 10 and far.min().exp() < 0.1 and near.abs().max() <= 0.3
    assert wide.G == 64 and 0 < max(map(abs, wide.adv)) < 1e-5
    assert len(long.shared) > 256 and max(long.T) - min(long.T) > 1


# ---------------- the command line


def test_only_takes_ids_and_families_of_ids_and_losses_a_whole_file(capsys):
    assert verify.main(["--only", "c17,C5", "--losses", losses.__file__]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = [line.split()[0] for line in lines if line[6:11] in ("HOLDS", "FAILS")]
    assert said == ["C5", "C17", "C17h", "C17i"]


@pytest.mark.parametrize(
    "word, start, part",
    [
        ("C14", "C14  ", "Source: DFPO Cor. 3.2, Eq. 5 (S)"),
        ("symbols", NOTATION, NOTATION),
        ("all", NOTATION, "\n".join(CLAIMS[-1].text[2].splitlines()[-2:])),
        ("loss", "Why is the loss 0?", "Why does the loss rise?"),  # a word of two titles
        ("equal_groups", "Why is the loss 0?", "python verify.py --only"),  # of an answer
    ],
)
def test_explain_prints_proofs_symbols_or_questions(word, start, part, capsys):
    verify.main(["--explain", word])
    out = capsys.readouterr().out
    assert out.startswith(start) and part in out


@pytest.mark.parametrize("arguments", [["--only", "C99"], ["--explain", "D1"]])
def test_an_unknown_claim_is_named_and_so_are_the_others(arguments):
    with pytest.raises(SystemExit, match=f"no claim {arguments[1]}; accepted: M1 .*C14"):
        verify.main(arguments)


@pytest.mark.parametrize("text", [None, "def grpo(", "import no_such_module", "x = 1"])
def test_a_file_that_cannot_be_graded_is_one_clear_line(text, tmp_path):
    file = tmp_path / "mine.py"
    if text:
        file.write_text(text)
    with pytest.raises(SystemExit, match="error: .*mine.py"):
        verify.main(["--losses", str(file)])


MINE = """
def luspo(batch, eps_low=3e-4, eps_high=4e-4):
    ratio, adv = sequence_ratio(batch), trajectory_advantage(batch)
    surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - eps_low, 1 + eps_high) * adv)
    return -(surrogate * lengths(batch)).mean()

METHODS["luspo"] = Method((luspo,))
"""
MIN = "def min_replace(w, adv):\n    return w.detach().amin(1, keepdim=True).expand_as(w)"


@pytest.mark.parametrize(
    "text, wrong",
    [
        (MINE, ""),
        (MINE.replace(".mean()", ".sum()"), "! M1: luspo: a token's coefficient: expected"),
        (MINE.replace(".mean()", ".mean() + 3"), "! M1: luspo: the loss's value: expected"),
        (MINE.replace("luspo", "other"), "! M1: other: LookupError: other has no row in FORMULAS"),
        (MIN, ""),
        (MIN.replace("amin", "amax"), "! C9: min_replace: expected"),
        ("def min_replace(w, adv):\n    raise NotImplementedError", "not yet written"),
        ("def mine(adv, old): ...\nMETHODS['mine'] = Method((grpo,), credit=mine)", "mine: no"),
        ("METHODS['mine'] = Method((lambda batch: 2 * grpo(batch),))", "! mine: no claim checks"),
        ("METHODS['mine'] = Method((partial(grpo, kl=0.1),))", "! mine: no claim checks"),
    ],
)
def test_a_file_of_ones_own_is_checked_by_all_that_speaks_of_it(
    text, wrong, tmp_path, capsys, monkeypatch
):
    def luspo(y, t, hyper):
        value, slope = formulas.gspo(y, t, hyper)
        return y.T * value, y.T * slope

    formulas, file = sys.modules["claims.formulas"], tmp_path / "mine.py"
    monkeypatch.setitem(formulas.FORMULAS, "luspo", (luspo, "answer"))
    file.write_text(text)
    code = verify.main(["--losses", str(file), "--only", "M1", "M2", "C9", "C16"])
    out = capsys.readouterr().out
    assert code == bool(wrong) and wrong in out and ("! " in out) == bool(wrong)
    assert out.count("LookupError") <= 1  # one claim says it
