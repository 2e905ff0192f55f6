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

    def over_columns(self) -> dict[str, tuple[int, ...]]:
        """The factors' dimensions that run over the columns of a matrix; none: columns must be in their own order."""
        return {}

    def apply_in_memory_order(self, factors: Factors, g: Tensor) -> Tensor:
        """`U g` where the columns of `g` and of the factors are in the order that they have in memory."""
        return self.apply(factors, g)

    def inbox(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One stack in the memory order that all blocks have; row by row if they differ, or `U g` needs that."""
        first = self.blocks[0]
        if not self._share_memory_order() or (first.channels_last and not self.over_columns()):
            return self.blank(dtype, device)
        size = (self.k, *first.native), (first.size, *first.strides)
        return torch.empty_strided(*size, dtype=dtype, device=device)

    def for_inbox(self, factors: Factors) -> Factors:
        """With their columns in memory order: moved once per refresh, unlike the gradients and `U g` of every step."""
        if not self._columns_move():
            return factors
        own_order = torch.arange(self.n, device=next(iter(factors.values())).device)
        in_memory = own_order.view(self.blocks[0].native[1:]).movedim(0, -1).flatten()
        moved = dict(factors)
        for name, dimensions in self.over_columns().items():
            for dimension in dimensions:
                moved[name] = moved[name].index_select(dimension, in_memory)
        return moved

    def apply_inbox(self, factors: Factors, inbox: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
        """The memory of an inbox is a stack of matrices, and `U g` is written in the same order."""
        matrices = inbox.as_strided((inbox.numel(),), (1,)).view(self.k, *self.blocks[0].shape)
        apply = self.apply_in_memory_order if self._columns_move() else self.apply
        Ug = apply(factors, matrices)
        Ug = (Ug if dtype is None else Ug.to(dtype)).contiguous()
        return self.unpack(Ug.as_strided(inbox.shape, inbox.stride()))

    def _columns_move(self) -> bool:
        return self._share_memory_order() and self.blocks[0].channels_last and bool(self.over_columns())

    def _share_memory_order(self) -> bool:
        """Whether all blocks lie in memory alike, row by row or channels last."""
        first, *others = self.blocks
        same = all((block.native, block.strides) == (first.native, first.strides) for block in others)
        return same and (first.channels_last or first.row_by_row)

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
