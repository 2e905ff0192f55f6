"""Random numbers of one's own: user code draws from the global generators, and nothing else may notice it."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class RandomStates:
    """The states of the host's generators (torch, numpy, `random`) and of some others, begun from one seed.

    Code that runs `inside` continues these states; outside of it, the generators are as they would be without it.
    """

    def __init__(self, seed: int, others: Sequence[torch.Generator] = ()) -> None:
        self._generators = [torch.default_generator, *others]
        before = self._read()
        for generator in self._generators:
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # the generator that user code draws from
        self._states = self._read()
        self._write(before)

    @contextmanager
    def inside(self) -> Iterator[None]:
        before = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._states = self._read()
            self._write(before)

    def _read(self) -> tuple[Any, ...]:
        states = [generator.get_state() for generator in self._generators]
        return states, random.getstate(), np.random.get_state()  # noqa: NPY002

    def _write(self, states: tuple[Any, ...]) -> None:
        for generator, state in zip(self._generators, states[0], strict=True):
            generator.set_state(state)
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002
