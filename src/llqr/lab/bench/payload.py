"""What a rank receives, counted where torch hands a collective to its process group."""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Payload(TorchDispatchMode):
    """Bytes that this rank receives while entered: of vectors, and of the few numbers that ranks agree about.

    A ring brings a rank `(n - 1) / n` of a gathered or scattered buffer, and twice that of a reduced one.

    Attributes:
        vectors: bytes of buffers whose length in entries is one of `lengths`.
        numbers: bytes of all others.
    """

    def __init__(self, lengths: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no annotations
        self._lengths = set(lengths)
        self.vectors = 0
        self.numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        received = RECEIVED.get(func)
        if received is not None:
            buffer, count = received(*args)
            if buffer.numel() in self._lengths:
                self.vectors += count
            else:
                self.numbers += count
        return func(*args, **(kwargs or {}))


def _reduced(tensors: list[Tensor], group: Any, *rest: Any) -> tuple[Tensor, int]:
    ranks = dist.ProcessGroup.unbox(group).size()
    return tensors[0], 2 * (ranks - 1) * sum(tensor.nbytes for tensor in tensors) // ranks


RECEIVED: dict[Any, Callable[..., tuple[Tensor, int]]] = {
    torch.ops.c10d._allgather_base_.default: lambda output, given, *_: (output, output.nbytes - given.nbytes),
    torch.ops.c10d._reduce_scatter_base_.default: lambda output, given, *_: (given, given.nbytes - output.nbytes),
    torch.ops.c10d.allreduce_.default: _reduced,
}
