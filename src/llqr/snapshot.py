"""Copies of tensors that can be put back exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Snapshot:
    """Remembers the contents of tensors in buffers that are kept from step to step, and puts them back bit by bit."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self.held = False

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        if not self._fits(tensors):
            self._copies = [torch.empty_like(tensor) for tensor in tensors]
        self._tensors = list(tensors)
        self._copy(self._copies, self._tensors)
        self.held = True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the remembered contents back; does nothing when none are held."""
        if self.held:
            self._copy(self._tensors, self._copies)
            self.held = False

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        pairs = zip(tensors, self._copies, strict=False)
        return len(tensors) == len(self._copies) and all(
            t.shape == c.shape and t.dtype == c.dtype and t.device == c.device for t, c in pairs
        )

    @staticmethod
    def _copy(into: list[Tensor], source: list[Tensor]) -> None:
        if into:
            torch._foreach_copy_(into, source)

    def __getstate__(self) -> dict[str, object]:
        return {"_tensors": [], "_copies": [], "held": False}
