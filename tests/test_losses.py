"""To whoever calls a loss: padding counts nowhere, defaults are the papers', and mistakes are said.

That each loss is its formula is claim M1; advantages are M3; the baseline is C22; credit rules are
A2, M6, N4 and I3; the tree is C15. That a step follows a method's credit and repair: test_step.py.
"""

import math
from dataclasses import replace

import pytest
import torch

import losses
from claims.evidence import Draw
from llm.credit import nthr_scores
from losses import METHODS, Batch, bind, defaults, group_advantages, prefix_baseline

DRAW = Draw(0, 5)  # three groups of seven answers
LOSSES = {f.__name__: f for method in METHODS.values() for f in method.passes}
LOSSES["cancelled"] = lambda batch: prefix_baseline(losses.grpo(batch), batch, DRAW.nodes)
LOSSES["with kl"] = lambda batch: losses.grpo(batch, kl=0.3)


def make_batch():
    """Group 0 has losers only, as after a credit rule, and group 1 has no signal. In group 2 one
    answer is empty, and one has A = 0."""
    adv = DRAW.rows(DRAW.adv) * (1 + 0.5 * DRAW.noise)
    adv[:7], adv[14] = -adv[:7].abs(), 0.0
    batch = DRAW.batch(0.6, adv=adv)
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


# ---------------- METHODS

CLIP = {"eps_low": 0.2, "eps_high": 0.2}  # PPO's and GRPO's; ours where a paper names none
WIDER_CLIP = {"eps_low": 0.2, "eps_high": 0.24}  # all scripts of AR/Lopti's authors
DEFAULTS = {
    "group_advantages": {"scale": "std"},  # GRPO sec. 4.1.2
    "sequence_ratio": {"ratio": "geometric"},  # GSPO Eq. 7
    "reinforce": {},
    "grpo": CLIP | {"kl": 0.0, "kl_ratio": False},  # off; in the paper kl is 0.04
    "grpo_symmetric": CLIP,
    "dr_grpo": CLIP,
    "dapo": {"eps_low": 0.2, "eps_high": 0.28},  # DAPO sec. 4.1
    "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},  # GSPO sec. 5.1
    "cispo": {"eps_low": 1.0, "eps_high": 4.0},  # no lower bound: MiniMax-M1; r <= 5: ScaleRL
    "dfpo_min": {"ratio": "geometric", "eps": math.inf},  # ours; DFPO has no clip
    "dfpo_orthogonal": {"ratio": "geometric", "eps": math.inf},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},  # TRL's and verl's
    "pos_only": CLIP,
    "nthr_grpo": CLIP,  # NTHR's, not AR's .24
    "token_grpo": WIDER_CLIP,
    "lopti_low": {"eta": 0.5} | WIDER_CLIP,
    "lopti_high": {"eta": 0.5} | WIDER_CLIP,
    "advantage_reweighting": {"alpha": 0.3},  # with Lopti; 0.2 alone, 0.1 for maths
    "nthr": {"beta": 1.0, "eta": None, "self_term": False},  # None: NTHR's 2|0.5 - p|
    "shaped_rewards": {"bonus": 0.5, "weight": 0.6},  # IBPO, second-hand
    "ibpo": {"reading": "sign"},  # ours
}
# Losses, credit rule and repair. A method without a line here has one loss of its own name. One of
# your own may have any.
PARTS = {
    "lopti": "lopti_low lopti_high",
    "ar-lopti": "lopti_low lopti_high advantage_reweighting",
    "advantage-reweighting": "token_grpo advantage_reweighting",
    "nthr": "nthr_grpo nthr",
    "ibpo": "grpo ibpo shaped_rewards",
}


def test_the_defaults_are_those_of_the_papers():
    assert {name: defaults(getattr(losses, name)) for name in DEFAULTS} == DEFAULTS
    assert not defaults(nthr_scores)["full_vocab"]  # only the ids that occur in the group


def test_a_method_has_its_papers_parts_and_scale():
    for name, method in METHODS.items():
        own = name.replace("-", "_")
        if name in PARTS or own in DEFAULTS:
            parts = [function.__name__ for function in losses.functions(method)]
            assert parts == PARTS.get(name, own).split()
            assert method.scale == ("mean" if name == "dr-grpo" else "std")


def test_bind_fills_in_what_is_chosen_wherever_it_is_taken():
    bound = bind("lopti", {"eta": "0.3", "eps_high": 0.5})
    expected = {"eta": 0.3, "eps_low": 0.2, "eps_high": 0.5}
    assert [loss.keywords for loss in bound.passes] == [expected] * 2 and bound.hyper == expected
    assert bind("nthr", {"self_term": "true"}).credit.keywords["self_term"] is True
    assert bind("ibpo", {"bonus": "1"}).repair.keywords == {"bonus": 1.0, "weight": 0.6}


# ---------------- what would go unnoticed, and is refused. Other hyperparameters: test_run.py

X, MASK = torch.zeros(4, 3), torch.ones(4, 3) > 0
WRONG = {
    "adv (N, 1), which would broadcast": lambda: Batch(X, X, X[:, :1], MASK, 2, 3),
    "groups of one": lambda: group_advantages(X[:, 0], 1),
    "rows that are not whole groups": lambda: Batch(X, X, X, MASK, 3, 3),
    "near misses as good as right answers": lambda: losses.shaped_rewards(X[0], MASK[0], 2, 0.5),
    "an unknown scale": lambda: group_advantages(X[:, 0], 2, "max"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_a_value_error(wrong):
    with pytest.raises(ValueError):
        WRONG[wrong]()
