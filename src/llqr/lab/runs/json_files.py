"""Values as JSON holds them, and the JSON files of a run."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from llqr.lab.errors import DataError
from llqr.lab.writing import write_text

NUMBER = (int, float, type(None))
"""A number that is not finite is null in JSON."""
# The keys that these files must have, and what they hold, so that a damaged file is named when it is read; other keys
# are free.
Keys = Mapping[str, type | tuple[type, ...]]
CONFIG: Keys = {
    "recipe": str, "seed": int, "run.method": str, "run.training": dict, "run.data": dict, "started": str,
    "command": str, "machine.device": str, "resumed": list,
}  # fmt: skip
RESULT: Keys = {
    "recipe": str, "title": str, "method": str, "seed": int, "metric": str, "larger_is_better": bool, "best": NUMBER,
    "last": NUMBER, "seconds.total": NUMBER, "unit": str,
}  # fmt: skip
RECORD: Keys = {
    "epoch": NUMBER, "step": int, "train.loss": NUMBER, "seconds.train": NUMBER, "seconds.refresh": NUMBER,
    "refreshes": list,
}  # fmt: skip
LINE: Keys = {
    "recipe": str, "seed": int, "run.method": str, "machine.device": str, "resumed": list, "result.metric": str,
}  # fmt: skip
CURVE: Keys = {
    "recipe": str, "seed": int, "run.method": str, "finished": bool, "split": str, "epoch": list, "step": list,
    "train_loss": list,
}  # fmt: skip
ANALYSIS: Keys = {
    "samples": int, "loss": NUMBER, "sharpness.top.value": NUMBER, "sharpness.reason": str,
    "engine": str,
}  # fmt: skip


def checked(value: Any, keys: Keys, where: str) -> dict[str, Any]:
    """Return ``value`` if it is a table with these dotted keys; otherwise raise a `DataError` that says ``where``."""
    for key, kind in keys.items():
        found = value
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                raise DataError(f"{where} is damaged: {key} is missing.")
            found = found[part]
        if not isinstance(found, kind):
            raise DataError(f"{where} is damaged: {key} is {str(found)[:40]!r}.")
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


def read_json(path: Path, keys: Keys = MappingProxyType({})) -> dict[str, Any]:
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
