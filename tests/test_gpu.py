"""To whoever has a GPU: bf16 is for the model alone, and steps run there.

All but the last test run on a CPU. AdamW in main memory is in test_run.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, TOY, build, load, metrics

import train

KINDS = {"qwen2": {}, "mixtral": {"num_local_experts": 3}}


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_model_computes_in_bf16_numbers_and_gradients_are_fp32(kind, tmp_path):
    """The output layer as well: its logits are those of the hidden states, to fp32's rounding.
    Attention reads keys and values as the cache keeps them."""
    policy, found = load(build(kind, tmp_path, **KINDS[kind])), []
    policy.bf16 = True
    rollout = train.sample(policy, TOY, TOY.train[:2], 1, train.Config(group_size=3, max_tokens=6))
    assert rollout.logp_sampled.dtype == torch.float32
    with policy.autocast(), torch.no_grad():
        hidden, cache, _ = train.read_prompts(policy, rollout.prompt_ids)
        assert cache.layers[0].keys.dtype == torch.bfloat16
        logits = train.output_logits(policy, hidden)
    exact = hidden.float() @ policy.model.get_output_embeddings().weight.T
    torch.testing.assert_close(logits, exact)
    for policy.bf16 in (True, False):
        logp = train.log_probs(policy, rollout, 1.0)
        found.append((logp, *torch.autograd.grad(logp.sum(), policy.model.parameters())))
    for rounded, exact in zip(*found, strict=True):
        assert rounded.dtype == torch.float32
        assert 0 < (rounded - exact).norm() < 0.2 * exact.norm()


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no GPU")
@pytest.mark.parametrize("flags", ["nthr --prefix-baseline", "ibpo --offload --hyper kl=0.1"])
def test_a_step_runs_on_a_real_gpu(tmp_path, flags):
    seeing = {key: x for key, x in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "train.py", *TINY, "--out", tmp_path / "run", "--method"]
    subprocess.run([*command, *flags.split()], env=seeing, check=True)
    assert all(line.get("max_logp_gap", 0) < 0.3 for line in metrics(tmp_path / "run"))
