"""What a structure of `U` is: three methods that it must have, and defaults for everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
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


def flattened(factors: Iterable[Factors]) -> list[Tensor]:
    """All factors of some groups, in order."""
    return [factor for own in factors for factor in own.values()]


class Structure(ABC):
    """Blocks that share one structure, and the mathematics of their part of `U`.

    A structure holds no numbers: factors are passed in, so that the inner solver can work on a copy. All methods act on
    the whole group at once, in its packed layout.

    To add a structure, subclass `Stacked` (matrices of one shape) or `Flat` (entries laid end to end), give it a
    `name`, write `shapes`, `identity` and `apply`, and put the class into `STRUCTURES`. The pull-back then comes from
    autograd and the dense form from applying `U` to basis vectors. Override `trace` for a faster pull-back, `constrain`
    to support bounds, `times` to support `normalise`, and the class variables below to say what the structure can do.

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
    #: Sets of factors in each of which `U` is linear while the other factors are fixed. The relaxed objective is
    #: quadratic in such a set; solvers that need this alternate between the sets, and refuse a structure without any.
    linear_in: ClassVar[FactorSets] = ()
    #: Whether every factor entry multiplies entries of `g` of its own, so that `U g` is `u * g`.
    scales_entries: ClassVar[bool] = False
    #: Whether `U g` is made of matrix products, which may run in a lower precision than the factors are held in.
    multiplies: ClassVar[bool] = False

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)

    # -- what a structure must say -------------------------------------------------------------------------------------

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every factor of the whole group."""

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
        if not self.linear_in:
            raise ValueError(
                f"normalise: the structure {self.name!r} has no `times` that would scale it; write one, or leave "
                "normalise out"
            )
        return factors | {name: factors[name] * number.to(factors[name]) for name in self.linear_in[0]}

    def constrain(self, factors: Factors, bounds: Bounds) -> Factors:
        """Keep the spectrum of `U` inside `bounds`; without bounds, do what the paper's runs do, which is nothing."""
        if bounds is not None:
            raise ValueError(
                f"bounds: the structure {self.name!r} has no `constrain` that would keep them; write one, or leave "
                "bounds out"
            )
        return factors

    def matrices(self, factors: Factors) -> list[Tensor]:
        """Every block of `U` as a dense matrix that acts on the row-major flattened block: the reference.

        By applying `U` to basis vectors, to one of every block at a time: `U` does not mix blocks.
        """
        like = next(iter(factors.values()))
        columns: list[list[Tensor]] = [[] for _ in self.blocks]
        for i in range(max(block.size for block in self.blocks)):
            basis = [torch.zeros(block.native, dtype=like.dtype, device=like.device) for block in self.blocks]
            for vector in basis:
                vector.view(-1)[i : i + 1] = 1.0
            applied = self.unpack(self.apply(factors, self.pack(basis)))
            for block, own, column in zip(self.blocks, columns, applied, strict=True):
                if i < block.size:
                    own.append(column.reshape(-1))
        return [torch.stack(own, 1) for own in columns]

    def apply_pieces(self, factors: Factors, pieces: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """`U g`, computed in the dtype of the factors `for_inbox`, one tensor per block in and out."""
        inbox = self.inbox(dtype, pieces[0].device)
        copy_each(self.unpack(inbox), pieces)
        dtypes = {piece.dtype for piece in pieces}
        return self.apply_inbox(factors, inbox, dtypes.pop() if len(dtypes) == 1 else None)

    def inbox(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory for a gradient, each block in its parameter's memory order; `unpack` gives them."""
        return self.blank(dtype, device)

    def for_inbox(self, factors: Factors) -> Factors:
        """The factors as `apply_inbox` takes them."""
        return factors

    def apply_inbox(self, factors: Factors, inbox: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
        """`U g` for the gradient in an `inbox`, one tensor per block, in this dtype (default: as computed).

        Converted all at once: converting each block would be one kernel launch per block.
        """
        Ug = self.apply(factors, inbox)
        return self.unpack(Ug if dtype is None else Ug.to(dtype))

    def stored(self) -> int:
        """Stored scalars."""
        return sum(prod(shape) for shape in self.shapes().values())

    @classmethod
    def longest_side(cls, block: Block) -> int:
        """The longest side a factor of this block has, which `max_side` limits."""
        return max(block.shape)

    def inseparable(self) -> list[tuple[Block, ...]]:
        """The blocks, in the smallest pieces that different ranks can learn."""
        return [(block,) for block in self.blocks]

    # -- the layout: how the group's blocks are stored in one tensor (`Stacked` and `Flat`) ----------------------------

    @classmethod
    @abstractmethod
    def group_key(cls, block: Block) -> Hashable:
        """Blocks with equal keys can be in one group."""

    @abstractmethod
    def blank(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The group's one tensor, uninitialised."""

    def pack(self, pieces: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor per block -> the group's one tensor."""
        packed = self.blank(dtype or pieces[0].dtype, pieces[0].device)
        copy_each(self.unpack(packed), pieces)
        return packed

    @abstractmethod
    def unpack(self, packed: Tensor) -> list[Tensor]:
        """The inverse of `pack`, as views in the blocks' native shapes."""

    @abstractmethod
    def units(self, gradients: Factors) -> list[Tensor]:
        """The parts of the factors' gradients that are clipped as one, as views."""

    @abstractmethod
    def scaled(self, gradients: Factors, numbers: Tensor) -> Factors:
        """The gradients, with every unit multiplied by its number."""

    @abstractmethod
    def named(self, factors: Factors) -> Iterator[tuple[str, Tensor]]:
        """Views of the factors, one block at a time, under names that do not depend on the packing."""
