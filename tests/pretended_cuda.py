"""A GPU that is pretended: its tensors say "cuda", and compute on the CPU.

A storage carries the label, so views, parameters and saved tensors share it. As with CUDA, one
operation takes tensors of one device; only numbers without dimensions, and indices of a tensor on
the GPU, may be on the CPU. The CPU's generator draws nothing on the GPU. autocast is in real bf16.

It cannot see kernels (rounding, nan, the order of sums), memory, speed, and what CUDA's autocast
keeps in fp32. In a backward pass it compares no devices: autograd's own tensors have no label.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

INDEXED = (Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put, Tensor.index_put_)
MOVES = (Tensor.to, Tensor.copy_, Tensor.data.__set__, torch._has_compatible_shallow_copy_type)


def is_on_gpu(x: Tensor) -> bool:
    return getattr(x.untyped_storage(), "is_on_gpu", False)


def tensors_in(value) -> list[Tensor]:
    value = tuple(value.values()) if isinstance(value, dict) else value
    if isinstance(value, tuple | list):
        return [x for part in value for x in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


class PretendedCuda(TorchFunctionMode):
    """Sees every call of torch, also those of transformers and of torch's optimisers."""

    in_backward = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        on_gpu = any(map(is_on_gpu, inputs))
        if function == Tensor.device.__get__:
            return torch.device("cuda", 0) if on_gpu else function(*args)
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
            x = x.clone() if function == Tensor.to else x
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
def pretended_cuda(capability=(8, 0)) -> Iterator[PretendedCuda]:
    real = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def autocast(self, device_type, *args, **kwargs):
        real[0](self, "cpu", *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, PretendedCuda() as gpu:
        patch.setattr(torch.autocast, "__init__", autocast)
        patch.setattr(torch, "is_autocast_enabled", lambda *_: real[1]("cpu"))
        patch.setattr(torch, "get_autocast_dtype", lambda *_: real[2]("cpu"))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        patch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
        yield gpu
