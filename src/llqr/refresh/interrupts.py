"""Ctrl-C during a refresh waits for a place where the model is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class _Deferral:
    """Remembers one signal; a second one is not held back."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._pending = False

    def remember(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self._handler(number, frame)
        self._pending = True

    def deliver(self) -> None:
        if self._pending:
            self._pending = False
            self._handler(signal.SIGINT, None)


_active: list[_Deferral] = []


@contextmanager
def deferred() -> Iterator[None]:
    """While entered, Ctrl-C takes effect at `check` or at the end; pressed twice, at once.

    torch puts other tensors into a model while it differentiates, and forward mode has levels that must be left in
    order. An interrupt in the middle would leave the model with foreign parameters, or the process without forward
    mode. Python delivers signals to the main thread only.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    deferral = _Deferral(handler)
    signal.signal(signal.SIGINT, deferral.remember)
    _active.append(deferral)
    try:
        yield
    finally:
        _active.remove(deferral)
        signal.signal(signal.SIGINT, handler)
        deferral.deliver()


def check() -> None:
    """Deliver a pending interrupt: called where it does no harm."""
    if _active and threading.current_thread() is threading.main_thread():
        _active[-1].deliver()
