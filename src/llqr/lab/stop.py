"""When to stop early: on Ctrl-C, on SIGTERM, or when the time is up. The loop asks after every step."""

import math
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A context in which a signal sets `requested`, as do ``max_minutes`` from now; Ctrl-C after that interrupts.

    A second SIGTERM does not: a scheduler sends one to every process, and `--jobs` then sends its own.
    Python lets no thread but the main one wait for signals; elsewhere they are left alone.
    """

    def __init__(self, max_minutes: float | None = None) -> None:
        self.reason = ""
        self._limit = max_minutes
        self._deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        if not self.reason and time.monotonic() >= self._deadline:
            self.reason = f"the limit of {self._limit:g} minutes"
        return bool(self.reason)

    def __enter__(self) -> Self:
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = self.reason or signal.Signals(number).name
