"""To whoever calls a loss: what no claim says of it.

Hostile padding, empty answers, overflow, ties, defaults, errors. That each loss is its formula is
claim M1, and that `cancel` is its own is C22; `formula` is the naive twin of the losses.
"""

import itertools
import math
import runpy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import losses
from claims.evidence import Draw, Readout
from claims.formulas import FORMULAS, Rows, defaults, formula
from llm.neighbours import correct, kept_tokens, nthr_scores
from losses import (
    METHODS,
    Batch,
    Method,
    OldPolicy,
    group_advantages,
    nthr,
    nthr_random,
    nthr_selected,
)
from train import bind


def cancelled(batch):
    """grpo with `cancel`, where answers share a node as long as both go on."""
    nodes = losses.prefix_nodes(torch.zeros_like(batch.mask).long(), batch.mask, batch.group_size)
    return losses.cancel(losses.grpo(batch), batch, nodes)


LOSSES = {f.__name__: f for method in METHODS.values() for f in method.passes}
LOSSES["cancelled"] = cancelled
every_loss = pytest.mark.parametrize("name", LOSSES)
every_known_loss = pytest.mark.parametrize("name", [name for name in LOSSES if name in FORMULAS])
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


def test_ratios_are_clamped_nowhere():
    b = make_batch()
    far = replace(b, logp=b.logp_old + 30.0)
    for x in (losses.token_ratio(far)[b.mask], losses.sequence_ratio(far)):
        torch.testing.assert_close(x.log(), torch.full_like(x, 30.0))


def test_edges_of_conditions():
    b = make_batch(spread=0.0)  # on-policy
    kl = losses.grpo(b, kl=0.01) - losses.grpo(b)
    torch.testing.assert_close(kl, 0.01 * losses.seq_mean(losses.k3(b), b))
    assert losses.off_policy_mask(b, delta=0.0) == losses.grpo(b)  # no distance is not above it
    far = make_batch(spread=0.6)
    torch.testing.assert_close(METHODS["gspo"].clips(far)[:, 0], losses.sequence_ratio(far))
    losers = replace(b, adv=-b.adv.abs())  # as after a credit rule; their groups count all the same
    torch.testing.assert_close(losses.dapo(losers), -losses.dapo(replace(b, adv=b.adv.abs())))
    nodes = losses.prefix_nodes(torch.arange(8).view(2, 4), torch.ones(2, 4) > 0, 2)
    assert nodes.unique().numel() == 8  # where answers never agree, no two tokens have one node
    logp = torch.zeros(2, 1, requires_grad=True)  # a ratio that underflows, beside one of 1
    old = torch.tensor([[200.0], [0.0]])
    batch = Batch(logp, old, torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1) > 0, 2, 1)
    c = losses.token_coefficients(losses.cancel(losses.grpo(batch), batch, old.long()), logp)
    assert c.isfinite().all() and not c.requires_grad


def test_recentred_stays_finite_where_a_product_of_ratios_overflows():
    logp = torch.zeros(3, 100, requires_grad=True)
    old = torch.tensor([-2.0, -2.0, 3.0])[:, None].expand(3, 100)  # e^200 is no float32
    adv = torch.tensor([1.0, -0.5, -0.5])[:, None].expand(3, 100)
    batch = Batch(logp, old, adv, torch.ones(3, 100) > 0, 3, 100)
    c = losses.token_coefficients(losses.recentred(batch), logp)
    assert c.isfinite().all() and c[0, 0] > 0 and float(c.sum()) == 0


@pytest.mark.parametrize("G, push", [(2, -0.0078), (3, -0.0091), (4, -0.0090)])
def test_min_replace_cancels_and_its_expected_push_favours_one_of_two_equal_ways(G, push):
    """Two ways with shares of 1/2, both right with chance 1/2, then and now. The right answers of
    way 0 have ratios of .5 and 1.5, all others 1. Every group is enumerated."""
    kinds = [
        (0, 1, 0.5, 1),
        (0, 1, 1.5, 1),
        (0, 0, 1, 2),
        (1, 1, 1, 2),
        (1, 0, 1, 2),
    ]  # and eighths
    found = dict.fromkeys((losses.dfpo_min, losses.recentred), 0.0)
    for group in itertools.product(kinds, repeat=G):
        way, R, ratio, eighths = torch.tensor(group, dtype=torch.float64).T
        logp = torch.stack([0 * ratio, ratio.log()], 1).requires_grad_()  # the way, what follows
        adv = group_advantages(R, G, "mean")[:, None].expand(G, 2)
        batch = Batch(logp, torch.zeros(G, 2).double(), adv, torch.ones(G, 2) > 0, G, 1)
        for loss in found:
            c = losses.token_coefficients(loss(batch, ratio="product"), logp)[:, 0]
            found[loss] += float((eighths / 8).prod() * (c * (0.5 - way)).mean())
    assert found[losses.dfpo_min] == pytest.approx(push, abs=5e-5)
    assert found[losses.recentred] == pytest.approx(0, abs=1e-12)  # the truth


# ---------------- METHODS

CLIP = {"eps_low": 0.2, "eps_high": 0.2}  # PPO's and GRPO's; ours where a paper names none
WIDER_CLIP = {"eps_low": 0.2, "eps_high": 0.24}  # all scripts of AR/Lopti's authors
NTHR = {"beta": 1.0, "eta": -1.0, "self_term": False}  # -1 stands for NTHR's 2|0.5 - p|
DEFAULTS = {
    "group_advantages": {"scale": "std"},  # GRPO sec. 4.1.2
    "sequence_ratio": {"ratio": "geometric"},  # GSPO Eq. 7
    "reinforce": {},
    "grpo": CLIP | {"kl": 0.0},  # off; in the paper 0.04
    "grpo_symmetric": CLIP,
    "dr_grpo": CLIP,
    "dapo": {"eps_low": 0.2, "eps_high": 0.28},  # DAPO sec. 4.1
    "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},  # GSPO sec. 5.1
    "cispo": {"eps_low": 1.0, "eps_high": 4.0},  # no lower bound: MiniMax-M1; r <= 5: ScaleRL
    "dfpo_min": {"ratio": "geometric", "eps": math.inf},  # ours; DFPO has no clip
    "dfpo_orthogonal": {"ratio": "geometric", "eps": math.inf},
    "recentred": {"ratio": "product"},  # ours; only so without bias
    "balanced": CLIP,
    "off_policy_mask": {"delta": 0.1} | CLIP,  # ours; the paper prints none
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
}


def test_the_defaults_are_those_of_the_papers():
    assert {name: defaults(getattr(losses, name)) for name in DEFAULTS} == DEFAULTS


LOPTI = (losses.lopti_low, losses.lopti_high)
MORE_THAN_A_LOSS = {
    "dr-grpo": Method((losses.dr_grpo,), scale="mean"),
    "recentred": Method((losses.recentred,), scale="mean"),
    "nthr": Method((losses.nthr_grpo,), credit=losses.nthr, needs_scores=True),
    "nthr-random": Method((losses.nthr_grpo,), credit=losses.nthr_random, needs_scores=True),
    "advantage-reweighting": Method((losses.token_grpo,), credit=losses.advantage_reweighting),
    "lopti": Method(LOPTI),
    "ar-lopti": Method(LOPTI, credit=losses.advantage_reweighting),
    "ibpo": Method((losses.grpo,), credit=losses.ibpo, repair=losses.shaped_rewards),
}


def test_a_method_is_its_papers_scale_credit_and_passes():
    for name in METHODS.keys() - MORE_THAN_A_LOSS.keys() - {"gspo"}:
        assert METHODS[name] == Method((LOSSES[name.replace("-", "_")],))
    assert MORE_THAN_A_LOSS.items() <= METHODS.items()
    assert replace(METHODS["gspo"], clips=losses.token_ratio) == Method((losses.gspo,))


def test_every_method_is_printed_with_its_formulas(capsys):
    runpy.run_path(losses.__file__, run_name="__main__")
    said = capsys.readouterr().out
    for name, method in METHODS.items():
        assert f"{name}: " in said and method.passes[0].__name__ in said


# ---------------- errors. What a hyperparameter may be: test_run.py

BATCH = dict.fromkeys(("logp", "logp_old", "adv", "logp_ref"), torch.zeros(4, 3))
BATCH |= {"mask": torch.ones(4, 3).bool(), "group_size": 2, "max_tokens": 3}
FLAT = {name: x[:, 0] for name, x in BATCH.items() if torch.is_tensor(x)}
OLD = dict.fromkeys(("tokens", "logp", "scores", "own_scores"), torch.zeros(4, 3))
OLD |= dict.fromkeys(("rewards", "repaired"), torch.zeros(4))
OLD |= {"mask": BATCH["mask"], "kept_mask": BATCH["mask"], "group_size": 2}


@pytest.mark.parametrize("kind, good, first", [(Batch, BATCH, "logp"), (OldPolicy, OLD, "tokens")])
def test_a_tensor_of_another_shape_is_named(kind, good, first):
    for name in good.keys() - {first, "group_size", "max_tokens"}:
        for shape in ((4, 2), (3, 4), (2,)):
            with pytest.raises(ValueError, match=f"{name} has shape"):
                kind(**good | {name: torch.zeros(shape, dtype=good[name].dtype)})


@pytest.mark.parametrize(
    "function, arguments",
    [
        (Batch, BATCH | {"mask": torch.ones(4, 3)}),
        (Batch, BATCH | FLAT),
        (Batch, BATCH | {"max_tokens": 0}),
        (Batch, BATCH | {"group_size": 1}),
        (OldPolicy, OLD | {"group_size": 3}),
        (group_advantages, dict(rewards=torch.zeros(4), group_size=2, scale="max")),
        (group_advantages, dict(rewards=torch.zeros(4).long(), group_size=2)),
        (group_advantages, dict(rewards=torch.zeros(4, 1), group_size=2)),
        (group_advantages, dict(rewards=torch.zeros(0), group_size=2)),
        (losses.nthr, dict(adv=BATCH["adv"], old=OldPolicy(**OLD | {"scores": None}))),
        (losses.nthr, dict(adv=BATCH["adv"], old=OldPolicy(**OLD | {"own_scores": None}))),
        (losses.ibpo, dict(adv=BATCH["adv"], old=OldPolicy(**OLD | {"kept_mask": None}))),
        (losses.ibpo, dict(adv=BATCH["adv"], old=OldPolicy(**OLD | {"repaired": None}))),
        (bind, dict(name="grpoo", hyper={})),
        (losses.sequence_ratio, dict(batch=Batch(**BATCH), ratio="arithmetic")),
        (losses.grpo, dict(batch=Batch(**BATCH | {"logp_ref": None}), kl=0.04)),
        (losses.advantage_reweighting, dict(adv=BATCH["adv"], old=OldPolicy(**OLD), alpha=1.5)),
        (losses.ibpo, dict(adv=BATCH["adv"], old=OldPolicy(**OLD), reading="kept")),
        (losses.shaped_rewards, dict(rewards=OLD["rewards"], repaired=None, bonus=1, weight=1.0)),
        (losses.prefix_nodes, dict(tokens=OLD["tokens"], mask=OLD["mask"], group_size=3)),
        (losses.cancel, dict(loss=None, batch=Batch(**BATCH), nodes=torch.zeros(4, 2))),
    ],
)
def test_what_does_not_fit_is_a_value_error(function, arguments):
    with pytest.raises(ValueError):
        function(**arguments)


# ---------------- NTHR and IBPO: empty answers, ties, the alignment
#
# That the rules are their formulas, whatever the padding holds: claims M6, N4 and I3.

REWARDS = [1, 0, 0, 1] + [0, 0, 0, 0] + [1, 1, 1, 1]  # groups: mixed, all wrong, all right


def make_facts(empty=()) -> dict:
    """Twelve answers with hidden states; those of `empty` have no tokens. Padding holds garbage."""
    readout = Readout(Draw(0, 4, group_size=4))
    facts = readout.facts | readout.reading | {"rewards": torch.tensor(REWARDS).double()}
    facts["mask"] = facts["mask"].clone()
    facts["mask"][list(empty)] = False
    facts["hidden"] = facts["hidden"].masked_fill(~facts["mask"][..., None], math.nan)
    return facts


def make_old(facts: dict) -> OldPolicy:
    known = {key: facts[key] for key in ("tokens", "mask", "logp", "rewards", "group_size")}
    scores, own_scores = (x.masked_fill(~known["mask"], math.nan) for x in nthr_scores(**facts))
    return OldPolicy(**known, scores=scores, own_scores=own_scores)


def test_empty_answers_have_no_scores_and_no_say():
    facts = make_facts(empty=(0, 1))  # a right one and a wrong one
    scores, own_scores = nthr_scores(**facts)
    assert scores.isfinite().all() and own_scores.isfinite().all()
    assert (scores[4:] == 0).all() and (own_scores[4:] == 0).all()  # all wrong, all right
    mean = scores[3][facts["mask"][3]].mean()  # row 3 is right and has tokens
    expected = facts["mask"] & (scores > -5.0 * mean)
    selected = nthr_selected(make_old(facts), -5.0, self_term=True)
    assert selected[2].equal(expected[2]) and selected[2].any() and not selected[[0, 1, 3]].any()


@pytest.mark.parametrize("empty", [(), (0, 3), range(12)])
def test_without_tokens_of_a_right_answer_nothing_is_selected(empty):
    old = make_old(make_facts(empty))
    adv = -torch.ones(old.mask.shape).double()
    for rule in (nthr, nthr_random):
        softened = rule(adv, old, -1.0, 0.0) != adv
        assert not softened[4:].any() and softened.any() == (not empty)


def test_a_token_whose_score_is_tau_is_not_above_it():
    old = make_old(make_facts())
    scores = torch.tensor([[0.5], [0.5], [0.75], [1.0]]).repeat(3, old.mask.shape[1])
    old = replace(old, scores=scores, own_scores=0 * scores, mask=old.mask | True)
    # of group 0, rows 0 and 3 are right, so tau is 0.5
    assert nthr_selected(old)[:4, 0].tolist() == [False, False, True, False]


def distance(a, b, keep=None) -> float:
    """Edits (Levenshtein) minus a hundredth of the kept tokens.

    With `keep`, those of a's places must stay and no others may.
    """

    @cache
    def cost(t, u):
        if t == len(a):
            return len(b) - u
        ways = [cost(t, u + 1) + 1] if u < len(b) else []
        if keep is None or t not in keep:
            ways += [cost(t + 1, u) + 1] + ([cost(t + 1, u + 1) + 1] if u < len(b) else [])
        if u < len(b) and a[t] == b[u] and (keep is None or t in keep):
            ways.append(cost(t + 1, u + 1) - 0.01)
        return min(ways, default=math.inf)

    return cost(0, 0)


def test_kept_tokens_are_those_of_a_shortest_edit_of_rows_of_any_length():
    g = torch.Generator().manual_seed(0)
    for width, other, letters in ((6, 7, 2), (7, 4, 3), (1, 1, 2), (5, 9, 5)):
        a, b = (torch.randint(0, letters, (60, w), generator=g) for w in (width, other))
        la, lb = (torch.randint(0, w + 1, (60, 1), generator=g) for w in (width, other))
        masks = torch.arange(width) < la, torch.arange(other) < lb
        kept = kept_tokens(a, masks[0], b, masks[1])
        assert not (kept & ~masks[0]).any()
        for i in range(60):
            x, y = a[i, : la[i]].tolist(), b[i, : lb[i]].tolist()
            ours = distance(x, y, {*kept[i].nonzero().flatten().tolist()})
            assert ours == pytest.approx(distance(x, y))


def test_a_correction_that_ends_with_another_eos_keeps_the_end():
    """3 5 and the end 1 become 4 5 and the end 2."""
    tokens = torch.tensor([[3, 5, 1], [4, 5, 2]])
    facts = dict(tokens=tokens, mask=tokens > 0, rewards=torch.tensor([0.0, 1.0]), generated=6)
    answers = SimpleNamespace(**facts, items="ab", texts="ab")
    fixed = SimpleNamespace(**{name: x[1:] for name, x in facts.items() if name != "generated"})
    fixed.generated = 3
    config = SimpleNamespace(group_size=2, repair_references=1)
    task = SimpleNamespace(repair=lambda *shown: shown)
    correct(answers, task, config, ask=lambda problems: fixed, eos=torch.tensor([1, 2]))
    assert answers.kept_mask.tolist() == [[False, True, True], [False] * 3]
