"""`torch.compile` for networks: block by block where equal blocks repeat, so that one is compiled and not all."""

import torch
from torch import nn

ENOUGH = 4
"""So many equal blocks in a row make it worth while to give up fusion across their borders."""


def compile_network(model: nn.Module) -> nn.Module:
    """A compiled form of ``model`` that shares its parameters.

    Blocks are compiled in place: their names stay, and ``model`` itself is returned.
    """
    blocks = repeated_blocks(model)
    for block in blocks:
        block.compile()
    return model if blocks else torch.compile(model)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of every container that holds several modules of one class with parameters of the same shapes."""
    found = []
    for container in model.modules():
        if not isinstance(container, nn.Sequential | nn.ModuleList) or len(container) < ENOUGH:
            continue
        composed = next(container[0].children(), None) is not None
        if composed and len({_signature(block) for block in container}) == 1:
            found += list(container)
    return found


def _signature(block: nn.Module) -> tuple[object, ...]:
    return type(block), tuple((name, p.shape) for name, p in block.named_parameters())
