"""To whoever reads a verdict of verify.py: all claims come out as expected, and a loss that is
broken in any of these ways is refused.

Run: python -m pytest -q tests/test_claims.py
"""

import functools
import inspect
import itertools
import math
import re

import pytest

import losses
import verify
from claims import (
    CLAIMS,
    Claim,
    Evidence,
    control_variate,
    drift,
    examine,
    formulas,
    nthr,
    objective,
    random_draws,
)
from claims.evidence import NOTICEABLE, Draw, examine_on
from llm import neighbours

# ---------------- verdicts

# Rows of verify.py's tables, some of which README, claims/ and toy/ print.
ROWS = """
gspo 0 0.075 0.007 0.348
grpo 0.983 0.793 0.670 0.708
cispo 1.000 0.772 0.969 0.775
earns nothing; right .9 0.640 0.480 0.480
a good way, taken with .1; right .9, else .1 0.410 0.787 2.952
right .95, .05, .5; sure, sure, even 0.135 0.135 0.541 0.246 1.147
1.5 0.040 1.280 1.097
K, std 2.313 2.177 1.895 1.735 1.895 2.177
weight 0.1 0.399 0.319 0.244 0.120 0.042
weight 0.5 0 0 0 0 0
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


# ---------------- who checks the checker

TREES = [Draw(0, k) for k in range(4)]  # answers of one length and of several; some have A = 0
WHERE = ("all", "minus", "last", "tilt")


def spoil(where, right, *args, **hyper):
    """What the right function returns, and a millionth more of "all" of it, or of the "last" row
    that is not 0; or "minus" it. Of a loss, that is of its pushes. Or the first answer is pushed
    more and the last one as much less ("tilt"); then the loss keeps its value. Of ids, one more."""
    batch = inspect.signature(right).bind(*args, **hyper).arguments.get("batch")
    result, more = right(*args, **hyper), -2.0 if where == "minus" else 1e-6
    if isinstance(result, float):
        return (1 + more) * result
    if isinstance(result, dict):
        return {key: (1 + more) * x for key, x in result.items()}
    if isinstance(result, tuple):
        return tuple(spoil(where, lambda x=x: x) for x in result)
    if where == "tilt" and batch and not result.dim():
        tilt = 1e-6 * (batch.logp[0, 0] - batch.logp[-1, 0])
        return result + tilt - tilt.detach()
    x = result if result.dim() else losses.token_coefficients(result, batch.logp)
    rows = x.reshape(len(x), -1).any(1)
    if where == "last":
        rows = rows & (rows.flip(0).cumsum(0).flip(0) == 1)
    chosen = rows.view(-1, *[1] * (x.dim() - 1))
    if not result.dim():
        return result - more * (x * chosen * batch.logp)[batch.mask].sum() / len(x)
    return result * (1 + more * chosen) if x.is_floating_point() else result + chosen.long()


def only_if(condition, where=None):
    """A fault of a loss under a condition: of its value, or of its pushes."""

    def fault(right, batch, **hyper):
        if not condition(batch, hyper):
            return right(batch, **hyper)
        return spoil(where, right, batch, **hyper) if where else right(batch, **hyper) + 1e-6

    return fault


def empty(batch, hyper):
    return not batch.mask.any()


def without_advantages(batch, hyper):
    return batch.mask.any() and not batch.adv[batch.mask].any()


def off_policy(batch, hyper):
    return hyper and (batch.logp != batch.logp_old)[batch.mask].any()


def constant(right, *args, **hyper):
    return right(*args, **hyper) + 1e-6


def attached(right, x, other, **hyper):
    return right(x, other, **hyper) + 0 * getattr(other, "logp", x)


def factor(right, *args):
    return 0.999 * right(*args)


def scaled(*scales):
    """Faults of group_advantages with one of these scales."""

    def fault(spoilt, right, rewards, group_size, scale="std"):
        return right(rewards, group_size, scale) * (1.01 if scale == spoilt else 1)

    return [("group_advantages", functools.partial(fault, scale)) for scale in scales]


def nudged(levels):
    """A fault of group_advantages with the std, where rewards have so many levels."""

    def fault(right, rewards, group_size, scale="std"):
        more = 0.01 * (scale == "std" and len(rewards.unique()) == levels)
        return right(rewards, group_size, scale) + more * (rewards == 1)

    return "group_advantages", fault


def deeper(right, loss, batch, nodes):
    """More of the pushes beyond what large groups share; the value stays."""
    more = 1e-6 * (batch.group_size > 2) * batch.logp[:, 2:][batch.mask[:, 2:]].sum()
    return right(loss, batch, nodes) + more - more.detach()


def of_many_rewards(right, loss, batch, nodes):
    """Half of the pushes, if there are more than two rewards."""
    result = right(loss, batch, nodes)
    return result / 2 if len(batch.adv[:, 0].unique()) > 2 else result


# What else a claim must notice in functions of losses.py, of its own, or of others.
FURTHER = {
    "M1": [("grpo", only_if(off_policy)), ("grpo", constant)],
    "M2": [
        ("dapo", only_if(when, where))
        for when in (empty, without_advantages)
        for where in (None, "tilt")
    ],
    "M3": [
        *scaled(*losses.SCALES),
        ("group_advantages", lambda right, *args: right(*args) + 1e-12),  # equal rewards: 0
        (
            "group_advantages",
            lambda right, R, G, scale: right(R.abs() if scale == "maxrl" else R, G, scale),
        ),
    ],
    "M6": [
        ("nthr_random", lambda right, adv, old, **hyper: adv),
        ("nthr", lambda right, *x, **hyper: right(*x, **hyper) + 1e-6 * (hyper.get("eta") != 0)),
        ("nthr", lambda right, adv, old, **hyper: right(adv, old, **hyper) + 1e-6 * (adv > 0)),
    ],
    "C4": [
        (
            "sequence_ratio",
            lambda right, batch, ratio="geometric": right(batch, ratio) + (ratio == "geometric"),
        )
    ],
    "C7": [("dr_grpo", lambda right, batch, **hyper: losses.grpo_symmetric(batch, **hyper))],
    "C9": [("min_replace", attached)],
    "C10": [
        ("adv_orthogonal", attached),
        ("adv_orthogonal", lambda right, w, adv: right(w, adv) + 0.01 * adv),
    ],
    "C13": [(drift, "kl", factor)],
    "C14": [(drift, "pushes_of", factor)],
    "C15": [("prefix_nodes", lambda right, *args: right(*args).div(2, rounding_mode="floor"))],
    "C18": [
        nudged(2),
        ("grpo", lambda right, batch: losses.dr_grpo(batch)),
        (
            "group_advantages",
            lambda right, R, G, scale: right(R, G, "mean" if len(R.unique()) > 2 else scale),
        ),
    ],
    "C19": [nudged(2)],
    "C22": [("prefix_baseline", deeper)],
    "C22b": [("prefix_baseline", functools.partial(spoil, "all"))],
    "C25": [("group_advantages", constant)],  # the sum alone
    "C27": [  # of two rewards alone, at a token that earns nothing, and of more
        ("prefix_baseline", lambda right, *x: right(*x) if len(x[1].adv.unique()) > 3 else x[0]),
        ("prefix_baseline", lambda right, *x: x[0] if len(x[1].adv.unique()) > 3 else right(*x)),
    ],
    "C27b": [
        ("prefix_baseline", lambda right, loss, batch, nodes: loss),
        ("decided", lambda right, R, nodes, mask, *x: right(R, nodes, nodes >= 0, *x)),
        ("decided", lambda right, *x: right(*x[:4], *(1.001 * logp for logp in x[4:]))),
        *(
            ("decided", lambda right, *x, key=key: right(*x) | {key: 0.5})
            for key in ("decided", "visitors", "break_even")
        ),
    ],
    "C28": [("prefix_baseline", of_many_rewards)],
    "C29a": scaled(*losses.SCALES),
    "C29b": [(objective, "pass_at", lambda right, k, G: [k * x for x in right(k, G)])],
    "C30": [
        nudged(2),
        nudged(3),
        (
            "group_advantages",  # pairs alone
            lambda right, R, G, scale: right(R, G, scale) + (scale == "std") * (G == 2) * (R == 1),
        ),
    ],
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
        ("advantage_reweighting", attached),
        (
            "advantage_reweighting",
            lambda right, adv, old, alpha=0.3: right(adv, old, alpha) + 0.01 * alpha,
        ),
    ],
    "A4": [
        ("lopti_low", lambda right, batch, eta: right(batch, eta=eta + 1e-12)),
        ("lopti_low", lambda right, batch, eta: right(batch, eta=eta) * (1 + 0.01 * (eta != 0.5))),
    ],
    "I1": [("shaped_rewards", lambda right, rewards, repaired, *hyper: right(rewards, repaired))],
    "I3": [
        (
            "ibpo",
            lambda right, adv, old, reading: right(adv, old, reading.replace("changed", "sign")),
        )
    ],
    "AUDIT": [("grpo", lambda right, batch, **hyper: losses.dr_grpo(batch, **hyper))],
    "Q1": [("dr_grpo", constant)],
    "Q4": [("k3", constant)],
}
# What a claim does not notice by its nature: claim, where, which functions (or all), and why.
SILENT = [
    ("M2", ("all", "minus", "last"), None, "0 is 0 times anything"),
    ("C13", WHERE, None, "any direction g will do"),
    ("C14", ("all", "minus"), None, "its identity holds for any coefficients that cancel"),
    ("C16", ["last"], {"sequence_ratio"}, "the last group has equal answers, so no advantage"),
    ("C19", ("all", "minus", "last"), {"grpo_symmetric"}, "0 is 0 times anything"),
    ("C22b", ("all", "minus"), None, "true of any push that is made of the answer alone"),
    ("C22b", WHERE, control_variate.OTHERS, "these must only move"),
    ("C27 C28 C29d C30b", ["last"], None, "in the last group all earn the same"),
    ("C27 C28 I1 AUDIT", ["minus"], None, "a variance and a share have no sign"),
    ("C29c", ["tilt"], None, "what is the same at every policy has no curl"),
    ("AUDIT", ["all"], None, "a share has no size"),
    ("AUDIT", WHERE, {"pos_only"}, "1 whatever the pushes, since all go up"),
    ("Q4", ["last"], None, "the first of two equal rows is read"),
]


def test_trees_have_all_that_a_loss_may_trip_over():
    *ordinary, steep, wide, long = random_draws(0)
    groups = [group for draw in ordinary for group in draw.adv.view(-1, draw.G)]
    assert any(not group.any() for group in groups)
    assert any(group.any() and not group.all() for group in groups)
    for draw in ordinary:
        assert draw.noise.min() < 0 < draw.noise.max()  # ratios on both sides of 1
        assert draw.batch().logp[~draw.mask].min() > 1e3  # on padding exp overflows
    assert {len({*draw.T}) == 1 for draw in ordinary} == {True, False}
    assert {draw.N // draw.G for draw in ordinary} == {1, 2, 3}
    assert steep.tokens.max() > 2**16 and wide.adv.abs().max() < 1e-5 and max(long.T) > 2**8


def message(monkeypatch, claim, function, fault=None, module=losses, name=None):
    """What a claim says about a function if it, or the one of that name, has this fault."""
    name = name or function
    with monkeypatch.context() as patch:
        if fault:
            right = getattr(module, name)
            patch.setattr(module, name, functools.wraps(right)(functools.partial(fault, right)))
        found = examine_on(TREES, claim, function)
        return found.message or found.mean_left < NOTICEABLE


def is_silent(claim, where, function):
    return any(
        claim.id in ids.split() and where in places and (names is None or function in names)
        for ids, places, names, _ in SILENT
    )


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_notices_every_fault_that_it_could(claim, monkeypatch):
    for function, where in itertools.product(claim.names, WHERE):
        if is_silent(claim, where, function):
            continue
        fault = functools.partial(spoil, where)
        module = neighbours if function == "nthr_scores" else losses
        assert message(monkeypatch, claim, function, fault, module), (function, where)
    for *module, name, fault in FURTHER.get(claim.id, []):
        function = name if name in claim.names else claim.names[0]
        assert message(monkeypatch, claim, function, fault, *module, name=name), (name, fault)
    assert not message(monkeypatch, claim, claim.names[0])


def test_what_holds_is_not_printed_for_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(losses, "cispo", functools.partial(spoil, "all", losses.cispo))
    assert verify.main(["--only", "C7", "C9"]) == 1
    out = capsys.readouterr().out
    shown = re.findall(r"^C\d+ +(\w+) +\S+ +\S+ +(\S+)", out, re.MULTILINE)
    assert [(word, float(error) > 1e-10) for word, error in shown] == [
        ("WRONG", True),
        ("HOLDS", False),
    ]
    assert "! C7: cispo: expected" in out and "1 of 2 claims came out as expected." in out


# ---------------- a method of one's own


def test_a_method_of_ones_own_needs_a_formula_and_must_ascend(capsys, monkeypatch):
    def mine(batch):
        return -losses.reinforce(batch)

    monkeypatch.setattr(losses, "mine", mine, raising=False)
    monkeypatch.setattr(losses, "METHODS", {"mine": losses.Method((mine,))})
    assert verify.main(["--only", "m1"]) == 1
    assert "! M1: mine: ValueError: there is no row for it in FORMULAS" in capsys.readouterr().out
    row = (lambda y, t, hyper: (-y.adv[t] * y.logp[t], -y.adv[t])), "budget"
    monkeypatch.setitem(formulas.FORMULAS, "mine", row)
    assert verify.main(["--only", "M1", "C16"]) == 1
    out = capsys.readouterr().out
    assert "! C16: mine: whether it ascends" in out and "! M1" not in out


def test_a_credit_rule_that_no_claim_speaks_of_is_named(capsys, monkeypatch):
    method = losses.Method((losses.grpo,), credit=losses.lengths)
    monkeypatch.setattr(losses, "METHODS", {"mine": method})
    assert verify.main(["--only", "C9"]) == 1
    assert "! mine: no claim checks lengths" in capsys.readouterr().out


# ---------------- explanations


def test_explain_prints_one_proof_or_what_there_is_about_a_word(capsys):
    assert [*verify.proofs()] == ["Notation", *(claim.id for claim in CLAIMS)]
    verify.main(["--explain", "c18"])
    out = capsys.readouterr().out
    assert out.startswith("C18  ") and "**For good.**" in out and "## " not in out
    verify.main(["--explain", "gspo"])
    out = capsys.readouterr().out
    assert "Token or sequence ratio?" in out and "\nC4  A sequence ratio" in out


@pytest.mark.parametrize("arguments", [["--only", "C99"], ["--explain", "D1"]])
def test_an_unknown_claim_is_named_and_so_are_the_others(arguments):
    with pytest.raises(SystemExit, match=f"no claim {arguments[1]}; accepted: M1 .*C14"):
        verify.main(arguments)
    assert [claim.id for claim in verify.select(["c22"])] == ["C22", "C22b", "C22c"]
