"""Whether other threads compute meanwhile: one of them may be training another network."""

from __future__ import annotations

import threading
import time

Times = dict[threading.Thread, float | None]


def computing_times() -> Times:
    """How long each other thread has computed, in seconds; None where the system does not tell.

    Those that load data or draw progress bars are daemons, and left out.
    """
    others = [one for one in threading.enumerate() if not one.daemon and one is not threading.current_thread()]
    return {one: _computed(one) for one in others}


def idle_since(before: Times) -> bool:
    """Whether no other thread has computed since. Pools keep threads that only wait; torch.compile leaves one."""
    now = computing_times()
    return now == before and None not in now.values()


def _computed(thread: threading.Thread) -> float | None:
    clock_of = getattr(time, "pthread_getcpuclockid", None)  # on Unix, but not on every one
    try:
        return None if clock_of is None or thread.ident is None else time.clock_gettime(clock_of(thread.ident))
    except OSError:  # it has just ended
        return None
