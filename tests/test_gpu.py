"""To whoever has a GPU: bf16 is for the model alone, a step's memory is known, and steps run there.

All but the last test run on a CPU. AdamW in main memory is in test_run.py.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, TOY, build, load, metrics
from torch.profiler import profile

import train
from experiments import memory

GPT2, QWEN = "transformer.h.0.mlp.c_fc", "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("name, fast", [(GPT2, False), (GPT2, True), (QWEN, True)])
def test_where_the_model_computes_in_bf16_numbers_and_gradients_are_fp32(name, fast, qwen_path):
    policy = load(qwen_path if name == QWEN else "scratch", fast=fast, width=16)
    layer, dtypes, found = policy.model.get_submodule(name), set(), []
    policy.bf16 = True
    layer.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
    rollout = train.sample(policy, TOY, TOY.train[:2], 1, train.Config(group_size=3, max_tokens=6))
    weights = [layer.weight, *policy.model.parameters()]
    for policy.bf16 in (True, False):
        logp = train.log_probs(policy, rollout, 1.0)
        found.append((logp, *torch.autograd.grad(logp.sum(), weights)))
    for rounded, exact in zip(*found, strict=True):
        assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()
    assert dtypes == {torch.bfloat16, torch.float32}
    assert {x.dtype for x in (rollout.logp_sampled, *found[0])} == {torch.float32}
    # In fast.py a weight is used twice, and autocast's own cache would add its gradients in bf16.
    grad = found[0][1]
    assert fast != torch.equal(grad, grad.bfloat16().float())


def test_the_counted_memory_is_that_of_a_real_step(tmp_path):
    """torch's profiler sees what is allocated for real, here on a CPU, in fp32."""
    policy = load(build("qwen2", tmp_path, vocab_size=20_000), fast=True)
    config = train.Config(micro_rows=3, max_tokens=100, prompts=1, group_size=3, fast=True)
    counted = memory.count(config, policy.model.config, 30, bf16=False)
    tokens = torch.zeros(3, 100, dtype=torch.long)
    prompts = torch.ones(3, 30, dtype=torch.long)
    answers = SimpleNamespace(prompt_ids=prompts, tokens=tokens, mask=tokens == 0)
    train.log_probs(policy, answers, 1.0).sum().backward()
    with profile(profile_memory=True) as seen:
        train.log_probs(policy, answers, 1.0).sum().backward()
    events = [x for x in seen.profiler.kineto_results.events() if x.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert counted["gradients"] == pytest.approx(counted["weights"], rel=1e-4)
    assert counted["moments"] == pytest.approx(2 * counted["weights"], rel=1e-4)
    assert counted["activations"] == pytest.approx(peak, rel=1e-3)


STEPS = ["nthr --prefix-baseline", "ibpo --fast --offload --micro-rows 1 --hyper kl=0.1"]


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no GPU")
@pytest.mark.parametrize("flags", STEPS)
def test_a_step_runs_on_a_real_gpu(tmp_path, flags):
    seeing = {key: x for key, x in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "train.py", *TINY, "--out", tmp_path / "run", "--method"]
    subprocess.run([*command, *flags.split()], env=seeing, check=True)
    assert all(line.get("max_logp_gap", 0) < 0.3 for line in metrics(tmp_path / "run"))
