"""The trainer on a pretended GPU: where tensors are, generators, dtypes, unfinished work."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TRANSFORMERS_4, load
from helpers import TINY, metrics
from pretended_cuda import pretended_cuda

import llm.policy
import train
from llm.runs import adamw
from losses import METHODS
from toy.arithmetic import Arithmetic

if TRANSFORMERS_4:
    pytest.skip("transformers 4 makes masks of tensors without storage", allow_module_level=True)

SMALL = "--warm-steps 2 --prompts 3 --group-size 2 --micro-rows 2 --max-tokens 6 --eval-every 1"
SMALL += " --eval-items 1 --eval-samples 1 --device cuda --minibatches 1"


def test_what_cuda_refuses_is_refused_and_what_it_takes_is_taken():
    with pretended_cuda() as gpu:
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        first, on_cpu = torch.tensor([0], device="cuda"), torch.tensor([0])
        for mistake in (
            lambda: x + y,
            lambda: torch.cat([x, y]),
            lambda: torch.where(x > 0, x, y),
            lambda: x.index_put_((first,), y[:1]),
            lambda: x.index_put_((first,), x[:1].bfloat16()),
            lambda: y[first],
            lambda: torch.rand(3, generator=torch.Generator(), device="cuda"),
            lambda: x.uniform_(generator=torch.Generator()),
        ):
            with pytest.raises(RuntimeError):
                mistake()
        x[on_cpu] = 2 * x[on_cpu] * torch.tensor(1.0)
        x.copy_(x + y.to(x.device))
        parameter = torch.nn.Parameter(x)
        (parameter * x).sum().backward()
        assert {z.device.type for z in (x[1:], parameter.grad, first)} == {"cuda"}
        assert not gpu.is_idle and x.sum().item() == 7 and gpu.is_idle
        assert (x.to("cpu") + y).device.type == "cpu"
        with torch.autocast("cuda", torch.bfloat16):
            assert (x[None] @ x[:, None]).dtype == torch.bfloat16


@pytest.fixture(scope="module")
def start(scratch):
    """Policy, reference, and a rollout with its corrections, on the pretended GPU."""
    with pretended_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arithmetic, "reward", lambda self, text, item: text.count("1") % 2 * 1.0)
        options = dict(layers=1, width=16, method="ibpo", group_size=3, max_tokens=6)
        policy, reference = (load("scratch", device="cuda", **options) for _ in range(2))
        task = Arithmetic()
        dtypes = set()
        layer = policy.model.base_model.h[0].mlp.c_fc
        layer.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
        answers = train.sample(policy, task, task.train[:4], 1, train.Config(**options))
        assert dtypes == {torch.bfloat16} and answers.logp.dtype == torch.float32
        assert answers.repaired.device.type == policy.eos.device.type == "cuda"
        return policy, reference, answers


@pytest.mark.parametrize("method", [*METHODS, "nthr full_vocab=True"])
def test_a_step_of_every_method(start, method):
    method, *hyper = method.split()
    policy, reference, answers = start
    options = dict(group_size=3, max_tokens=6, prompts=4, minibatches=2, lr=0.0, micro_rows=2)
    config = train.Config(method=method, hyper=hyper, project=method == "gspo", **options)
    with pretended_cuda():
        scored = train.score(policy, reference, answers, config)
        updates = train.learn(policy, adamw(policy.model, 0.0), scored, config)
        assert train.diagnose(policy, answers, scored, updates, config)["grad_norm"] > 0


def test_the_chunked_output_layer(monkeypatch):
    monkeypatch.setitem(llm.policy.CHUNK, "cuda", 1)  # then 512 rows a chunk
    with pretended_cuda():
        hidden, weight = (torch.ones(n, 4, device="cuda", requires_grad=True) for n in (600, 5))
        targets = torch.zeros(600, dtype=torch.long, device="cuda")
        logp, _ = llm.policy.token_log_probs(hidden, weight, None, targets, 1.0)
        logp.sum().backward()
        assert hidden.grad.device.type == weight.grad.device.type == "cuda"


def test_a_whole_run_and_what_is_left_of_a_resumed_one(tmp_path, monkeypatch, easy):
    args = [*TINY, *SMALL.split(), "--method", "ibpo", "--out", str(tmp_path / "run")]
    with pretended_cuda() as gpu:
        count = itertools.count()

        def perf_counter():
            """A stage that leaves work to the next one would take its seconds, too."""
            number = next(count)
            assert gpu.is_idle or number % 4 == 0
            return float(number)

        clock = SimpleNamespace(perf_counter=perf_counter, strftime=train.time.strftime)
        monkeypatch.setattr(train, "time", clock)
        train.main([*args, "--steps", "1", "--schedule", "constant"])
        train.main(["--resume", str(tmp_path / "run"), "--steps", "2"])
        real = train.score
        monkeypatch.setattr(train, "score", lambda *a: replace(real(*a), max_logp_gap=4.0))
        with pytest.raises(SystemExit, match="differ by 4 nats"):
            train.main(["--resume", str(tmp_path / "run"), "--steps", "3"])
    lines = metrics(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["device"] == "cuda:0"
    assert [line["step"] for line in lines] == [0, 1, 2] and "greedy" in lines[2]
    assert all(line["max_logp_gap"] < 0.5 for line in lines[1:])


def test_the_output_layer_has_tf32():
    cublas = torch.backends.cuda.matmul
    cublas.allow_tf32 = False
    with pretended_cuda():
        load("scratch", device="cuda", layers=1, width=16)
    assert cublas.allow_tf32
    cublas.allow_tf32 = False


def test_cudnns_attention_is_off():
    """Its backward gives nan on H100 and H200: see llm/policy.py."""
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_the_tests_choose_the_cpu_before_torch_is_imported(tmp_path):
    said = "import os, sys; sys.exit(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    (tmp_path / "torch.py").write_text(said)
    paths = os.pathsep.join(map(str, (tmp_path, Path(__file__).parent)))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": paths}
    command = [sys.executable, "-c", "import conftest"]
    assert subprocess.run(command, env=env, capture_output=True, text=True).stderr.strip() == "''"
