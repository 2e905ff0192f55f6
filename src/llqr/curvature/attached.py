"""What the modules of a model hold: parameters and buffers by name, and everything they have, to be put back."""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import nn


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


def holders(root: nn.Module) -> list[dict[str, Any]]:
    """Where its modules hold parameters, buffers, and attributes such as a state that they go on from."""
    return [held for module in root.modules() for held in (module._parameters, module._buffers, module.__dict__)]


def unchanged(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether a module holds the same objects as before."""
    return len(now) == len(before) and all(map(is_, now.values(), before.values()))


def reattach(held: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> None:
    """Put back what the modules held before, also if an interrupt came while torch was doing so."""
    for now, own in zip(held, before, strict=True):
        if unchanged(now, own):
            continue
        for name in now.keys() - own.keys():
            del now[name]
        for name, value in own.items():
            if name not in now or now[name] is not value:
                now[name] = value
