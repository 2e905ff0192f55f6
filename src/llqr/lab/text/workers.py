"""Maps a function over pieces in several processes; results come in the order of the pieces."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

Map = Callable[..., Iterable[Any]]


@contextmanager
def workers(processes: int) -> Iterator[Map]:
    """A `map` that runs in ``processes`` processes; with one process it is the built-in `map`."""
    if processes == 1:
        yield map
        return
    # Spawned, not forked: this process has threads of torch and of a progress display.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_prepare_worker)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare_worker() -> None:
    """Leave signals to the parent process, and exit when it exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:  # None in the process that started everything
        parent.join()
        os._exit(1)
