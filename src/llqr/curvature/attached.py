"""The parameters and buffers that the modules of a model hold: where, under which names, and put back."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

#: Where a module holds its parameters or buffers, a name there, and the tensor.
Attached = tuple[dict[str, Any], str, Tensor]


def places(root: nn.Module) -> dict[str, str]:
    """Every place that holds a parameter or a buffer -> the one name its tensor goes by.

    Tied tensors have several places. A module that the model holds twice is one place: `functional_call`, left to find
    tied tensors itself, would visit it twice and leave the replacement behind in the model.
    """
    named = [*root.named_parameters(), *root.named_buffers()]
    names = {id(tensor): name for name, tensor in named}
    return {
        f"{owner}.{local}": names[id(tensor)]
        for owner, module in root.named_modules()
        for local, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    }


def attached(root: nn.Module) -> list[Attached]:
    return [
        (held, name, tensor)
        for module in root.modules()
        for held in _holders(module)
        for name, tensor in held.items()
        if tensor is not None
    ]


def _holders(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers


def reattach(tensors: list[Attached]) -> None:
    for held, name, tensor in tensors:
        if held.get(name) is not tensor:
            held[name] = tensor
