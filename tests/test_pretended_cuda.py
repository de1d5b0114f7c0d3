"""The trainer on a pretended GPU, plain and fast: where tensors are, generators, dtypes."""

from dataclasses import replace

import pytest
import torch
from conftest import TRANSFORMERS_4, load
from helpers import TINY, metrics, refused, spy
from pretended_cuda import pretended_cuda

import train
from llm import fast
from losses import METHODS
from toy.arithmetic import Arithmetic

if TRANSFORMERS_4:
    pytest.skip("transformers 4 makes masks of tensors without storage", allow_module_level=True)

both_ways = pytest.mark.parametrize("quick", [False, True], ids=["plain", "fast"])


def test_what_cuda_refuses_is_refused_and_what_it_takes_is_taken():
    with pretended_cuda():
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        first, on_cpu = torch.tensor([0], device="cuda"), torch.tensor([0])
        for mistake in (
            lambda: x + y,
            lambda: torch.cat([x, y]),
            lambda: x.index_put_((first,), y[:1]),
            lambda: y[first],
            lambda: torch.rand(3, generator=torch.Generator(), device="cuda"),
        ):
            with pytest.raises(RuntimeError):
                mistake()
        x[on_cpu] = 2 * x[on_cpu] * torch.tensor(1.0)
        x.copy_(x + y.to(x.device))
        parameter = torch.nn.Parameter(x)
        (parameter * x).sum().backward()
        assert {z.device.type for z in (x[1:], parameter.grad, first)} == {"cuda"}
        assert x.sum().item() == 7 and (x.to("cpu") + y).device.type == "cpu"


@pytest.fixture(scope="module")
def start(scratch):
    """Policy, reference, and a rollout with its corrections, on the pretended GPU."""
    with pretended_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arithmetic, "reward", lambda self, text, item: text.count("1") % 2 * 1.0)
        options = dict(layers=1, width=16, method="ibpo", group_size=3, max_tokens=6, fast=True)
        policy, reference = (load("scratch", **options) for _ in range(2))
        task, dtypes = Arithmetic(), set()
        layer = policy.model.base_model.h[0].mlp.c_fc
        layer.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
        for policy.fast in (True, False):
            answers = train.sample(policy, task, task.train[:4], 1, train.Config(**options))
            assert dtypes == {torch.bfloat16} and answers.logp.dtype == torch.float32
            dtypes.clear()
        assert answers.repaired.device.type == policy.eos.device.type == "cuda"
        return policy, reference, answers


FAST = ("grpo", "nthr", "ibpo")


@pytest.mark.parametrize("method", [*METHODS, *(f"{name} fast" for name in FAST)])
def test_a_step_of_every_method(start, method):
    method, quick = method.split()[0], method.endswith("fast")
    policy, reference, answers = start
    policy, reference = replace(policy, fast=quick), replace(reference, fast=quick)
    options = dict(group_size=3, max_tokens=6, prompts=4, minibatches=2, lr=0.0, micro_rows=2)
    config = train.Config(method=method, project=method == "gspo", **options)
    with pretended_cuda():
        scored = train.score(policy, reference, answers, config)
        assert scored.max_logp_gap < 0.5  # bf16 rounds by the shape of a batch
        updates = train.learn(policy, train.adamw(policy.model, 0.0), scored, config)
        assert train.diagnose(policy, scored, updates, config)["grad_norm"] > 0


@both_ways
def test_a_card_before_ampere_computes_in_fp32(quick):
    with pretended_cuda(capability=(7, 5)):
        policy = load("scratch", layers=1, width=16, fast=quick)
        dtypes, task = set(), Arithmetic()
        layer = policy.model.base_model.h[0].mlp.c_fc
        layer.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
        config = train.Config(group_size=2, max_tokens=4, warm_steps=1, method="nthr", fast=quick)
        train.warm_start(policy, task, config)
        answers = train.sample(policy, task, task.train[:2], 1, config)
        train.score(policy, None, answers, config)
    assert dtypes == {torch.float32}


def test_the_chunked_output_layer_computes_in_fp32(start, monkeypatch):
    monkeypatch.setitem(fast.CHUNK, "cuda", 1)  # then 512 rows a chunk
    policy, *_ = start
    with pretended_cuda():
        hidden = torch.full((600, 16), 1 / 3, device="cuda", requires_grad=True)
        targets = torch.zeros(600, dtype=torch.long, device="cuda")
        with fast.autocast(policy):
            logp, _ = fast.token_log_probs(policy.model, hidden, targets, 1.0)
        logp.sum().backward()
        exact = (hidden @ policy.model.get_output_embeddings().weight.T).log_softmax(1)[:, 0]
        assert (logp - exact).abs().max() < 1e-5 and hidden.grad.device.type == "cuda"


def test_gradients_of_a_weight_that_is_used_twice_are_added_in_fp32(start):
    """autocast's own cache would keep one bf16 copy of each weight, and add there."""
    policy, _, answers = start
    with pretended_cuda():
        policy.model.zero_grad()
        fast.log_probs(policy, answers, train.Config())[0].sum().backward()
        grad = policy.model.base_model.h[0].mlp.c_fc.weight.grad
        assert not torch.equal(grad, grad.bfloat16().float())


@both_ways
def test_a_whole_run_and_what_is_left_of_a_resumed_one(tmp_path, monkeypatch, easy, quick):
    small = "--warm-steps 2 --prompts 3 --group-size 2 --micro-rows 2 --max-tokens 6 --eval-every 1"
    small += " --eval-items 1 --eval-samples 1 --minibatches 1 --method ibpo --schedule constant"
    flag, folder = "--fast" if quick else "--no-fast", str(tmp_path / "run")
    devices = spy(monkeypatch, "update", lambda policy, *_: policy.model.device.type)
    with pretended_cuda():
        train.main([*TINY, *small.split(), flag, "--steps", "1", "--out", folder])
        train.main(["--resume", folder, "--steps", "2"])
        monkeypatch.setattr(train, "check_gap", lambda gap, *a, real=train.check_gap: real(4.0, *a))
        assert "step 3" in refused(train.main, ["--resume", folder, "--steps", "3"])
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2] and "greedy" in lines[2]
    assert devices == ["cuda"] * 2 and not torch.backends.cuda.cudnn_sdp_enabled()
