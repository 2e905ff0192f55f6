"""Values as JSON holds them, and the JSON files of a run."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from llqr.lab.errors import DataError
from llqr.lab.writing import write_text

# The keys that these files must have, so that a damaged one is named when it is read; other keys are free.
CONFIG = ("recipe", "seed", "run.method", "run.training", "run.data", "started", "command", "machine.device", "resumed")
RESULT = ("recipe", "title", "method", "seed", "metric", "larger_is_better", "best", "last", "seconds.total", "unit")
RECORD = ("epoch", "step", "train.loss", "seconds.train", "seconds.refresh", "refreshes")
LINE = ("recipe", "seed", "run.method", "machine.device", "result.metric")
CURVE = ("recipe", "seed", "run.method", "finished", "split", "epoch", "step", "train_loss")
ANALYSIS = ("samples", "loss", "sharpness.top.value", "sharpness.reason", "engine")


def checked(value: Any, keys: Iterable[str], where: str) -> dict[str, Any]:
    """Return ``value`` if it is a table with these dotted keys; otherwise raise a `DataError` that says ``where``."""
    for key in keys:
        found = value
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                raise DataError(f"{where} is damaged: {key} is missing.")
            found = found[part]
        if isinstance(found, str) and not found.isprintable() and key != "command":
            raise DataError(f"{where} is damaged: {key} has control characters.")
    table: dict[str, Any] = value
    return table


def plain(value: Any) -> Any:
    """Convert to what JSON can hold, exactly as it will be read back: NaN and infinity to null, a dtype to its name."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested tables as dotted keys with their values."""
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from flatten(entry, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def read_json(path: Path, keys: Iterable[str] = ()) -> Any:
    """Read a file of one JSON table that must have these keys."""
    try:
        found = json.loads(content(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}.") from error
    return checked(found, keys, str(path))


def content(path: Path) -> bytes:
    """Read a file; a pipe or a device, which need not end, is none."""
    if not path.is_file():
        raise DataError(f"{path} is not a file.")
    return path.read_bytes()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(plain(value), indent=1) + "\n")
