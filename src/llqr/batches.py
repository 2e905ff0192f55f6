"""Batches that a geometry draws by itself."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from llqr.curvature import Batch
from llqr.random_state import vary

Batches = Iterable[Any] | Callable[[], Any]


class BatchSource:
    """An iterable of batches, begun again whenever it ends, or a function that returns one batch each time.

    A generator function is an iterable too, begun by a call.

    A saved position is found again by beginning with the random state of that time and skipping the batches that were
    drawn, which is exact for a `DataLoader` that shuffles with torch's generator. A source with a `state_dict` and a
    `load_state_dict` (torchdata's `StatefulDataLoader`) is asked for its own position instead. A function is only
    called again. A position may be loaded before there is a source.

    Attributes:
        source: what was given. It may be the loader that the training loop iterates over.
    """

    def __init__(self) -> None:
        self.source: Batches | None = None
        self._own: Batches | None = None
        self._begun = False
        self._saved: Mapping[str, Any] | None = None  # a position without a source yet
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        self._began_at: Tensor | None = None

    def draw_from(self, source: Batches | None) -> None:
        """From now on, beginning at a position that was loaded before if there is one."""
        if not (source is None or isinstance(source, Iterable) or callable(source)):
            raise TypeError(f"batches: expected an iterable of batches or a function, got {type(source).__name__}")
        self.source, self._own = source, _for_oneself(source)
        self._iterator, self._position, self._began_at, self._begun = None, 0, None, False
        if source is not None and self._saved is not None:
            self.load(self._saved)
            self._saved = None

    def draw(self, given: Batch | Callable[[], Batch] | None, device: torch.device, seed: int) -> Batch:
        """The batch that is given, what a function returns, or the next one here, with its tensors on the device.

        Leaves the random state as it was. Adds the seed to it while it draws, or a function would draw the same batch
        again and again.
        """
        if given is not None and not callable(given):
            return given
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            vary(device, seed)
            return self._next_batch(device) if given is None else given()

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
                self._iterator = self._begin_again(source)
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._iterator, self._began_at, self._position = None, None, 0
            else:
                self._position += 1
                self._begun = True
                return batch
        raise ValueError("batches: there are none (any more); pass the iterable itself, not an iterator that ends")

    def _begin_again(self, source: Batches) -> Iterator[Any]:
        """Iterate from the start; after loading, up to the saved position."""
        now = torch.get_rng_state()
        if self._began_at is not None:
            torch.set_rng_state(self._began_at)
        self._began_at = torch.get_rng_state()
        iterator = iter(source if isinstance(source, Iterable) else source())
        for _ in range(self._position):
            next(iterator, None)
        if self._position:
            torch.set_rng_state(now)
        return iterator

    def state(self) -> Mapping[str, Any] | None:
        if self.source is None:
            return self._saved
        if self._begun and _keeps_state(self._own):  # otherwise a loader would begin, and draw its order, to be asked
            with torch.random.fork_rng(devices=[]):
                return {"source": self._own.state_dict()}  # type: ignore[union-attr]
        return {"position": self._position, "began_at": self._began_at}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Begin at a saved position at the next draw; without one, go on."""
        if self.source is None or state is None:
            self._saved = state
            return
        self._iterator = None
        if "source" in state and _keeps_state(self._own):
            self._own.load_state_dict(state["source"])  # type: ignore[union-attr]
            self._position, self._began_at, self._begun = 0, None, True
        else:
            began_at = state.get("began_at")
            self._position = int(state.get("position", 0))
            self._began_at = None if began_at is None else began_at.cpu()

    def __getstate__(self) -> dict[str, Any]:
        """Without the iterator, which cannot be copied in general."""
        return {"source": self.source, "position": self.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        BatchSource.__init__(self)
        self._saved = state["position"]
        self.draw_from(state["source"])


def _moved(leaf: Any, device: torch.device) -> Any:
    """Tensors, and what torch's trees do not look into but moves like one: a graph, or what a tokenizer returns."""
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf


def _for_oneself(source: Batches | None) -> Batches | None:
    """A loader begins again for all who iterate over it, or tells the position of the last: training has its own."""
    if not hasattr(source, "_iterator") or not (getattr(source, "persistent_workers", False) or _keeps_state(source)):
        return source
    own: Any = copy.copy(source)
    own._iterator = None
    if _keeps_state(own):
        own.load_state_dict({})  # forgets that it has begun
        own.next_iter_state = None
    return own  # type: ignore[no-any-return]


def _keeps_state(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
