"""NTHR, Advantage Reweighting, Lopti and IBPO against their formulas, one token at a time
(theory.md, sections 4 to 6).

`naive_scores` is the second opinion on NTHR: the double sum over pairs of tokens in plain floats, no matrix M. The
batches hold an all-wrong group, an all-right one, a partial reward, unequal lengths and garbage in the padding.
"""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

import losses
from losses import (
    METHODS,
    Batch,
    OldPolicy,
    advantage_reweighting,
    nthr,
    nthr_random,
    nthr_scores,
    nthr_selected,
)

REWARDS = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0.5, 1, 0, 0]]


def make_old(
    seed=0, size=4, width=5, vocabulary=7, d=3, temperature=1.0, dtype=torch.float64
) -> OldPolicy:
    """Rows of a policy that is nothing but its hidden states and its output embeddings."""
    g = torch.Generator().manual_seed(seed)
    rewards = torch.tensor(
        [row[:size] if size < 4 else row + row[1:2] * (size - 4) for row in REWARDS]
    ).double()
    n = rewards.numel()
    tokens, hidden = (
        torch.randint(1, vocabulary, (n, width), generator=g),
        torch.randn(n, width, d, generator=g),
    )
    head, lengths = (
        torch.randn(vocabulary, d, generator=g),
        torch.randint(1, width + 1, (n, 1), generator=g),
    )
    hidden, head = hidden.to(dtype), head.to(dtype)
    logp = (
        (hidden.double() @ head.double().T / temperature)
        .log_softmax(-1)
        .gather(2, tokens[..., None])[..., 0]
    )
    mask = torch.arange(width) < lengths
    hidden = hidden.masked_fill(~mask[..., None], math.nan)
    tokens = tokens.masked_fill(~mask, 0)  # an id that no answer holds
    return OldPolicy(
        tokens,
        mask,
        logp.masked_fill(~mask, 1e4),
        rewards.flatten(),
        size,
        temperature,
        hidden,
        head,
    )


def make_adv(old: OldPolicy) -> torch.Tensor:
    adv = torch.randn(
        old.mask.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    return adv.masked_fill(~old.mask, 0.0)


def prediction_errors(old: OldPolicy, ids):
    """{(i, t): ([g on ids], [h])} in floats, the softmax over the whole vocabulary."""
    found = {}
    for i, t in old.mask.nonzero().tolist():
        h = old.hidden[i, t].tolist()
        z = [
            sum(a * b for a, b in zip(row, h, strict=True)) / old.temperature
            for row in old.head.tolist()
        ]
        total = sum(map(math.exp, z))
        found[i, t] = ([int(v == old.tokens[i, t]) - math.exp(z[v]) / total for v in ids], h)
    return found


def naive_scores(old: OldPolicy, self_term=True, full_vocab=False):
    """{(i, t): sum over the tokens of the group's correct answers of <g, g'> <h, h'>}, mixed groups
    only."""
    scores, R = {}, old.rewards.tolist()
    for start in range(0, len(R), old.group_size):
        group = range(start, start + old.group_size)
        right = [i for i in group if R[i] == 1]
        if not right or len(right) == len(group):
            continue
        ids = {
            old.tokens[i, t].item()
            for i in group
            for t in range(old.mask.shape[1])
            if old.mask[i, t]
        }
        errors = prediction_errors(old, range(len(old.head)) if full_vocab else sorted(ids))
        for (i, t), (g, h) in errors.items():
            if i in group:
                scores[i, t] = 0.0
                for (j, u), (g2, h2) in errors.items():
                    if j in right and (self_term or (i, t) != (j, u)):
                        gg, hh = (
                            sum(a * b for a, b in zip(*pair, strict=True))
                            for pair in ((g, g2), (h, h2))
                        )
                        scores[i, t] += gg * hh
    return scores


def naive_selection(old: OldPolicy, beta=1.0, self_term=True, full_vocab=False):
    scores, chosen, R = naive_scores(old, self_term, full_vocab), set(), old.rewards.tolist()
    for start in range(0, len(R), old.group_size):
        group = range(start, start + old.group_size)
        means = []
        for i in group:
            own = [s for (j, _), s in scores.items() if j == i]
            if R[i] == 1 and own:
                means.append(sum(own) / len(own))
        chosen |= {
            (i, t)
            for (i, t), s in scores.items()
            if i in group and R[i] != 1 and s > beta * min(means)
        }
    return chosen


def where(mask) -> set:
    return set(map(tuple, mask.nonzero().tolist()))


# ---------------- NTHR

VARIANTS = [(s, f) for s in (True, False) for f in (True, False)]


@pytest.mark.parametrize("self_term, full_vocab", VARIANTS)
@pytest.mark.parametrize(
    "shape", [{}, {"size": 6}, {"width": 1}, {"temperature": 0.6}, {"size": 2, "width": 9}], ids=str
)
def test_scores_and_selection_are_the_double_sum(shape, self_term, full_vocab):
    for seed in range(3):
        old = make_old(seed, **shape)
        scores, expected = nthr_scores(old, self_term, full_vocab), torch.zeros_like(old.logp)
        for at, s in naive_scores(old, self_term, full_vocab).items():
            expected[at] = s
        torch.testing.assert_close(scores, expected, rtol=1e-10, atol=1e-12)
        for beta in (0.0, 0.3, 1.0, 2.0):
            chosen = nthr_selected(old, beta, self_term, full_vocab)
            assert where(chosen) == naive_selection(old, beta, self_term, full_vocab)
        assert 0 < nthr_selected(old, 0.0).sum() < old.mask.sum()


def test_the_readings_of_the_paper_differ():
    old = make_old(1, size=6)
    variants = [nthr_scores(old, *v) for v in VARIANTS]
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(variants) for b in variants[:i])


def test_selected_tokens_get_eta_times_their_advantage_and_the_others_their_own():
    old = make_old(2, size=8)
    adv, chosen = make_adv(old), nthr_selected(old)
    share = (old.rewards == 1).double().view(-1, 8).mean(1).tolist()
    assert chosen[:8].any() and chosen[24:].any() and share[0] < 0.5 < share[3] < 1
    for eta in (-1.0, 0.0, 0.25):
        new = nthr(adv, old, eta=eta)
        for i, t in old.mask.nonzero().tolist():
            factor = 2 * abs(0.5 - share[i // 8]) if eta < 0 else eta
            hit = chosen[i, t] and adv[i, t] < 0
            assert new[i, t].item() == pytest.approx(
                (factor if hit else 1.0) * adv[i, t].item(), abs=1e-15
            )
    for beta, self_term, full_vocab in ((0.0, True, False), (1.0, False, False), (0.5, True, True)):
        changed = nthr(-adv.abs(), old, beta, 0.0, self_term, full_vocab) != -adv.abs()
        assert changed.equal(nthr_selected(old, beta, self_term, full_vocab))
        gone = nthr_random(-adv.abs(), old, beta, self_term, full_vocab) != -adv.abs()
        assert gone.sum(1).equal(changed.sum(1))


def test_each_reading_of_the_paper_reaches_the_result():
    for reading in ({"beta": 0.2}, {"self_term": False}, {"full_vocab": True}):
        changed = set()
        for seed in range(12):
            old = make_old(seed, size=8)
            adv = -old.mask.double()
            plain, other = (nthr(adv, old, eta=0.0, **named) for named in ({}, reading))
            assert (other == 0).equal(nthr_selected(old, **reading) | ~old.mask)
            changed.add(plain.equal(other))
        assert False in changed, reading


@pytest.mark.parametrize("rule", [nthr, nthr_random])
def test_groups_all_right_or_all_wrong_and_every_right_answer_are_left_as_they_are(rule):
    old = make_old(3)
    adv = make_adv(old)
    new = rule(adv, old) if rule is nthr_random else rule(adv, old, eta=0.0)
    assert new[4:12].equal(adv[4:12]) and new[old.rewards == 1].equal(adv[old.rewards == 1])
    assert not new.equal(adv) and not new.requires_grad


def test_scores_survive_padding_row_order_and_splitting():
    old = make_old(4)
    scores, selected, n = nthr_scores(old), nthr_selected(old), len(old.mask)

    def take(rows, **change):
        tensors = {
            k: getattr(old, k)[rows] for k in ("tokens", "mask", "logp", "rewards", "hidden")
        }
        return replace(old, **tensors | change)

    for start in range(0, n, 4):
        part = take(slice(start, start + 4))
        assert nthr_scores(part).equal(scores[start : start + 4])
        assert nthr_selected(part).equal(selected[start : start + 4])
    order = torch.tensor([2, 0, 3, 1, *range(4, 12), 15, 12, 14, 13])
    torch.testing.assert_close(nthr_scores(take(order)), scores[order], rtol=1e-12, atol=1e-14)
    wide = OldPolicy(
        *(torch.cat([x, x[:, :2].clone()], 1) for x in (old.tokens, old.mask & True, old.logp)),
        old.rewards,
        4,
        hidden=torch.cat([old.hidden, old.hidden[:, :2]], 1),
        head=old.head,
    )
    wide.mask[:, -2:] = False
    torch.testing.assert_close(nthr_scores(wide)[:, :-2], scores, rtol=1e-12, atol=1e-14)


def test_an_empty_answer_a_lone_pair_and_half_precision_give_numbers():
    old = make_old(5, size=2)  # 1 right, 1 wrong in the last group
    old.mask[[1, 6]] = False  # an empty wrong answer, an empty answer with a partial reward
    assert nthr_scores(old).isfinite().all() and not nthr_selected(old)[[1, 6]].any()
    many = make_old(5, size=8)
    many.mask[0] = False  # an empty right answer has no mean score
    assert where(nthr_selected(many)) == naive_selection(many) and naive_selection(many)
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
        new = nthr_random(adv, replace(old, gen=torch.Generator().manual_seed(seed)))
        gone = new == 0
        assert (gone | (new == -1)).all() and not (gone & ~old.mask).any()
        assert gone.sum(1).equal(selected.sum(1))
        counts += gone
    expected = selected.sum(1, keepdim=True) / old.mask.sum(1, keepdim=True) * old.mask
    assert (counts / tries - expected).abs().max() < 0.12 and (
        expected > 0
    ).sum() > selected.sum() > 0
    again = [nthr_random(adv, replace(old, gen=torch.Generator().manual_seed(1))) for _ in range(2)]
    assert again[0].equal(again[1])
    assert nthr_random(-adv, old).equal(-adv)  # nothing to soften where there is no penalty


# ---------------- Advantage Reweighting and Lopti


def test_reweighting_by_hand():
    p = torch.tensor([[0.1, 0.9], [0.1, 0.9]], dtype=torch.float64)
    old = OldPolicy(torch.ones(2, 2).long(), p > 0, p.log(), torch.tensor([1.0, 0.0]), 2)
    adv = torch.tensor([[2.0, 2.0], [-1.0, -1.0]], dtype=torch.float64)
    for alpha, ratio in ((0.0, 9.0), (0.1, 8.3), (0.2, 7.5), (0.3, 6.8)):
        new = advantage_reweighting(adv, old, alpha)
        expected = [
            [a * (alpha * q + 1 - alpha) for a, q in zip(*x, strict=True)]
            for x in zip(adv.tolist(), p.tolist(), strict=True)
        ]
        assert new.flatten().tolist() == pytest.approx([x for row in expected for x in row])
        norms = new[0] * (1 - p[0])  # of the two tokens' gradients, up to a factor: claim A1
        assert (norms[0] / norms[1]).item() == pytest.approx(ratio, abs=0.05)
    assert advantage_reweighting(adv, old).equal(advantage_reweighting(adv, old, 0.3))
    assert not advantage_reweighting(
        adv, replace(old, logp=old.logp.requires_grad_())
    ).requires_grad
    for alpha in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="alpha must lie between 0 and 1"):
            advantage_reweighting(adv, old, alpha)


def lopti_batch(old_probabilities, ratio=1.0) -> Batch:
    p = torch.tensor([old_probabilities] * 2, dtype=torch.float64)
    logp = (p.log() + math.log(ratio)).requires_grad_()
    adv = torch.tensor([[1.0], [-0.5]]).expand_as(p).double()
    return Batch(logp, p.log(), adv, p > 0, 2, 10)


def test_the_two_passes_part_the_tokens_by_their_old_probability_and_add_up_to_the_joint_loss():
    for ratio in (1.0, 1.1, 0.5, 1.5):
        b = lopti_batch([0.1, 0.5, 0.51, 0.9], ratio)
        low, high, joint = (
            torch.autograd.grad(f(b), b.logp)[0]
            for f in (losses.lopti_low, losses.lopti_high, losses.token_grpo)
        )
        assert (low[:, 2:] == 0).all() and (
            high[:, :2] == 0
        ).all()  # 0.5 itself is low, whatever pi_theta is now
        torch.testing.assert_close(low + high, joint)
        assert joint.abs().max() > 0


def test_the_neighbours_are_made_of_these_parts():
    table = {
        "nthr": ("grpo", nthr, True),
        "nthr-random": ("grpo", nthr_random, True),
        "advantage-reweighting": ("token_grpo", advantage_reweighting, False),
        "lopti": ("lopti_low lopti_high", None, False),
        "ar-lopti": ("lopti_low lopti_high", advantage_reweighting, False),
        "ibpo": ("grpo", losses.ibpo, False),
    }
    for name, (passes, credit, needs_hidden) in table.items():
        method = METHODS[name]
        assert " ".join(f.__name__ for f in method.passes) == passes and method.scale == "std"
        assert (method.credit, method.needs_hidden, method.repair) == (
            credit,
            needs_hidden,
            name == "ibpo",
        )


# ---------------- IBPO


def distance(a, b, keep=None) -> float:
    """Levenshtein by recursion over suffixes; with `keep`, those of a's places must stay and no
    others may."""

    @cache
    def cost(t, u):
        if t == len(a):
            return len(b) - u
        found = [cost(t, u + 1) + 1] if u < len(b) else []
        if keep is None or t not in keep:
            found += [cost(t + 1, u) + 1] + ([cost(t + 1, u + 1) + 1] if u < len(b) else [])
        if u < len(b) and a[t] == b[u] and (keep is None or t in keep):
            found.append(cost(t + 1, u + 1))
        return min(found, default=math.inf)

    return cost(0, 0)


def test_kept_tokens_are_those_of_a_shortest_edit():
    g = torch.Generator().manual_seed(0)
    for width, other, letters in ((6, 7, 2), (7, 4, 3), (1, 1, 2), (5, 9, 5)):
        a, b = (torch.randint(0, letters, (60, w), generator=g) for w in (width, other))
        la, lb = (torch.randint(0, w + 1, (60, 1), generator=g) for w in (width, other))
        masks = torch.arange(width) < la, torch.arange(other) < lb
        kept = losses.kept_tokens(a, masks[0], b, masks[1])
        assert not (kept & ~masks[0]).any()
        for i in range(60):
            x, y = a[i, : la[i]].tolist(), b[i, : lb[i]].tolist()
            assert distance(x, y) == distance(x, y, set(kept[i].nonzero()[:, 0].tolist()))


@pytest.mark.parametrize(
    "answer, correction, kept",
    [
        ("so #107", "so #85", "1111000"),
        ("abc", "abc", "111"),
        ("abc", "xaxbxcx", "111"),
        ("abc", "", "000"),
    ]
    + [
        ("5+9=14,#84", "5+9=15,#85", "1111101110"),
        ("aab", "ab", "011"),
        ("kitten", "sitting", "011101"),
    ],
)
def test_kept_tokens_by_hand(answer, correction, kept):
    a, b = (torch.tensor([[ord(x) for x in text] or [0]]) for text in (answer, correction))
    found = losses.kept_tokens(a, a > 0, b, b > 0)
    assert found[0].tolist() == [x == "1" for x in kept]


def test_ibpo_blames_the_changed_tokens_of_repaired_answers_only():
    old = make_old(8)
    kept = old.mask & (torch.rand(old.mask.shape, generator=torch.Generator().manual_seed(1)) < 0.5)
    adv = make_adv(old)
    new = losses.ibpo(adv, replace(old, kept_mask=kept))
    assert (new[kept] == 0).all() and new[~kept].equal(adv[~kept]) and kept.any()
    assert losses.ibpo(adv, replace(old, kept_mask=kept & False)).equal(adv)
    with pytest.raises(ValueError, match="corrections"):
        losses.ibpo(adv, old)


def test_a_repair_of_a_wrong_answer_is_worth_weight_times_bonus():
    rewards, repaired = torch.tensor([0.0, 0.0, 1.0, 0.5]), torch.tensor([True, False, True, True])
    assert losses.shaped_rewards(rewards, repaired).tolist() == pytest.approx([0.3, 0, 1, 0.5])
    assert losses.shaped_rewards(rewards.double(), repaired, 0.2, 0.7).tolist() == pytest.approx(
        [0.14, 0, 1, 0.5]
    )


# ---------------- errors say what is wrong


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mask": torch.ones(4, 2).bool()}, r"mask .*\(4, 2\).*\(4, 3\)"),
        ({"logp": torch.zeros(4)}, r"logp .*\(4,\).*\(4, 3\)"),
        ({"rewards": torch.zeros(2)}, r"rewards .*\(2,\).*\(4,\)"),
        ({"hidden": torch.zeros(4, 3, 6)}, r"hidden .*\(4, 3, 6\).*\(4, 3, 5\)"),
        ({"kept": torch.zeros(4, 2).bool()}, r"kept .*\(4, 2\).*\(4, 3\)"),
        ({"group_size": 3}, "4 rows .*group_size 3"),
        ({"group_size": 1}, "group_size 1"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    good = {
        "tokens": torch.zeros(4, 3).long(),
        "mask": torch.ones(4, 3).bool(),
        "logp": torch.zeros(4, 3),
    }
    good |= {
        "rewards": torch.zeros(4),
        "group_size": 2,
        "hidden": torch.zeros(4, 3, 5),
        "head": torch.zeros(9, 5),
    }
    OldPolicy(**good)
    with pytest.raises(ValueError, match=message):
        OldPolicy(**good | change)


def test_nthr_without_hidden_states_says_so():
    old = make_old()
    for missing in ("hidden", "head"):
        with pytest.raises(ValueError, match="hidden states and the output embeddings"):
            nthr(make_adv(old), replace(old, **{missing: None}))
