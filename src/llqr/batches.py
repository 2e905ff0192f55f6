"""Batches that a geometry draws by itself."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from llqr.curvature import Batch

Batches = Iterable[Any] | Callable[[], Any]


class BatchSource:
    """An iterable of batches, which starts over when it ends, or a function that returns one batch each time.

    A generator function is an iterable too, started by a call. A saved position is found again by starting with the
    random state of that time and skipping the batches drawn before, which is exact for a `DataLoader` that shuffles
    with torch's generator. A function is only called again. A position may be loaded before there is a source.

    Attributes:
        source: what was given. It may be the loader that the training loop iterates over.
    """

    def __init__(self) -> None:
        self.source: Batches | None = None
        self._own: Batches | None = None
        self._saved: Mapping[str, Any] | None = None  # a position without a source yet
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        self._began_at: Tensor | None = None
        self._left: list[Tensor] = []  # states of generators

    def draw_from(self, source: Batches | None) -> None:
        """Draw from this source, starting at a position that was loaded before if there is one."""
        if not (source is None or isinstance(source, Iterable) or callable(source)):
            raise TypeError(f"batches: expected an iterable of batches or a function, got {type(source).__name__}")
        self.source = self._own = source
        if hasattr(source, "_iterator"):  # a copy of a loader, so that refreshes do not advance the training loop's
            # Accelerate's and Fabric's hold the loader itself.
            own: Any = copy.copy(getattr(source, "base_dataloader", getattr(source, "_dataloader", source)))
            # Persistent workers go on with their random numbers in a second pass, which could not be resumed. The last
            # is a position of torchdata's StatefulDataLoader.
            vars(own).update(_iterator=None, persistent_workers=False, next_iter_state=None)
            self._own = own
        self._iterator, self._position, self._began_at, self._left = None, 0, None, []
        if source is not None and self._saved is not None:
            self.load(self._saved)
            self._saved = None

    def draw(self, function: Callable[[], Batch] | None, device: torch.device, seed: int) -> Batch:
        """What a function returns, or the next batch here, with its tensors on the device.

        Leaves the random state as it was. Adds the seed to it while it draws, or a function would draw the same batch
        again and again.
        """
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), self._own_generators():
            _vary(device, seed)
            return self._next_batch(device) if function is None else function()

    def _generators(self) -> list[torch.Generator]:
        """Of a loader and its samplers, which the training loop draws from too."""
        holders: list[Any] = [self._own]
        while (inner := getattr(holders[-1], "batch_sampler", None)) is not None:
            holders.append(inner)
        holders += [getattr(holder, "sampler", None) for holder in holders]
        found = dict.fromkeys(getattr(holder, "generator", None) for holder in holders)
        return [generator for generator in found if isinstance(generator, torch.Generator)]

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Go on from where the last draw left these generators; afterwards put the training loop's states back."""
        generators = self._generators()
        theirs = [generator.get_state() for generator in generators]
        for generator, state in zip(generators, self._left, strict=False):
            generator.set_state(state)
        try:
            yield
        finally:
            self._left = [generator.get_state() for generator in generators]
            for generator, state in zip(generators, theirs, strict=True):
                generator.set_state(state)

    def _next_batch(self, device: torch.device) -> Batch:
        if self._own is None:
            raise TypeError(
                "batch: expected (inputs, targets), a mapping with targets, or a callable that returns one of these; "
                "or set geometry.batches"
            )
        if isinstance(self._own, Iterable) or inspect.isgeneratorfunction(self._own):
            batch = self._next(self._own)
        else:
            batch = self._own()
        if isinstance(batch, Mapping):
            batch = dict(batch)  # tokenizers return classes of their own
        moved: Batch = pytree.tree_map(lambda leaf: _moved(leaf, device), batch)
        return moved

    def _next(self, source: Batches) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._start(source)
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._iterator, self._began_at, self._position = None, None, 0
            else:
                self._position += 1
                return batch
        raise ValueError("batches: there are none (any more); pass the iterable itself, not an iterator that ends")

    def _start(self, source: Batches) -> Iterator[Any]:
        """Iterate from the start; after loading, up to the saved position."""
        now = torch.get_rng_state()
        if self._began_at is not None:
            torch.set_rng_state(self._began_at)
        self._began_at = torch.get_rng_state()
        for generator in self._generators():
            generator.manual_seed(int(torch.randint(2**62, ())))
        iterator = iter(source if isinstance(source, Iterable) else source())
        for _ in range(self._position):
            next(iterator, None)
        if self._position:
            torch.set_rng_state(now)
        return iterator

    def state(self) -> Mapping[str, Any] | None:
        return self._saved if self.source is None else {"position": self._position, "began_at": self._began_at}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Start at a saved position at the next draw; without one, go on."""
        if self.source is None or state is None:
            self._saved = state
            return
        began_at = state["began_at"]
        self._iterator, self._position = None, int(state["position"])
        self._began_at = None if began_at is None else began_at.cpu()

    def __getstate__(self) -> dict[str, Any]:
        """Without the iterator, which cannot be copied in general."""
        return self.__dict__ | {"_iterator": None}


def _moved(leaf: Any, device: torch.device) -> Any:
    """Tensors, and what torch's trees do not look into but moves like one: a graph, or what a tokenizer returns."""
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf


def _vary(device: torch.device, by: int) -> None:
    """Make the next random numbers depend on `by`, because every refresh starts from the same random state."""
    seed = int(torch.randint(2**62, (), device="cpu")) + by
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
