"""Tensors that modules keep from one call to the next as attributes, such as the state of a recurrent network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

MISSING = object()
#: The attributes or the buffers of a module, and what they were.
Kept = tuple[dict[str, Any], Mapping[str, Any]]


def may_keep(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that may have states of their own: torch's modules call theirs buffers, and write to them in place."""
    return [module for module in modules if type(module).__module__.partition(".")[0] != "torch"]


def kept_by(modules: Iterable[nn.Module]) -> list[Kept]:
    return [(held, dict(held)) for module in modules for held in (module.__dict__, module._buffers)]


def put_back(kept: Iterable[Kept]) -> None:
    """States that have been replaced since; what has been written to in place stays as it is."""
    for now, before in kept:
        if len(now) == len(before) and all(map(is_, now.values(), before.values())):
            continue
        for name, new in list(now.items()):
            old = before.get(name, MISSING)
            if old is new or not _is_state(old, new):
                continue
            if old is MISSING:
                del now[name]
            else:
                now[name] = old


def _is_state(old: Any, new: Any) -> bool:
    """Whether these are constant tensors, alone or in a list, or one of them is and the other not yet.

    A tensor with a graph belongs to the pass that has made it. Numbers alone are left to those who count calls.
    """
    leaves = [leaf for leaf in pytree.tree_leaves((old, new)) if leaf is not None and leaf is not MISSING]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    numbers = [leaf for leaf in leaves if isinstance(leaf, int | float)]
    return bool(tensors) and len(tensors) + len(numbers) == len(leaves) and not any(t.requires_grad for t in tensors)
