"""What every structure of `U` offers, and the two ways blocks are laid out in memory: stacked and flat."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from llqr.metric.block import Block
from llqr.metric.copying import copy_each

Factors = dict[str, Tensor]
FactorSets = tuple[tuple[str, ...], ...]
Bounds = tuple[float, float] | None
#: `r -> ` the gradient of `<r, U g>` in every factor.
Pull = Callable[[Tensor], Factors]


class Structure(ABC):
    """Blocks that share one structure, and the mathematics of their part of `U`.

    A structure holds no numbers: factors are passed in, so that the inner solver can work on a copy. All methods act on
    the whole group at once, in its packed layout. To add a structure, subclass `Stacked` or `Flat`, write `shapes`,
    `identity`, `apply`, `pull_back`, `constrain` and `matrices`, and put it into `STRUCTURES`. One whose pull-back can
    use what `U g` was made from is a `Traced` one, and says both in `trace`.

    Example (the groups of a metric: two weights of one shape, stacked, and their biases):
        >>> from llqr import Metric
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> [(group.name, group.shapes()) for group in Metric(model, structure="diag-kfac").groups]
        [('diag-kfac', {'out': (2, 4), 'in': (2, 4)}), ('diagonal', {'diagonal': (8,)})]
    """

    name: ClassVar[str]
    #: Sets of factors in each of which `U` is linear while the others stand still. The relaxed objective is quadratic
    #: in such a set; solvers that need this go round them, and refuse a structure that names none.
    linear_in: ClassVar[FactorSets] = ()
    #: Whether `U g` is made of matrix products, which may run in a lower precision than the factors are held in.
    multiplies: ClassVar[bool] = False

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every factor of the whole group."""

    @abstractmethod
    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        """The factors for which `U = I`."""

    @abstractmethod
    def blank(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The group's one tensor, with nothing in it yet."""

    def pack(self, pieces: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor a block -> the group's one tensor."""
        packed = self.blank(dtype or pieces[0].dtype, pieces[0].device)
        copy_each(self.unpack(packed), pieces)
        return packed

    @abstractmethod
    def unpack(self, packed: Tensor) -> list[Tensor]:
        """The inverse of `pack`, as views in the blocks' native shapes."""

    @abstractmethod
    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        """`U g`."""

    def apply_pieces(self, factors: Factors, pieces: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """`U g`, computed in the dtype of the factors, one tensor a block in and out."""
        moved = self.apply(factors, self.pack(pieces, dtype))
        dtypes = {piece.dtype for piece in pieces}
        # Back all at once where that can be: a block at a time is a kernel launch each.
        return self.unpack(moved.to(dtypes.pop()) if len(dtypes) == 1 else moved)

    @abstractmethod
    def pull_back(self, factors: Factors, g: Tensor, r: Tensor) -> Factors:
        """Gradient of `<r, U g>` in every factor."""

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        """`U g`, and the pull-back `r -> pull_back(factors, g, r)`, which may use again what `U g` was made from."""
        return self.apply(factors, g), lambda r: self.pull_back(factors, g, r)

    @abstractmethod
    def units(self, gradients: Factors) -> list[Tensor]:
        """What is clipped as one, as views of the factors' gradients."""

    @abstractmethod
    def scaled(self, gradients: Factors, numbers: Tensor) -> Factors:
        """Every unit times its number."""

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

    def blank(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(self.k, *self.blocks[0].shape, dtype=dtype, device=device)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        return [matrix.view(block.native) for matrix, block in zip(packed.unbind(0), self.blocks, strict=True)]

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
        return torch.eye(size, dtype=dtype, device=device).repeat(self.k, 1, 1)


class Traced(Stacked):
    """A stacked structure whose pull-back shares work with its action: `trace` says both."""

    @abstractmethod
    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]: ...

    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        return self.trace(factors, g)[0]

    def pull_back(self, factors: Factors, g: Tensor, r: Tensor) -> Factors:
        return self.trace(factors, g)[1](r)


#: Layers of a multiple of this many entries are scaled together, in one kernel that looks up one number a row. Widths
#: of networks are multiples of 64; what is not (a head) comes last and is scaled on its own.
ROW = 64


class Flat(Structure):
    """Blocks of any shape laid end to end in one vector, layer after layer; a layer is the unit that is clipped.

    Each block lies there in its parameter's own memory order, so that a few multi-tensor kernels serve all of them.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        entries: dict[str, int] = {}
        for block in blocks:
            entries[block.layer] = entries.get(block.layer, 0) + block.size
        self.layers = sorted(entries, key=lambda layer: entries[layer] % ROW > 0)  # stable: otherwise as they come
        order = {layer: i for i, layer in enumerate(self.layers)}
        super().__init__(sorted(blocks, key=lambda block: order[block.layer]))
        self.sizes = [block.size for block in self.blocks]
        self.layer_sizes = [entries[layer] for layer in self.layers]
        self.offsets = [0, *accumulate(self.sizes)][:-1]
        self._rows = [size // ROW for size in self.layer_sizes if size % ROW == 0]
        self._counts: dict[torch.device, Tensor] = {}
        self._layers_of_rows: dict[torch.device, Tensor] = {}

    def blank(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(sum(self.sizes), dtype=dtype, device=device)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        start = packed.storage_offset()
        rows = zip(self.blocks, self.offsets, strict=True)
        return [packed.as_strided(block.native, block.strides, start + offset) for block, offset in rows]

    def by_layer(self, flat: Tensor) -> list[Tensor]:
        """The layers' parts of a packed vector, as views."""
        ends = list(accumulate(self.layer_sizes))
        return [flat[end - size : end] for end, size in zip(ends, self.layer_sizes, strict=True)]

    def scale_layers(self, flat: Tensor, numbers: Tensor) -> Tensor:
        """Every layer's entries times the layer's number."""
        whole, rows = self._in_rows(flat)
        parts = list(zip(self.by_layer(flat)[whole:], numbers[whole:].unbind(), strict=True))
        scaled = [part * number for part, number in parts]
        if whole:
            of_rows = numbers.index_select(0, self._layer_of_row(flat.device))
            scaled = [(rows * of_rows.unsqueeze(1)).view(-1), *scaled]
        return scaled[0] if len(scaled) == 1 else torch.cat(scaled)

    def sum_layers(self, flat: Tensor) -> Tensor:
        """One sum a layer, added up in float64."""
        whole, rows = self._in_rows(flat)
        sums = [part.sum(dtype=torch.float64) for part in self.by_layer(flat)[whole:]]
        if not whole:
            return torch.stack(sums).to(flat.dtype)
        lengths = self._rows_of_layer(flat.device)
        of_rows = torch.segment_reduce(rows.sum(1, dtype=torch.float64), "sum", lengths=lengths, unsafe=True)
        return torch.cat([of_rows, *(part.view(1) for part in sums)]).to(flat.dtype)

    def _in_rows(self, flat: Tensor) -> tuple[int, Tensor]:
        """How many layers fill whole rows, and their entries, which come first, row by row."""
        return len(self._rows), flat[: sum(self._rows) * ROW].view(-1, ROW)

    def _rows_of_layer(self, device: torch.device) -> Tensor:
        # Kept, because making it copies to the device, and so in the next method.
        if device not in self._counts:
            self._counts[device] = torch.tensor(self._rows, device=device)
        return self._counts[device]

    def _layer_of_row(self, device: torch.device) -> Tensor:
        if device not in self._layers_of_rows:
            counts = torch.tensor(self._rows)
            self._layers_of_rows[device] = torch.arange(len(counts)).repeat_interleave(counts).to(device)
        return self._layers_of_rows[device]


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of two stacks in at least float32, which it is added up in: not rounded to their dtype in between."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide:
        return a @ b
    # There is such a product of narrow matrices on NVIDIA's devices only.
    return torch.bmm(a, b, wide) if a.is_cuda and torch.version.hip is None else (a @ b).to(wide)


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
