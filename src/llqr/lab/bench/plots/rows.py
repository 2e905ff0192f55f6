"""The rows of a measurement, and how they are gathered into panels and lines."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
Rows = Sequence[Row]


def grouped(rows: Rows, *keys: str) -> dict[str, list[Row]]:
    """Rows with the same words under these keys, by these words, in the order of the rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(row[key] for key in keys), []).append(row)
    return groups
