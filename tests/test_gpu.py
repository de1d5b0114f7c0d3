"""To whoever has a GPU: bf16 is for the model alone, memory is enough, a step of each kind runs."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, load, metrics, refused, run
from torch.profiler import profile
from transformers import AutoModelForCausalLM, Qwen2Config

import train
from experiments import memory
from llm import fast
from toy.arithmetic import Arithmetic

STEPS = ["nthr --prefix-baseline", "ibpo --fast", "grpo --hyper kl=0.1 --micro-rows 2"]
STEPS += ["grpo --fast --micro-rows 1 --offload"]


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no GPU")
@pytest.mark.parametrize("flags", STEPS)
def test_a_step_runs_on_a_real_gpu(tmp_path, flags):
    seeing = {key: x for key, x in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "train.py", *TINY, "--out", tmp_path / "run", "--method"]
    subprocess.run([*command, *flags.split()], env=seeing, check=True)


@pytest.mark.parametrize("fast", [False, True])
def test_log_probs_and_gradients_are_fp32_where_the_model_computes_in_bf16(fast):
    """As on a GPU from Ampere on; here on the CPU."""
    policy = replace(load("scratch", layers=1, width=16, fast=fast), bf16=True)
    task, layer, dtypes = Arithmetic(), policy.model.base_model.h[0].mlp.c_fc, set()
    layer.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
    config = train.Config(group_size=3, max_tokens=6)
    rollout = train.sample(policy, task, task.train[:2], 1, config)
    logp = train.log_probs(policy, rollout, 1.0)
    logp.sum().backward()
    grad = layer.weight.grad
    # In fast.py a weight is used twice, and autocast's own cache would add its gradients in bf16.
    assert not (fast and torch.equal(grad, grad.bfloat16().float()))
    assert dtypes == {torch.bfloat16}
    assert {x.dtype for x in (rollout.logp_sampled, logp, grad)} == {torch.float32}


def test_weights_that_are_cast_again_have_the_gradients_of_autocast(qwen_path, monkeypatch):
    """And none of them waits for the backward pass as a copy."""
    policy = replace(load(qwen_path, fast=True), bf16=True)
    prompts = torch.tensor([[-1, 5, 6]] * 3 + [[7, 8, 9]])
    tokens, mask, *_ = train.generate(policy, prompts, 9, 1.0, train.rng(0))
    answers = SimpleNamespace(prompt_ids=prompts, tokens=tokens, mask=mask)
    shapes = {tuple(x.shape) for x in policy.model.parameters() if x.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}
    found, copies = [], []

    def note(x: torch.Tensor):
        copies[-1] += x.dtype == torch.bfloat16 and tuple(x.shape) in shapes
        return x

    for kind in (fast.RecastWeights, nullcontext):
        monkeypatch.setattr(fast, "RecastWeights", kind)
        copies.append(0)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            logp = train.log_probs(policy, answers, 1.0)
        found.append([logp, *torch.autograd.grad(logp.sum(), policy.model.parameters())])
    assert all(map(torch.equal, *found))
    assert copies[0] == 0 < copies[1]


# ---------------- memory


@pytest.mark.parametrize("rows", [1, 3])
def test_the_counted_memory_is_that_of_a_real_step(rows):
    """torch's profiler sees what is allocated for real, here on a CPU, in fp32."""
    sizes = dict(vocab_size=20_000, hidden_size=256, intermediate_size=1024, num_hidden_layers=2)
    more = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    shape = Qwen2Config(**sizes, **more)
    config = train.Config(micro_rows=rows, max_tokens=100, prompts=1, group_size=3, fast=True)
    counted = memory.count(config, shape, 30, bf16=False)

    model = AutoModelForCausalLM.from_config(shape).eval()
    policy = train.Policy(model, None, torch.tensor([0]), fast=True)
    tokens = torch.zeros(rows, 100, dtype=torch.long)
    prompts = torch.ones(rows, 30, dtype=torch.long)
    answers = SimpleNamespace(prompt_ids=prompts, tokens=tokens, mask=tokens == 0)
    train.log_probs(policy, answers, 1.0).sum().backward()
    with profile(profile_memory=True) as seen:
        train.log_probs(policy, answers, 1.0).sum().backward()
    events = [x for x in seen.profiler.kineto_results.events() if x.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert counted["weights"] == counted["gradients"] == counted["moments"] / 2
    assert counted["activations"] == pytest.approx(peak, rel=1e-3)


def test_adamw_in_main_memory_makes_the_same_run_and_resumes_any(tmp_path, monkeypatch, easy):
    flags = "--method", "grpo", "--schedule", "constant"
    whole = run(tmp_path / "whole", *flags)
    assert any(line.get("grad_norm") for line in metrics(whole))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: x.clone())  # as from a GPU
    runs = [run(tmp_path / "away", *flags, "--offload", "true")]
    for first, then in (("true", "false"), ("false", "true")):
        runs.append(run(tmp_path / first, *flags, "--steps", 2, "--offload", first))
        train.main(["--resume", str(runs[-1]), "--steps", "4", "--offload", then])
    for folder in runs:
        assert metrics(folder) == metrics(whole)
        model, expected = (x / "model" / "model.safetensors" for x in (folder, whole))
        assert model.read_bytes() == expected.read_bytes()


def test_a_model_too_large_for_this_machine_is_refused(monkeypatch):
    """Here of 1e9 weights: 16 GB with gradients and moments."""
    model = SimpleNamespace(parameters=lambda: [torch.empty(10**9, device="meta")])
    there = {"free": 15.9e9, "SC_PAGE_SIZE": 1e9, "SC_PHYS_PAGES": 16}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (there["free"], 80e9))
    monkeypatch.setattr(train.os, "sysconf", there.get, raising=False)
    said = refused(train.check_room, model, train.Config())
    assert "need 16.0 GB of the GPU, of which 15.9 GB are free; --offload true" in said
    train.check_room(model, train.Config(offload=True))
    there["SC_PHYS_PAGES"] = 15
    said = refused(train.check_room, model, train.Config(offload=True))
    assert "16.0 GB of main memory; this machine has 15.0 GB" in said
    there["free"] = 7.9e9
    assert "need 8.0 GB" in refused(train.check_room, model, train.Config(offload=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    there["free"] = 0  # before the model moves
    assert "of which 0.0 GB are free" in refused(load, "scratch")


def test_where_memory_ends_a_line_names_the_flags_that_help(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "generate", full)
    said = refused(run, tmp_path / "run", "--warm-steps", 0)
    assert all(flag in said for flag in ("--micro-rows", "--offload", "--prompts", "--max-tokens"))
