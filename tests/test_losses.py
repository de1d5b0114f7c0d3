"""What no claim says of the losses: hostile padding, order, splitting, one token, none, errors.

That each loss is its formula is claim M1; here naive.py is a second opinion on a few hard batches:
unequal lengths, garbage in the padding, ratios on both sides of both clips, and an equal-reward
group between two mixed ones.
"""

import inspect
import math
from dataclasses import replace

import naive
import pytest
import torch

import losses
from losses import (
    METHODS,
    Batch,
    group_advantages,
    learning_tax,
    prefix_nodes,
    project,
    project_unbiased,
    token_coefficients,
)

LOSSES = {f.__name__: f for method in METHODS.values() for f in method.passes}
TOKEN_MEAN = ("dapo", "cispo", "token_grpo", "lopti_low", "lopti_high")
WIDE, NARROW = {"eps_low": 0.1, "eps_high": 0.5}, {"eps_low": 0.03, "eps_high": 0.06}
CASES = [(name, {}) for name in LOSSES]
CASES += [(name, WIDE) for name in ("grpo", "grpo_symmetric", "dr_grpo", "pos_only", *TOKEN_MEAN)]
CASES += [("lopti_low", {"eta": 0.2}), ("lopti_high", {"eta": 0.2}), ("gspo", NARROW)]
CASES += [("grpo", {"kl": 0.3}), ("grpo", {"kl": 0.3, **WIDE})]
DFPO = ("dfpo_min", "dfpo_orthogonal")
CASES += [
    (name, more) for name in DFPO for more in ({"ratio": "product"}, {"eps": 0.15}, {"eps": 0.0})
]
every_case = pytest.mark.parametrize("name, options", CASES, ids=str)


def make_batch(seed=0, groups=4, size=4, width=6, spread=0.4, credit=False):
    """Random rows. Group 1 has equal rewards, one answer of group 2 has A_i = 0."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    n = groups * size
    lengths = torch.randint(1, width + 1, (n,), generator=g)
    lengths[0], lengths[-1] = width, 1
    logp, adv = -3 * rand(n, width), rand(groups, size)
    adv -= adv.mean(1, keepdim=True)
    adv[1:2], adv[2:3, 0] = 0.0, 0.0
    adv = adv.view(n, 1)
    mask = torch.arange(width) < lengths[:, None]
    logp_old = logp + spread * (2 * rand(n, width) - 1)
    if credit:  # which may leave out all first tokens of a group
        adv = adv * rand(n, width)
        adv[2 * size : 3 * size, 0] = 0.0
    return Batch(
        logp=logp,
        logp_old=logp_old,
        adv=torch.where(mask, adv, rand(n, width)),
        mask=mask,
        group_size=size,
        max_tokens=width + 5,
        logp_ref=logp + rand(n, width) - 0.5,
    )


def loss_and_grad(name, b, **options):
    b = replace(b, logp=b.logp.clone().requires_grad_())
    loss = LOSSES[name](b, **options)
    return loss.detach(), torch.autograd.grad(loss, b.logp)[0]


def naive_loss_and_grad(name, b, **options):
    logp = b.logp.clone().requires_grad_()
    tensors = (logp, b.logp_old, b.adv, b.logp_ref)
    rows = [[x[i, : m.sum()] for i, m in enumerate(b.mask)] for x in tensors]
    loss = naive.loss(name, *rows, b.group_size, b.max_tokens, **options)
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


def assert_same(pair, expected):
    for x, y in zip(pair, expected, strict=True):
        torch.testing.assert_close(x, torch.as_tensor(y, dtype=x.dtype), rtol=1e-11, atol=1e-14)


@every_case
def test_value_and_gradient_are_the_naive_ones(name, options):
    for spread, credit in ((0.0, False), (0.02, True), (0.7, True)):  # on-policy, near it, far
        b = make_batch(seed=1, size=5, spread=spread, credit=credit)
        assert_same(loss_and_grad(name, b, **options), naive_loss_and_grad(name, b, **options))


@every_case
def test_one_token_answers_and_an_empty_one(name, options):
    for b in (make_batch(seed=3, width=1), make_batch(seed=11)):
        b.mask[9] = False
        assert_same(loss_and_grad(name, b, **options), naive_loss_and_grad(name, b, **options))


# ---------------- invariances


@every_case
def test_padding_width_changes_nothing(name, options):
    b = make_batch(seed=5)
    seven, false = torch.full((16, 3), 7.0), torch.zeros(16, 3, dtype=torch.bool)
    pad = {"logp": seven, "logp_old": seven, "adv": seven, "logp_ref": seven, "mask": false}
    wide = replace(b, **{k: torch.cat([getattr(b, k), x], 1) for k, x in pad.items()})
    loss, grad = loss_and_grad(name, b, **options)
    expected = (loss, torch.cat([grad, torch.zeros(16, 3)], 1))
    assert_same(loss_and_grad(name, wide, **options), expected)


@every_case
def test_what_the_padding_holds_changes_nothing(name, options):
    b = make_batch(seed=8)
    for tensor in ("logp", "logp_old", "logp_ref", "adv"):
        for value in (1e4, -1e4, math.inf, -math.inf, math.nan):
            poisoned = replace(b, **{tensor: getattr(b, tensor).masked_fill(~b.mask, value)})
            assert_same(loss_and_grad(name, poisoned, **options), loss_and_grad(name, b, **options))


@every_case
def test_order_of_rows_in_a_group_and_of_groups_changes_nothing(name, options):
    b = make_batch(seed=6)
    loss, grad = loss_and_grad(name, b, **options)
    within = torch.tensor([2, 0, 3, 1, 4, 7, 6, 5, 9, 8, 11, 10, 15, 12, 13, 14])
    between = torch.arange(16).view(4, 4)[[2, 0, 3, 1]].flatten()
    for order in (within, between):
        assert_same(loss_and_grad(name, b[order], **options), (loss, grad[order]))


@every_case
def test_batches_of_whole_groups_add_up(name, options):
    b, total, grads = make_batch(seed=7), 0.0, []
    size = b.mask.float() if name in TOKEN_MEAN else torch.ones(16, 1)  # what the mean divides by
    size[4:8] *= name != "dapo"  # group 1 has equal rewards
    for part in (slice(0, 4), slice(4, 8), slice(8, 16)):
        weight = size[part].sum().double() / size.sum()
        loss, grad = loss_and_grad(name, b[part], **options)
        total, grads = total + weight * loss, grads + [weight * grad]
    assert_same((total, torch.cat(grads)), loss_and_grad(name, b, **options))


@every_case
def test_all_zero_advantages_or_an_all_false_mask_give_exactly_zero(name, options):
    b = make_batch(seed=9)
    zero_adv, no_token = replace(b, adv=b.adv * 0), replace(b, mask=b.mask & False)
    no_kl = {k: v for k, v in options.items() if k != "kl"}
    for empty, given in ((zero_adv, no_kl), (no_token, options)):
        loss, grad = loss_and_grad(name, empty, **given)
        assert loss == 0 and (grad == 0).all()


def test_the_ratio_of_padding_is_one():
    b = make_batch()
    assert (losses.token_ratio(b)[~b.mask] == 1).all()


# ---------------- by hand


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", ["std", "mean"])
def test_a_group_of_equal_rewards_gets_exactly_zero_and_its_neighbour_does_not(scale, dtype):
    for size in (2, 3, 7, 8, 31, 64):
        for reward in (0.1, 0.3, 1.0, 1 / 3, 1e6 + 0.1):
            rewards = torch.cat([torch.full((size,), reward), torch.arange(size) / 7]).to(dtype)
            adv = group_advantages(rewards, size, scale)
            assert (adv[:size] == 0).all() and adv[size] < 0 < adv[-1]
            assert group_advantages(rewards, size).equal(adv) == (scale == "std")


def test_kl_term_is_k3_and_needs_a_reference():
    b = make_batch(groups=1, size=2, width=1)
    b = replace(b, adv=b.adv * 0, logp_ref=b.logp - math.log(2))
    # q = 1/2: k3 = q - log q - 1 = 1/2 + log 2 - 1, and dk3 / dlogp = 1 - q
    expected = 0.1 * (math.log(2) - 0.5), [[0.1 * 0.5 / 2]] * 2
    assert_same(loss_and_grad("grpo", b, kl=0.1), expected)
    losses.grpo(replace(b, logp_ref=None))  # kl = 0 needs none
    with pytest.raises(ValueError, match="logp_ref"):
        losses.grpo(replace(b, logp_ref=None), kl=0.1)


@pytest.mark.parametrize("context", [1, 2, 3, 99])
def test_with_a_context_nodes_are_equal_iff_group_and_last_tokens_are(context):
    b = make_batch(groups=3, size=4, width=6)
    tokens = torch.randint(0, 2, (12, 6), generator=torch.Generator().manual_seed(0))
    tokens[1] = tokens[0]  # but for the first token
    tokens[1, 0] += 2
    b.mask[:2] = True
    nodes, pairs = prefix_nodes(tokens, b.mask, 4, context), set()
    for i, t in b.mask.nonzero().tolist():
        last = (*tokens[i, max(0, t + 1 - context) : t + 1].tolist(),)
        place = t if len(last) < context else None  # the start of the answer is part of it
        pairs.add(((i // 4, last, place), nodes[i, t].item()))
    assert len(pairs) == len({key for key, _ in pairs}) == len({node for _, node in pairs})
    assert (nodes[~b.mask] == -1).all() and (nodes[b.mask] >= 0).all()
    with pytest.raises(ValueError, match="context must be at least 1"):
        prefix_nodes(tokens, b.mask, 4, 0)


def test_learning_tax_and_projection_by_hand():
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 2, 3]])
    A, mask = torch.tensor([2.0, -1.0, -1.0, 0.0]), torch.ones(4, 3, dtype=torch.bool)
    c = torch.tensor([[2.0, 2.0, 9.0], [-3.0, -3.0, 9.0], [-1.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    # token 1: w = 1, 3, 1, tax = -2 of 6. token 2: w = 1, 3, tax = -1 - 2 * 1 = -3 of 5. Other
    # nodes have one visitor.
    nodes = prefix_nodes(tokens, mask, 4)
    tax = learning_tax(c, A, nodes, mask)
    assert isinstance(tax, float) and tax == pytest.approx(5 / 11)
    logp = torch.zeros(4, 3, requires_grad=True)
    new = token_coefficients(project(-(c * logp).sum() / 4, logp, A, nodes, mask), logp)
    expected = [[10 / 3, 4.0, 9.0], [-5 / 3, -2.0, 9.0], [-5 / 3, 9.0, 9.0], [9.0, 9.0, 9.0]]
    assert new.flatten().tolist() == pytest.approx(sum(expected, []))
    assert learning_tax(new, A, nodes, mask) < 1e-6
    # unbiased: three answers count, so token 1 is fully shared, and at token 2 k = (1 - 2/3) / 1.
    batch = Batch(logp, logp.detach(), A[:, None].expand(4, 3), mask, 4, 3)
    new = token_coefficients(project_unbiased(-(c * logp).sum() / 4, batch, A, nodes), logp)
    expected[0][1], expected[1][1] = 2 * (2 + 1 / 3), -(2 - 1 / 3)
    assert new.flatten().tolist() == pytest.approx(sum(expected, []))


@every_case
def test_the_projection_of_a_loss_takes_its_tax_whatever_the_padding_holds(name, options):
    b = make_batch(groups=2, size=8)
    tokens = torch.randint(0, 2, (16, 6), generator=torch.Generator().manual_seed(0))
    b = replace(b, logp=b.logp.masked_fill(~b.mask, math.nan).requires_grad_())
    nodes, A = prefix_nodes(tokens, b.mask, 8), b.adv[:, 0].clone()
    loss = LOSSES[name](b, **options)
    for projected in (project(loss, b.logp, A, nodes, b.mask), project_unbiased(loss, b, A, nodes)):
        c = token_coefficients(projected, b.logp)
        assert projected.isfinite() and (c[~b.mask] == 0).all() and c.isfinite().all()
    c = token_coefficients(project(loss, b.logp, A, nodes, b.mask), b.logp)
    assert learning_tax(c, A, nodes, b.mask) < 1e-12


# ---------------- defaults

CLIP = {"eps_low": 0.2, "eps_high": 0.2}  # PPO's and GRPO's; ours where a paper names none
WIDER_CLIP = {"eps_low": 0.2, "eps_high": 0.24}  # all scripts of AR/Lopti's authors
EVERY_READING = {"beta": 1.0, "self_term": True, "full_vocab": False}  # ours: the paper is open
DEFAULTS = {
    "group_advantages": {"scale": "std"},  # GRPO sec. 4.1.2
    "sequence_ratio": {"kind": "geometric"},  # GSPO Eq. 7
    "grpo": CLIP | {"kl": 0.0},  # off; in the paper 0.04
    "dapo": {"eps_low": 0.2, "eps_high": 0.28},  # DAPO sec. 4.1
    "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},  # GSPO sec. 5.1
    "cispo": {"eps_low": 1.0, "eps_high": 4.0},  # no lower bound: MiniMax-M1; r <= 5: ScaleRL
    **dict.fromkeys(("grpo_symmetric", "dr_grpo", "pos_only"), CLIP),
    **dict.fromkeys(DFPO, {"ratio": "geometric", "eps": math.inf}),  # ours; DFPO has no clip
    "token_grpo": WIDER_CLIP,
    **dict.fromkeys(("lopti_low", "lopti_high"), {"eta": 0.5} | WIDER_CLIP),
    "advantage_reweighting": {"alpha": 0.3},  # AR/Lopti; 0.1 for maths
    # -1 stands for NTHR's 2|0.5 - p|
    **dict.fromkeys(("nthr", "nthr_random"), EVERY_READING | {"eta": -1.0}),
    "nthr_selected": EVERY_READING,
    "nthr_scores": {"self_term": True, "full_vocab": False},
    "shaped_rewards": {"bonus": 0.5, "weight": 0.6},  # IBPO, second-hand
    "ibpo": {"reading": "sign"},  # ours
    "prefix_nodes": {"context": None},
    "Batch": {"logp_ref": None},
    "OldPolicy": {"temperature": 1.0}
    | dict.fromkeys(("hidden", "head", "gen"))
    | dict.fromkeys(("kept_mask", "repaired")),
    "Method": {"scale": "std", "credit": None, "needs_hidden": False, "repair": None},
}


def test_the_defaults_are_those_of_the_papers():
    for name, function in vars(losses).items():
        if getattr(function, "__module__", "") == losses.__name__ and not name.startswith("_"):
            parameters = inspect.signature(function).parameters.values()
            given = {x.name: x.default for x in parameters if x.default is not x.empty}
            assert given == DEFAULTS.get(name, {}), name


# ---------------- errors say what is wrong


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logp_old": torch.zeros(4, 2)}, r"logp_old .*\(4, 2\).*\(4, 3\)"),
        ({"adv": torch.zeros(4)}, r"adv .*\(4,\).*\(4, 3\)"),
        ({"mask": torch.ones(3, 3).bool()}, r"mask .*\(3, 3\).*\(4, 3\)"),
        ({"logp_ref": torch.zeros(4, 4)}, r"logp_ref .*\(4, 4\).*\(4, 3\)"),
        ({"mask": torch.ones(4, 3)}, "mask bool, .*float32"),
        ({"group_size": 3}, "4 rows .*group_size 3"),
        ({"group_size": 1}, "group_size 1"),
        ({"max_tokens": 0}, "max_tokens .*0"),
        (dict.fromkeys(("logp", "logp_old", "adv", "mask"), torch.zeros(0, 3).bool()), "0 rows"),
        (dict.fromkeys(("logp", "logp_old", "adv", "mask"), torch.ones(4).bool()), "1-d"),
    ],
)
def test_a_bad_batch_is_refused(change, message):
    good = dict.fromkeys(("logp", "logp_old", "adv"), torch.zeros(4, 3))
    good |= {"mask": torch.ones(4, 3).bool(), "group_size": 2, "max_tokens": 3}
    Batch(**good)
    with pytest.raises(ValueError, match=message):
        Batch(**good | change)


def test_bad_arguments_are_refused():
    for rewards, size, scale, message in (
        (torch.ones(4), 1, "std", "group_size .*1"),
        (torch.ones(4), 3, "std", r"\(4,\).* 3"),
        (torch.ones(4, 1), 2, "std", r"\(4, 1\)"),
        (torch.ones(4).long(), 2, "mean", "int64"),
        (torch.ones(4), 2, "max", "std.*mean.*'max'"),
    ):
        with pytest.raises(ValueError, match=message):
            group_advantages(rewards, size, scale)
    with pytest.raises(ValueError, match="geometric.*product.*'arithmetic'"):
        losses.dfpo_min(make_batch(), ratio="arithmetic")
