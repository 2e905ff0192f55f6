"""A process group that takes CUDA tensors only, imitated on the CPU: for what `llqr` hands to collectives."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

import llqr.distributed.collectives

CUDA = torch.device("cuda")


class OnTheCpu(TorchFunctionMode):
    """What is asked for on a CUDA device is made on the CPU, as a tensor of its own that is marked."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = [*args, *(kwargs or {}).values()]
        if CUDA not in [value for value in given if isinstance(value, torch.device)]:
            return func(*args, **(kwargs or {}))
        args = [torch.device("cpu") if value == CUDA else value for value in args]
        kwargs = {key: torch.device("cpu") if value == CUDA else value for key, value in (kwargs or {}).items()}
        made = func(*args, **kwargs).clone()
        made.on_cuda = True
        return made


class CudaOnly:
    """`torch.distributed`, as if every group had NCCL alone; counts what travels."""

    def __init__(self):
        self.collectives = 0

    def get_backend_config(self, group):
        return "cuda:nccl"

    def __getattr__(self, name):
        real = getattr(dist, name)
        if not name.startswith(("all_", "reduce_scatter")):
            return real

        def checked(*args, **kwargs):
            for value in args:
                if isinstance(value, Tensor) and not hasattr(value, "on_cuda"):
                    raise RuntimeError("No backend type associated with device type cpu")
            self.collectives += 1
            return real(*args, **kwargs)

        return checked


@contextmanager
def cuda_only():
    """While entered, the collectives of `llqr` are refused unless their tensors are sent to a CUDA device first."""
    group = CudaOnly()
    with patch.object(llqr.distributed.collectives, "dist", group), OnTheCpu():
        yield group
