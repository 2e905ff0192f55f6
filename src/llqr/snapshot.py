"""Copies of tensors that can be put back exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Snapshot:
    """Remembers the contents of tensors, and puts them back bit by bit; takes memory only while it holds something."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self.held = False

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._copies = [torch.empty_like(tensor) for tensor in tensors]
        self._copy(self._copies, self._tensors)
        self.held = True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the remembered contents back; does nothing when none are held."""
        if self.held:
            self._copy(self._tensors, self._copies)
            self._tensors, self._copies, self.held = [], [], False

    @staticmethod
    def _copy(into: list[Tensor], source: list[Tensor]) -> None:
        if into:
            torch._foreach_copy_(into, source)

    def __getstate__(self) -> dict[str, object]:
        return {"_tensors": [], "_copies": [], "held": False}
