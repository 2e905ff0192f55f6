"""Parameters that a model writes to whenever it is called: embeddings with a `max_norm`, or a momentum encoder."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Writes(TorchDispatchMode):
    """While entered, notes which of these tensors are written to; `undo` puts back what they held.

    Nothing is copied but what is written to, just before that.

    Args:
        tensors: by name. A model may also assign to their `.data`, which leaves others in the same memory alone.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
        # Others, such as quantized weights, may have no memory of their own.
        tensors = {name: tensor for name, tensor in tensors.items() if type(tensor) is Tensor}
        self._tensors = tensors
        self._places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self._names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                self._names.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        self._before: dict[str, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for written in _written_by(func, args, kwargs):
            for name in self._names.get(written.untyped_storage().data_ptr(), ()):
                if name not in self._before:
                    self._before[name] = self._tensors[name].clone()
        return func(*args, **kwargs)

    @property
    def replaced(self) -> list[str]:
        """Those whose `.data` is another one now."""
        return sorted(name for name, place in self._places.items() if self._tensors[name].data_ptr() != place)

    @property
    def names(self) -> frozenset[str]:
        return frozenset((*self._before, *self.replaced))

    @torch.no_grad()
    def undo(self) -> None:
        for name, content in self._before.items():
            if self._tensors[name].data_ptr() == self._places[name]:
                self._tensors[name].copy_(content)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(given) if type(leaf) is Tensor)
