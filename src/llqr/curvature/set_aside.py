"""What is set aside while a model is called: FSDP's own weights, and compiled code."""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def fsdp_set_aside(root: nn.Module) -> Iterator[None]:
    """While entered, modules run without FSDP's hooks, which would put its own weights in the place of those given."""
    changed: list[tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]] = []
    used = "torch.distributed.fsdp" in sys.modules
    try:
        for module in root.modules() if used else ():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                if any(map(_is_fsdps, hooks.values())):
                    changed.append((hooks, dict(hooks)))
                    _replace(hooks, {key: hook for key, hook in hooks.items() if not _is_fsdps(hook)})
        yield
    finally:
        for hooks, before in changed:
            _replace(hooks, before)


def _is_fsdps(hook: Callable[..., Any]) -> bool:
    return str(getattr(inspect.unwrap(hook), "__module__", "")).startswith("torch.distributed.fsdp.")


def _replace(hooks: dict[int, Callable[..., Any]], others: Mapping[int, Callable[..., Any]]) -> None:
    """In place, because handles of hooks refer to the dictionary."""
    hooks.clear()
    hooks.update(others)


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
