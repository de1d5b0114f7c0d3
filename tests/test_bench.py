"""The benches compare sides that do the same work, and what is computed of memory is true."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from conftest import TRANSFORMERS_4

import train
from experiments import gpu
from experiments.bench import cases, memory, rollout, timing
from llm import fast

SMALL = replace(
    cases.CASES["gsm8k"], prompts=3, prompt=5, mean=6, cap=12, layers=2, width=32, vocab=50
)


def test_the_three_samplers_make_as_many_answers_of_the_same_lengths():
    policy, size = cases.make_policy(SMALL), (3 * cases.GROUP, 12)
    plain = rollout.ours(policy, SMALL, 3)
    assert torch.equal(plain, rollout.ours(replace(policy, fast=True), SMALL, 3))
    for tokens in (plain, rollout.theirs(policy, SMALL, 3)):
        assert tokens.shape == size and tokens.unique().numel() > 20
        assert (tokens != 0).sum(1).float().mean() == pytest.approx(5.3, abs=1.5)


def test_trl_and_we_make_as_many_steps_on_as_many_tokens():
    pytest.importorskip("trl", minversion="1.16")
    from experiments.bench import trl_step

    sides = trl_step.run(replace(cases.CASES["toy"], mean=5, layers=1), 2)
    assert all(len(x) == 2 and min(x) > 0 for x in sides.seconds.values())
    assert sides.tokens["plain"] == sides.tokens["fast"]
    theirs = sum(sides.tokens["trl"])
    assert sum(sides.tokens["fast"]) == pytest.approx(theirs, rel=0.15) and theirs > 1500


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 looks into its masks")
def test_memory_is_counted_without_data_as_it_is_with():
    case = replace(SMALL, prompts=2, cap=8)
    (kept, parameters), (real, _) = (memory.count_kept(case, 12, fake) for fake in (True, False))
    mask = 4 * 2 * 5 * 5  # of the prompts, which with data is seen to be needless
    assert kept == real + mask > 4 * 12 * 8 * 32
    policy = cases.make_policy(replace(case, mean=float("inf")))
    assert parameters == sum(p.numel() for p in policy.model.parameters())
    published = memory.compute(cases.CASES["0.5B"], micro_rows=8)["at the peak"]
    assert published == pytest.approx(19.0, abs=0.3)  # another transformers may keep a bit more


def test_what_memory_counts_is_the_forward_pass_of_fast_log_probs(monkeypatch):
    case, seen = replace(SMALL, mean=float("inf"), cap=8), []
    policy, task = cases.make_policy(case, cases.Ids()), cases.Task(case)
    task.train = [[1] * 5] * 3
    answers = train.sample(policy, task, task.train, 1, cases.make_config(case))
    answers.tokens.zero_()
    answers.mask.fill_(True)
    monkeypatch.setattr(fast, "_chunk_log_probs", lambda model, hidden, *_: seen.append(hidden))
    with suppress(TypeError):  # nothing comes back from there
        fast.log_probs(policy, answers, train.Config())
    torch.testing.assert_close(memory.read(policy.model, case, 24), seen[0])


def test_timing_takes_turns_and_a_peak_is_what_is_allocated():
    calls = []
    sides = {"b": lambda: calls.append("b"), "a": lambda: calls.append("a")}
    seconds = timing.turns(sides, 2)
    assert "".join(calls) == "baabba" and [len(x) for x in seconds.values()] == [2, 2]
    assert timing.show_ratio([2, 6, 9], [1, 2, 9]) == "2.00 (quartiles 1.50 to 2.50, 3 rounds)"
    peak = timing.peak_gb(lambda: torch.zeros(50_000_000).sum())
    assert peak == pytest.approx(0.2, abs=0.05)


@pytest.mark.skipif(TRANSFORMERS_4, reason="the memory table counts without data")
def test_the_gpus_table_is_made_end_to_end_on_a_cpu(monkeypatch, capsys):
    """In small. What only a GPU has is left out: its name, its allocator."""
    for name, value in (
        ("DEVICE", "cpu"),
        ("CASE", replace(SMALL, mean=float("inf"), layers=1, width=16, cap=6)),
        ("STEPS", 2),
        ("METHODS", ["grpo", "nothing"]),
        ("TOY", f"{gpu.TOY} --layers 1 --width 16 --max-tokens 5"),
    ):
        monkeypatch.setattr(gpu, name, value)
    is_there = iter([False, True])  # asked first; and then there is none, for the parts
    monkeypatch.setattr(torch.cuda, "is_available", lambda: next(is_there, False))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no card")
    with pytest.raises(SystemExit, match="^error: torch finds no CUDA device"):
        gpu.main()
    gpu.main()
    said = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in said.splitlines()[4:]]
    table = {row[0]: row[-1] for row in rows}
    assert "failed" not in said and table["two steps of the toy, --fast"] == "1 of 2 methods"
    gap = table["a step, fast, cuDNN attention off: sampled and scored log-probs"]
    assert float(gap.split()[0]) < 1e-4
    assert float(table["peak of a step, fast"].split()[0]) >= 0
