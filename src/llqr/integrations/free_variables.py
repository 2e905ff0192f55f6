"""The tensors that a function finds under names of its surroundings, which a loop may have given to others since."""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

#: Of a batch that is a list, a tuple or a mapping, which are looked at.
MEMBERS = 8


class FreeVariables:
    """What a function's free names stand for now, where that is a tensor or holds one, such as a batch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._found = {name: value for name, value in _bindings(function).items() if _holds_tensors(value)}

    def changed(self) -> str | None:
        """A name that stands for something else now."""
        now = _bindings(self._function)
        return next((name for name, value in self._found.items() if now.get(name) is not value), None)


def _bindings(function: Callable[..., Any]) -> dict[str, Any]:
    if not isinstance(function, FunctionType):
        return {}
    names = _global_names(function.__code__)
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # deleted, or not assigned yet
            found.pop(name, None)
    return found


@functools.lru_cache(maxsize=256)
def _global_names(code: CodeType) -> frozenset[str]:
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")


def _holds_tensors(value: Any) -> bool:
    """Looks at a few members only: a function may also know of a whole data set."""
    if isinstance(value, Mapping):
        value = list(itertools.islice(value.values(), MEMBERS))
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple) and any(isinstance(member, Tensor) for member in value[:MEMBERS])
    )
