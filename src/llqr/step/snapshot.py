"""Copies of tensors that can be put back exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from llqr.distributed.dtensors import local

#: Tensors of one device and dtype, and their copies.
Pair = tuple[list[Tensor], list[Tensor]]


class Snapshot:
    """Remembers the contents of tensors and puts them back, bit-exact; of sharded ones, those of this rank's parts.

    Args:
        keep_memory: keep the copies' memory for the next `take` of the same tensors, which then allocates nothing.
            Otherwise memory is taken only while something is held.
    """

    def __init__(self, *, keep_memory: bool = False) -> None:
        self._keep_memory = keep_memory
        self._pairs: list[Pair] = []
        self._forms: list[object] = []
        self.held = False

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        tensors = local(tensors)
        forms = _forms(tensors) if self._keep_memory else []
        if not self._keep_memory or forms != self._forms:
            self._forms, self._pairs = forms, _paired(tensors)
        for into, copies in self._pairs:
            torch._foreach_copy_(copies, into)
        self.held = True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the remembered contents back, if there are any."""
        if not self.held:
            return
        for into, copies in self._pairs:
            try:
                torch._foreach_copy_(into, copies)
            except RuntimeError:  # one of them has changed its size
                for tensor, copy in zip(into, copies, strict=True):
                    tensor.resize_(copy.shape).copy_(copy)
        self.held = False
        if not self._keep_memory:
            self._pairs = []

    @property
    def nbytes(self) -> int:
        """Memory of the copies."""
        return sum(copy.nbytes for _, copies in self._pairs for copy in copies)

    def __getstate__(self) -> dict[str, object]:
        return Snapshot(keep_memory=self._keep_memory).__dict__


def _forms(tensors: Sequence[Tensor]) -> list[object]:
    """Which tensors these are, and the form that a copy of each must have: `tensor.data = other` may change it."""
    return [(id(tensor), tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


def _paired(tensors: Sequence[Tensor]) -> list[Pair]:
    """By device and dtype: a mixed list (BatchNorm counts batches in integers) would be copied tensor by tensor."""
    if not tensors:
        return []
    groups = _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)
    members = [[tensors[i] for i in indices] for _, indices in groups.values()]
    return [(into, [torch.empty_like(tensor) for tensor in into]) for into in members]
