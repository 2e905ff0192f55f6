"""What the result of a pass depends on."""

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def leaves_of(result: Any) -> set[Tensor] | None:
    """The tensors at the start of the autograd graphs of what a pass returns; None if there are none."""
    tensors = [part for part in pytree.tree_leaves(result) if isinstance(part, Tensor)]
    ahead = [part.grad_fn for part in tensors if part.grad_fn is not None]
    if not ahead:
        return None
    leaves, visited = set(), set(ahead)
    while ahead:
        node = ahead.pop()
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        following = {after for after, _ in node.next_functions if after is not None} - visited
        visited |= following
        ahead += following
    return leaves
