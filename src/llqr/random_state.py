"""The random number generators at one moment, so that several passes draw the same numbers."""

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
