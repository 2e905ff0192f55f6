"""From a model's parameters to the blocks that a metric is made of, and vectors in that layout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

#: Convolutions of any dimension, transposed ones included.
Convolution = nn.modules.conv._ConvNd

#: A vector of the weights' size as the inner loop works with it: one tensor per group of blocks.
Packed = list[Tensor]

#: Terms of an inner product that are in memory at once.
PIECE = 2**22
#: BLAS counts in 31 bits.
MOST = 2**30


@dataclass(frozen=True)
class Block:
    """A piece of one parameter that owns one diagonal block of `U`.

    `shape` is `(m, n)` = (out, in) for a matrix and `(n,)` for a vector; `rows` selects the piece along the parameter's
    first dimension when the parameter is fused; `layer` groups weight and bias. `native` and `strides` are the piece's
    own shape and memory order (those of a channels-last convolution, say). `kernel_positions` is `kh * kw` for a
    convolution, whose `n = in * kh * kw`, and 1 otherwise.

    Example (a metric's blocks):
        >>> from llqr import Metric
        >>> [(block.name, block.shape) for block in Metric(torch.nn.Conv2d(3, 8, 5)).blocks]
        [('weight', (8, 75)), ('bias', (8,))]
    """

    name: str
    parameter: str
    layer: str
    shape: tuple[int, ...]
    native: tuple[int, ...]
    strides: tuple[int, ...]
    rows: tuple[int, int] | None
    dtype: torch.dtype
    device: torch.device
    kernel_positions: int = 1

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2

    @cached_property
    def row_by_row(self) -> bool:
        """Whether its memory holds one row of the matrix after the other."""
        return self._memory().is_contiguous()

    @cached_property
    def channels_last(self) -> bool:
        """Whether its memory holds `(out, kh, kw, in)` instead of `(out, in, kh, kw)`."""
        return self.kernel_positions > 1 and not self.row_by_row and self._memory().movedim(1, -1).is_contiguous()

    def _memory(self) -> Tensor:
        return torch.empty_strided(self.native, self.strides, device="meta")

    def piece(self, tensor: Tensor) -> Tensor:
        """This block's part of a tensor that has the parameter's shape, as a view in its native shape."""
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


def blocks_of(model: nn.Module, parameters: Mapping[str, Tensor]) -> list[Block]:
    """The blocks of the given parameters (name -> tensor) of a model, in order."""
    modules = dict(model.named_modules())
    return [block for name, tensor in parameters.items() for block in _split(name, tensor, modules)]


def _split(name: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> Iterator[Block]:
    owner_name, _, local = name.rpartition(".")
    owner = modules.get(owner_name)
    layer = layer_of(name)
    parts: dict[str, tuple[int, int] | None] = {"": None}
    if _is_fused(owner_name, local, owner, tensor):
        third = tensor.shape[0] // 3
        parts = {f"[{part}]": (i * third, (i + 1) * third) for i, part in enumerate("qkv")}
    outline = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")  # a DTensor's is that of the whole
    for suffix, rows in parts.items():
        piece = outline if rows is None else outline[rows[0] : rows[1]]
        yield Block(
            name=name + suffix,
            parameter=name,
            layer=layer + suffix,
            shape=_matrix_shape(piece, owner),
            native=tuple(piece.shape),
            strides=torch.empty_like(piece).stride(),
            rows=rows,
            dtype=tensor.dtype,
            device=tensor.device,
            kernel_positions=prod(piece.shape[2:]) if isinstance(owner, Convolution) else 1,
        )


def layer_of(name: str) -> str:
    """The layer a parameter belongs to: weight and bias of one module are one layer, anything else is its own."""
    owner, _, local = name.rpartition(".")
    return owner if local.endswith(("weight", "bias")) else name


def _is_fused(owner_name: str, local: str, owner: nn.Module | None, tensor: Tensor) -> bool:
    """Query, key and value in one parameter: `nn.MultiheadAttention`, or a module or parameter called `qkv`."""
    if isinstance(owner, nn.MultiheadAttention):
        return local in ("in_proj_weight", "in_proj_bias")
    called_qkv = local == "qkv" or (owner_name.rpartition(".")[2] == "qkv" and local in ("weight", "bias"))
    return called_qkv and tensor.ndim > 0 and tensor.shape[0] % 3 == 0


def _matrix_shape(tensor: Tensor, owner: nn.Module | None) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if len(shape) < 2 or 0 in shape:
        return (prod(shape),)
    if not isinstance(owner, Convolution):
        # A positional table (1, rows, dim) is (rows, dim), a class token (1, 1, dim) is (1, dim).
        while len(shape) > 2 and shape[0] == 1:
            shape = shape[1:]
    return (shape[0], prod(shape[1:]))


def assembled(blocks: Sequence[Block], pieces: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join pieces (by block name) to parameters, for the parameters in `like`, in the dtypes and strides of `like`.

    Blocks without a piece are taken from `like`.
    """
    joined: dict[str, Tensor] = {}
    fused: dict[str, list[Tensor]] = {}
    for block in blocks:
        name = block.parameter
        if name in like:
            found = pieces.get(block.name)
            joined[name] = like[name] if found is None else found
            if block.rows is not None:
                fused.setdefault(name, []).append(block.piece(like[name]) if found is None else found)
    for name, parts in fused.items():
        joined[name] = torch.cat(parts)
    for name, tensor in joined.items():
        own = like[name]  # with other strides than its own, foreach kernels would be slower
        if tensor.dtype != own.dtype or tensor.stride() != own.stride():
            joined[name] = torch.empty_like(own, device=tensor.device).copy_(tensor)  # `own` may be an outline
    return joined


def copy_each(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """`into[i] <- given[i]`, with one multi-tensor kernel for all pairs that can share one.

    A list with several dtypes, or with a single pair of different memory orders, would be copied tensor by tensor.
    """
    kinds: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(into, given, strict=True):
        alike = target.stride() == source.stride()
        kind = target.dtype, source.dtype, target.device, source.device, alike
        targets, sources = kinds.setdefault(kind, ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in kinds.values():
        torch._foreach_copy_(targets, sources)


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Accumulated in float64, whatever the dtype of the terms; piece by piece, so that it needs little memory."""
    return _total(a, [(x * y).sum(dtype=torch.float64) for x, y in _pieces(a, b, PIECE)])


def quick_dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """In the precision of the terms, in one pass over them."""
    return _total(a, [torch.dot(x, y).double() for x, y in _pieces(a, b, MOST)])


def _pieces(a: Sequence[Tensor], b: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in zip(a, b, strict=True):
        if x.numel() <= size:
            yield x.flatten(), y.flatten()
        else:
            yield from zip(x.flatten().split(size), y.flatten().split(size), strict=True)


def _total(like: Sequence[Tensor], sums: list[Tensor]) -> Tensor:
    return sums[0] if len(sums) == 1 else torch.stack([part.to(like[0].device) for part in sums]).sum()
