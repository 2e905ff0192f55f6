"""Ctrl-C where nothing must be saved: while modules are imported, which takes seconds, and outside of training."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from llqr.lab.errors import INTERRUPTED, Interrupted

SENTENCE = "interrupted."


@contextmanager
def quitting() -> Iterator[None]:
    """Ctrl-C ends the process at once: an exception inside an import is caught or renamed by some packages."""
    with _handling(_quit):
        yield


@contextmanager
def explained() -> Iterator[None]:
    """Ctrl-C becomes `Interrupted`, also where a package has made another exception of it or dropped it.

    A second one ends the process at once.
    """
    seen = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        if seen.is_set():
            _quit(number, frame)
        seen.set()
        raise KeyboardInterrupt

    def unraisable(error: Any) -> None:
        """Python prints an exception that leaves a destructor or a callback of its collector, and goes on."""
        if issubclass(error.exc_type, KeyboardInterrupt):
            _quit(signal.SIGINT, None)
        previous(error)

    previous = sys.unraisablehook
    try:
        with _handling(interrupt):
            sys.unraisablehook = unraisable
            yield
    except KeyboardInterrupt:
        raise Interrupted(SENTENCE) from None
    except Exception:
        if seen.is_set():
            raise Interrupted(SENTENCE) from None
        raise
    finally:
        sys.unraisablehook = previous
    if seen.is_set():
        raise Interrupted(SENTENCE)


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    """Where Ctrl-C is ignored, as in a background job, or handled by somebody else, it stays so."""
    previous = signal.getsignal(signal.SIGINT)
    ours = previous in _REPLACEABLE and threading.current_thread() is threading.main_thread()
    if not ours:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    _REPLACEABLE.append(handler)
    try:
        yield
    finally:
        _REPLACEABLE.remove(handler)
        signal.signal(signal.SIGINT, previous)


def _quit(number: int, frame: FrameType | None) -> NoReturn:
    print(f"llqr: {SENTENCE}", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


_REPLACEABLE: list[Any] = [signal.default_int_handler]
"""Python's own handler, and those of the contexts that are entered."""
