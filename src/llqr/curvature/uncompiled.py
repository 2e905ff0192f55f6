"""Compiled code runs as it was written for a while."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_inside = 0
_stance: AbstractContextManager[Any] | None = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled code has first derivatives only. Nor can torch compile where every operation is looked at, and it would
    not try again what has failed once.

    torch's switch is one for all threads, and each puts back what it has found: of several that are inside at the same
    time, the first one switches, and the last one back.
    """
    global _inside, _stance
    with _lock:
        if not _inside and "torch._dynamo" in sys.modules:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _stance is not None:
                _stance.__exit__(None, None, None)
                _stance = None


def as_written(function: Callable[P, T]) -> Callable[P, T]:
    """What was compiled: a module or a partial has attributes that say what it computes."""
    function = getattr(function, "_orig_mod", function)
    function = getattr(function, "_torchdynamo_orig_callable", function)
    inside = getattr(function, "__wrapped__", None)  # torch gives a partial a frame to compile
    return inside if isinstance(inside, partial) else function
