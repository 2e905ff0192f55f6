"""The stages of a preparation: each shows its progress and can be stopped."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llqr.lab.errors import Stopped
from llqr.lab.progress import Display
from llqr.lab.stop import Stop


class Stages:
    """Shows stages on a display and ends them when a stop is requested, which is checked after every piece of work."""

    def __init__(self, display: Display | None = None, stop: Stop | None = None) -> None:
        self._display = display or Display(quiet=True)
        self._stop = stop

    @contextmanager
    def stage(self, label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """A stage of ``total`` units; yields a function to call with the number of units just done."""
        started = time.monotonic()
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            self._display.advance(done)
            if self._stop is not None and self._stop.requested:
                raise Stopped(f"Stopped by {self._stop.reason} before the text was prepared; nothing was kept.")

        self._display.begin(label, total, 0)
        yield advance
        self._display.end(f"{label}: {total:,} {unit} in {time.monotonic() - started:.1f} s")
