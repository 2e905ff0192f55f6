"""What the result of a pass depends on."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def leaves_of(result: Any) -> set[Tensor] | None:
    """The tensors at the start of an autograd graph; None if there is no graph, as for a number."""
    start = getattr(result, "grad_fn", None)
    if start is None:
        return None
    leaves, visited, ahead = set(), {start}, [start]
    while ahead:
        node = ahead.pop()
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        following = {after for after, _ in node.next_functions if after is not None} - visited
        visited |= following
        ahead += following
    return leaves
