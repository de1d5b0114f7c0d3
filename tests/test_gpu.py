"""To whoever has a GPU: bf16 is for the model alone, and a step of each kind runs there."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TINY, load

import train
from toy.arithmetic import Arithmetic

STEPS = ["nthr --prefix-baseline", "ibpo --fast", "grpo --hyper kl=0.1 --micro-rows 2"]


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
    logp = policy.log_probs(policy, rollout, 1.0)
    logp.sum().backward()
    grad = layer.weight.grad
    # In fast.py a weight is used twice, and autocast's own cache would add its gradients in bf16.
    assert not (fast and torch.equal(grad, grad.bfloat16().float()))
    assert dtypes == {torch.bfloat16}
    assert {x.dtype for x in (rollout.logp_sampled, logp, grad)} == {torch.float32}
