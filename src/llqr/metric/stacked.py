"""Structures of matrices of one shape, kept as one stack, so that a few batched products serve all of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from llqr.metric.block import Block
from llqr.metric.structure import Factors, Structure


class Stacked(Structure):
    """Matrices of one shape `(m, n)`, stacked to `(k, m, n)`; every factor has the leading dimension `k`."""

    @property
    def k(self) -> int:
        return len(self.blocks)

    @property
    def m(self) -> int:
        return self.blocks[0].shape[0]

    @property
    def n(self) -> int:
        return self.blocks[0].shape[-1]

    @classmethod
    def group_key(cls, block: Block) -> Hashable:
        return block.shape

    def blank(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(self.k, *self.blocks[0].shape, dtype=dtype, device=device)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        # Those of an `inbox` are native already, and a view would change the strides of dimensions of length 1.
        pairs = zip(packed.unbind(0), self.blocks, strict=True)
        return [member if member.shape == block.native else member.view(block.native) for member, block in pairs]

    def inbox(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One stack in the memory order that all blocks have, such as channels-last; row by row if they differ."""
        layouts = {(block.native, block.strides) for block in self.blocks}
        if len(layouts) > 1:
            return self.blank(dtype, device)
        ((native, strides),) = layouts
        size = (self.k, *native), (self.blocks[0].size, *strides)
        return torch.empty_strided(*size, dtype=dtype, device=device)

    def apply_inbox(self, factors: Factors, inbox: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
        """Memory orders are changed for the whole stack at once: one kernel launch instead of one per block."""
        Ug = self.apply(factors, inbox.reshape(self.k, *self.blocks[0].shape)).view(inbox.shape)
        if inbox.is_contiguous():
            return self.unpack(Ug if dtype is None else Ug.to(dtype))
        return self.unpack(torch.empty_like(inbox, dtype=dtype or Ug.dtype).copy_(Ug))

    def units(self, gradients: Factors) -> list[Tensor]:
        return [member for gradient in gradients.values() for member in gradient.unbind(0)]

    def scaled(self, gradients: Factors, numbers: Tensor) -> Factors:
        rows = zip(gradients.items(), numbers.split(self.k), strict=True)
        return {name: gradient * own.view(-1, *[1] * (gradient.ndim - 1)) for (name, gradient), own in rows}

    def named(self, factors: Factors) -> Iterator[tuple[str, Tensor]]:
        for i, block in enumerate(self.blocks):
            for name, factor in factors.items():
                yield f"{block.name}/{name}", factor[i]

    def eye(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A stack of identity matrices."""
        return torch.eye(size, dtype=dtype, device=device).repeat(self.k, 1, 1)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of two stacks in at least float32: a product of narrower ones is not rounded back to their dtype."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide:
        return a @ b
    # Only NVIDIA devices have a product of narrow matrices with a wide result.
    return torch.bmm(a, b, wide) if a.is_cuda and torch.version.hip is None else (a @ b).to(wide)
