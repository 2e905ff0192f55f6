"""A model sharded by FSDP2 called as if it were not: on whole weights that it is given."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
