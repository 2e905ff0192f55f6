"""What a structure of `U` is: two methods that it must have, and defaults for everything else."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from llqr.metric.layout import Block, copy_each

Factors = dict[str, Tensor]
Bounds = tuple[float, float] | None
#: `r -> ` the gradient of `<r, U g>` in every factor.
Pull = Callable[[Tensor], Factors]
META = torch.device("meta")

#: Layers whose size is a multiple of this are scaled together, in one kernel that looks up one number per row. Widths
#: of networks are multiples of 64; layers of other sizes (a head) come last and are scaled one by one.
ROW = 64


def flattened(factors: Iterable[Factors]) -> list[Tensor]:
    """All factors of some groups, in order."""
    return [factor for own in factors for factor in own.values()]


@cache
def widened(dtype: torch.dtype) -> torch.dtype:
    """At least float32, which factors are learned in."""
    return torch.promote_types(dtype, torch.float32)


class Structure(ABC):
    """Blocks that share one structure, and the mathematics of their part of `U`.

    The blocks are `k` matrices of one shape `(m, n)`, stacked to `(k, m, n)`, and so are their factors. A structure
    holds no numbers: factors are passed in, so that the inner solver can work on a copy, and all methods act on the
    whole stack at once. The columns of channels-last convolutions are sorted by kernel position, as their memory is, so
    that gradients are multiplied as they are; `over_columns` says how the factors follow.

    To add a structure, subclass this class, or `Flat` (entries of any shape, laid end to end), give it a `name`, write
    `identity` and `apply`, and put the class into `STRUCTURES`. The pull-back then comes from autograd.
    Override `trace` for a faster pull-back, `project` to support bounds, `times` to support `normalise`, and the class
    variables below to say what the structure can do.

    Example (the groups of a metric: two weights of one shape, stacked, and their biases):
        >>> from llqr import Metric
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> [(group.name, group.shapes()) for group in Metric(model, structure="diag-kfac").groups]
        [('diag-kfac', {'out': (2, 4), 'in': (2, 4)}), ('diagonal', {'diagonal': (8,)})]
    """

    name: ClassVar[str]
    #: Whether it can be the structure of a vector; a vector gets a diagonal otherwise.
    takes_vectors: ClassVar[bool] = False
    #: The structure that replaces this one where a factor would be longer than `max_side`; None: any length is fine.
    fallback: ClassVar[str | None] = None
    #: The factor that `times` multiplies, because `U` is linear in it.
    scales_with: ClassVar[str | None] = None
    #: Whether every factor entry multiplies entries of `g` of its own, so that `U g` is `u * g`.
    scales_entries: ClassVar[bool] = False
    #: Whether `U g` is made of matrix products, which may run in a lower precision than the factors are held in.
    multiplies: ClassVar[bool] = False
    #: Bounds that hold if the user gives none.
    default_bounds: ClassVar[Bounds] = None

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)
        self.k, self.m, self.n = len(blocks), blocks[0].shape[0], blocks[0].shape[-1]
        self.by_position = self.sorts_positions(blocks[0]) and bool(self.over_columns())
        self.dtype, self.device = widened(blocks[0].dtype), blocks[0].device
        self.names, self.parameters = [block.name for block in blocks], {block.parameter for block in blocks}
        self._shape = self.packed_shape()
        self._strides = torch.empty(self._shape, device=META).stride()
        self._places = [
            (block.native, self.strides_of(block), start)
            for block, start in zip(blocks, accumulate((b.size for b in blocks), initial=0), strict=False)
        ]
        alike = blocks[0].native, torch.empty(blocks[0].native, device=META).stride()
        self._stacked = all(place[:2] == alike for place in self._places)

    # -- what a structure must say -------------------------------------------------------------------------------------

    @abstractmethod
    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        """The factors for which `U = I`."""

    @abstractmethod
    def apply(self, factors: Factors, g: Tensor) -> Tensor:
        """`U g`."""

    # -- what follows from it, to be overridden where something better is known ----------------------------------------

    def trace(self, factors: Factors, g: Tensor) -> tuple[Tensor, Pull]:
        """`U g`, and the pull-back from `r` to the gradient of `<r, U g>` in every factor.

        By autograd through `apply`. A faster one can reuse the intermediate products of `U g`.
        """
        leaves = {name: factor.detach().requires_grad_() for name, factor in factors.items()}
        with torch.enable_grad():
            Ug = self.apply(leaves, g)

        def pull(r: Tensor) -> Factors:
            slopes = torch.autograd.grad(
                Ug, list(leaves.values()), r.to(Ug.dtype), retain_graph=True, materialize_grads=True
            )
            return dict(zip(leaves, slopes, strict=True))

        return Ug.detach(), pull

    def times(self, factors: Factors, number: Tensor) -> Factors:
        """The factors of `number U`, for a positive number."""
        if self.scales_with is None:
            raise ValueError(
                f"normalise: the structure {self.name!r} has no `times` that would scale it; write one, or leave "
                "normalise out"
            )
        return factors | {self.scales_with: factors[self.scales_with] * number.to(factors[self.scales_with])}

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        """Keep the spectrum of `U` inside `bounds`; without bounds, do what the authors' code does."""
        bounds = bounds or self.default_bounds
        return factors if bounds is None else self.project(factors, *bounds)

    def project(self, factors: Factors, lower: float, upper: float) -> Factors:
        """Factors near these for which the spectrum of `U` is in `[lower, upper]`."""
        raise ValueError(
            f"bounds: the structure {self.name!r} has no `project` that would keep them; write one, or leave bounds out"
        )

    def apply_each(self, factors: Factors, pieces: Sequence[Tensor]) -> list[Tensor]:
        """`U g`, computed in the dtype of the factors, one tensor per block in and out."""
        first, dtype = pieces[0], next(iter(factors.values())).dtype
        if len(pieces) == 1 and first.dtype == dtype and first.stride() == self._places[0][1]:
            packed = first.as_strided(self._shape, self._strides)  # a single block is used where it is
        else:
            packed = self.pack(pieces, dtype)
        Ug = self.apply(factors, packed)
        if Ug.dtype != first.dtype and all(piece.dtype == first.dtype for piece in pieces):
            Ug = Ug.to(first.dtype)  # at once: converting each block would be one kernel launch per block
        return self.unpack(Ug)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every factor of the whole group."""
        return {name: tuple(factor.shape) for name, factor in self.identity(self.dtype, META).items()}

    def stored(self) -> int:
        """Stored scalars."""
        return sum(prod(shape) for shape in self.shapes().values())

    @classmethod
    def longest_side(cls, block: Block) -> int:
        """The longest side a factor of this block has, which `max_side` limits."""
        return max(block.shape)

    # -- the layout: matrices of one shape stacked to `(k, m, n)`; `Flat` has another one ------------------------------

    def packed_shape(self) -> tuple[int, ...]:
        """Of the tensor that holds all blocks."""
        return (self.k, *self.blocks[0].shape)

    def blank(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The group's one tensor, uninitialised."""
        return torch.empty(self._shape, dtype=dtype, device=device)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Views of the blocks in their native shapes."""
        packed = packed.contiguous()
        offset = packed.storage_offset()
        return [packed.as_strided(native, strides, offset + start) for native, strides, start in self._places]

    def pack(self, pieces: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor per block -> the group's one tensor."""
        dtype = dtype or pieces[0].dtype
        if self._stacked and all(piece.dtype == dtype for piece in pieces):
            return torch.stack(tuple(pieces)).reshape(self._shape)
        packed = self.blank(dtype, pieces[0].device)
        copy_each(self.unpack(packed), pieces)
        return packed

    @classmethod
    def sorts_positions(cls, block: Block) -> bool:
        """Whether the columns of this block are sorted by kernel position."""
        return block.channels_last

    @classmethod
    def group_key(cls, block: Block) -> Hashable:
        """Blocks with equal keys can be in one group."""
        return block.shape, block.kernel_positions if cls.sorts_positions(block) else 1

    def strides_of(self, block: Block) -> tuple[int, ...]:
        """The memory order of a block in the packed tensor."""
        if block.channels_last if self.by_position else block.row_by_row:
            return block.strides
        out, *rest = block.native
        order = (out, *rest[1:], rest[0]) if self.by_position else block.native
        memory = torch.empty(order, device=META)
        return memory.movedim(-1, 1).stride() if self.by_position else memory.stride()

    def over_columns(self) -> dict[str, tuple[int, ...]]:
        """The factors' dimensions that run over the columns of a matrix; none: columns must be in their own order."""
        return {}

    def reordered(self, factors: Factors, *, to_memory: bool) -> Factors:
        """Factors with their columns sorted by position, from the order (channel, position) that is saved, or back."""
        if not self.by_position:
            return factors
        positions = self.blocks[0].kernel_positions
        shape = (-1, positions) if to_memory else (positions, -1)
        order = torch.arange(self.n, device=self.device).view(shape).mT.flatten()
        moved = dict(factors)
        for name, dimensions in self.over_columns().items():
            for dimension in dimensions:
                moved[name] = moved[name].index_select(dimension, order)
        return moved

    def inseparable(self) -> list[tuple[Block, ...]]:
        """The blocks, in the smallest pieces that different ranks can learn."""
        return [(block,) for block in self.blocks]

    def norms(self, gradient: Tensor) -> Tensor:
        """The norm of every part of a factor's gradient that is clipped as one, in at least float32."""
        norms: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=widened(gradient.dtype))
        return norms

    def scaled(self, gradient: Tensor, numbers: Tensor) -> Tensor:
        """A factor's gradient with every such part multiplied by its number."""
        return gradient * numbers.view(-1, *[1] * (gradient.ndim - 1))

    def clipped(self, gradients: Factors, limit: float) -> Factors:
        """Bound the norm of every such part (a block's factor, a layer of a diagonal) by `limit`."""
        limit = max(limit, torch.finfo(torch.float32).tiny)
        shrink = {n: self.norms(gradient).reciprocal().mul_(limit).clamp_max_(1.0) for n, gradient in gradients.items()}
        return {name: self.scaled(gradient, shrink[name]) for name, gradient in gradients.items()}

    def named(self, factors: Factors) -> Iterator[tuple[str, Tensor]]:
        """Views of the factors, one block at a time, under names that do not depend on the packing."""
        for i, block in enumerate(self.blocks):
            for name, factor in factors.items():
                yield f"{block.name}/{name}", factor[i]

    def eye(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A stack of identity matrices."""
        stack = torch.zeros(self.k, size, size, dtype=dtype, device=device)
        stack.diagonal(dim1=1, dim2=2).fill_(1)  # torch.eye of the meta device, which plans memory, is slow to import
        return stack


class Flat(Structure):
    """Blocks of any shape laid end to end in one vector, layer after layer; a layer is the unit that is clipped.

    Each block keeps its parameter's memory order, so that a few multi-tensor kernels serve all of them. A factor
    has one number per entry or one per layer.
    """

    takes_vectors = True

    def __init__(self, blocks: Sequence[Block]) -> None:
        entries: dict[str, int] = {}
        for block in blocks:
            entries[block.layer] = entries.get(block.layer, 0) + block.size
        self.layers = sorted(entries, key=lambda layer: entries[layer] % ROW > 0)  # stable: otherwise as they come
        order = {layer: i for i, layer in enumerate(self.layers)}
        self.size = sum(entries.values())
        super().__init__(sorted(blocks, key=lambda block: order[block.layer]))
        self.layer_sizes = [entries[layer] for layer in self.layers]
        self._rows = [size // ROW for size in self.layer_sizes if size % ROW == 0]
        self._of_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @classmethod
    def group_key(cls, block: Block) -> Hashable:
        return None

    def packed_shape(self) -> tuple[int, ...]:
        return (self.size,)

    def strides_of(self, block: Block) -> tuple[int, ...]:
        return block.strides

    def inseparable(self) -> list[tuple[Block, ...]]:
        """Whole layers: they are clipped as one, and may share a number."""
        return [tuple(block for block in self.blocks if block.layer == layer) for layer in self.layers]

    def norms(self, gradient: Tensor) -> Tensor:
        if not self._per_entry(gradient):
            return gradient.abs().to(widened(gradient.dtype))
        return torch.stack(torch._foreach_norm(gradient.split(self.layer_sizes), 2, widened(gradient.dtype)))

    def scaled(self, gradient: Tensor, numbers: Tensor) -> Tensor:
        return self.scale_layers(gradient, numbers) if self._per_entry(gradient) else gradient * numbers

    def named(self, factors: Factors) -> Iterator[tuple[str, Tensor]]:
        """An only factor is named after its block or layer alone."""
        for name, factor in factors.items():
            suffix = f"/{name}" if len(factors) > 1 else ""
            if self._per_entry(factor):
                for block, own in zip(self.blocks, self.unpack(factor), strict=True):
                    yield block.name + suffix, own
            else:
                for layer, own in zip(self.layers, factor, strict=True):
                    yield layer + suffix, own

    def _per_entry(self, factor: Tensor) -> bool:
        return len(factor) == self.size

    def scale_layers(self, flat: Tensor, numbers: Tensor) -> Tensor:
        """Every layer's entries times the layer's number."""
        whole, rows = self._in_rows(flat)
        parts = list(zip(flat.split(self.layer_sizes)[whole:], numbers[whole:].unbind(), strict=True))
        scaled = [part * number for part, number in parts]
        if whole:
            of_rows = numbers.index_select(0, self._rows_and_layers(flat.device)[1])
            scaled = [(rows * of_rows.unsqueeze(1)).view(-1), *scaled]
        return scaled[0] if len(scaled) == 1 else torch.cat(scaled)

    def sum_layers(self, flat: Tensor) -> Tensor:
        """One sum per layer, accumulated in float64."""
        whole, rows = self._in_rows(flat)
        sums = [part.sum(dtype=torch.float64) for part in flat.split(self.layer_sizes)[whole:]]
        if not whole:
            return torch.stack(sums).to(flat.dtype)
        lengths = self._rows_and_layers(flat.device)[0]
        of_rows = torch.segment_reduce(rows.sum(1, dtype=torch.float64), "sum", lengths=lengths, unsafe=True)
        return torch.cat([of_rows, *(part.view(1) for part in sums)]).to(flat.dtype)

    def _in_rows(self, flat: Tensor) -> tuple[int, Tensor]:
        """How many layers fill whole rows, and their entries (which come first) as a matrix of rows."""
        return len(self._rows), flat[: sum(self._rows) * ROW].view(-1, ROW)

    def _rows_and_layers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows of each layer, and the layer of each row; cached, because they are copied from the host."""
        if device not in self._of_device:
            counts = torch.tensor(self._rows)
            layers = torch.arange(len(counts)).repeat_interleave(counts)
            self._of_device[device] = counts.to(device), layers.to(device)
        return self._of_device[device]


# -- what structures and solvers compute with --------------------------------------------------------------------------


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of two stacks in at least float32: a product of narrower ones is not rounded back to their dtype."""
    wide = widened(a.dtype)
    if a.dtype == wide:
        return torch.bmm(a, b)
    # Only NVIDIA devices have a product of narrow matrices with a wide result.
    return torch.bmm(a, b, wide) if a.is_cuda and torch.version.hip is None else (a @ b).to(wide)


def clamp_singular_values(stack: Tensor, lower: float, upper: float) -> Tensor:
    """Project every matrix of a stack onto those with singular values in `[lower, upper]`."""
    left, values, right = torch.linalg.svd(stack.to(widened(stack.dtype)), full_matrices=False)
    projected: Tensor = (left * values.clamp(lower, upper).unsqueeze(-2)) @ right
    return projected.to(stack.dtype)


def clamp_eigenvalues(stack: Tensor, lower: float, upper: float) -> Tensor:
    """Project every matrix of a stack onto the symmetric ones with eigenvalues in `[lower, upper]`."""
    wide = stack.to(widened(stack.dtype))
    values, vectors = torch.linalg.eigh(0.5 * (wide + wide.mT))
    projected: Tensor = (vectors * values.clamp(lower, upper).unsqueeze(-2)) @ vectors.mT
    return projected.to(stack.dtype)
