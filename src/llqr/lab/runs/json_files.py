"""Values as JSON holds them, and files of them."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from llqr.lab.errors import DataError
from llqr.lab.writing import write_text


def plain(value: Any) -> Any:
    """What JSON can hold, exactly as it will be read back; NaN and infinity become null, a dtype its name."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted keys."""
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from flatten(entry, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}.") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(plain(value), indent=1) + "\n")
