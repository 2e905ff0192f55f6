"""Structures of blocks of any shape, laid end to end in one vector."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from llqr.metric.block import Block
from llqr.metric.structure import Factors, Structure

#: Layers whose size is a multiple of this are scaled together, in one kernel that looks up one number per row. Widths
#: of networks are multiples of 64; layers of other sizes (a head) come last and are scaled one by one.
ROW = 64


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
        super().__init__(sorted(blocks, key=lambda block: order[block.layer]))
        self.sizes = [block.size for block in self.blocks]
        self.layer_sizes = [entries[layer] for layer in self.layers]
        self.offsets = [0, *accumulate(self.sizes)][:-1]
        self._rows = [size // ROW for size in self.layer_sizes if size % ROW == 0]
        self._of_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @classmethod
    def group_key(cls, block: Block) -> Hashable:
        return None

    def identity(self, dtype: torch.dtype, device: torch.device) -> Factors:
        """Ones, as of factors that scale entries or layers."""
        return {name: torch.ones(shape, dtype=dtype, device=device) for name, shape in self.shapes().items()}

    def blank(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(sum(self.sizes), dtype=dtype, device=device)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        start = packed.storage_offset()
        rows = zip(self.blocks, self.offsets, strict=True)
        return [packed.as_strided(block.native, block.strides, start + offset) for block, offset in rows]

    def inseparable(self) -> list[tuple[Block, ...]]:
        """Whole layers: they are clipped as one, and may share a number."""
        pieces: dict[str, list[Block]] = {}
        for block in self.blocks:
            pieces.setdefault(block.layer, []).append(block)
        return [tuple(blocks) for blocks in pieces.values()]

    def units(self, gradients: Factors) -> list[Tensor]:
        return [
            unit
            for gradient in gradients.values()
            for unit in (self.by_layer(gradient) if self._per_entry(gradient) else gradient.unbind())
        ]

    def scaled(self, gradients: Factors, numbers: Tensor) -> Factors:
        rows = zip(gradients.items(), numbers.split(len(self.layers)), strict=True)
        return {
            name: self.scale_layers(gradient, own) if self._per_entry(gradient) else gradient * own
            for (name, gradient), own in rows
        }

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
        return len(factor) == sum(self.sizes)

    def by_layer(self, flat: Tensor) -> list[Tensor]:
        """The layers' parts of a packed vector, as views."""
        return list(flat.split(self.layer_sizes))

    def scale_layers(self, flat: Tensor, numbers: Tensor) -> Tensor:
        """Every layer's entries times the layer's number."""
        whole, rows = self._in_rows(flat)
        parts = list(zip(self.by_layer(flat)[whole:], numbers[whole:].unbind(), strict=True))
        scaled = [part * number for part, number in parts]
        if whole:
            of_rows = numbers.index_select(0, self._rows_and_layers(flat.device)[1])
            scaled = [(rows * of_rows.unsqueeze(1)).view(-1), *scaled]
        return scaled[0] if len(scaled) == 1 else torch.cat(scaled)

    def sum_layers(self, flat: Tensor) -> Tensor:
        """One sum per layer, accumulated in float64."""
        whole, rows = self._in_rows(flat)
        sums = [part.sum(dtype=torch.float64) for part in self.by_layer(flat)[whole:]]
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
