"""What the files of a run must hold, so that a damaged one is named when it is read and not where it is used."""

from collections.abc import Mapping
from typing import Any

from llqr.lab.errors import DataError

Shape = Mapping[str, Any]
"""A type, or types, or the shape of a table, for every key that must be there; other keys are free."""

NUMBER = (int, float)
NUMBER_OR_NULL = (int, float, type(None))
CONFIG: Shape = {
    "recipe": str,
    "seed": int,
    "run": {"method": str, "training": {}, "data": {}},
    "started": str,
    "command": str,
    "versions": {},
    "machine": {"device": str},
    "resumed": list,
}
RESULT: Shape = {
    "recipe": str,
    "title": str,
    "method": str,
    "seed": int,
    "metric": str,
    "larger_is_better": bool,
    "best": NUMBER,
    "last": NUMBER,
    "seconds": {"total": NUMBER},
    "epoch_seconds": NUMBER,
    "rate": NUMBER,
    "unit": str,
    "metric_bytes": int,
}
RECORD: Shape = {
    "epoch": NUMBER,
    "step": int,
    "train": {"loss": NUMBER_OR_NULL},
    "seconds": {"train": NUMBER, "refresh": NUMBER},
    "refreshes": list,
}
HEAD: Shape = {"recipe": str, "seed": int, "run": {"method": str}}
LINE: Shape = {**HEAD, "machine": {"device": str}, "result": {"metric": str}}
"""A line of a file of results, which may be older than the other keys of today's runs."""
CURVE: Shape = {**HEAD, "finished": bool, "split": str, "epoch": list, "step": list, "train_loss": list}
ANALYSIS: Shape = {
    "samples": int,
    "loss": NUMBER_OR_NULL,
    "sharpness": {"top": {"value": NUMBER_OR_NULL}, "reason": str},
    "slices": list,
    "engine": str,
}


def checked(value: Any, shape: Shape, where: str) -> dict[str, Any]:
    """``value`` if it has this shape; otherwise a `DataError` that says what is wrong ``where``."""
    fault = _fault(value, shape, "")
    if fault:
        raise DataError(f"{where} is damaged: {fault}.")
    table: dict[str, Any] = value
    return table


def _fault(value: Any, shape: Shape, key: str) -> str:
    if not isinstance(value, dict):
        return f"expected a table{f' at {key}' if key else ''}, found {_shown(value)}"
    for name, kind in shape.items():
        path = f"{key}.{name}" if key else name
        if name not in value:
            return f"{path} is missing"
        if isinstance(kind, Mapping):
            if fault := _fault(value[name], kind, path):
                return fault
        elif not isinstance(value[name], kind) or (isinstance(value[name], bool) and kind is not bool):
            return f"{path} cannot be {_shown(value[name])}"
    return ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
