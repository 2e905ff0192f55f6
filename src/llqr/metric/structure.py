"""What every structure of `U` offers, and the two ways blocks are laid out in memory: stacked and flat."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from .block import Block

Factors = dict[str, Tensor]
Bounds = tuple[float, float] | None


class Structure(ABC):
    """Blocks that share one structure, and the mathematics of their part of `U`.

    A structure holds no numbers: factors are passed in, so that the inner solver can work on a copy. All methods act on
    the whole group at once, in its packed layout. To add a structure, subclass `Stacked` or `Flat`, write `shapes`,
    `identity`, `apply`, `pull_back`, `constrain` and `matrices`, and put it into `STRUCTURES`.

    Example (the groups of a metric: two weights of one shape, stacked, and their biases):
        >>> from llqr import Metric
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> [(group.name, group.shapes()) for group in Metric(model, structure="diag-kfac").groups]
        [('diag-kfac', {'out': (2, 4), 'in': (2, 4)}), ('diagonal', {'diagonal': (8,)})]
    """

    name: ClassVar[str]
    #: `U` is linear in its factors, hence the relaxed objective is quadratic in them and conjugate gradients apply.
    linear: ClassVar[bool] = False

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every factor of the whole group."""

    @abstractmethod
    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        """The factors for which `U = I`."""

    @abstractmethod
    def pack(self, pieces: Sequence[Tensor]) -> Tensor:
        """One tensor a block -> the group's one tensor."""

    @abstractmethod
    def unpack(self, packed: Tensor) -> list[Tensor]:
        """The inverse of `pack`, as views in the blocks' native shapes."""

    @abstractmethod
    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        """`U g`."""

    def apply_pieces(self, factors: Factors, pieces: Sequence[Tensor]) -> list[Tensor]:
        """`U g`, one tensor a block in and out."""
        return self.unpack(self.apply(factors, self.pack(pieces)))

    @abstractmethod
    def pull_back(self, factors: Factors, g: Tensor, r: Tensor) -> Factors:
        """Gradient of `<r, U g>` in every factor."""

    @abstractmethod
    def clip(self, gradients: Factors, limit: float) -> Factors:
        """Bound the norm of every factor's gradient by `limit`."""

    @abstractmethod
    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        """Keep the spectrum of `U` inside `bounds`; without bounds, what the paper's runs do."""

    @abstractmethod
    def matrices(self, factors: Factors) -> list[Tensor]:
        """Every block of `U` written out densely, acting on the row-major flattened block: the reference."""

    @abstractmethod
    def named(self, factors: Factors) -> Iterator[tuple[str, Tensor]]:
        """Views of the factors, one block at a time, under names that do not depend on the packing."""

    def stored(self) -> int:
        """Stored scalars."""
        return sum(prod(shape) for shape in self.shapes().values())


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

    def pack(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.stack([piece.reshape(self.blocks[0].shape) for piece in pieces])

    def unpack(self, packed: Tensor) -> list[Tensor]:
        return [matrix.view(block.native) for matrix, block in zip(packed.unbind(0), self.blocks, strict=True)]

    def clip(self, gradients: Factors, limit: float) -> Factors:
        return {name: gradient * _shrink(_norms(gradient), limit) for name, gradient in gradients.items()}

    def named(self, factors: Factors) -> Iterator[tuple[str, Tensor]]:
        for i, block in enumerate(self.blocks):
            for name, factor in factors.items():
                yield f"{block.name}/{name}", factor[i]

    def eye(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.eye(size, dtype=dtype, device=device).repeat(self.k, 1, 1)


class Flat(Structure):
    """Blocks of any shape laid end to end in one vector, layer after layer; a layer is the unit that is clipped.

    Each block lies there in its parameter's own memory order, so that a few multi-tensor kernels serve all of them.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        order = {layer: i for i, layer in enumerate(dict.fromkeys(block.layer for block in blocks))}
        super().__init__(sorted(blocks, key=lambda block: order[block.layer]))
        self.layers = list(order)
        self.sizes = [block.size for block in self.blocks]
        self.layer_sizes = [sum(b.size for b in self.blocks if b.layer == layer) for layer in self.layers]
        self.offsets = [0, *accumulate(self.sizes)][:-1]

    def pack(self, pieces: Sequence[Tensor]) -> Tensor:
        packed = pieces[0].new_empty(sum(self.sizes))
        torch._foreach_copy_(self.unpack(packed), list(pieces))
        return packed

    def unpack(self, packed: Tensor) -> list[Tensor]:
        start = packed.storage_offset()
        rows = zip(self.blocks, self.offsets, strict=True)
        return [packed.as_strided(block.native, block.strides, start + offset) for block, offset in rows]

    def scale_layers(self, flat: Tensor, numbers: Tensor) -> Tensor:
        """Every layer's entries times the layer's number."""
        parts = zip(flat.split(self.layer_sizes), numbers.unbind(), strict=True)
        return torch.cat([part * number for part, number in parts])

    def layer_norms(self, flat: Tensor) -> Tensor:
        return torch.stack(torch._foreach_norm(list(flat.split(self.layer_sizes))))


def _norms(stack: Tensor) -> Tensor:
    """Norm of every member of a stack, shaped to broadcast against it."""
    norms: Tensor = torch.linalg.vector_norm(stack, dim=tuple(range(1, stack.ndim)), keepdim=True)
    return norms


def _shrink(norms: Tensor, limit: float) -> Tensor:
    """`min(1, limit / norm)`, and 1 where the norm is 0."""
    shrink: Tensor = limit / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    return shrink.clamp(max=1.0)


def clamp_singular_values(stack: Tensor, lower: float, upper: float) -> Tensor:
    """Project every matrix of a stack onto those with singular values in `[lower, upper]`."""
    left, values, right = torch.linalg.svd(stack.float() if stack.dtype.itemsize < 4 else stack, full_matrices=False)
    projected: Tensor = (left * values.clamp(lower, upper).unsqueeze(-2)) @ right
    return projected.to(stack.dtype)


def clamp_eigenvalues(stack: Tensor, lower: float, upper: float) -> Tensor:
    """Project every matrix of a stack onto the symmetric ones with eigenvalues in `[lower, upper]`."""
    wide = stack.float() if stack.dtype.itemsize < 4 else stack
    values, vectors = torch.linalg.eigh(0.5 * (wide + wide.mT))
    projected: Tensor = (vectors * values.clamp(lower, upper).unsqueeze(-2)) @ vectors.mT
    return projected.to(stack.dtype)
