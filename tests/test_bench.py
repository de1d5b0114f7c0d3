"""The benches compare sides that do the same work, and what is computed of memory is true."""

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


def draw(case, seed: int):
    """Sampling from the numbers that train.generate would draw, for transformers' own."""
    size = (case.prompts * cases.GROUP, case.cap)
    gen = torch.Generator().manual_seed(seed)
    uniform = torch.rand(size, generator=gen, dtype=torch.float64)

    def only(ids, scores):
        cdf = scores.double().softmax(-1).cumsum(-1)
        number = uniform[:, ids.shape[1] - case.prompt, None].contiguous()
        token = torch.searchsorted(cdf, number, right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)

    return only


def test_the_three_samplers_give_the_same_tokens_from_the_same_numbers():
    policy = cases.make_policy(SMALL)
    plain = rollout.ours(policy, SMALL, 3)
    quick = rollout.ours(replace(policy, fast=True), SMALL, 3)
    hf = rollout.theirs(policy, SMALL, 3, processors=[draw(SMALL, 3)])
    assert torch.equal(plain, quick) and torch.equal(plain, hf)
    lengths = (plain != 0).sum(1)
    assert lengths.float().mean() == pytest.approx(5.3, abs=1.5) and plain.unique().numel() > 20


def test_a_bench_step_is_the_same_both_ways_and_leaves_the_policy_as_it_is():
    policy, task = cases.make_policy(SMALL, cases.Ids()), cases.Task(SMALL)
    before = [p.clone() for p in policy.model.parameters()]
    config = cases.make_config(SMALL)
    plain = cases.step(policy, task, config)
    quick = cases.step(replace(policy, fast=True), task, config)
    assert plain == pytest.approx(quick, rel=1e-4, abs=1e-5)
    assert 0.2 < plain["reward"] < 0.8 and plain["grad_norm"] > 0
    assert all(map(torch.equal, before, policy.model.parameters()))


def test_trl_and_we_make_as_many_steps_on_as_many_tokens():
    pytest.importorskip("trl", minversion="1.16")
    from experiments.bench import trl_step

    case = replace(cases.CASES["toy"], mean=5, layers=1)
    sides = trl_step.run(case, 2)
    assert {len(x) for kind in (sides.seconds, sides.tokens) for x in kind.values()} == {2}
    assert min(min(x) for x in sides.seconds.values()) > 0
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


def test_what_memory_counts_is_the_forward_pass_of_fast_log_probs(monkeypatch):
    case = replace(SMALL, mean=float("inf"), cap=8)
    policy, seen = cases.make_policy(case), []
    monkeypatch.setattr(fast, "_chunk_log_probs", lambda model, hidden, *_: seen.append(hidden))
    answers = train.Answers(
        items=[],
        prompts=train.Prompts(*(torch.ones(12, 5, dtype=t) for t in (torch.long, torch.bool))),
        texts=[],
        tokens=torch.zeros(12, 8, dtype=torch.long),
        mask=torch.ones(12, 8, dtype=torch.bool),
        logp=torch.zeros(12, 8),
        rewards=torch.zeros(12),
        generated=96,
    )
    with pytest.raises(TypeError):  # nothing comes back from there
        fast.log_probs(policy, answers, train.Config())
    torch.testing.assert_close(memory.read(policy.model, case, 12), seen[0])


def test_timing_takes_turns_and_a_peak_is_what_is_allocated():
    calls = []
    sides = {"b": lambda: calls.append("b"), "a": lambda: calls.append("a")}
    seconds = timing.turns(sides, 2)
    assert "".join(calls) == "baabba" and [len(x) for x in seconds.values()] == [2, 2]
    assert timing.show_ratio([2, 6, 9], [1, 2, 9]) == "2.00 (quartiles 1.50 to 2.50, 3 rounds)"
    torch.zeros(150_000_000).sum()  # a higher peak, but before
    big = timing.peak_gb(lambda: torch.zeros(50_000_000).sum())
    assert big == pytest.approx(0.2, abs=0.05)


@pytest.mark.skipif(TRANSFORMERS_4, reason="the memory table counts without data")
def test_the_gpus_table_is_made_end_to_end_on_a_cpu(monkeypatch, capsys):
    """In small. What only a GPU has is left out: its name, its allocator."""
    with pytest.raises(SystemExit, match="^error: torch finds no CUDA device"):
        gpu.main()
    for owner, name, value in (
        (torch.cuda, "get_device_name", lambda: "no card"),
        (gpu, "DEVICE", "cpu"),
        (gpu, "CASE", replace(SMALL, mean=float("inf"), layers=1, width=16, cap=6)),
        (gpu, "STEPS", 2),
        (gpu, "METHODS", ["grpo", "nothing"]),
        (gpu, "TOY", f"{gpu.TOY} --layers 1 --width 16 --max-tokens 5"),
    ):
        monkeypatch.setattr(owner, name, value)
    for name in [*gpu.PARTS]:  # the last parts decide on the GPU's own attention
        part = gpu.PARTS[name]
        monkeypatch.setitem(gpu.PARTS, name, lambda part=part: run_without_cuda(part))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu.main()
    said = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in said.splitlines()[4:]]
    table = {row[0]: row[-1] for row in rows}
    assert "failed" not in said and table["two steps of the toy, --fast"] == "1 of 2 methods"
    for fast_, cudnn in (("fast", "off"), ("plain", "off"), ("fast", "on"), ("plain", "on")):
        name = f"a step, {fast_}, cuDNN attention {cudnn}"
        assert float(table[f"{name}: sampled and scored log-probs"].split()[0]) < 1e-4
        stages = [float(table[f"{name}: {s}"].split()[0]) for s in ("rollout", "update", "in all")]
        assert 0 <= max(stages[:2]) <= stages[2]
    assert float(table["peak of a step, fast"].split()[0]) >= 0


def run_without_cuda(part):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return part()
