"""The random number generators at one moment, so that several passes draw the same numbers."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class TorchRandomState:
    """The state of the host's generator and of those of the parameters' CUDA devices, taken when constructed."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        devices = {parameter.device.index for parameter in parameters if parameter.is_cuda}
        # The generators themselves: torch.cuda.set_rng_state copies a tensor, which a traced pass would record.
        generators = [torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)]
        self._states = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)


class RandomState(TorchRandomState):
    """Also that of Python's and numpy's own generators, with which networks drop layers and mask or mix samples."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")  # who has not imported it does not draw from it
        self._numpy = None if numpy is None else pickle.dumps(numpy.get_state(legacy=False))  # bytes can be compared

    def restore(self, instead_of: RandomState | None = None) -> None:
        """`instead_of` is the present state, if it is known: setting numpy's takes a while, and is seldom needed."""
        super().restore()
        if instead_of is None or instead_of._python != self._python:
            random.setstate(self._python)
        if self._numpy is not None and (instead_of is None or instead_of._numpy != self._numpy):
            sys.modules["numpy.random"].set_state(pickle.loads(self._numpy))


@contextmanager
def repeated(state: RandomState, parameters: Iterable[Tensor]) -> Iterator[None]:
    """While entered, for the second pass, the numbers since that state are drawn again; then the stream goes on.

    A pass that draws fewer numbers than the first one leaves none of them to be drawn once more.
    """
    now = RandomState(parameters)
    state.restore(instead_of=now)
    try:
        yield
    finally:
        now.restore(instead_of=state)


def vary(device: torch.device, by: int) -> None:
    """Let what is drawn next depend on a number too, where the state itself is put back again and again."""
    seed = int(torch.randint(2**62, (), device="cpu")) + by
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
