"""Checkpoints: written whole or not at all, read without running code, random states included."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch

from llqr.lab.errors import CannotWrite, DataError
from llqr.lab.writing import check_archive, replacing

MOST_ENTRIES = 10**7


def save(state: Mapping[str, Any], path: Path) -> None:
    """Replace ``path`` atomically: after a crash at any time, the file is the old or the new one."""
    with replacing(path) as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # torch's, about a position in the file, if the disk is full
            reason = getattr(error.__context__, "strerror", None) or error
            raise CannotWrite(f"{path} cannot be written: {reason}.") from error


def load(path: Path, device: torch.device) -> dict[str, Any]:
    """Load the state that was saved, with its tensors on ``device``."""
    try:
        check_archive(path)
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        if _entries(state, {}) > MOST_ENTRIES:
            raise ValueError("it holds the same tables many times over")
    except (OSError, EOFError, RuntimeError, ValueError, BadZipFile, pickle.UnpicklingError) as error:
        first_line = str(error).partition("\n")[0]
        raise DataError(f"{path} is not a readable checkpoint ({first_line}); delete it to start over.") from error
    return state


def _entries(value: Any, known: dict[int, int]) -> int:
    """Count what a state holds when it is written out: a few nested lists of one another may stand for billions."""
    if not isinstance(value, dict | list | tuple | set):
        return 1
    if id(value) not in known:
        each = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_entries(one, known) for one in each)
    return known[id(value)]


def to_host(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the tensors of a state to host memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of torch's global generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
