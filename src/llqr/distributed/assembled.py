"""Parameters from their blocks: pieces of fused projections are joined, memory orders kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from llqr.metric.block import Block


def assembled(blocks: Sequence[Block], pieces: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Block name -> piece becomes parameter name -> tensor, for the parameters that `like` has.

    Blocks without a piece are taken from `like`. Each tensor has the memory order it has in `like`: a single one in
    another order would slow down multi-tensor kernels.
    """
    parts: dict[str, list[Tensor]] = {}
    for block in blocks:
        whole = like.get(block.parameter)
        if whole is not None:
            found = pieces.get(block.name)
            parts.setdefault(block.parameter, []).append(block.piece(whole) if found is None else found)
    return {name: _in_layout_of(like[name], _joined(found)) for name, found in parts.items()}


def _in_layout_of(like: Tensor, tensor: Tensor) -> Tensor:
    """In the dtype and memory order of `like`; the tensor itself if it has them already."""
    if tensor.dtype == like.dtype and tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces concatenated along the first dimension: a view if they are adjacent in memory, as in a stack."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    ends = accumulate((piece.numel() for piece in pieces), initial=first.storage_offset())
    memory = first.untyped_storage().data_ptr()
    if all(
        piece.is_contiguous() and piece.untyped_storage().data_ptr() == memory and piece.storage_offset() == start
        for piece, start in zip(pieces, ends, strict=False)
    ):
        rows = sum(piece.shape[0] for piece in pieces)
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    return torch.cat(list(pieces))
