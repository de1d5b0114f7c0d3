"""toy/ibpo.py: the credit of each reading against a naive loop, and the signs of the table."""

import pytest
import torch

from toy import ibpo


def naive_gradient(W, words, answers, fixed, reading):
    """Of the mean of A'_i / T_i log pi over the tokens that a reading gives credit to."""
    G, T, right = ibpo.G, ibpo.LENGTH, ibpo.PARTNER
    wrong, failed = (
        [
            [bool(x != right[w]) for w, x in zip(*pair, strict=True)]
            for pair in zip(words, y, strict=True)
        ]
        for y in (answers, fixed)
    )
    repaired = [
        any(x) and not any(y) and reading != "grpo" for x, y in zip(wrong, failed, strict=True)
    ]
    shaped = torch.tensor(
        [0.3 if ok else 1.0 - any(x) for x, ok in zip(wrong, repaired, strict=True)]
    )
    assert {0.0, 1.0} < {*shaped.tolist()} or reading == "grpo"
    found = torch.zeros_like(W)
    for i in range(len(words)):
        group = shaped[i - i % G : i - i % G + G].double()
        A = (shaped[i] - group.mean()) / (group.std() + 1e-4)
        for t in range(T):
            token, slip = int(answers[i, t]), wrong[i][t]
            if repaired[i] and reading == "correction":
                token = int(fixed[i, t])
            if repaired[i] and reading in ("changed", "correction") and not slip:
                continue
            if repaired[i] and reading == "sign" and slip == bool(A > 0):
                continue
            row = words[i, t]
            found[row] -= A * W.detach()[row].softmax(0) / (T * len(words))
            found[row, token] += A / (T * len(words))
    return found


@pytest.mark.parametrize("reading", ibpo.READINGS)
def test_the_loss_gives_credit_to_the_tokens_of_its_reading(reading):
    gen = torch.Generator().manual_seed(2)
    W = ibpo.start_table(gen)
    words = ibpo.draw_words(8, gen).repeat_interleave(ibpo.G, 0)
    answers = ibpo.sample(W, words, gen)
    right = ibpo.PARTNER[words]
    # A slip that the right answer has elsewhere could be kept there, by another alignment.
    elsewhere = (answers[:, :, None] == right[:, None]).any(2)
    answers = torch.where(elsewhere, right, answers)
    fixed = ibpo.correct(words, answers, gen)
    ibpo.loss(W, words, answers, fixed, reading).backward()
    expected = naive_gradient(W, words, answers, fixed, reading)
    torch.testing.assert_close(-W.grad, expected, rtol=1e-6, atol=1e-9)


def test_groups_of_the_single_step_have_no_right_answer_and_corrections_only_mend():
    gen = torch.Generator().manual_seed(0)
    W = ibpo.start_table(gen)
    words, answers = ibpo.draw_wrong_groups(W, gen)
    right = ibpo.PARTNER[words]
    assert answers.shape == (ibpo.GROUPS * ibpo.G, ibpo.LENGTH)
    assert (words.view(ibpo.GROUPS, ibpo.G, -1).diff(dim=1) == 0).all()
    assert not (answers == right).all(1).any()
    fixed = ibpo.correct(words, answers, gen)
    assert ((fixed == answers) | (fixed == right)).all()
    share = (fixed != answers).sum() / (answers != right).sum()
    assert share == pytest.approx(ibpo.MEND, abs=0.05)


def test_the_step_on_changed_tokens_rewards_mistakes_and_the_others_do_not():
    steps = {name: [ibpo.one_step(name, seed) for seed in (0, 1)] for name in ibpo.READINGS}
    assert steps["grpo"] == [(0.0, 0.0)] * 2
    for name in ("sign", "correction"):
        assert all(right > 0.1 and slips < 0 for right, slips in steps[name])
    assert all(right < -0.1 and slips > 0 for right, slips in steps["changed"])


def test_the_command_prints_the_table(capsys, monkeypatch):
    monkeypatch.setattr(ibpo, "STEPS", 2)
    monkeypatch.setattr(ibpo, "EARLY", 1)
    ibpo.main(["--starts", "2", "--seeds", "2"])
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in ibpo.READINGS) and "after 2 steps" in out
    with pytest.raises(SystemExit):
        ibpo.main(["--seeds", "1"])
