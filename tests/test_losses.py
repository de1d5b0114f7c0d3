"""Every loss against its formula, worked out one token at a time in plain Python (theory.md,
sections 1 to 3).

`naive` is the second opinion: a double loop over floats that returns the loss and its derivative, no tensor algebra and
no autograd. The batches are hard on purpose: unequal lengths, garbage in the padding, ratios on both sides of both
clips, an equal-reward group between two mixed ones.
"""

import math
import statistics
from collections import defaultdict
from dataclasses import replace

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
    token_coefficients,
)

EPS = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}  # every other clip is (0.2, 0.2)
SEQ_MEAN, TOKEN_MEAN = (
    ("grpo", "gspo", "pos-only"),
    ("dapo", "token-grpo", "lopti-low", "lopti-high"),
)
LOSSES = {
    f.__name__.replace("_", "-"): f for method in METHODS.values() for f in method.passes
}  # others: 1/(N L)
WIDE, NARROW = {"eps_low": 0.1, "eps_high": 0.5}, {"eps_low": 0.03, "eps_high": 0.06}
CASES = (
    [(name, {}) for name in LOSSES]
    + [
        (name, WIDE)
        for name in ("grpo", "grpo-symmetric", "dr-grpo", "dapo", "pos-only", *TOKEN_MEAN[1:])
    ]
    + [(name, {"eta": 0.2}) for name in ("lopti-low", "lopti-high")]
    + [("gspo", NARROW), ("grpo", {"kl": 0.3}), ("grpo", {"kl": 0.3, **WIDE})]
    + [
        (name, more)
        for name in ("dfpo-min", "dfpo-orthogonal")
        for more in ({"ratio": "product"}, {"eps": 0.15})
    ]
)
every_case = pytest.mark.parametrize(
    "name, options", CASES, ids=[f"{n}-{o}" if o else n for n, o in CASES]
)


# ---------------- the second opinion


def ppo(r, a, low, high):
    """min(r a, clip(r) a) and its derivative in log r: flat above 1+high for a winner, below 1-low
    for a loser."""
    if a > 0 and r > 1 + high:
        return (1 + high) * a, 0.0
    if a < 0 and r < 1 - low:
        return (1 - low) * a, 0.0
    return r * a, r * a


def naive(name, b, eps_low=None, eps_high=None, kl=0.0, ratio="geometric", eta=0.5, eps=None):
    """(loss, dloss/dlogp) in floats; A_i, where a formula wants one per answer, is the mean over
    the answer."""
    low, high = EPS.get(name, (0.2, 0.2)) if eps_low is None else (eps_low, eps_high)
    logp, old, ref, adv = (x.tolist() for x in (b.logp, b.logp_old, b.logp_ref, b.adv))
    n, T = len(logp), [sum(row) for row in b.mask.tolist()]
    group = [range(i - i % b.group_size, i - i % b.group_size + b.group_size) for i in range(n)]
    A = [sum(adv[i][: T[i]]) / max(T[i], 1) for i in range(n)]
    s = [sum(logp[i][t] - old[i][t] for t in range(T[i])) for i in range(n)]
    s = [math.exp(s[i] if ratio == "product" else s[i] / max(T[i], 1)) for i in range(n)]
    mixed = [any(adv[j][t] != 0 for j in group[i] for t in range(T[j])) for i in range(n)]
    loss, grad = 0.0, torch.zeros_like(b.logp)
    for i in range(n):
        for t in range(T[i]):
            a, r, w = adv[i][t], math.exp(logp[i][t] - old[i][t]), 1.0
            if name == "dfpo-min":
                w = min(s[j] for j in group[i])
            if name == "dfpo-orthogonal" and mixed[i]:
                w = s[i] - A[i] * sum(A[j] * s[j] for j in group[i]) / sum(
                    A[j] ** 2 for j in group[i]
                )
            if name in ("reinforce", "dfpo-min", "dfpo-orthogonal"):
                j, c = w * a * logp[i][t], w * a
            elif name == "grpo-symmetric":
                inside = 1 - low <= r <= 1 + high
                j, c = min(max(r, 1 - low), 1 + high) * a, r * a if inside else 0.0
            elif name == "gspo":
                j, c = ppo(s[i], A[i], low, high)
            else:
                j, c = ppo(r, max(a, 0.0) if name == "pos-only" else a, low, high)
            if eps and not 1 - eps <= r <= 1 + eps:
                j, c = 0.0, 0.0
            if name.startswith("lopti") and (math.exp(old[i][t]) <= eta) != (name == "lopti-low"):
                j, c = 0.0, 0.0
            log_q = ref[i][t] - logp[i][t]
            j, c = j - kl * (math.exp(log_q) - log_q - 1), c - kl * (1 - math.exp(log_q))
            if name in SEQ_MEAN:
                share = 1 / n / T[i]
            elif name in TOKEN_MEAN:
                counted = [
                    name != "dapo" or mixed[k] for k in range(n)
                ]  # dapo leaves equal-reward groups out
                share = counted[i] / sum(T[k] for k in range(n) if counted[k])
            else:
                share = 1 / n / b.max_tokens
            loss, grad[i, t] = loss - share * j, -share * c
    return loss, grad


def make_batch(seed=0, groups=4, size=4, width=6, spread=0.4, credit=False):
    """Random rows; group 1 has equal rewards, one answer of group 2 has A_i = 0; the padding holds
    garbage."""
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
    return Batch(
        logp=logp,
        logp_old=logp + spread * (2 * rand(n, width) - 1),
        adv=torch.where(mask, adv * (rand(n, width) if credit else 1.0), rand(n, width)),
        mask=mask,
        group_size=size,
        max_tokens=width + 5,
        logp_ref=logp + rand(n, width) - 0.5,
    )


def loss_and_grad(name, b, **options):
    b = replace(b, logp=b.logp.clone().requires_grad_())
    loss = LOSSES[name](b, **options)
    return loss.detach(), torch.autograd.grad(loss, b.logp)[0]


def assert_same(pair, expected):
    for x, y in zip(pair, expected, strict=True):
        torch.testing.assert_close(x, torch.as_tensor(y, dtype=x.dtype), rtol=1e-11, atol=1e-14)


# ---------------- value and gradient


@every_case
def test_value_and_gradient_are_the_formula(name, options):
    for size in range(2, 9):
        for spread in (0.0, 0.02, 0.7):  # on-policy, near it, far from it
            for credit in (False, True):
                b = make_batch(seed=size, size=size, spread=spread, credit=credit)
                assert_same(loss_and_grad(name, b, **options), naive(name, b, **options))


def test_these_batches_reach_both_sides_of_both_clips_for_winners_and_losers():
    b = make_batch(seed=1, size=8, spread=0.7)
    log_ratio = (b.logp - b.logp_old).masked_fill(~b.mask, 0.0)
    r, s = log_ratio.exp(), (log_ratio.sum(1) / b.mask.sum(1)).exp()[:, None].expand_as(b.mask)
    for sign in (1, -1):
        who = b.mask & (sign * b.adv > 0)
        assert all(
            (x[who] > 1.5).any() and (x[who] < 0.8).any() and ((x[who] - 1).abs() < 0.1).any()
            for x in (r, s)
        )


@pytest.mark.parametrize("name, options", [c for c in CASES if "dfpo" not in c[0]], ids=str)
def test_the_second_opinion_agrees_with_itself(name, options):
    b, h = (
        make_batch(seed=1, groups=2, size=2, width=3),
        1e-6,
    )  # dfpo is left out: its weight is not differentiated
    for i, t in b.mask.nonzero().tolist():
        step = torch.zeros_like(b.logp)
        step[i, t] = h
        up, down = (naive(name, replace(b, logp=b.logp + d), **options)[0] for d in (step, -step))
        assert (up - down) / (2 * h) == pytest.approx(
            naive(name, b, **options)[1][i, t].item(), abs=1e-8
        )


def test_the_methods_are_one_pass_each_and_only_dr_grpo_keeps_the_scale_of_the_rewards():
    base = (
        "reinforce grpo grpo-symmetric dr-grpo dapo gspo dfpo-min dfpo-orthogonal pos-only".split()
    )
    assert set(base) <= set(METHODS)
    for name in base:
        assert (
            METHODS[name].passes[0].__name__ == name.replace("-", "_")
            and len(METHODS[name].passes) == 1
        )
        assert (
            METHODS[name].scale == ("mean" if name == "dr-grpo" else "std")
            and METHODS[name].credit is None
        )


def test_kl_term_is_k3_and_needs_a_reference():
    b = make_batch(groups=1, size=2, width=1)
    b = replace(
        b, adv=b.adv * 0, logp_ref=b.logp - math.log(2)
    )  # q = 1/2: k3 = 1/2 + log 2 - 1, dk3/dlogp = 1 - q
    assert_same(
        loss_and_grad("grpo", b, kl=0.1), (0.1 * (math.log(2) - 0.5), [[0.1 * 0.5 / 2]] * 2)
    )
    losses.grpo(replace(b, logp_ref=None))  # kl = 0 needs none
    with pytest.raises(ValueError, match="logp_ref"):
        losses.grpo(replace(b, logp_ref=None), kl=0.1)


# ---------------- invariances


@every_case
def test_padding_width_changes_nothing(name, options):
    b = make_batch(seed=5)
    seven, false = torch.full((16, 3), 7.0), torch.zeros(16, 3, dtype=torch.bool)
    pad = {"logp": seven, "logp_old": seven, "adv": seven, "logp_ref": seven, "mask": false}
    wide = replace(b, **{k: torch.cat([getattr(b, k), x], 1) for k, x in pad.items()})
    loss, grad = loss_and_grad(name, b, **options)
    assert_same(
        loss_and_grad(name, wide, **options), (loss, torch.cat([grad, torch.zeros(16, 3)], 1))
    )


@every_case
def test_order_of_rows_in_a_group_and_of_groups_changes_nothing(name, options):
    b = make_batch(seed=6)
    loss, grad = loss_and_grad(name, b, **options)
    within = torch.tensor([2, 0, 3, 1, 4, 7, 6, 5, 9, 8, 11, 10, 15, 12, 13, 14])
    between = torch.arange(16).view(4, 4)[[2, 0, 3, 1]].flatten()
    for order in (within, between):
        assert_same(loss_and_grad(name, b[order], **options), (loss, grad[order]))


@every_case
def test_micro_batches_of_whole_groups_add_up(name, options):
    b, total, grads = make_batch(seed=7), 0.0, []
    size = (
        b.mask.float() if name in TOKEN_MEAN else torch.ones(16, 1)
    )  # what the average divides by
    size[4:8] *= name != "dapo"  # group 1 has equal rewards
    for part in (slice(0, 4), slice(4, 8), slice(8, 16)):
        weight = size[part].sum().double() / size.sum()
        loss, grad = loss_and_grad(name, b[part], **options)
        total, grads = total + weight * loss, grads + [weight * grad]
    assert_same((total, torch.cat(grads)), loss_and_grad(name, b, **options))


@every_case
def test_what_the_padding_holds_changes_nothing(name, options):
    b = make_batch(seed=8)
    for tensor in ("logp", "logp_old", "logp_ref", "adv"):
        for value in (1e4, -1e4, math.inf, -math.inf, math.nan):
            poisoned = replace(b, **{tensor: getattr(b, tensor).masked_fill(~b.mask, value)})
            assert_same(loss_and_grad(name, poisoned, **options), loss_and_grad(name, b, **options))


@every_case
def test_all_zero_advantages_or_an_all_false_mask_give_exactly_zero(name, options):
    b = make_batch(seed=9)
    no_kl = {k: v for k, v in options.items() if k != "kl"}
    zero_adv, no_token = replace(b, adv=b.adv * 0), replace(b, mask=b.mask & False)
    for loss, grad in (
        loss_and_grad(name, zero_adv, **no_kl),
        loss_and_grad(name, no_token, **options),
    ):
        assert loss == 0 and (grad == 0).all()


@every_case
def test_one_token_answers_and_an_empty_one(name, options):
    for b in (make_batch(seed=3, width=1), make_batch(seed=11)):
        b.mask[9] = False
        assert_same(loss_and_grad(name, b, **options), naive(name, b, **options))


@pytest.mark.parametrize("name", ["reinforce", "grpo-symmetric", "dfpo-min", "dfpo-orthogonal"])
def test_without_a_min_the_loss_is_odd_in_the_advantages(name):
    b = make_batch(seed=12)
    loss, grad = loss_and_grad(name, b)
    assert_same(loss_and_grad(name, replace(b, adv=-b.adv)), (-loss, -grad))


# ---------------- advantages and weight transforms


def test_advantages_are_the_rewards_less_the_mean_over_the_unbiased_std():
    rewards = torch.tensor([1, 0, 0, 1, 0.5, 2, -1, 7], dtype=torch.float64)
    groups = [rewards[:4].tolist(), rewards[4:].tolist()]
    mean = [r - statistics.mean(g) for g in groups for r in g]
    std = [(r - statistics.mean(g)) / (statistics.stdev(g) + 1e-4) for g in groups for r in g]
    assert group_advantages(rewards, 4, "mean").tolist() == pytest.approx(mean, abs=1e-12)
    assert group_advantages(rewards, 4, "std").tolist() == pytest.approx(std, abs=1e-12)
    assert group_advantages(rewards[:2], 2, "std").tolist() == pytest.approx(
        [0.5 / (0.5**0.5 + 1e-4), -0.70700679]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", ["std", "mean"])
def test_a_group_of_equal_rewards_gets_exactly_zero_and_its_neighbour_does_not(scale, dtype):
    for size in range(2, 65):
        for reward in (0.1, 0.3, 1.0, 1 / 3, 1e6 + 0.1):
            rewards = torch.cat([torch.full((size,), reward), torch.arange(size) / 7]).to(dtype)
            adv = group_advantages(rewards, size, scale)
            assert (adv[:size] == 0).all() and adv[size] < 0 < adv[-1]


def test_min_replace_is_the_smallest_weight_of_each_group():
    w, adv = torch.tensor([[3.0, 1.0, 2.0], [5.0, 6.0, 4.0]], requires_grad=True), torch.ones(2, 3)
    new = losses.min_replace(w, adv)
    assert new.tolist() == [[1, 1, 1], [4, 4, 4]] and not new.requires_grad


def test_adv_orthogonal_by_hand():
    adv = torch.tensor([[1.0] * 4 + [-1.0] * 4], dtype=torch.float64)
    w = torch.tensor([[3.0] + [0.1] * 7], dtype=torch.float64, requires_grad=True)
    new = losses.adv_orthogonal(w, adv)  # A.w / ||A||^2 = 2.9 / 8 = 0.3625
    assert new.tolist()[0] == pytest.approx([2.6375] + [-0.2625] * 3 + [0.4625] * 4)
    assert not new.requires_grad and new.sum().item() == pytest.approx(w.sum().item())
    assert (
        abs((new * adv).sum()) < 1e-12 < 1 < abs((new * adv)[0, [0, 4]].sum())
    )  # whole group yes, subset no
    assert losses.adv_orthogonal(w, adv * 0).equal(w)
    pair = losses.adv_orthogonal(
        torch.tensor([[3.0, 1.0], [2.0, 2.0]]), torch.tensor([[0.7, -0.7], [1.0, -1.0]])
    )
    assert pair.flatten().tolist() == pytest.approx([2, 2, 2, 2])  # G = 2: the mean weight


# ---------------- the meter


def naive_nodes(tokens, mask, group_size):
    """{(i, t): (group, prefix)} of every real token."""
    T, tokens = mask.sum(1).tolist(), tokens.tolist()
    return {
        (i, t): (i // group_size, tuple(row[: t + 1]))
        for i, row in enumerate(tokens)
        for t in range(T[i])
    }


def visitors(tokens, mask, group_size, A):
    """The (i, t) of every node, answers with A_i = 0 left out."""
    found = defaultdict(list)
    for (i, t), key in naive_nodes(tokens, mask, group_size).items():
        if A[i] != 0:
            found[key].append((i, t))
    return list(found.values())


def make_tree(seed, groups, size, width):
    """Binary tokens, so that prefixes are shared, some answers being a prefix of others; some A_i =
    0."""
    b = make_batch(seed, groups, size, width)
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 2, (groups * size, width), generator=g)
    A = torch.randint(-2, 3, (groups * size,), generator=g).double() / 3
    return b, tokens, A, prefix_nodes(tokens, b.mask, size)


TREES = [(0, 3, 4, 6), (1, 2, 2, 5), (2, 1, 64, 7), (3, 3, 8, 1)]
every_tree = pytest.mark.parametrize("shape", TREES, ids=["", "G=2", "G=64", "one token"])


def test_token_coefficients_are_what_the_loss_does_to_a_token():
    b = make_batch()
    logp = b.logp.requires_grad_()
    loss = METHODS["reinforce"].passes[0](b)
    c = token_coefficients(loss, logp)
    assert_same([c], [(b.adv / b.max_tokens).masked_fill(~b.mask, 0.0)])
    assert not c.requires_grad
    loss.backward()  # the graph is still there
    assert_same([logp.grad], [-c / 16])


@every_tree
def test_nodes_are_equal_iff_group_and_prefix_are(shape):
    b, tokens, _, nodes = make_tree(*shape)
    keys = naive_nodes(tokens, b.mask, b.group_size)
    pairs = {(key, nodes[i, t].item()) for (i, t), key in keys.items()}
    assert (
        len(pairs) == len(set(keys.values())) == len({node for _, node in pairs})
    )  # a one-to-one map
    assert (
        (nodes[~b.mask] == -1).all() and (nodes[b.mask] >= 0).all() and nodes.dtype == torch.int64
    )


@every_tree
@pytest.mark.parametrize("context", [1, 2, 3, 99])
def test_with_a_context_nodes_are_equal_iff_group_and_last_tokens_are(shape, context):
    b, tokens, _, _ = make_tree(*shape)
    nodes, group, T = (
        prefix_nodes(tokens, b.mask, b.group_size, context),
        b.group_size,
        b.mask.sum(1).tolist(),
    )
    ids, pairs = tokens.tolist(), set()
    for i, row in enumerate(ids):
        for t in range(T[i]):
            last = tuple(row[max(0, t + 1 - context) : t + 1])
            pairs.add(((i // group, last, t if len(last) < context else None), nodes[i, t].item()))
    assert (
        len(pairs) == len({key for key, _ in pairs}) == len({node for _, node in pairs})
    )  # a one-to-one map
    assert (
        (nodes[~b.mask] == -1).all() and (nodes[b.mask] >= 0).all() and nodes.dtype == torch.int64
    )
    with pytest.raises(ValueError, match="context must be at least 1"):
        prefix_nodes(tokens, b.mask, group, 0)


def test_nodes_by_hand():
    tokens = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 8, 7], [5, 6, 7]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]], dtype=torch.bool)
    n = prefix_nodes(tokens, mask, 2)
    assert (
        n[0, 0] == n[1, 0] and n[0, 1] == n[1, 1] and n[1, 2] == -1
    )  # the second answer is a prefix of the first
    assert n[2, 0] == n[3, 0] != n[0, 0]  # same text, another group
    assert n[2, 1] != n[3, 1] and n[2, 2] != n[3, 2]  # same token 7, another history


def test_learning_tax_by_hand():
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 2, 3]])
    A, mask = torch.tensor([2.0, -1.0, -1.0, 0.0]), torch.ones(4, 3, dtype=torch.bool)
    c = torch.tensor([[2.0, 2.0, 9.0], [-3.0, -3.0, 9.0], [-1.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    # token 1: w = 1, 3, 1, tax = -2 of 6. token 2: w = 1, 3, tax = -1 - 2 * 1 = -3 of 5. The rest
    # has one visitor.
    tax = learning_tax(c, A, prefix_nodes(tokens, mask, 4), mask)
    assert isinstance(tax, float) and tax == pytest.approx(5 / 11)


@every_tree
def test_learning_tax_is_the_covariance_of_weight_and_advantage(shape):
    b, tokens, A, nodes = make_tree(*shape)
    c, tax, total = b.logp * b.logp_old, 0.0, 0.0
    for members in visitors(tokens, b.mask, b.group_size, A.tolist()):
        w = [c[i, t].item() / A[i].item() for i, t in members]
        covariance = sum(
            (x - statistics.mean(w)) * A[i].item() for x, (i, _) in zip(w, members, strict=True)
        )
        if len(members) > 1:
            tax, total = tax + abs(covariance), total + sum(abs(c[i, t].item()) for i, t in members)
    assert learning_tax(c, A, nodes, b.mask) == pytest.approx(tax / total, abs=1e-12) != 0
    assert learning_tax(0.3 * A[:, None].expand_as(c), A, nodes, b.mask) < 1e-14  # constant weights
    assert learning_tax(c, A * 0, nodes, b.mask) == learning_tax(c * 0, A, nodes, b.mask) == 0
    assert learning_tax(c, A, nodes, b.mask & False) == 0


def project(c, A, nodes, mask):
    """Coefficients after the projection of a loss that has coefficients c."""
    logp = torch.zeros_like(c, requires_grad=True)
    return token_coefficients(project(-(c * logp).sum() / len(c), logp, A, nodes, mask), logp)


@every_tree
def test_exchangeable_gives_every_visitor_of_a_node_the_mean_weight(shape):
    b, tokens, A, nodes = make_tree(*shape)
    c = (b.logp * b.logp_old).masked_fill(~b.mask, 0.0)
    expected = c.clone()  # A_i = 0 keeps its own
    for members in visitors(tokens, b.mask, b.group_size, A.tolist()):
        mean = statistics.mean(c[i, t].item() / A[i].item() for i, t in members)
        for i, t in members:
            expected[i, t] = mean * A[i]
    new = project(c, A, nodes, b.mask)
    assert_same([new, project(new, A, nodes, b.mask)], [expected, expected])  # idempotent
    assert learning_tax(c, A, nodes, b.mask) > 0.01 and learning_tax(new, A, nodes, b.mask) < 1e-14


@every_case
def test_exchangeable_takes_the_tax_and_keeps_the_credit_of_every_method(name, options):
    for shape in TREES:
        b, tokens, _, nodes = make_tree(*shape)
        b = replace(b, logp=b.logp.masked_fill(~b.mask, math.nan).requires_grad_())
        A, loss = b.adv[:, 0].clone(), LOSSES[name](b, **options)
        surrogate = project(loss, b.logp, A, nodes, b.mask)
        c, new = (token_coefficients(x, b.logp) for x in (loss, surrogate))
        assert_same([surrogate.detach()], [-(new * b.logp.detach())[b.mask].sum() / len(A)])
        assert learning_tax(new, A, nodes, b.mask) < 1e-12 and (new[~b.mask] == 0).all()
        done = (
            name in ("reinforce", "dfpo-min") and "eps" not in options
        )  # already exchangeable: nothing to do
        kept = slice(None) if done else A == 0
        assert_same([new[kept]], [c[kept]])
        for members in visitors(tokens, b.mask, b.group_size, A.tolist()):
            i, t = map(list, zip(*members, strict=True))
            assert_same(
                [new[i, t].sum()], [(c[i, t] / A[i]).mean() * A[i].sum()]
            )  # the credit, and no tax
            if len(members) == 1:
                assert_same([new[i, t]], [c[i, t]])


# ---------------- the audit table of theory.md, section 3

EQUAL, UNEQUAL = (5, 5, 5, 5), (2, 7, 3, 5)
SITUATIONS = {  # (lengths, ratio of the shared token, log-ratio of the other tokens of winners, minus that of losers)
    "on-policy, equal T": [(EQUAL, 1.0, 0.0)],
    "on-policy, unequal T": [(UNEQUAL, 1.0, 0.0)],
    "off-policy, inside the clip": [
        (EQUAL, 1.1, 0.1),
        (EQUAL, 0.9, -0.1),
        (UNEQUAL, 1.1, 0.1),
        (UNEQUAL, 0.9, -0.1),
    ],
    "off-policy, outside it": [
        (EQUAL, 1.5, 0.1),
        (EQUAL, 0.5, -0.1),
        (UNEQUAL, 1.5, 0.1),
        (UNEQUAL, 0.5, -0.1),
    ],
}
AUDIT = {  # 0: the coefficients of the group cancel at the shared token, x: they do not
    "reinforce": "0000",
    "grpo": "0x0x",
    "dr-grpo": "000x",
    "dapo": "000x",
    "grpo-symmetric": "0000",
    "gspo": "0xxx",
    "dfpo-min": "0000",
    "dfpo-orthogonal": "0000",
    "token-grpo": "000x",
}


def shared_token(name, lengths, ratio, other, projected=False, **options):
    """(G,) coefficients of the first token, which all four answers share; two win, two lose."""
    A = group_advantages(
        torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64),
        4,
        "mean" if name == "dr-grpo" else "std",
    )
    log_ratio = other * A.sign()[:, None].repeat(1, 7)
    log_ratio[:, 0] = math.log(ratio)
    logp = torch.full((4, 7), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    b = Batch(logp, logp.detach() - log_ratio, A[:, None].expand(4, 7), mask, 4, 10)
    loss = LOSSES[name](b, **options)
    if projected:
        tokens = torch.arange(28).view(4, 7).index_fill(1, torch.tensor(0), 99)
        loss = project(loss, logp, A, prefix_nodes(tokens, mask, 4), mask)
    return token_coefficients(loss, logp)[:, 0], A


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", AUDIT)
def test_audit_table(name, situation):
    column = list(SITUATIONS).index(situation)
    for lengths, ratio, other in SITUATIONS[situation]:
        if name == "grpo" and column == 2 and lengths == UNEQUAL:
            continue  # the cell is about equal lengths; unequal ones are column 1
        c, _ = shared_token(
            name, lengths, ratio, other, **(WIDE if name == "gspo" and column == 2 else {})
        )
        if AUDIT[name][column] == "0":
            assert abs(c.sum()) < 1e-12
        else:
            assert abs(c.sum()) > 0.05 * c.abs().max() > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_audit_table_with_the_projection_everything_cancels(name):
    for setting in (s for settings in SITUATIONS.values() for s in settings):
        assert abs(shared_token(name, *setting, projected=True)[0].sum()) < 1e-12


def test_outside_the_clip_range_the_shared_token_is_pushed_back_to_the_old_policy():
    for ratio, direction in (
        (1.5, -1),
        (0.5, 1),
    ):  # C6: -rho P and +rho P, P = the sum of the positive advantages
        c, A = shared_token("dr-grpo", EQUAL, ratio, 0.1)
        assert c.sum().item() * 10 == pytest.approx(direction * ratio * A.clamp(min=0).sum().item())


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
    ],
)
def test_a_bad_batch_is_refused(change, message):
    good = dict.fromkeys(("logp", "logp_old", "adv"), torch.zeros(4, 3)) | {
        "mask": torch.ones(4, 3).bool()
    }
    good |= {"group_size": 2, "max_tokens": 3}
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
