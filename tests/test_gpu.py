"""To whoever has a GPU: bf16 is for the model alone, and a step of each kind runs there."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TINY, load, refused

import train
from llm import loading
from toy.arithmetic import Arithmetic

STEPS = ["nthr --prefix-baseline", "ibpo --fast", "grpo --hyper kl=0.1 --micro-rows 2"]


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no GPU")
@pytest.mark.parametrize("flags", STEPS)
def test_a_step_runs_on_a_real_gpu(tmp_path, flags):
    seeing = {key: x for key, x in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "train.py", *TINY, "--out", tmp_path / "run", "--method"]
    done = subprocess.run([*command, *flags.split()], env=seeing, check=True, capture_output=True)
    assert b"GB at most" in done.stdout


@pytest.mark.parametrize("fast", [False, True])
def test_log_probs_and_gradients_are_fp32_where_the_model_computes_in_bf16(fast):
    """As on a GPU from Ampere on; here on the CPU."""
    policy = replace(load("scratch", layers=1, width=16, fast=fast), bf16=True)
    task, layer, dtypes = Arithmetic(), policy.model.base_model.h[0].mlp.c_fc, set()
    layer.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
    config = train.Config(group_size=3, max_tokens=6)
    rollout = train.sample(policy, task, task.train[:2], 1, config)
    logp = policy.log_probs(policy, rollout, 1.0)
    logp.sum().backward()
    grad = layer.weight.grad
    # In fast.py a weight is used twice, and autocast's own cache would add its gradients in bf16.
    assert not (fast and torch.equal(grad, grad.bfloat16().float()))
    assert dtypes == {torch.bfloat16}
    assert {x.dtype for x in (rollout.logp_sampled, logp, grad)} == {torch.float32}


def test_micro_rows_follow_the_memory_that_a_card_has_free(monkeypatch, scratch):
    """Here 2 GB. One answer takes 300 MB at its peak and two take 400, so an answer takes 100, and
    200 are shared: (0.7 * 2000 - 0.2 - 200) / 100 is 11 answers. A minibatch may have fewer."""
    out_of_memory, mega = [], 10**6
    peaks = {"now": 0}

    def read(policy, answers, temperature):
        peaks["now"] = 50 * mega + {1: 300, 2: 400}[len(answers.tokens)] * mega
        if len(answers.tokens) in out_of_memory:
            raise torch.OutOfMemoryError
        return train.log_probs(policy, answers, temperature)

    for name, value in {
        "memory_allocated": lambda: 50 * mega,
        "max_memory_allocated": lambda: peaks["now"],
        "reset_peak_memory_stats": lambda: None,
        "mem_get_info": lambda: (2000 * mega, 8000 * mega),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    policy, config = replace(scratch, log_probs=read), train.Config(max_tokens=5)
    prompts = torch.tensor([[-1, 7, 8], [5, 6, 7]])
    assert loading.fit_micro_rows(policy, prompts, config) == 11
    assert all(weight.grad is None for weight in policy.model.parameters())
    config.prompts, config.group_size, config.minibatches = 2, 3, 2
    assert loading.fit_micro_rows(policy, prompts, config) == 3
    out_of_memory.append(2)
    assert loading.fit_micro_rows(policy, prompts, config) == 1
    out_of_memory.append(1)
    with pytest.raises(ValueError, match="lower --max-tokens"):
        loading.fit_micro_rows(policy, prompts, config)


def test_a_card_is_asked_only_where_no_flag_says_how_many(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for flags, rows in (("", 64), ("--model some/model", 0), ("--task sums --micro-rows 3", 3)):
        assert train.parse(f"--out x {flags}".split()).micro_rows == rows
    monkeypatch.undo()
    assert "--micro-rows 0" in refused(train.parse, ["--micro-rows", "0"])
