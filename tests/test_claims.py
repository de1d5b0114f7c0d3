"""To whoever reads a verdict of verify.py: all claims come out as expected, and a loss that is
broken in any of these ways is refused.

Run: python -m pytest -q tests/test_claims.py
"""

import dataclasses
import functools
import inspect
import itertools
import math
import re

import pytest
import torch

import losses
import verify
from claims import (
    CLAIMS,
    Claim,
    Evidence,
    choice,
    control_variate,
    drift,
    examine,
    formulas,
    nthr,
    objective,
    random_draws,
)
from claims.evidence import Draw, examine_on
from llm import neighbours

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


# ---------------- who checks the checker

TREES = [Draw(0, k) for k in range(4)]  # answers of one length and of several; some have A = 0
WHERE = ("all", "winners", "first")


def a_hundredth_more(where, right, *args, **hyper):
    """What the right function returns, and a hundredth more of it: of "all", of "winners" (A > 0),
    or of the "first" row that is not 0. Of a loss, more of its pushes; of ids, one more."""
    given = inspect.signature(right).bind(*args, **hyper).arguments
    result, batch = right(*args, **hyper), given.get("batch")
    if isinstance(result, float):
        return 1.01 * result
    if isinstance(result, dict):
        return {key: 1.01 * x for key, x in result.items()}
    if isinstance(result, tuple):
        return tuple(a_hundredth_more(where, lambda x=x: x) for x in result)
    x = result if result.dim() else losses.token_coefficients(result, batch.logp)
    rows = x.reshape(len(x), -1).any(1)
    if where == "first":
        rows = rows & (rows.cumsum(0) == 1)
    chosen = rows.view(-1, *[1] * (x.dim() - 1))
    if where == "winners":
        adv = batch.adv if batch else given.get("adv", x)
        chosen = (adv if adv.dim() == x.dim() else adv[:, 0]) > 0
    if not result.dim():
        return result - 0.01 * (x * chosen * batch.logp)[batch.mask].sum() / len(x)
    return result * (1 + 0.01 * chosen) if x.is_floating_point() else result + chosen.long()


def without_tokens(right, batch, **hyper):
    return right(batch, **hyper) + 0.01 * (not batch.mask.any())


def without_advantages(right, batch, **hyper):
    adv = batch.adv[batch.mask]
    return right(batch, **hyper) + 0.01 * bool(len(adv) and not adv.any())


def where_A_is_0(right, batch, **hyper):
    return right(batch, **hyper) - 0.01 * batch.logp[batch.mask & (batch.adv == 0)].sum()


def of_a_sibling(right, batch, **hyper):
    """Each answer is pushed by the advantage of another one."""
    adv = batch.adv.view(-1, batch.group_size, batch.adv.shape[1]).flip(1).view(batch.adv.shape)
    return right(dataclasses.replace(batch, adv=adv), **hyper)


def pushes_alone(right, *args, **hyper):
    """The value stays."""
    result, (batch,) = right(*args, **hyper), [x for x in args if isinstance(x, losses.Batch)]
    more = 0.01 * batch.logp[batch.mask].sum()
    return result + more - more.detach()


def constant(right, *args, **hyper):
    return right(*args, **hyper) + 0.01


def factor(right, *args):
    return 1.001 * right(*args)


def scaled(*scales):
    """Faults of group_advantages with one of these scales."""

    def fault(spoilt, right, rewards, group_size, scale="std"):
        return right(rewards, group_size, scale) * (1.01 if scale == spoilt else 1)

    return [("group_advantages", functools.partial(fault, scale)) for scale in scales]


# What else a claim must notice in functions of losses.py, of its own, or of others.
FURTHER = {
    "M1": [(name, where_A_is_0) for name in formulas.every_loss()],
    "M2": [
        (name, fault)
        for name in formulas.every_loss()
        for fault in (without_tokens, without_advantages)
    ],
    "M3": [
        *scaled(*losses.SCALES),
        ("group_advantages", lambda right, *args: right(*args) + 1e-12),  # equal rewards: 0
    ],
    "M6": [("nthr_random", lambda right, adv, old, **hyper: adv)],
    "C10": [
        ("adv_orthogonal", constant),
        ("adv_orthogonal", lambda right, w, adv: right(w, adv) + 0.01 * adv),
    ],
    "C13": [(drift, "kl", factor), (drift, "kl", lambda right, new, old, h: right(old, new, h))],
    "C14": [(drift, "coefficients", factor)],
    "C15": [("prefix_nodes", lambda right, *args: right(*args).div(2, rounding_mode="floor"))],
    "C18": scaled("mean", "std"),
    "C19": scaled("mean", "std"),
    "C22": [("prefix_baseline", pushes_alone)],
    "C22b": [
        ("prefix_baseline", functools.partial(a_hundredth_more, "all")),
        ("reinforce", of_a_sibling),
    ],
    "C24": [(control_variate, "unbiased_pair_rules", lambda right, *x: right(*x).repeat(2, 1))],
    "C25": [("group_advantages", constant), ("reinforce", of_a_sibling)],  # sum alone, update alone
    "C27": [  # of two rewards alone, at a token that earns nothing, and of more
        ("prefix_baseline", lambda right, *x: right(*x) if len(x[1].adv.unique()) > 3 else x[0]),
        ("prefix_baseline", lambda right, *x: x[0] if len(x[1].adv.unique()) > 3 else right(*x)),
    ],
    "C27b": [
        ("prefix_baseline", lambda right, loss, batch, nodes: loss),
        ("decided", lambda right, R, nodes, mask, *x: right(R, nodes, nodes >= 0, *x)),
        (
            "decided",
            lambda right, R, nodes, *x: right(R, nodes, *x[:2], *x[2:] or [-nodes.double()]),
        ),
        ("decided", lambda right, *x: right(*x[:4], *(logp.flip(1) for logp in x[4:]))),
    ],
    "C29a": scaled(*losses.SCALES),
    "C29b": [(objective, "train_with", lambda right, c: right(c)[::-1])],
    "C30": scaled("mean", "std"),
    "N4": [
        (
            neighbours,
            "nthr_scores",
            lambda right, **x: [y * (1 + k / 99) for k, y in enumerate(right(**x))],
        ),
        (neighbours, "nthr_scores", lambda right, **x: right(**x | {"full_vocab": True})),
        (nthr, "ascent", factor),
    ],
    "A2": [
        ("advantage_reweighting", lambda right, adv, old, **x: right(adv, old, **x) + 0 * old.logp)
    ],
    "I1": [("shaped_rewards", lambda right, rewards, repaired, *hyper: right(rewards, repaired))],
    "I3": [
        (
            "ibpo",
            lambda right, adv, old, reading: right(adv, old, reading.replace("changed", "sign")),
        )
    ],
    "AUDIT": [("grpo", lambda right, batch, **hyper: losses.dr_grpo(batch, **hyper))],
    "Q1": [("dr_grpo", constant), ("grpo", pushes_alone)],
    "Q4": [("k3", constant)],
}
TOKEN_LOSSES = {"reinforce", "grpo_symmetric", "dr_grpo", "dapo", "cispo"}
# What a claim does not notice by its nature: claim, where, which functions (or all), and why.
SILENT = [
    ("M2", WHERE, None, "0 is 0 times anything"),
    ("C8", ["all"], TOKEN_LOSSES, "what cancels is 0 times anything"),
    ("C13", WHERE, None, "any direction g will do"),
    ("C14", ["all"], None, "its identity holds for any coefficients that cancel"),
    ("C15", ["winners"], {"prefix_nodes"}, "ids are names, and these are others"),
    ("C16", ["first"], {"sequence_ratio"}, "the first group has equal answers, so no advantage"),
    ("C22b", WHERE, None, "true of any push that is made of the answer alone"),
    ("C29d", ["first"], None, "in the first group all earn the same"),
    ("C30b", ["all", "first"], None, "its push is 0, and in the first group all earn the same"),
    ("AUDIT", ["all"], None, "a share has no size"),
    ("AUDIT", WHERE, {"pos_only"}, "1 whatever the pushes, since all go up"),
    ("Q4", ["winners"], None, "no advantages"),
]


def test_trees_have_answers_and_groups_without_an_advantage():
    groups = [group for draw in TREES for group in draw.adv.view(-1, draw.G)]
    assert any(not group.any() for group in groups)
    assert any(group.any() and not group.all() for group in groups)


def message(monkeypatch, claim, function, fault=None, module=losses, name=None):
    """What a claim says about a function if it, or the one of that name, has this fault."""
    name = name or function
    with monkeypatch.context() as patch:
        if fault:
            right = getattr(module, name)
            patch.setattr(module, name, functools.wraps(right)(functools.partial(fault, right)))
        return examine_on(TREES, claim, function).message


def is_silent(claim, where, function):
    return any(
        claim.id == id_ and where in places and (names is None or function in names)
        for id_, places, names, _ in SILENT
    )


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_notices_every_fault_that_it_could(claim, monkeypatch):
    for function, where in itertools.product(claim.names, WHERE):
        if is_silent(claim, where, function):
            continue
        fault = functools.partial(a_hundredth_more, where)
        module = neighbours if function == "nthr_scores" else losses
        assert message(monkeypatch, claim, function, fault, module), (function, where)
    for *module, name, fault in FURTHER.get(claim.id, []):
        function = name if name in claim.names else claim.names[0]
        assert message(monkeypatch, claim, function, fault, *module, name=name), (name, fault)
    assert not message(monkeypatch, claim, claim.names[0])


def test_a_better_way_must_grow_also_if_push_and_prediction_agree(monkeypatch):
    (c18,) = [claim for claim in CLAIMS if claim.id == "C18"]
    for name in ("measure_push", "predict_push"):
        right = getattr(choice, name)
        patched = lambda *args, right=right: -torch.as_tensor(right(*args), dtype=torch.float64)  # noqa: E731
        monkeypatch.setattr(choice, name, patched)
    assert message(monkeypatch, c18, "reinforce")


def test_what_holds_is_not_printed_for_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(losses, "min_replace", lambda w, adv: 1.01 * w.detach())
    assert verify.main(["--only", "C9", "C10"]) == 1
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("C")] == [
        "WRONG",
        "HOLDS",
    ]
    assert "! C9: min_replace: expected" in out and "1 of 2 claims came out as expected." in out


def test_a_bug_of_the_check_itself_is_not_said_against_the_function():
    def check(name, draws, evidence):
        evidence.equals(1, 1)

    with pytest.raises(AttributeError):
        examine(Claim("X", check, ("grpo",)), "grpo", [])


# ---------------- texts


def test_a_claim_has_three_paragraphs_and_one_section_of_proofs():
    for claim in CLAIMS:
        _, source, measured = claim.text
        assert source.startswith("Source: ") and measured.startswith("Measured: "), claim.id
    titles = re.findall("^## (.*)", verify.PROOFS.read_text(), re.MULTILINE)
    assert titles == ["Notation", *(claim.id for claim in CLAIMS)]


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
        ("symbols", "| symbol", "second-hand"),
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
