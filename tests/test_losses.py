"""To whoever calls a loss: padding counts nowhere, methods are made of their papers' parts, and
what would go unnoticed is refused.

That each loss is its formula is claim M1; advantages are M3; the baseline is C22; credit rules are
A2, M6, N4 and I3; the tree is C15.

Run: python -m pytest -q tests/test_losses.py
"""

import math
from dataclasses import replace

import pytest
import torch

import losses
from claims.evidence import Tree
from losses import METHODS, Batch, bind, group_advantages, prefix_baseline, prefix_nodes

TREE = Tree(0, 5)  # three groups of seven answers
LOSSES = {f.__name__: f for method in METHODS.values() for f in method.passes}
LOSSES["cancelled"] = lambda batch: prefix_baseline(losses.grpo(batch), batch, TREE.nodes)
LOSSES["with kl"] = lambda batch: losses.grpo(batch, kl=0.3)


def make_batch():
    """Group 0 has losers only, as after a credit rule, and group 1 has no signal. In group 2 one
    answer is empty, and one has A = 0."""
    adv = TREE.rows(TREE.adv) * (1 + 0.5 * TREE.noise)
    adv[:7], adv[14] = -adv[:7].abs(), 0.0
    batch = TREE.batch(0.6, adv=adv)
    batch.mask[-1] = False
    return batch


def loss_and_grad(name, b):
    b = replace(b, logp=b.logp.detach().requires_grad_())
    loss = LOSSES[name](b)
    return loss.detach(), torch.autograd.grad(loss, b.logp)[0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_same_whatever_the_padding_holds(name):
    b = make_batch()
    clean = loss_and_grad(name, b)
    assert clean[1].isfinite().all() and clean[1].any()
    for tensor in ("logp", "logp_old", "logp_ref", "adv"):
        for garbage in (math.inf, -math.inf, math.nan):
            poisoned = replace(b, **{tensor: getattr(b, tensor).masked_fill(~b.mask, garbage)})
            torch.testing.assert_close(loss_and_grad(name, poisoned), clean, rtol=0, atol=1e-11)


def test_pushes_stay_finite_where_ratios_are_0():
    b = make_batch()
    assert loss_and_grad("cancelled", replace(b, logp_old=b.logp + 1000))[1].isfinite().all()


def test_nodes_of_a_large_vocabulary():
    """A short integer takes 65,537 for 1."""
    tokens = torch.tensor([[1, 151_999], [65_537, 151_999], [1, 20_927]])
    nodes = prefix_nodes(tokens, torch.ones(3, 2) > 0, 3)
    assert nodes.tolist() == [[0, 1], [2, 3], [0, 5]]


# ---------------- METHODS

# Losses, credit rule and repair. A method without a line here has one loss of its own name.
PARTS = {
    "lopti": "lopti_low lopti_high",
    "ar-lopti": "lopti_low lopti_high advantage_reweighting",
    "advantage-reweighting": "token_grpo advantage_reweighting",
    "nthr": "nthr_grpo nthr",
    "ibpo": "grpo ibpo shaped_rewards",
}


def test_a_method_has_its_papers_parts_and_scale():
    for name, method in METHODS.items():
        parts = [function.__name__ for function in losses.functions(method)]
        assert parts == PARTS.get(name, name.replace("-", "_")).split()
        assert method.scale == ("mean" if name == "dr-grpo" else "std")
        assert method.needs_scores == (name == "nthr")


def test_bind_fills_in_what_is_chosen_wherever_it_is_taken():
    bound = bind("lopti", {"eta": "0.3", "eps_high": 0.5})
    expected = {"eta": 0.3, "eps_low": 0.2, "eps_high": 0.5}
    assert [loss.keywords for loss in bound.passes] == [expected] * 2 and bound.hyper == expected
    assert bind("nthr", {"self_term": "true"}).credit.keywords["self_term"] is True
    assert bind("grpo", {"kl_ratio": "False"}).passes[0].keywords["kl_ratio"] is False
    assert bind("ibpo", {"bonus": "1"}).repair.keywords == {"bonus": 1.0, "weight": 0.6}


# ---------------- what would go unnoticed, and is refused

X, MASK, ANY = torch.zeros(4, 3), torch.ones(4, 3) > 0, make_batch()
WRONG = {
    "adv (N, 1), which would broadcast": lambda: Batch(X, X, X[:, :1], MASK, 2, 3),
    "rows that are not whole groups": lambda: Batch(X, X, X, MASK, 3, 3),
    "an unknown scale": lambda: group_advantages(X[:, 0], 2, "max"),
    "an unknown ratio": lambda: losses.dfpo_min(ANY, ratio="mean"),
    "a word for true or false": lambda: bind("grpo", {"kl_ratio": "no"}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_a_value_error(wrong):
    with pytest.raises(ValueError):
        WRONG[wrong]()
