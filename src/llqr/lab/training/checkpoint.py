"""Checkpoints: written whole or not at all, read without running code, random states included.

A checkpoint is a file of `torch.save` with its SHA-256 after its end: torch itself reads damaged tensors silently.
"""

import hashlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from llqr.lab.errors import DataError
from llqr.lab.writing import replacing

MARK = b"\nllqr sha256 "
TRAILER = len(MARK) + 2 * hashlib.sha256().digest_size
BLOCK = 2**20


def save(state: Mapping[str, Any], path: Path) -> None:
    """Replace ``path`` atomically: after a crash at any time, the file is the old or the new one."""
    with replacing(path) as file:
        hashing = Hashing(file)
        try:
            torch.save(dict(state), cast(BinaryIO, hashing))  # torch only writes and flushes
        except RuntimeError:
            if hashing.failure is None:
                raise
            raise hashing.failure from None  # after which torch complains about a position in the file
        file.write(MARK + hashing.digest.hexdigest().encode())


def load(path: Path, device: torch.device) -> dict[str, Any]:
    """The state that was saved; tensors are put on ``device``."""
    try:
        verify(path)
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        first_line = str(error).partition("\n")[0]
        raise DataError(f"{path} is not a readable checkpoint ({first_line}); delete it to start over.") from error
    return state


class Hashing:
    """A file that is only written to, and the digest of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        try:
            return self._file.write(content)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self._file.flush()


def verify(path: Path) -> None:
    """Compare the file with the digest at its end; an `OSError` if it is not the file that was written."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - TRAILER
        while left > 0 and (block := file.read(min(BLOCK, left))):
            digest.update(block)
            left -= len(block)
        if file.read() != MARK + digest.hexdigest().encode():
            raise OSError("its digest is missing or does not match: it is damaged, cut off or no checkpoint of llqr")


def to_host(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of the tensors of a state in host memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's global generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
