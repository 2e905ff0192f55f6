"""Steps and refreshes are not for `torch.compile`, also where a caller compiles the code around them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

#: torch prints this where compiled code calls a step and may not be left (`fullgraph=True`).
REASON = "llqr: a step or a refresh cannot be compiled; compile the model, or the closure, and call the step outside"


def never_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """A function that leaves compiled code when it is called there, and runs as it was written.

    torch would compile a refresh piece by piece for minutes, and its forward derivatives come out as zero. What is
    compiled inside, such as a model, stays compiled.
    """
    made: list[Callable[P, T]] = []

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(msg=REASON)  # type: ignore[no-untyped-call]  # torch has not annotated it
        if not made:
            if "torch._dynamo" not in sys.modules:  # it takes seconds to import, and nobody has compiled anything
                return function(*args, **kwargs)
            made.append(torch.compiler.disable(function))
        return made[0](*args, **kwargs)

    return outside
