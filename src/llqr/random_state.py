"""The random number generators at one moment, so that several passes draw the same numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class RandomState:
    """The state of the host's generator and of those of the parameters' CUDA devices, taken when constructed."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        devices = {parameter.device for parameter in parameters if parameter.is_cuda}
        self._host = torch.get_rng_state()
        self._devices = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        for device, state in self._devices:
            torch.cuda.set_rng_state(state, device)
