"""Measured numbers: how many decimals they are printed with, and tables of them on a terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table

NOTHING = "-"
IN_MIB = 2**-20
"""Bytes times this are MiB."""


def decimals(value: float) -> int:
    """Two from 10 on, as for accuracies and BLEU; more for smaller numbers, which would look alike otherwise."""
    size = abs(value)
    return 2 if size >= 10 or not size else 3 if size >= 1 else 4 if size >= 0.01 else 6


def spread(mean: float, std: float | None = None) -> str:
    """A mean, with its standard deviation unless that is None or NaN."""
    digits = decimals(mean)
    return f"{mean:.{digits}f}" if std is None or math.isnan(std) else f"{mean:.{digits}f} ± {std:.{digits}f}"


class Column(NamedTuple):
    """A column: the heading, where a row holds the number (``a.b`` is nested), its format, and what it is times.

    Of a sample it shows the quartiles.
    """

    heading: str
    key: str
    form: str
    times: float = 1

    def text(self, row: Mapping[str, Any]) -> str:
        value: Any = row
        for key in self.key.split("."):
            value = None if value is None else value.get(key)
        if isinstance(value, Mapping):
            return " .. ".join(self.form.format(self.times * value[end]) for end in ("low", "high"))
        return NOTHING if value is None else self.form.format(self.times * value)


def number_table(
    title: str, rows: Sequence[Mapping[str, Any]], words: Sequence[str], numbers: Sequence[Column]
) -> Table:
    """Columns of words, aligned left, then columns of numbers, aligned right.

    A row that was ``refused`` has no numbers, and says below the table why.
    """
    table = Table(*words, title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for column in numbers:
        table.add_column(column.heading, justify="right")
    for row in rows:
        cells = ["refused"] if "refused" in row else [column.text(row) for column in numbers]
        table.add_row(*(row[word] or NOTHING for word in words), *cells)
    table.caption = "\n".join(dict.fromkeys(row["refused"] for row in rows if "refused" in row)) or None
    return table
