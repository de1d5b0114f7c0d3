"""To whoever reads a verdict of verify.py: a broken loss is refused, and nothing holds by itself.

All claims are run by `python verify.py`, which `make test` calls after the tests.
"""

import functools
import math

import pytest
import torch

import losses
import verify
from claims import CLAIMS
from claims.evidence import Tree, claim, equal, not_zero, random_trees
from claims.formulas import FORMULAS
from llm import credit

TREES = [Tree(0, k) for k in range(4)]


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
    *((id_, names, spoil) for id_, (_, names) in CLAIMS.items() if id_ != "C13"),
    ("M1", ["grpo"], lambda right, batch, **hyper: right(batch, **hyper) + 1e-6),
    ("C10", ["adv_orthogonal"], lambda right, s, adv: right(s, adv) + 0.01 * adv),
    ("C18", ["grpo"], lambda right, batch: -right(batch)),
    ("C22", ["prefix_baseline"], lambda right, loss, batch, nodes: loss),
    ("AUDIT", ["pos_only"], lambda right, batch: losses.reinforce(batch)),
]


@pytest.mark.parametrize("id_, names, fault", FAULTS)
def test_a_claim_notices_a_fault_of_each_function_that_it_speaks_of(id_, names, fault, monkeypatch):
    for name in names:
        module = credit if name == "nthr_scores" else losses
        right = getattr(module, name)
        with monkeypatch.context() as patch:
            patch.setitem(CLAIMS, id_, (CLAIMS[id_][0], [name]))
            assert verify.check(id_, TREES).startswith("HOLDS")
            patch.setattr(module, name, functools.wraps(right)(functools.partial(fault, right)))
            assert verify.check(id_, TREES).startswith("WRONG")


def test_nothing_holds_by_itself(monkeypatch):
    equal([1.0, 0.0], [1 + 1e-11, 0.0])
    for wrong in (1 + 1e-9, math.nan, [1.0, 1.0]):
        with pytest.raises(AssertionError):
            equal(1, wrong)
    with pytest.raises(AssertionError):
        not_zero(torch.zeros(2))
    with pytest.raises(ValueError):
        claim("C9", "grpo")(None)
    half = (lambda name, tree: equal([1] * (name == "grpo"), [1] * (name == "grpo"))), ("grpo", "x")
    monkeypatch.setitem(CLAIMS, "X", half)
    assert verify.check("X", TREES) == "WRONG for x: nothing was compared"
    assert {x.kind for x in random_trees()} == {"", "steep", "wide", "long"}


def test_what_is_wrong_is_printed_and_is_the_exit_code(monkeypatch, capsys):
    assert verify.main(["c22B", "symbols", "q4"]) == 0
    out = capsys.readouterr().out
    assert "C22b  HOLDS, " in out and "three conditions" in out
    assert "Q4  proved, not measured" in out
    monkeypatch.setattr(losses, "min_replace", functools.partial(spoil, losses.min_replace))
    monkeypatch.setitem(losses.METHODS, "new", losses.Method((len,)))
    assert verify.main(["C9", "C10"]) == 1
    out = capsys.readouterr().out
    assert "\nC9  WRONG for min_replace, tree 0" in out and "\nC10  HOLDS, " in out
    assert "no claim checks len" in out
