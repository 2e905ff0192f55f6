"""Ctrl-C where nothing must be saved: while modules are imported, which takes seconds."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from llqr.lab.errors import INTERRUPTED


@contextmanager
def quitting() -> Iterator[None]:
    """Ctrl-C ends the process at once: an exception inside an import is caught or renamed by some packages."""
    previous = signal.getsignal(signal.SIGINT)
    # Left alone where Ctrl-C is ignored, as in a background job, and where somebody else handles it.
    ours = previous is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, _quit)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, previous)


def _quit(number: int, frame: FrameType | None) -> NoReturn:
    print("llqr: interrupted.", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
