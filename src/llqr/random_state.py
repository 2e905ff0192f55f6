"""The random number generators at one moment, so that several passes draw the same numbers."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Bytes of the state of numpy's default generator: 624 words and a position.
TWISTER = 4 * 625


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
        self._numpy = NumpyState.now()

    def restore(self, instead_of: RandomState | None = None) -> None:
        """`instead_of` is the present state, if it is known: numpy's is set only if it differs."""
        super().restore()
        random.setstate(self._python)
        if self._numpy is not None and (instead_of is None or instead_of._numpy != self._numpy):
            sys.modules["numpy.random"].set_state(self._numpy.whole)


@dataclass(frozen=True)
class NumpyState:
    """The state of numpy's own generator. Asking numpy for it is slow, and only done when it has changed."""

    memory: bytes
    held_back: float | None  # a normal number that was drawn with the one before it, and is not in the memory
    whole: dict[str, Any] = field(compare=False)

    @classmethod
    def now(cls) -> NumpyState | None:
        """None if nobody has imported it, and so does not draw from it."""
        global _last
        numpy = sys.modules.get("numpy.random")
        if numpy is None:
            return None
        bits = numpy.get_bit_generator()
        twister = type(bits).__name__ == "MT19937"
        memory = ctypes.string_at(bits.ctypes.state_address, TWISTER) if twister else b""
        if not (twister and _last is not None and (_last.memory, _last.held_back) == (memory, None)):
            whole = numpy.get_state(legacy=False)
            held_back = whole["gauss"] if whole["has_gauss"] else None
            _last = cls(memory if twister else pickle.dumps(whole), held_back, whole)
        return _last


_last: NumpyState | None = None


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
