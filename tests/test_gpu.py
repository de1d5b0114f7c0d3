"""To whoever has a GPU: train.py and llm/fast.py put tensors where CUDA wants them, in the right
dtype. On a pretended GPU, whose tensors say "cuda" and compute on the CPU.

A storage carries the label, so views, parameters and saved tensors share it. As with CUDA, one
operation takes tensors of one device; only numbers without dimensions, and indices of a tensor on
the GPU, may be on the CPU. The CPU's generator draws nothing on the GPU. autocast is in real bf16.

It cannot see kernels (rounding, nan, the order of sums), memory, speed, and what CUDA's autocast
keeps in fp32. In a backward pass it compares no devices: autograd's own tensors have no label.
"""

from contextlib import contextmanager

import pytest
import torch
from conftest import TRANSFORMERS_4, load, metrics, run
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import losses
import train
from toy.arithmetic import Arithmetic

if TRANSFORMERS_4:
    pytest.skip("transformers 4 makes masks of tensors without storage", allow_module_level=True)

INDEXED = (Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put, Tensor.index_put_)
MOVES = (Tensor.to, Tensor.copy_, Tensor.data.__set__, torch._has_compatible_shallow_copy_type)


def is_on_gpu(x: Tensor) -> bool:
    return getattr(x.untyped_storage(), "is_on_gpu", False)


def tensors_in(value) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


class PretendedCuda(TorchFunctionMode):
    """Sees every call of torch, also those of transformers and of torch's optimisers."""

    in_backward = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        on_gpu = any(map(is_on_gpu, inputs))
        if function == Tensor.device.__get__:
            return torch.device("cuda", 0) if on_gpu else function(*args)
        on_gpu = on_gpu and function != Tensor.cpu
        if function == Tensor.backward:
            return self.run_backward(*args, **kwargs)
        asked = kwargs.get("device", args[1] if function == Tensor.to and args[1:] else None)
        if isinstance(asked, str | torch.device):
            on_gpu = torch.device(asked).type == "cuda"
            args, kwargs = tree_map(lambda x: "cpu" if x is asked else x, (args, kwargs))
        if not self.in_backward:
            refuse(function, args, kwargs, on_gpu)

        def put(x):
            if not isinstance(x, Tensor) or is_on_gpu(x) == on_gpu:
                return x
            x = x.clone() if function in (Tensor.to, Tensor.cpu) else x
            if x.untyped_storage() not in [y.untyped_storage() for y in inputs]:  # not in place
                x.untyped_storage().is_on_gpu = on_gpu
            return x

        return tree_map(put, function(*args, **kwargs))

    def run_backward(self, x, gradient, **options):  # the code's own functions in it are seen
        self.in_backward = True
        with self:
            torch.autograd.backward(x, gradient, **options)
        self.in_backward = False


def refuse(function, args: tuple, kwargs: dict, on_gpu: bool):
    if on_gpu and (generator := kwargs.get("generator")) and generator.device.type == "cpu":
        raise RuntimeError("expected a generator on cuda, found one on cpu")
    if function in INDEXED and is_on_gpu(args[0]):
        args = (args[0], args[2:])  # its indices may be anywhere
    devices = {is_on_gpu(x) for x in tensors_in((args, kwargs)) if is_on_gpu(x) or x.dim()}
    if len(devices) > 1 and function not in MOVES:
        raise RuntimeError(f"{function}: expected all tensors on one device, found cpu and cuda")


@contextmanager
def pretended_cuda(capability=(8, 0)):
    real = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def autocast(self, device_type, *args, **kwargs):
        real[0](self, "cpu", *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, PretendedCuda():
        patch.setattr(torch.autocast, "__init__", autocast)
        patch.setattr(torch, "is_autocast_enabled", lambda *_: real[1]("cpu"))
        patch.setattr(torch, "get_autocast_dtype", lambda *_: real[2]("cpu"))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        patch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
        yield


# ---------------- what is promised


# Those that make tensors of their own. The others are made of the same parts.
NAMES = ("grpo", "gspo", "recentred", "balanced", "nthr-random", "ar-lopti", "ibpo")
CASES = [(name, False, (8, 0)) for name in NAMES]
CASES += [("grpo", True, (8, 0)), ("nthr", True, (8, 0)), ("grpo", True, (7, 5))]


@pytest.mark.parametrize("name, quick, card", CASES)
def test_a_step_computes_in_bf16_where_there_is_one(name, quick, card, easy):
    """With a KL term where there is one, and cancelled. Before Ampere there is no bf16."""
    options = dict(layers=1, width=16, fast=quick)
    sizes = dict(group_size=3, max_tokens=6, prompts=4, minibatches=2, micro_rows=2)
    config = train.Config(prefix_baseline=True, **options, **sizes)
    method = losses.bind(name, {"kl": 0.1} if name == "grpo" else {})
    with pretended_cuda(card):
        policy, task, dtypes = load("scratch", **options), Arithmetic(), set()
        layer = policy.model.base_model.h[0].mlp.c_fc
        layer.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
        answers = train.sample(policy, task, task.train[:4], 1, config)
        answers.logp[0, 0] -= 0.5  # bf16 rounds by the shape of a batch
        scored = train.score(policy, answers, method, config, reference=policy)
        if method.credit:
            scored = train.reshape_credit(policy, task, scored, method, config)
        updates = train.learn(policy, train.adamw(policy.model, 1.0), scored, method, config)
        assert train.diagnose(policy, scored, updates, method, config)["grad_norm"] > 0
        assert dtypes == {torch.bfloat16 if card >= (8, 0) else torch.float32}
        made = answers.logp, scored.batch.logp, updates[0].push
        assert {(x.device.type, x.dtype) for x in made} == {("cuda", torch.float32)}


def test_fast_adds_gradients_and_makes_logits_in_fp32():
    with pretended_cuda():
        policy, task = load("scratch", layers=1, width=16, fast=True), Arithmetic()
        config = train.Config(group_size=3, max_tokens=6)
        answers = train.sample(policy, task, task.train[:2], 1, config)
        made = []
        head = policy.model.get_output_embeddings()
        head.register_forward_hook(lambda _, __, logits: made.append(logits.dtype))
        policy.scorer(policy, answers, 1.0)[0].sum().backward()
        policy.sampler(policy, answers.prompts, 2, 1.0, train.rng(0))
        assert {*made} == {torch.float32}
        # autocast's own cache would keep one bf16 copy of a weight that is used twice.
        grad = policy.model.base_model.h[0].mlp.c_fc.weight.grad
        assert not torch.equal(grad, grad.bfloat16().float())


def test_a_whole_run_and_what_is_left_of_a_resumed_one(tmp_path, easy):
    small = "--warm-steps 2 --prompts 3 --micro-rows 2 --max-tokens 6 --eval-every 1 --trace"
    small += " --minibatches 1 --method ibpo --schedule constant --steps 1 --fast"
    folder = tmp_path / "run"
    with pretended_cuda():
        run(folder, *small.split())
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"steps": 1', '"steps": 2'))
        train.main(["--resume", str(folder)])
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [0, 1, 2] and "kl_start" in lines[2]
    assert not torch.backends.cuda.cudnn_sdp_enabled()
