"""Copies of tensors that can be put back exactly."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

#: What a copy must share with its tensor in order to hold it bit by bit.
_KIND = attrgetter("shape", "dtype", "device")


class Snapshot:
    """Remembers the contents of tensors in buffers that are kept from step to step, and puts them back bit by bit."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._alike: list[list[int]] = []
        self.held = False

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        kinds: list[tuple[Any, ...]] = list(map(_KIND, tensors))
        if kinds != self._kinds:
            self._copies = [torch.empty_like(tensor) for tensor in tensors]
            self._kinds = kinds
            # One multi-tensor kernel wants one dtype on one device.
            groups: dict[tuple[object, ...], list[int]] = {}
            for i, (_, *place) in enumerate(kinds):
                groups.setdefault(tuple(place), []).append(i)
            self._alike = list(groups.values())
        self._tensors = list(tensors)
        self._copy(self._copies, self._tensors)
        self.held = True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the remembered contents back; does nothing when none are held."""
        if self.held:
            self._copy(self._tensors, self._copies)
            self.held = False

    def _copy(self, into: list[Tensor], source: list[Tensor]) -> None:
        for group in self._alike:
            torch._foreach_copy_([into[i] for i in group], [source[i] for i in group])

    def __getstate__(self) -> dict[str, object]:
        return {"_tensors": [], "_copies": [], "_kinds": [], "_alike": [], "held": False}
