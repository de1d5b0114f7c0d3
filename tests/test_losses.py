"""What no claim says of the losses: hostile padding, empty answers, fp32, defaults, errors.

That each loss is its formula is claim M1; `formula` is its naive twin.
"""

import inspect
import math
import runpy
from dataclasses import replace

import pytest
import torch

import losses
from claims.formulas import FORMULAS, Rows, defaults, formula
from losses import METHODS, Batch, Method, OldPolicy, bind, group_advantages

LOSSES = {f.__name__: f for method in METHODS.values() for f in method.passes}
every_loss = pytest.mark.parametrize("name", LOSSES)
every_known_loss = pytest.mark.parametrize("name", FORMULAS.keys() & LOSSES)
GARBAGE = (1e4, -1e4, math.inf, -math.inf, math.nan)


def make_batch(seed=0, groups=4, size=4, width=6, spread=0.4):
    """Random rows. Group 1 has equal rewards, one answer of group 2 has A_i = 0."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    n = groups * size
    lengths = torch.randint(1, width + 1, (n,), generator=g)
    logp, adv = -3 * rand(n, width), rand(groups, size)
    adv -= adv.mean(1, keepdim=True)
    adv[1], adv[2:3, 0] = 0.0, 0.0
    mask = torch.arange(width) < lengths[:, None]
    return Batch(
        logp=logp,
        logp_old=logp + spread * (2 * rand(n, width) - 1),
        adv=adv.view(n, 1) * rand(n, width),
        mask=mask,
        group_size=size,
        max_tokens=width + 5,
        logp_ref=logp + rand(n, width) - 0.5,
    )


def loss_and_grad(name, b, **options):
    b = replace(b, logp=b.logp.clone().requires_grad_())
    loss = LOSSES[name](b, **options)
    return loss.detach(), torch.autograd.grad(loss, b.logp)[0]


def assert_same(pair, expected, tolerance=1e-11):
    for x, y in zip(pair, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, check_dtype=False)


def variants(name):
    """Hyperparameters that switch on what the defaults leave off."""
    more = {"kl": 0.3, "ratio": "product", "eps": 0.15}
    return [{}] + [{key: more[key]} for key in more if key in defaults(LOSSES[name])]


# ---------------- the tensors of a batch


@every_loss
def test_what_the_padding_holds_changes_nothing(name):
    b = make_batch(seed=8)
    for options in variants(name):
        clean = loss_and_grad(name, b, **options)
        for tensor in ("logp", "logp_old", "logp_ref", "adv"):
            for value in GARBAGE:
                poisoned = replace(b, **{tensor: getattr(b, tensor).masked_fill(~b.mask, value)})
                assert_same(loss_and_grad(name, poisoned, **options), clean)


@every_known_loss
@pytest.mark.parametrize("width", [1, 6])
def test_empty_answers_and_answers_of_one_token(name, width):
    b = make_batch(seed=3, width=width)
    b.mask[9] = False
    for options in variants(name):
        tensors = (b.logp, b.logp_old, b.adv, b.logp_ref)
        rows = [[x[i, m].tolist() for i, m in enumerate(b.mask)] for x in tensors]
        value, c = formula(name, Rows(*rows, b.group_size, b.max_tokens), **options)
        grad = torch.zeros_like(b.logp)
        grad[b.mask] = torch.tensor(sum(c, [])).double() / -len(b.logp)
        assert_same(loss_and_grad(name, b, **options), (torch.tensor(value), grad), 1e-7)


@every_loss
def test_fp32_gives_what_float64_gives(name):
    b = make_batch(seed=5)
    single = {
        k: x.float() for k, x in vars(b).items() if torch.is_tensor(x) and x.is_floating_point()
    }
    loss, grad = loss_and_grad(name, replace(b, **single))
    assert loss.dtype == grad.dtype == torch.float32
    assert_same((loss, grad), loss_and_grad(name, b), 1e-5)


@every_loss
def test_the_projection_takes_the_tax_of_a_batch_whatever_the_padding_holds(name):
    b = make_batch(groups=2, size=8)
    b.adv = b.adv[:, :1].expand(b.mask.shape)
    tokens = torch.randint(0, 2, (16, 6), generator=torch.Generator().manual_seed(0))
    nodes, A = losses.prefix_nodes(tokens, b.mask, 8), b.adv[:, 0].clone()
    for value in GARBAGE:
        b = replace(b, logp=b.logp.detach().masked_fill(~b.mask, value).requires_grad_())
        projected = losses.project(LOSSES[name](b), b.logp, A, nodes, b.mask)
        c = losses.token_coefficients(projected, b.logp)
        assert projected.isfinite() and (c[~b.mask] == 0).all() and c.isfinite().all()
        assert losses.learning_tax(c, A, nodes, b.mask) < 1e-12


def test_the_ratio_is_one_on_padding_and_is_clamped_nowhere():
    b = make_batch()
    far = replace(b, logp=b.logp_old + 30.0)
    assert (losses.token_ratio(far)[~b.mask] == 1).all()
    for x in (losses.token_ratio(far)[b.mask], losses.sequence_ratio(far)):
        torch.testing.assert_close(x.log(), torch.full_like(x, 30.0))


def test_recentred_stays_finite_where_a_product_of_ratios_overflows():
    logp = torch.zeros(3, 100, requires_grad=True)
    old = torch.tensor([-2.0, -2.0, 3.0])[:, None].expand(3, 100)  # e^200 is no float32
    adv = torch.tensor([1.0, -0.5, -0.5])[:, None].expand(3, 100)
    batch = Batch(logp, old, adv, torch.ones(3, 100) > 0, 3, 100)
    c = losses.token_coefficients(losses.recentred(batch), logp)
    assert c.isfinite().all() and c[0, 0] > 0 and float(c.sum()) == 0


@pytest.mark.parametrize("differing", [1, 255, 256, 257, 512])
def test_answers_that_once_differed_share_no_node_again(differing):
    tokens = torch.zeros(2, 600, dtype=torch.long)
    tokens[1, :differing] = 1
    nodes = losses.prefix_nodes(tokens, tokens >= 0, 2)
    assert (nodes[0] != nodes[1]).all() and nodes.unique().numel() == 1200


def test_a_part_of_a_batch_keeps_every_field():
    b = make_batch()
    part = b[torch.arange(4, 12)]
    for name, x in vars(b).items():
        kept = getattr(part, name)
        assert kept.equal(x[4:12]) if torch.is_tensor(x) else kept == x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", ["std", "mean"])
def test_a_group_of_equal_rewards_gets_exactly_zero_and_its_neighbour_does_not(scale, dtype):
    for size in (2, 3, 7, 8, 31, 64):
        for reward in (0.1, 0.3, 1.0, 1 / 3, 1e6 + 0.1):
            rewards = torch.cat([torch.full((size,), reward), torch.arange(size) / 7]).to(dtype)
            adv = group_advantages(rewards, size, scale)
            assert (adv[:size] == 0).all() and adv[size] < 0 < adv[-1]


# ---------------- METHODS

CLIP = {"eps_low": 0.2, "eps_high": 0.2}  # PPO's and GRPO's; ours where a paper names none
WIDER_CLIP = {"eps_low": 0.2, "eps_high": 0.24}  # all scripts of AR/Lopti's authors
NTHR = {"beta": 1.0, "eta": -1.0, "self_term": False}  # -1 stands for NTHR's 2|0.5 - p|
DEFAULTS = {
    "group_advantages": {"scale": "std"},  # GRPO sec. 4.1.2
    "sequence_ratio": {"kind": "geometric"},  # GSPO Eq. 7
    "reinforce": {},
    "grpo": CLIP | {"kl": 0.0},  # off; in the paper 0.04
    "grpo_symmetric": CLIP,
    "dr_grpo": CLIP,
    "dapo": {"eps_low": 0.2, "eps_high": 0.28},  # DAPO sec. 4.1
    "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},  # GSPO sec. 5.1
    "cispo": {"eps_low": 1.0, "eps_high": 4.0},  # no lower bound: MiniMax-M1; r <= 5: ScaleRL
    "dfpo_min": {"ratio": "geometric", "eps": math.inf},  # ours; DFPO has no clip
    "dfpo_orthogonal": {"ratio": "geometric", "eps": math.inf},
    "pos_only": CLIP,
    "nthr_grpo": CLIP,  # NTHR's, not AR's .24
    "token_grpo": WIDER_CLIP,
    "lopti_low": {"eta": 0.5} | WIDER_CLIP,
    "lopti_high": {"eta": 0.5} | WIDER_CLIP,
    "advantage_reweighting": {"alpha": 0.3},  # with Lopti; 0.2 alone, 0.1 for maths
    "nthr": NTHR,
    "nthr_random": NTHR,
    "shaped_rewards": {"bonus": 0.5, "weight": 0.6},  # IBPO, second-hand
    "ibpo": {"reading": "sign"},  # ours
    "bind": {"reference": True},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_are_those_of_the_papers(name):
    assert defaults(getattr(losses, name)) == DEFAULTS[name]


LOPTI = (losses.lopti_low, losses.lopti_high)
ALONE = "reinforce grpo grpo-symmetric dr-grpo dapo gspo cispo dfpo-min dfpo-orthogonal pos-only"
ROWS = {name: Method((LOSSES[name.replace("-", "_")],)) for name in ALONE.split()}
ROWS["dr-grpo"].scale = "mean"  # the only one that leaves the standard deviation out
ROWS["nthr"] = Method((losses.nthr_grpo,), credit=losses.nthr, needs_scores=True)
ROWS["nthr-random"] = Method((losses.nthr_grpo,), credit=losses.nthr_random, needs_scores=True)
ROWS["advantage-reweighting"] = Method((losses.token_grpo,), credit=losses.advantage_reweighting)
ROWS["lopti"] = Method(LOPTI)
ROWS["ar-lopti"] = Method(LOPTI, credit=losses.advantage_reweighting)
ROWS["ibpo"] = Method((losses.grpo,), credit=losses.ibpo, repair=losses.shaped_rewards)


@pytest.mark.parametrize("name", ROWS)
def test_a_method_is_its_papers_scale_credit_and_passes(name):
    assert METHODS[name] == ROWS[name]


def test_every_method_is_printed_with_its_formulas(capsys):
    runpy.run_path(losses.__file__, run_name="__main__")
    said = capsys.readouterr().out
    for name, method in METHODS.items():
        assert f"{name}: " in said and method.passes[0].__name__ in said


def test_bind_fills_in_what_is_chosen_and_nothing_else():
    bound = bind("lopti", {"eta": "0.3", "eps_high": 0.5})
    b = make_batch()
    for loss, name in zip(bound.passes, ("lopti_low", "lopti_high"), strict=True):
        assert loss(b) == LOSSES[name](b, eta=0.3, eps_high=0.5)
    assert bind("dfpo-min", {"ratio": "product"}).passes[0](b) == losses.dfpo_min(b, "product")
    assert bind("dr-grpo", {}).scale == "mean"
    for value in (True, False):
        keywords = bind("nthr", {"self_term": str(value)}).credit.keywords
        assert keywords == {"self_term": value}
    assert bind("ibpo", {"bonus": "1"}).repair.keywords == {"bonus": 1.0}
    assert bind("nthr", {"eta": -1}).credit.keywords == {"eta": -1.0}  # a default may be negative


@pytest.mark.parametrize(
    "name, chosen, message",
    [
        ("grpoo", {}, "method 'grpoo' does not exist; accepted: .*grpo"),
        ("grpo", {"eta": 1}, "grpo has no hyperparameter 'eta'; accepted: eps_low=0.2"),
        ("reinforce", {"eps": 1}, "reinforce has no hyperparameter 'eps'; accepted: none"),
        ("grpo", {"eps_low": "wide"}, "eps_low=wide: accepted: a finite number, at least 0"),
        ("grpo", {"eps_low": -0.1}, "eps_low=-0.1"),
        ("grpo", {"eps_low": math.nan}, "eps_low=nan"),
        ("nthr", {"self_term": "yes"}, "self_term=yes: accepted: True, False"),
        ("dfpo-min", {"ratio": "harmonic"}, "ratio must be .*'harmonic'"),
        ("ibpo", {"reading": "kept"}, "reading must be"),
        ("ibpo", {"weight": 2}, "weight 2.0 times bonus 0.5"),
        ("ar-lopti", {"alpha": 1.5}, "alpha must lie between"),
    ],
)
def test_bind_refuses_what_a_method_does_not_take(name, chosen, message):
    with pytest.raises(ValueError, match=message):
        bind(name, chosen)


def test_a_kl_term_needs_a_reference():
    assert bind("grpo", {"kl": 0}, reference=False)
    with pytest.raises(ValueError, match="logp_ref"):
        bind("grpo", {"kl": 0.1}, reference=False)


# ---------------- errors say what is wrong


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logp_old": torch.zeros(4, 2)}, r"logp_old .*\(4, 2\).*\(4, 3\)"),
        ({"adv": torch.zeros(4)}, r"adv .*\(4,\).*\(4, 3\)"),
        ({"mask": torch.ones(3, 3).bool()}, r"mask .*\(3, 3\).*\(4, 3\)"),
        ({"logp_ref": torch.zeros(4, 4)}, r"logp_ref .*\(4, 4\).*\(4, 3\)"),
        ({"mask": torch.ones(4, 3)}, "mask bool"),
        ({"group_size": 3}, "4 rows .*groups of 3"),
        ({"group_size": 1}, "groups of 1"),
        ({"max_tokens": 0}, "max_tokens"),
        (dict.fromkeys(("logp", "logp_old", "adv", "mask"), torch.zeros(0, 3).bool()), "0 rows"),
        (dict.fromkeys(("logp", "logp_old", "adv", "mask"), torch.ones(4).bool()), r"\(N, T\)"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(change, message):
    good = dict.fromkeys(("logp", "logp_old", "adv"), torch.zeros(4, 3))
    good |= {"mask": torch.ones(4, 3).bool(), "group_size": 2, "max_tokens": 3}
    Batch(**good)
    with pytest.raises(ValueError, match=message):
        Batch(**good | change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mask": torch.ones(4, 2).bool()}, r"mask .*\(4, 2\).*\(4, 3\)"),
        ({"logp": torch.zeros(4)}, r"logp .*\(4,\).*\(4, 3\)"),
        ({"rewards": torch.zeros(2)}, r"rewards .*\(2,\).*\(4,\)"),
        ({"scores": torch.zeros(4, 4)}, r"scores .*\(4, 4\).*\(4, 3\)"),
        ({"own_scores": torch.zeros(4)}, r"own_scores .*\(4,\).*\(4, 3\)"),
        ({"kept_mask": torch.zeros(4, 2).bool()}, r"kept_mask .*\(4, 2\).*\(4, 3\)"),
        ({"repaired": torch.zeros(4, 3).bool()}, r"repaired .*\(4, 3\).*\(4,\)"),
        ({"group_size": 3}, "4 rows .*groups of 3"),
    ],
)
def test_an_old_policy_that_does_not_fit_is_refused(change, message):
    good = {"tokens": torch.zeros(4, 3).long(), "mask": torch.ones(4, 3).bool()}
    good |= {"logp": torch.zeros(4, 3), "rewards": torch.zeros(4), "group_size": 2}
    OldPolicy(**good)
    with pytest.raises(ValueError, match=message):
        OldPolicy(**good | change)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.zeros(4), 1, "std"), "groups of 1"),
        ((torch.zeros(5), 2, "std"), "5 rows"),
        ((torch.zeros(4), 2, "max"), "scale must be .*'max'"),
        ((torch.zeros(4).long(), 2, "std"), "floats"),
        ((torch.zeros(4, 1), 2, "std"), "floats"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(*arguments)


def test_every_loss_takes_a_batch_and_hyperparameters_with_defaults():
    for function in LOSSES.values():
        first, *others = inspect.signature(function).parameters.values()
        assert first.name == "batch" and all(x.default is not x.empty for x in others)
