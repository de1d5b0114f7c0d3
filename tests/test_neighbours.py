"""What no claim says of NTHR, Advantage Reweighting and IBPO: padding, empty answers, chance.

That the rules are their formulas is said by the claims M6 to M8, N4 and A2. naive.py is a second
opinion on NTHR: the double sum over pairs of tokens. The batches hold an all-wrong group, an
all-right one, a partial reward, unequal lengths and garbage in the padding.
"""

import math
from dataclasses import replace
from functools import cache

import naive
import pytest
import torch

import losses
from losses import (
    OldPolicy,
    advantage_reweighting,
    nthr,
    nthr_random,
    nthr_scores,
    nthr_selected,
)

REWARDS = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0.5, 1, 0, 0]]


def make_old(
    seed=0, size=4, width=5, vocabulary=7, temperature=1.0, dtype=torch.float64
) -> OldPolicy:
    """Rows of a policy that is nothing but its hidden states and its output embeddings."""
    g = torch.Generator().manual_seed(seed)
    rewards = [row[:size] if size < 4 else row + row[1:2] * (size - 4) for row in REWARDS]
    rewards = torch.tensor(rewards).double().flatten()
    n = len(rewards)
    tokens = torch.randint(1, vocabulary, (n, width), generator=g)
    hidden = torch.randn(n, width, 3, generator=g).to(dtype)
    head = torch.randn(vocabulary, 3, generator=g).to(dtype)
    logp = (hidden.double() @ head.double().T / temperature).log_softmax(-1)
    logp = logp.gather(2, tokens[..., None])[..., 0]
    mask = torch.arange(width) < torch.randint(1, width + 1, (n, 1), generator=g)
    hidden = hidden.masked_fill(~mask[..., None], math.nan)
    tokens = tokens.masked_fill(~mask, 0)  # an id that no answer holds
    logp = logp.masked_fill(~mask, 1e4)
    return OldPolicy(tokens, mask, logp, rewards, size, temperature, hidden, head)


def make_adv(old: OldPolicy) -> torch.Tensor:
    g = torch.Generator().manual_seed(9)
    return torch.randn(old.mask.shape, generator=g, dtype=torch.float64).masked_fill(~old.mask, 0.0)


def naive_scores(old: OldPolicy, self_term=True, full_vocab=False) -> list[list[float]]:
    rows = []
    for i, mask in enumerate(old.mask):
        h, G = old.hidden[i][mask], old.group_size
        group = slice(i - i % G, i - i % G + G)
        ids = sorted({*old.tokens[group][old.mask[group]].tolist()})
        ids = [*range(len(old.head))] if full_vocab else ids
        g = -(h @ old.head.T / old.temperature).softmax(-1)[:, ids]
        for t, token in enumerate(old.tokens[i][mask].tolist()):
            g[t, ids.index(token)] += 1
        rows.append((g, h))
    return naive.nthr_scores(rows, old.rewards.tolist(), old.group_size, self_term)


def assert_naive(ours: torch.Tensor, rows: list[list], old: OldPolicy):
    expected = torch.zeros_like(ours)
    expected[old.mask] = torch.tensor(sum(rows, []), dtype=ours.dtype)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("self_term", [True, False])
@pytest.mark.parametrize("full_vocab", [True, False])
@pytest.mark.parametrize(
    "shape", [{}, {"size": 6}, {"width": 1}, {"temperature": 0.6}, {"size": 2, "width": 9}], ids=str
)
def test_scores_and_selection_are_the_double_sum(shape, self_term, full_vocab):
    old = make_old(1, **shape)
    scores = naive_scores(old, self_term, full_vocab)
    assert_naive(nthr_scores(old, self_term, full_vocab), scores, old)
    for beta in (-1.0, 0.0, 0.3, 1.0, 2.0):
        chosen = naive.nthr_selected(scores, old.rewards.tolist(), old.group_size, beta)
        assert_naive(nthr_selected(old, beta, self_term, full_vocab), chosen, old)
    assert 0 < nthr_selected(old, 0.0).sum() < old.mask.sum()
    assert nthr_scores(old).equal(nthr_scores(old, self_term=True, full_vocab=False))


def test_a_token_whose_score_is_tau_is_not_above_it():
    old = make_old(1)
    assert nthr_selected(old, 0.0)[-1, 0]
    old.hidden[-1, 0] = 0.0
    assert nthr_scores(old)[-1, 0] == 0 and not nthr_selected(old, 0.0)[-1, 0]


def test_scores_survive_padding_row_order_and_splitting():
    old = make_old(4)
    scores, selected, n = nthr_scores(old), nthr_selected(old), len(old.mask)

    def take(rows, **change):
        names = ("tokens", "mask", "logp", "rewards", "hidden")
        return replace(old, **{name: getattr(old, name)[rows] for name in names} | change)

    for start in range(0, n, 4):
        part = take(slice(start, start + 4))
        assert nthr_scores(part).equal(scores[start : start + 4])
        assert nthr_selected(part).equal(selected[start : start + 4])
    order = torch.tensor([2, 0, 3, 1, *range(4, 12), 15, 12, 14, 13])
    torch.testing.assert_close(nthr_scores(take(order)), scores[order], rtol=1e-12, atol=1e-14)
    names = ("tokens", "mask", "logp", "hidden")  # these have a column for each token
    wide = {name: getattr(old, name)[:, [*range(5), 0, 1]] for name in names}
    wide["mask"][:, -2:] = False
    more = nthr_scores(OldPolicy(**wide, rewards=old.rewards, group_size=4, head=old.head))
    torch.testing.assert_close(more[:, :-2], scores, rtol=1e-12, atol=1e-14)


def test_an_empty_answer_a_lone_pair_and_half_precision_give_numbers():
    old = make_old(5, size=2)  # 1 right, 1 wrong in the last group
    old.mask[[1, 6]] = False  # an empty wrong answer, an empty answer with a partial reward
    assert nthr_scores(old).isfinite().all() and not nthr_selected(old)[[1, 6]].any()
    many = make_old(5, size=8)
    many.mask[0] = False  # an empty right answer has no mean score
    chosen = naive.nthr_selected(naive_scores(many), many.rewards.tolist(), 8)
    assert_naive(nthr_selected(many), chosen, many)
    assert sum(map(sum, chosen)) > 0
    old.mask[:] = False
    assert nthr(make_adv(old), old).equal(make_adv(old))
    half = make_old(6, dtype=torch.bfloat16)
    assert nthr_scores(half).dtype == torch.float32
    exact = replace(half, hidden=half.hidden.double(), head=half.head.double())
    torch.testing.assert_close(nthr_scores(half).double(), nthr_scores(exact), rtol=1e-4, atol=1e-4)


def test_the_random_control_takes_as_many_tokens_of_each_wrong_answer_and_all_of_them_in_turn():
    old, counts = make_old(7, size=6, width=8), torch.zeros(24, 8)
    selected = nthr_selected(old)
    adv, tries = -torch.ones(24, 8).double(), 400
    for seed in range(tries):
        new = nthr_random(adv, replace(old, gen=torch.Generator().manual_seed(seed)), eta=0.0)
        gone = new == 0
        assert (gone | (new == -1)).all() and not (gone & ~old.mask).any()
        assert gone.sum(1).equal(selected.sum(1))
        counts += gone
    expected = selected.sum(1, keepdim=True) / old.mask.sum(1, keepdim=True) * old.mask
    assert (counts / tries - expected).abs().max() < 0.12
    assert (expected > 0).sum() > selected.sum() > 0
    again = [nthr_random(adv, replace(old, gen=torch.Generator().manual_seed(1))) for _ in range(2)]
    assert again[0].equal(again[1])
    assert nthr_random(-adv, old).equal(-adv)  # nothing to soften where there is no penalty


def test_the_random_control_is_uniform_and_independent_between_rows_groups_and_steps(monkeypatch):
    """Two of four tokens are drawn: six sets. 120 is exceeded by chance once in 10^9 times."""
    n, bits = 7200, torch.tensor([1, 2, 4, 8, 0])
    mask = (bits > 0).expand(n, 5)
    monkeypatch.setattr(losses, "nthr_selected", lambda *_: mask & (bits < 4))
    drawn = []
    for seed in (0, 1):
        gen = torch.Generator().manual_seed(seed)
        old = OldPolicy(mask.long(), mask, mask.double(), torch.zeros(n), 4, gen=gen)
        gone = nthr_random(-mask.double(), old, eta=0.0) == 0
        drawn.append((gone * bits).sum(1).unique(return_inverse=True)[1])
        assert drawn[-1].max() == 5
    first, second = drawn
    rows = torch.arange(0, n, 8)  # the first row of every other group
    for one, other in (
        (first[rows], first[rows + 1]),  # neighbours in a group
        (first[rows], first[rows + 4]),  # the same place in another group
        (first[rows + 3], first[rows + 4]),
        (first, second),
    ):
        counts = (6 * one + other).bincount(minlength=36)
        expected = len(one) / 36
        assert ((counts - expected) ** 2 / expected).sum() < 120


def test_reweighting_by_hand():
    p = torch.tensor([[0.1, 0.9]] * 2, dtype=torch.float64)
    old = OldPolicy(torch.ones(2, 2).long(), p > 0, p.log(), torch.tensor([1.0, 0.0]), 2)
    for alpha, ratio in ((0.0, 9.0), (0.1, 8.3), (0.2, 7.5), (0.3, 6.8)):
        new = advantage_reweighting(torch.ones_like(p), old, alpha)[0]
        norms = new * (1 - p[0])  # of the two tokens' gradients, up to a factor: claim A1
        assert (norms[0] / norms[1]).item() == pytest.approx(ratio, abs=0.05)
    for alpha in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="alpha must lie between 0 and 1"):
            advantage_reweighting(p, old, alpha)


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
        kept = losses.kept_tokens(a, masks[0], b, masks[1])
        assert not (kept & ~masks[0]).any()
        for i in range(60):
            x, y = a[i, : la[i]].tolist(), b[i, : lb[i]].tolist()
            ours = distance(x, y, {*kept[i].nonzero().flatten().tolist()})
            assert ours == pytest.approx(distance(x, y))


KEPT = [("so #107", "so #85", "1111000"), ("abc", "abc", "111"), ("abc", "xaxbxcx", "111")]
KEPT += [("abc", "", "000"), ("5+9=14,#84", "5+9=15,#85", "1111101110"), ("aab", "ab", "011")]
KEPT += [("kitten", "sitting", "011101"), ("aaa", "ab", "010")]
KEPT += [("ba", "ac", "01")]  # two edits are enough with nothing kept, too
KEPT += [("abcde", "xyzab", "00000")]  # two kept would take six edits


@pytest.mark.parametrize("answer, correction, kept", KEPT)
def test_kept_tokens_by_hand(answer, correction, kept):
    a, b = (torch.tensor([[ord(x) for x in text] or [0]]) for text in (answer, correction))
    found = losses.kept_tokens(a, a > 0, b, b > 0)
    assert found[0].tolist() == [x == "1" for x in kept]


READINGS = [("sign", "0011", "1100"), ("changed", "0011", "0011"), ("none", "1111", "1111")]


@pytest.mark.parametrize("reading, blamed, praised", READINGS)
def test_ibpo_by_hand(reading, blamed, praised):
    """Two kept tokens, then two changed ones; the last two answers are not repaired."""
    kept_mask = torch.tensor([[True, True, False, False]] * 4)
    adv = torch.tensor([-2.0, 3.0, -1.0, 5.0], dtype=torch.float64)[:, None].expand(4, 4)
    old = OldPolicy(kept_mask.long(), kept_mask | True, adv, torch.zeros(4), 2)
    old.kept_mask, old.repaired = kept_mask, torch.tensor([True, True, False, False])
    expected = adv.clone()
    for row, marks in enumerate((blamed, praised)):
        expected[row] *= torch.tensor([float(mark) for mark in marks])
    assert losses.ibpo(adv, old, reading).equal(expected)
    assert losses.ibpo(adv, old).equal(expected) or reading != "sign"


# ---------------- errors say what is wrong


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mask": torch.ones(4, 2).bool()}, r"mask .*\(4, 2\).*\(4, 3\)"),
        ({"logp": torch.zeros(4)}, r"logp .*\(4,\).*\(4, 3\)"),
        ({"rewards": torch.zeros(2)}, r"rewards .*\(2,\).*\(4,\)"),
        ({"hidden": torch.zeros(4, 3, 6)}, r"hidden .*\(4, 3, 6\).*\(4, 3, 5\)"),
        ({"kept_mask": torch.zeros(4, 2).bool()}, r"kept_mask .*\(4, 2\).*\(4, 3\)"),
        ({"repaired": torch.zeros(4, 3).bool()}, r"repaired .*\(4, 3\).*\(4,\)"),
        ({"group_size": 3}, "4 rows .*group_size 3"),
        ({"group_size": 1}, "group_size 1"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    good = {"tokens": torch.zeros(4, 3).long(), "mask": torch.ones(4, 3).bool()}
    good |= {"logp": torch.zeros(4, 3), "rewards": torch.zeros(4), "group_size": 2}
    good |= {"hidden": torch.zeros(4, 3, 5), "head": torch.zeros(9, 5)}
    OldPolicy(**good)
    with pytest.raises(ValueError, match=message):
        OldPolicy(**good | change)


def test_a_near_miss_must_count_less_than_a_right_answer():
    zero, repaired = torch.zeros(2), torch.tensor([True, False])
    for bonus, weight in ((1.0, 1.0), (0.5, 2.0), (4.0, 0.3)):
        with pytest.raises(ValueError, match=f"weight {weight} times bonus {bonus} must stay"):
            losses.shaped_rewards(zero, repaired, bonus, weight)
    for bonus, weight in ((2.0, 0.4), (0.4, 2.0)):
        shaped = losses.shaped_rewards(zero, repaired, bonus, weight)
        assert shaped.tolist() == pytest.approx([0.8, 0.0])


def test_what_a_rule_lacks_is_named():
    old = make_old()
    for missing in ("hidden", "head"):
        with pytest.raises(ValueError, match="hidden states and output embeddings"):
            nthr(make_adv(old), replace(old, **{missing: None}))
    kept_mask, repaired = old.mask, old.rewards == 0
    for known in ({}, {"kept_mask": kept_mask}, {"repaired": repaired}):
        with pytest.raises(ValueError, match="corrections: kept_mask or repaired is None"):
            losses.ibpo(make_adv(old), replace(old, **known))
    whole = replace(old, kept_mask=kept_mask, repaired=repaired)
    with pytest.raises(ValueError, match="reading must be .*, not 'kept'"):
        losses.ibpo(make_adv(old), whole, "kept")
