"""`torch.compile` for networks: block by block where equal blocks repeat, so that only one of them is compiled."""

import torch
from torch import nn

ENOUGH = 4
"""From this many equal blocks on, faster compilation is worth more than fusion across block boundaries."""


def compile_network(model: nn.Module) -> nn.Module:
    """A compiled form of ``model`` that shares its parameters.

    Repeated blocks are compiled in place, which keeps their names, and ``model`` itself is returned.
    """
    blocks = repeated_blocks(model)
    for block in blocks:
        block.compile()
    if blocks:
        return model
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]  # a module, which the stubs do not say
    return compiled


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of every container that holds several modules of one class with parameters of the same shapes."""
    found = []
    for container in model.modules():
        if not isinstance(container, nn.Sequential | nn.ModuleList) or len(container) < ENOUGH:
            continue
        composed = next(container[0].children(), None) is not None
        alike = {(type(one), *((name, p.shape) for name, p in one.named_parameters())) for one in container}
        if composed and len(alike) == 1:
            found += list(container)
    return found
