"""To whoever calls a loss: padding counts nowhere, and what would go unnoticed is refused.

That each loss is its formula is claim M1; advantages are M3; the baseline is C22; credit rules are
A2, M6, N4 and I3; the tree is C15.
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


def loss_and_pushes(name, **garbage):
    batch = TREE.batch(0.6)
    for key, x in garbage.items():
        batch = replace(batch, **{key: getattr(batch, key).masked_fill(~batch.mask, x)})
    batch = replace(batch, logp=batch.logp.detach().requires_grad_())
    loss = LOSSES[name](batch)
    return loss.detach(), losses.token_pushes(loss, batch.logp)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_same_whatever_the_padding_holds(name):
    clean = loss_and_pushes(name)
    assert clean[1].isfinite().all() and clean[1].any()
    for key in ("logp", "logp_old", "logp_ref", "adv"):
        for x in (math.inf, -math.inf, math.nan):
            found = loss_and_pushes(name, **{key: x})
            torch.testing.assert_close(found, clean, rtol=0, atol=1e-11)


def test_pushes_stay_finite_where_ratios_are_0():
    batch = TREE.batch()
    batch.logp_old = batch.logp_old + 1000
    assert losses.token_pushes(LOSSES["cancelled"](batch), batch.logp).isfinite().all()


def test_nodes_of_a_large_vocabulary():
    """A short integer takes 65,537 for 1."""
    tokens = torch.tensor([[1, 151_999], [65_537, 151_999], [1, 20_927]])
    nodes = prefix_nodes(tokens, torch.ones(3, 2) > 0, 3)
    assert nodes.tolist() == [[0, 1], [2, 3], [0, 5]]


def test_bind_fills_in_what_is_chosen_wherever_it_is_taken():
    bound = bind("lopti", {"eta": "0.3", "eps_high": 0.5})
    expected = {"eta": 0.3, "eps_low": 0.2, "eps_high": 0.5}
    assert [loss.keywords for loss in bound.passes] == [expected] * 2 and bound.hyper == expected
    assert [loss.func for loss in bound.passes] == [losses.lopti_low, losses.lopti_high]
    assert bind("nthr", {"self_term": "true", "eta": "1"}).credit.keywords["eta"] == 1.0
    assert bind("grpo", {"kl_ratio": "False"}).passes[0].keywords["kl_ratio"] is False
    assert bind("ibpo", {"bonus": "1"}).repair.keywords == {"bonus": 1.0, "weight": 0.6}


# ---------------- what would go unnoticed, and is refused

X, MASK = torch.zeros(4, 3), torch.ones(4, 3) > 0
WRONG = {
    "adv (N, 1), which would broadcast": lambda: Batch(X, X, X[:, :1], MASK, 2, 3),
    "rows that are not whole groups": lambda: Batch(X, X, X, MASK, 3, 3),
    "an unknown scale": lambda: group_advantages(X[:, 0], 2, "max"),
    "an unknown ratio": lambda: losses.dfpo_min(Batch(X, X, X, MASK, 2, 3), ratio="mean"),
    "a word for true or false": lambda: bind("grpo", {"kl_ratio": "no"}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_a_value_error(wrong):
    with pytest.raises(ValueError):
        WRONG[wrong]()
