"""Weights of a network that was trained elsewhere: a saved state, found in the file whichever way it was saved."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llqr.lab.errors import DataError

WRAPPERS = ("module.", "_orig_mod.")
"""What DDP and `torch.compile` put before the names of weights."""


def load_into(model: nn.Module, path: Path, device: torch.device) -> None:
    """Give a network the weights of a file; a `DataError` names what does not fit."""
    own = model.state_dict()
    states = list(_states(_read(path, device)))
    if not states:
        raise DataError(f"{path} holds no weights: save model.state_dict() in it.")
    fitting = [named for state in states for named in _renamed(state, own) if named.keys() == own.keys()]
    if not fitting:
        raise DataError(f"{path} does not fit the model: {_mismatch(states[0], own)}.")
    for name, tensor in fitting[0].items():
        if tensor.shape != own[name].shape:
            raise DataError(f"{path}: {name} has the shape {tuple(tensor.shape)}, not {tuple(own[name].shape)}.")
    model.load_state_dict(fitting[0])


def _read(path: Path, device: torch.device) -> Any:
    if not path.is_file():
        raise DataError(f"{path} is not there.")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a file of anything raises anything, and torch's advice is to load it unsafely
        raise DataError(
            f"{path} is not a readable file of weights: it is damaged, of another format, or holds more than tensors, "
            f"such as a whole network ({type(error).__name__}); write it with torch.save(model.state_dict(), ...)."
        ) from error


def _states(saved: Any) -> Iterator[dict[str, Tensor]]:
    """The file itself, or the entries of it, that are tensors by name; those with the most weights first."""
    if not isinstance(saved, Mapping):
        return
    found = [saved, *(entry for entry in saved.values() if isinstance(entry, Mapping))]
    tensors = [{str(name): one for name, one in each.items() if isinstance(one, Tensor)} for each in found]
    yield from sorted((each for each in tensors if each), key=len, reverse=True)


def _renamed(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """With the names as they are, and without what a wrapper or a Lightning module put before them."""
    plain = state
    yield plain
    for wrapper in WRAPPERS:
        plain = {name.removeprefix(wrapper): tensor for name, tensor in plain.items()}
    yield plain
    first = next(iter(own), "")
    for name in plain:
        if name.endswith(f".{first}"):
            prefix = name.removesuffix(first)
            # What belongs to other parts of such a module, such as its loss, is left.
            yield {key.removeprefix(prefix): tensor for key, tensor in plain.items() if key.startswith(prefix)}


def _mismatch(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    missing = [name for name in own if name not in state]
    unknown = [name for name in state if name not in own]
    parts = [f"it has no {missing[0]}"] if missing else []
    parts += [f"the model has no {unknown[0]}"] if unknown else []
    return ", and ".join(parts) or "the names of the weights differ"
