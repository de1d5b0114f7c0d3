"""--trace: the numbers that are printed of one group."""

import pytest
import torch

import train
from llm.trace import show_group
from toy.arithmetic import Arithmetic


@pytest.mark.parametrize("group", (0, 1))  # whichever the update has first
def test_a_group_is_printed_with_its_coefficients_and_their_sums(scratch, capsys, group):
    """grpo, when all ratios are 1: c is A over the length of the answer."""
    task, config = Arithmetic(), train.Config(prompts=2, group_size=3, minibatches=1, lr=0.0)
    answers = train.sample(scratch, task, task.train[:2], 1, config)
    rows = scratch.tokenizer(["so#12", "so#1", "ok#"] * 2).input_ids
    padded = torch.tensor([row + [-1] * (5 - len(row)) for row in rows])
    answers.tokens, answers.mask = padded.clamp(min=0), padded >= 0
    answers.rewards = torch.zeros(6)
    answers.rewards[3 * group + 1] = 1  # the other group has nothing to learn
    answers.logp, _ = train.in_pieces(scratch, answers, config)
    scored = train.score(scratch, None, answers, config)
    updates = train.learn(scratch, train.adamw(scratch.model, 0.0), scored, config)
    show_group(scratch, scored, updates[0], answers.logp - 1)

    said = capsys.readouterr().out
    table = [line.split() for line in said.splitlines()]
    A = [-(3**-0.5), 2 * 3**-0.5, -(3**-0.5)]
    assert task.train[group].prompt in said and task.train[1 - group].prompt not in said
    assert [float(line[-1]) for line in table if line[:1] == ["answer"]] == pytest.approx(A, 1e-3)
    pushes = [[float(x) for x in line[2:]] for line in table if line[:2] == ["push", "c"]]
    assert pushes == [
        pytest.approx([a / n] * n, abs=2e-4) for a, n in zip(A, (5, 4, 3), strict=True)
    ]
    before, after = ([line for line in table if line[:1] == [word]] for word in ("log", "after"))
    for i in range(3):
        old = answers.logp[3 * group + i, answers.mask[3 * group + i]].tolist()
        assert [float(x) for x in before[i][2:]] == pytest.approx(old, abs=1e-4)
        assert [float(x) + 1 for x in after[i][1:]] == pytest.approx(old, abs=1e-4)
    sums, (line, *_) = [A[0] + A[1], A[0] / 5 + A[1] / 4], table[-2:]
    assert [float(x) for x in line[:2]] == pytest.approx(sums, abs=1e-3)
    assert line[2:] == ["1", "2:", "s", "o", "#", "1"]  # and no other line: only these are shared
    assert table[-3][:4] == "sum of A sum".split()


def test_a_batch_without_signal_says_so(scratch, capsys):
    task, config = Arithmetic(), train.Config(prompts=1, group_size=2, minibatches=1, max_tokens=4)
    answers = train.sample(scratch, task, task.train[:1], 1, config)
    answers.rewards = torch.zeros(2)
    scored = train.score(scratch, None, answers, config)
    updates = train.learn(scratch, train.adamw(scratch.model, 0.0), scored, config)
    show_group(scratch, scored, updates[0], answers.logp)
    assert "all advantages are 0" in capsys.readouterr().out
