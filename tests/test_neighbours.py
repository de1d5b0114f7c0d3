"""What no claim says of NTHR and IBPO: empty answers, ties, the alignment.

That the rules are their formulas, whatever the padding holds, is said by the claims M6, N4 and I3.
"""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from claims.readout import Readout
from claims.trees import Draw
from llm.neighbours import correct, kept_tokens, nthr_scores
from losses import OldPolicy, nthr, nthr_random, nthr_selected

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


# ---------------- NTHR


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
