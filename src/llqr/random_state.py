"""torch's random number generators at one moment, so that several passes draw the same numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class RandomState:
    """The state of the host's generator and of those of the parameters' CUDA devices, taken when constructed."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        devices = {parameter.device.index for parameter in parameters if parameter.is_cuda}
        # The generators themselves: torch.cuda.set_rng_state copies a tensor, which a traced pass would record.
        generators = [torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)]
        self._states = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)


def vary(device: torch.device, by: int) -> None:
    """Make the next random numbers depend on `by`, because every refresh starts from the same random state."""
    seed = int(torch.randint(2**62, (), device="cpu")) + by
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
