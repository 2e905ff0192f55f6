"""Weights of a network that was trained elsewhere."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from llqr.lab.errors import DataError

WRAPPERS = ("module.", "_orig_mod.", "model.", "net.")
"""What DDP, `torch.compile` and Lightning modules put before the names of weights."""


def load_into(model: nn.Module, path: Path, device: torch.device) -> None:
    """Give a network the weights of a file: a state_dict, or a checkpoint that holds one as an entry."""
    if not path.is_file():
        raise DataError(f"{path} is not there.")
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        entries = [entry for entry in [saved, *saved.values()] if isinstance(entry, Mapping)]
    except Exception as error:  # a file of anything raises anything, and torch's advice is to load it unsafely
        raise DataError(
            f"{path} is not a readable file of weights ({type(error).__name__}); write it with "
            "torch.save(model.state_dict(), ...)."
        ) from error
    states = [{name: one for name, one in entry.items() if isinstance(one, Tensor)} for entry in entries]
    saved, own = max(states, key=len), model.state_dict()
    named = {_unwrapped(name, own): one for name, one in saved.items()}
    if named.keys() & own.keys() - saved.keys():  # a wrapper may hold more, such as a loss
        named = {name: one for name, one in named.items() if name in own}
    try:
        model.load_state_dict(named)
    except RuntimeError as error:
        raise DataError(f"{path} does not fit the model: {' '.join(str(error).split())}.") from error


def _unwrapped(name: str, own: Mapping[str, Tensor]) -> str:
    while name not in own and (wrapper := next((one for one in WRAPPERS if name.startswith(one)), None)):
        name = name.removeprefix(wrapper)
    return name
