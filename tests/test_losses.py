"""To whoever calls a loss: what no claim says of it.

Hostile padding, empty answers, overflow, ties, defaults, errors. That each loss is its formula is
claim M1, and that `cancel` is its own is C22; `formula_of` is the naive twin of the losses.
"""

import inspect
import itertools
import math
import random
import runpy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import losses
from claims.evidence import Draw, Readout
from claims.formulas import FORMULAS, defaults, formula_of
from llm.neighbours import correct, kept_tokens, nthr_scores
from losses import METHODS, Batch, OldPolicy, cancel, group_advantages
from toy.policy import pad
from train import Answers, Config

DRAW = Draw(0, 5)  # three groups of seven answers
LOSSES = {f.__name__: f for method in METHODS.values() for f in method.passes}
LOSSES["cancelled"] = lambda batch: cancel(losses.grpo(batch), batch, DRAW.nodes)
# What the defaults leave off. On-policy a ratio is 1, and an eps of 0 leaves it inside.
MORE = [("kl", 0.3), ("ratio", "product"), ("eps", 0.15), ("eps", 0.0), ("delta", 0.0)]
GARBAGE = (1e4, -1e4, math.inf, -math.inf, math.nan)


def make_batch(spread):
    """Group 0 has losers only, as after a credit rule, and group 1 has no signal. In group 2 one
    answer is empty, and one has A = 0."""
    adv = DRAW.rows(DRAW.adv) * (1 + 0.5 * DRAW.noise)
    adv[:7], adv[14] = -adv[:7].abs(), 0.0
    logp, mask = DRAW.logp.detach(), DRAW.mask.clone()
    mask[-1] = False
    old = logp - DRAW.log_ratio(spread)
    return Batch(logp, old, adv, mask, DRAW.G, DRAW.max_tokens, DRAW.logp_ref)


def loss_and_grad(name, b, **options):
    b = replace(b, logp=b.logp.clone().requires_grad_())
    loss = LOSSES[name](b, **options)
    return loss.detach(), torch.autograd.grad(loss, b.logp)[0]


def assert_same(pair, expected):
    for x, y in zip(pair, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


# ---------------- the numbers of a batch


@pytest.mark.parametrize("spread", [0.0, 0.6])  # on-policy, off-policy
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula_whatever_the_padding_holds(name, spread):
    b = make_batch(spread)
    known = defaults(LOSSES[name])
    for options in [{}] + [{key: value} for key, value in MORE if key in known]:
        clean = loss_and_grad(name, b, **options)
        if name in FORMULAS:
            value, c = formula_of(name, b, **options)
            assert_same(clean, (torch.tensor(value, dtype=c.dtype), -c / len(c)))
        for tensor in ("logp", "logp_old", "logp_ref", "adv"):
            for value in GARBAGE:
                poisoned = replace(b, **{tensor: getattr(b, tensor).masked_fill(~b.mask, value)})
                assert_same(loss_and_grad(name, poisoned, **options), clean)


def test_ratios_are_clamped_nowhere():
    b = make_batch(0.0)
    far = replace(b, logp=b.logp_old + 30.0)
    for x in (losses.token_ratio(far)[b.mask], losses.sequence_ratio(far)[:-1]):
        torch.testing.assert_close(x.log(), torch.full_like(x, 30.0))


def test_coefficients_stay_finite_where_ratios_do_not():
    """In float32 e^200 is infinite, and e^-120 is 0."""
    logp = torch.zeros(3, 100, requires_grad=True)
    old = torch.tensor([[-2.0], [-2.0], [3.0]]).expand(3, 100)
    adv = torch.tensor([[1.0], [-0.5], [-0.5]]).expand(3, 100)
    batch = Batch(logp, old, adv, old == old, 3, 100)
    c = losses.token_coefficients(losses.recentred(batch), logp)
    assert c.isfinite().all() and c[0, 0] > 0 and float(c.sum()) == 0
    batch = replace(batch, logp_old=40 * old)
    loss = cancel(losses.grpo(batch), batch, nodes=torch.zeros(3, 100).long())
    assert losses.token_coefficients(loss, logp).isfinite().all()
    logp, old = torch.tensor([[[-9.0], [-1.0]], [[-1.0], [-1.0]]]).requires_grad_()
    batch = Batch(logp, old.detach(), torch.tensor([[1.0], [-1.0]]), old == old, 2, 1)
    loss = cancel(losses.reinforce(batch), batch, nodes=torch.tensor([[0], [1]]))
    c = losses.token_coefficients(loss, logp)
    torch.testing.assert_close(c[:, 0], torch.tensor([1 + math.exp(-8), -1 - math.exp(8)]))


def test_min_replace_cancels_and_its_expected_push_favours_one_of_two_equal_ways():
    """Two ways with shares of 1/2, both right with chance 1/2, then and now. The right answers of
    way 0 have ratios of .5 and 1.5, all others 1. Every group of two is enumerated."""
    way_0 = [(0, 1, 0.5), (0, 1, 1.5), (0, 0, 1.0), (0, 0, 1.0)]  # way, reward, ratio of what
    kinds = way_0 + [(1, 1, 1.0), (1, 1, 1.0), (1, 0, 1.0), (1, 0, 1.0)]  # follows; equally likely
    pushes = dict.fromkeys((losses.dfpo_min, losses.recentred), 0.0)
    for group in itertools.product(kinds, repeat=2):
        way, R, ratio = torch.tensor(group, dtype=torch.float64).T
        logp = torch.stack([0 * ratio, ratio.log()], 1).requires_grad_()  # the way, what follows
        adv = group_advantages(R, 2, "mean")[:, None].expand(2, 2)
        batch = Batch(logp, 0 * logp.detach(), adv, adv == adv, 2, 1)
        for loss in pushes:
            c = losses.token_coefficients(loss(batch, ratio="product"), logp)[:, 0]
            pushes[loss] += float((c * (0.5 - way)).mean()) / len(kinds) ** 2
    assert pushes[losses.dfpo_min] == pytest.approx(-1 / 128)
    assert pushes[losses.recentred] == pytest.approx(0, abs=1e-12)  # the truth


# ---------------- METHODS. That a step follows its credit and its repair: test_step.py

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


PASSES = dict.fromkeys(("lopti", "ar-lopti"), ["lopti_low", "lopti_high"])
PASSES |= dict.fromkeys(("nthr", "nthr-random"), ["nthr_grpo"])
PASSES |= {"advantage-reweighting": ["token_grpo"], "ibpo": ["grpo"]}
SHIPPED = [name for name in METHODS if name in PASSES or name.replace("-", "_") in DEFAULTS]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_method_has_its_papers_passes_and_scale(name):
    method = METHODS[name]
    expected = PASSES.get(name, [name.replace("-", "_")])
    assert [loss_fn.__name__ for loss_fn in method.passes] == expected
    assert method.scale == ("mean" if name in ("dr-grpo", "recentred") else "std")


def test_every_method_is_printed_with_its_formulas(capsys):
    runpy.run_path(losses.__file__, run_name="__main__")
    said = capsys.readouterr().out
    for name, method in METHODS.items():
        functions = filter(None, (method.repair, method.credit, *method.passes))
        assert f"{name}: " in said and all(f.__name__ in said for f in functions)


# ---------------- errors. What a hyperparameter may be: test_run.py

X = torch.zeros(4, 3)
BATCH = dict.fromkeys(("logp", "logp_old", "adv", "logp_ref"), X)
BATCH |= {"mask": X == 0, "group_size": 2, "max_tokens": 3}
OLD = dict.fromkeys(("tokens", "logp", "scores", "own_scores"), X)
OLD |= dict.fromkeys(("rewards", "repaired"), X[:, 0])
OLD |= {"mask": X == 0, "kept_mask": X == 0, "group_size": 2}


@pytest.mark.parametrize("kind, good, first", [(Batch, BATCH, "logp"), (OldPolicy, OLD, "tokens")])
def test_a_tensor_of_another_shape_is_named(kind, good, first):
    for name in good.keys() - {first, "group_size", "max_tokens"}:
        with pytest.raises(ValueError, match=f"{name} has shape"):
            kind(**good | {name: torch.zeros(4, 2, dtype=good[name].dtype)})


def batch(**other):
    return Batch(**BATCH | other)


def old(**other):
    return OldPolicy(**OLD | other)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: batch(mask=X),
        lambda: batch(**{key: x[:, 0] for key, x in BATCH.items() if torch.is_tensor(x)}),
        lambda: batch(max_tokens=0),
        lambda: batch(group_size=1),
        lambda: old(group_size=3),
        lambda: group_advantages(X[:, 0], 2, "max"),
        lambda: group_advantages(X[:, 0].long(), 2),
        lambda: group_advantages(X[:, :1], 2),
        lambda: group_advantages(X[:0, 0], 2),
        lambda: losses.nthr(X, old(scores=None)),
        lambda: losses.nthr(X, old(own_scores=None)),
        lambda: losses.ibpo(X, old(kept_mask=None)),
        lambda: losses.ibpo(X, old(repaired=None)),
        lambda: losses.ibpo(X, old(), reading="kept"),
        lambda: losses.shaped_rewards(X[:, 0], None, bonus=1, weight=1.0),
        lambda: losses.advantage_reweighting(X, old(), alpha=1.5),
        lambda: losses.sequence_ratio(batch(), "arithmetic"),
        lambda: losses.grpo(batch(logp_ref=None), kl=0.04),
        lambda: losses.prefix_nodes(X, X == 0, 3),
        lambda: cancel(None, batch(), X[:, :2]),
    ],
)
def test_what_does_not_fit_is_a_value_error(wrong):
    with pytest.raises(ValueError):
        wrong()


# ---------------- NTHR and IBPO: empty answers, ties, the alignment
#
# That the rules are their formulas, whatever the padding holds: claims M6, N4 and I3.


@pytest.mark.parametrize("empty", [[0, 1], range(12)])
def test_empty_answers_have_no_scores(empty):
    readout = Readout(Draw(0, 4, group_size=4))  # answer 0 is right, 1 is wrong
    mask = readout.draw.mask.clone()
    mask[empty] = False
    for x in nthr_scores(**readout.facts | readout.reading | {"mask": mask}):
        assert x.isfinite().all() and not x[~mask].any()


def test_scores_of_a_bf16_model_are_fp32_and_on_the_ids_that_occur():
    readout = Readout(Draw(0, 4, group_size=4))
    facts = {k: x.float() if k == "logp" else x for k, x in readout.facts.items()}
    reading = {k: x.bfloat16() if torch.is_tensor(x) else x for k, x in readout.reading.items()}
    for x in nthr_scores(**facts | reading):
        assert x.dtype == torch.float32
    assert not inspect.signature(nthr_scores).parameters["full_vocab"].default


def test_a_token_is_selected_above_tau_and_empty_answers_have_no_say():
    """Tau is 0.5 in the first group; in the second no right answer has a token."""
    nan, yes, no = math.nan, True, False
    scores = torch.tensor([[9, 9], [0.5, 0.75], [0.5, nan], [9, 9]] + 2 * [[9, 9], [1, 1]])
    mask = torch.tensor([[no, no], [yes, yes], [yes, no], [no, no]] + 2 * [[no, no], [yes, yes]])
    rewards = torch.tensor([1.0, 0.0] * 4)
    rewards[3] = 0
    known = OldPolicy(mask.long(), mask, X[0, 0] * scores, rewards, 4, None, scores, 0 * scores)
    assert losses.nthr_selected(known).nonzero().tolist() == [[1, 1]]
    assert losses.nthr_selected(known, beta=-1.0).nonzero().tolist() == [[1, 0], [1, 1]]


@cache
def shortest_edits(a, b):
    """All edits of a into b of the lowest price, as pairs: the price, and which of a's tokens stay.

    An insertion, a deletion and a substitution cost 100 each, a token that stays -1.
    """
    if not a or not b:
        return {(100 * len(a + b), (False,) * len(a))}
    same = a[0] == b[0]
    ways = {(price + 100, kept) for price, kept in shortest_edits(a, b[1:])}
    ways |= {(price + 100, (False, *kept)) for price, kept in shortest_edits(a[1:], b)}
    ways |= {
        (price + (-1 if same else 100), (same, *kept))
        for price, kept in shortest_edits(a[1:], b[1:])
    }
    return {way for way in ways if way[0] == min(ways)[0]}


def test_kept_tokens_are_those_of_a_shortest_edit_of_rows_of_any_length():
    rng = random.Random(0)
    for letters in (2, 3, 5):
        draw = [rng.choices(range(letters), k=rng.randint(0, 7)) for _ in range(120)]
        rows, others = (list(map(tuple, x)) for x in (draw[:60], draw[60:]))
        (a, a_mask), (b, b_mask) = pad(rows), pad(others)  # with 0, a letter
        for x, y, kept, mask in zip(
            rows, others, kept_tokens(a, a_mask, b, b_mask), a_mask, strict=True
        ):
            assert tuple(kept[mask].tolist()) in {way for _, way in shortest_edits(x, y)}
            assert not kept[~mask].any()
    a, b = torch.tensor([[1, 2, 3, 4, 4, 4, 4]]), torch.tensor([[5, 5, 5, 5, 1, 2, 3]])
    assert not kept_tokens(a, a > 0, b, b > 0).any()  # 7 edits keep nothing, 8 would keep three


def test_a_correction_that_ends_with_another_eos_keeps_the_end():
    """3 5 and the end 1 become 4 5 and the end 2."""
    tokens, rewards = torch.tensor([[3, 5, 1], [4, 5, 2]]), torch.tensor([0.0, 1.0])
    both = dict(items="ab", texts="ab", logp=None, prompts=None, generated=6)
    answers = Answers(tokens=tokens, mask=tokens > 0, rewards=rewards, **both)
    fixed = replace(answers, tokens=tokens[1:], mask=tokens[1:] > 0, rewards=rewards[1:])
    task = SimpleNamespace(repair=lambda *shown: shown)
    correct(answers, task, Config(group_size=2), lambda problems: fixed, eos=torch.tensor([1, 2]))
    assert answers.kept_mask.tolist() == [[False, True, True], [False] * 3]
    assert answers.repaired.tolist() == [True, False]
    fixed.rewards = torch.tensor([0.5])  # a part of the reward is no repair
    correct(answers, task, Config(group_size=2), lambda problems: fixed, eos=torch.tensor([1, 2]))
    assert not answers.repaired.any()
