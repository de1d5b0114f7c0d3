"""What no claim says of NTHR and IBPO: padding, empty answers, ties, chance, the alignment.

That the rules are their formulas is said by the claims M6, N4, A2 and I3. The batches hold an
all-wrong group, an all-right one, a partial reward, unequal lengths and garbage in the padding.
"""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import losses
from llm.neighbours import correct, kept_tokens, nthr_scores
from losses import OldPolicy, advantage_reweighting, nthr, nthr_random, nthr_selected

REWARDS = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0.5, 1, 0, 0]]


def make_facts(seed=0, width=5, dtype=torch.float64, empty=()) -> dict:
    """Rows of a policy that is nothing but its hidden states and its output embeddings."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 7, (16, width), generator=g)
    hidden = torch.randn(16, width, 3, generator=g).to(dtype)
    head = torch.randn(7, 3, generator=g).to(dtype)
    logp = (hidden.double() @ head.double().T).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    mask = torch.arange(width) < torch.randint(1, width + 1, (16, 1), generator=g)
    mask[list(empty)] = False
    return dict(
        tokens=tokens.masked_fill(~mask, 0),  # an id that no answer holds
        mask=mask,
        logp=logp.masked_fill(~mask, 1e4),
        rewards=torch.tensor(REWARDS).double().flatten(),
        hidden=hidden.masked_fill(~mask[..., None], math.nan),
        head=head,
        group_size=4,
    )


def make_old(facts: dict, gen=None) -> OldPolicy:
    scores, own_scores = nthr_scores(**facts)
    known = {key: x for key, x in facts.items() if key not in ("hidden", "head")}
    scores = scores.masked_fill(~facts["mask"], math.nan)  # a rule must not look there
    own_scores = own_scores.masked_fill(~facts["mask"], math.nan)
    return OldPolicy(**known, gen=gen, scores=scores, own_scores=own_scores)


# ---------------- NTHR


def test_scores_do_not_depend_on_row_order_splitting_or_padding():
    facts = make_facts(4)
    rows = ("tokens", "mask", "logp", "rewards", "hidden")

    def take(index):
        part = {key: facts[key][index] for key in rows}
        return [*nthr_scores(**facts | part), nthr_selected(make_old(facts | part))]

    whole = take(slice(None))
    for start in range(0, 16, 4):
        for x, y in zip(take(slice(start, start + 4)), whole, strict=True):
            assert x.equal(y[start : start + 4])
    order = torch.tensor([2, 0, 3, 1, *range(4, 12), 15, 12, 14, 13])
    for x, y in zip(take(order), whole, strict=True):
        torch.testing.assert_close(x, y[order], rtol=1e-12, atol=1e-14)
    wide = {key: facts[key][:, [*range(5), 0, 1]] for key in rows if key != "rewards"}
    wide["mask"][:, -2:] = False
    for x, y in zip(nthr_scores(**facts | wide), whole[:2], strict=True):
        torch.testing.assert_close(x[:, :-2], y, rtol=1e-12, atol=1e-14)
        assert (x[:, -2:] == 0).all()


def test_empty_answers_have_no_scores_and_no_say():
    for seed in range(10):
        facts = make_facts(seed, empty=(0, 1, 12))  # a right, a wrong and a partly right one
        scores, own_scores = nthr_scores(**facts)
        assert scores.isfinite().all() and own_scores.isfinite().all()
        assert (scores[4:12] == 0).all() and (own_scores[4:12] == 0).all()  # all wrong, all right
        # row 3 is the only right answer of group 0 that has tokens
        tau = 0.5 * scores[3][facts["mask"][3]].mean()
        expected = facts["mask"] & (scores > tau)
        selected = nthr_selected(make_old(facts), 0.5, self_term=True)
        assert selected[1:3].equal(expected[1:3]) and not selected[[0, 3, 12]].any()
    nobody = make_old(make_facts(5, empty=range(16)))
    adv = -torch.ones(16, 5).double()
    assert nthr(adv, nobody).equal(adv) and nthr_random(adv, nobody).equal(adv)


def test_without_a_right_answer_or_with_an_empty_one_alone_nothing_is_selected():
    for beta in (-1.0, 0.0, 1.0):
        assert not nthr_selected(make_old(make_facts(6)), beta)[4:12].any()
        assert not nthr_selected(make_old(make_facts(6, empty=(13,))), beta)[12:].any()


def test_half_precision_is_scored_in_fp32_and_without_a_gradient():
    half = make_facts(6, dtype=torch.bfloat16)
    half["hidden"].requires_grad_()
    exact = half | {key: half[key].detach().double() for key in ("hidden", "head")}
    half["logp"] = half["logp"].float()
    for x, y in zip(nthr_scores(**half), nthr_scores(**exact), strict=True):
        assert x.dtype == torch.float32 and not x.requires_grad
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def test_a_token_whose_score_is_tau_is_not_above_it():
    old = make_old(make_facts(1))
    first = torch.tensor([[0.5], [0.5], [0.75], [1.0]], dtype=torch.float64)
    scores, own_scores = first.repeat(4, 5), torch.zeros(16, 5)
    old = replace(old, scores=scores, own_scores=own_scores, mask=old.mask | True)
    # of group 0, rows 0 and 3 are right, so tau is 0.5
    assert nthr_selected(old)[:4, 0].tolist() == [False, False, True, False]


def test_the_random_control_is_uniform_and_independent_between_rows_and_steps(monkeypatch):
    """Two of four tokens are drawn: six sets. 120 is exceeded by chance once in 10^9 times."""
    n, bits = 7200, torch.tensor([1, 2, 4, 8, 0])
    mask = (bits > 0).expand(n, 5)
    monkeypatch.setattr(losses, "nthr_selected", lambda *_: mask & (bits < 4))
    drawn = []
    for seed in (0, 1, 0):
        gen = torch.Generator().manual_seed(seed)
        old = OldPolicy(mask.long(), mask, mask.double(), torch.zeros(n), 4, gen=gen)
        gone = nthr_random(-mask.double(), old, eta=0.0) == 0
        drawn.append((gone * bits).sum(1).unique(return_inverse=True)[1])
        assert drawn[-1].max() == 5
    first, second, again = drawn
    assert again.equal(first)
    rows = torch.arange(0, n, 8)  # the first row of every other group
    for one, other in ((first[rows], first[rows + 1]), (first[rows], first[rows + 4]), drawn[:2]):
        counts = (6 * one + other).bincount(minlength=36)
        expected = len(one) / 36
        assert ((counts - expected) ** 2 / expected).sum() < 120


def test_the_rules_leave_padding_and_praise_alone():
    facts = make_facts(7)
    adv = torch.where(facts["mask"], -1.0, -7.0).double()
    for rule in (nthr, nthr_random):
        softened = rule(adv, make_old(facts), 0.0, 0.5)
        assert (softened != adv).any() and (softened[~facts["mask"]] == -7).all()
        assert rule(-adv, make_old(facts), 0.0, 0.5).equal(-adv)


# ---------------- IBPO: the alignment


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


KEPT = [("so #107", "so #85", "1111000"), ("abc", "xaxbxcx", "111"), ("abc", "", "000")]
KEPT += [("5+9=14,#84", "5+9=15,#85", "1111101110"), ("kitten", "sitting", "011101")]
KEPT += [("ba", "ac", "01")]  # two edits are enough with nothing kept, too
KEPT += [("abcde", "xyzab", "00000")]  # two kept would take six edits


@pytest.mark.parametrize("answer, correction, kept", KEPT)
def test_kept_tokens_by_hand(answer, correction, kept):
    a, b = (torch.tensor([[ord(x) for x in text] or [0]]) for text in (answer, correction))
    found = kept_tokens(a, a > 0, b, b > 0)
    assert found[0].tolist() == [x == "1" for x in kept]


# ---------------- errors say what is wrong


def test_a_near_miss_must_count_less_than_a_right_answer():
    zero, repaired = torch.zeros(2), torch.tensor([True, False])
    for bonus, weight in ((1.0, 1.0), (0.5, 2.0), (4.0, 0.3)):
        with pytest.raises(ValueError, match=f"weight {weight} times bonus {bonus} must stay"):
            losses.shaped_rewards(zero, repaired, bonus, weight)
    for bonus, weight in ((2.0, 0.4), (0.4, 2.0)):
        shaped = losses.shaped_rewards(zero, repaired, bonus, weight)
        assert shaped.tolist() == pytest.approx([0.8, 0.0])


def test_what_a_rule_lacks_is_named():
    old = make_old(make_facts())
    adv = torch.ones(16, 5).double()
    for missing in ("scores", "own_scores"):
        with pytest.raises(ValueError, match="scores or own_scores is None"):
            nthr(adv, replace(old, **{missing: None}))
    kept_mask, repaired = old.mask, old.rewards == 0
    for known in ({}, {"kept_mask": kept_mask}, {"repaired": repaired}):
        with pytest.raises(ValueError, match="kept_mask or repaired is None"):
            losses.ibpo(adv, replace(old, **known))
    whole = replace(old, kept_mask=kept_mask, repaired=repaired)
    with pytest.raises(ValueError, match="reading must be .*, not 'kept'"):
        losses.ibpo(adv, whole, "kept")
    for alpha in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="alpha must lie between 0 and 1"):
            advantage_reweighting(adv, old, alpha)


def test_a_correction_that_ends_with_another_eos_keeps_the_end():
    """3 5 and then an end, 1 or 2, are corrected to 4 5 and the other end."""

    def ends(*tokens, rewards):
        tokens = torch.tensor(tokens)
        return SimpleNamespace(
            tokens=tokens,
            mask=tokens > 0,
            rewards=torch.tensor(rewards),
            items=["a"] * len(tokens),
            texts=["t"] * len(tokens),
            generated=int((tokens > 0).sum()),
        )

    answers = ends([3, 5, 1], [4, 5, 2], [3, 5, 2], rewards=[0.0, 1.0, 0.0])
    task = SimpleNamespace(repair=lambda item, text, shown: shown)
    config = SimpleNamespace(group_size=3, repair_references=1)
    fixed = ends([4, 5, 2], [4, 5, 1], rewards=[1.0, 0.0])
    correct(answers, task, config, ask=lambda problems: fixed, eos=torch.tensor([1, 2]))
    assert answers.repaired.tolist() == [True, False, False] and answers.generated == 15
    same = [[False, True, True], [False] * 3, [False, True, True]]
    assert answers.kept_mask.tolist() == same
