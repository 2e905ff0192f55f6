"""From a model's parameters to blocks, and from blocks to groups that share one structure and one shape."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from llqr.caller_warnings import warn
from llqr.metric.block import Block
from llqr.metric.structure import Structure
from llqr.metric.structures import STRUCTURES

#: Below the 4608 of a ResNet's deepest convolutions, which would cost more than all of its other layers and gained
#: nothing by a basis for that side. A factor of this side takes 64 MiB in float32.
MAX_SIDE = 4096

#: Of any dimension, transposed ones included.
Convolution = nn.modules.conv._ConvNd

StructureSpec = str | Mapping[str, str]


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
    outline = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")  # of a sharded one, of all of it
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
    if len(shape) < 2:
        return (prod(shape),)
    if not isinstance(owner, Convolution):
        # A positional table (1, rows, dim) is (rows, dim), a class token (1, 1, dim) is (1, dim).
        while len(shape) > 2 and shape[0] == 1:
            shape = shape[1:]
    return (shape[0], prod(shape[1:]))


def requested(block: Block, spec: StructureSpec) -> str:
    """The structure that was asked for, whatever the block gets."""
    rules = {"*": spec} if isinstance(spec, str) else spec
    matching = (kind for pattern, kind in rules.items() if _matches(block, pattern))
    kind = next(matching, "")
    if not kind:
        raise ValueError(f"structure: no pattern matches parameter {block.parameter!r}; add a '*' rule")
    return kind


def _matches(block: Block, pattern: str) -> bool:
    names = (block.parameter, plain_name(block.parameter))
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def plain_name(name: str) -> str:
    """As in the model without `torch.compile(part)`, which puts a name between a part and its parameters."""
    return name.replace("_orig_mod.", "")


def structure_names(blocks: list[Block], spec: StructureSpec, max_side: int = MAX_SIDE) -> dict[str, str]:
    """Block name -> structure name, after overrides, the rule for vectors, and the size limit."""
    if not isinstance(spec, str | Mapping):
        raise TypeError(f"structure: expected a name, or patterns -> names, got {spec!r}")
    rules = {"*": spec} if isinstance(spec, str) else dict(spec)
    for pattern, kind in rules.items():
        if kind not in STRUCTURES:
            known = ", ".join(sorted(STRUCTURES))
            raise ValueError(f"structure: unknown structure {kind!r} for {pattern!r}; choose one of {known}")
        if not any(_matches(block, pattern) for block in blocks):
            raise ValueError(f"structure: the pattern {pattern!r} matches no parameter")
    chosen: dict[str, str] = {}
    cheapened: dict[str, list[str]] = {}
    for block in blocks:
        kind = requested(block, rules)
        if not (block.is_matrix or STRUCTURES[kind].takes_vectors):
            kind = "diagonal"
        fitting = _fitting(block, kind, max_side)
        if fitting != kind:
            cheapened.setdefault(f"{kind} -> {fitting}", []).append(f"{block.name} {block.shape}")
        chosen[block.name] = fitting
    for change, names in cheapened.items():
        warn(f"max_side={max_side}: {change} for {', '.join(names)}")
    return chosen


def _fitting(block: Block, kind: str, max_side: int) -> str:
    """The structure itself, or the first of its cheaper ones, whose factors are not too long for this block."""
    cheaper = STRUCTURES[kind].fallback
    if cheaper is None or STRUCTURES[kind].longest_side(block) <= max_side:
        return kind
    return _fitting(block, cheaper, max_side)


def groups_of(blocks: list[Block], spec: StructureSpec, kinds: Mapping[str, str]) -> list[Structure]:
    """Blocks gathered by structure, dtype of the factors and device, and by what the structure groups them by.

    A vector that gets a diagonal beside a structure of matrices is clipped on its own, as in the authors' code: there
    the scale and the bias of a BatchNorm are one unit only if all of `U` is diagonal. So are the parameters of a layer
    that are of different dtypes, or on different devices.
    """
    gathered: dict[tuple[object, ...], list[Block]] = {}
    places: dict[tuple[str, str], set[object]] = {}  # of a layer: one in several groups has no number in common
    for block in blocks:
        place = factor_dtype(block, None), block.device
        places.setdefault((kinds[block.name], block.layer), set()).add(place)
    for block in blocks:
        kind = kinds[block.name]
        key = kind, STRUCTURES[kind].group_key(block), factor_dtype(block, None), block.device
        alone = not (block.is_matrix or STRUCTURES[requested(block, spec)].takes_vectors)
        alone = alone or len(places[kind, block.layer]) > 1
        gathered.setdefault(key, []).append(replace(block, layer=block.name) if alone else block)
    return [STRUCTURES[str(key[0])](members) for key, members in gathered.items()]


def factor_dtype(block: Block, held: torch.dtype | None) -> torch.dtype:
    """Factors follow the parameter, but never below float32 unless asked for."""
    if held is not None:
        return held
    return block.dtype if block.dtype.itemsize >= 4 else torch.float32
