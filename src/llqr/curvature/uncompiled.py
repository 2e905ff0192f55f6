"""Compiled code runs as it was written for a while."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

_lock = threading.Lock()
_inside = 0
_stance: AbstractContextManager[Any] | None = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """torch cannot compile where every operation is looked at, and would not try again what has failed once.

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


@contextmanager
def as_written(root: nn.Module) -> Iterator[None]:
    """Undo `module.compile()` for as long as this is entered."""
    compiled = [(module, module._compiled_call_impl) for module in root.modules() if module._compiled_call_impl]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
