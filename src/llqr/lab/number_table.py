"""Tables of measured numbers on a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

NOTHING = "-"


class NumberTable(Table):
    """Columns of words, aligned left, then columns of numbers, aligned right; nothing is wrapped."""

    def __init__(self, title: str, *words: str, numbers: Sequence[str]) -> None:
        super().__init__(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
        for heading in words:
            self.add_column(heading, no_wrap=True)
        for heading in numbers:
            self.add_column(heading, justify="right", no_wrap=True)

    def add(self, *cells: str | None) -> None:
        self.add_row(*(NOTHING if cell is None else cell for cell in cells))

    def explain(self, sentences: Iterable[str]) -> None:
        """Put sentences below the table, each once."""
        self.caption = "\n".join(dict.fromkeys(sentences))


def milliseconds(sample: Mapping[str, Any]) -> tuple[str, str]:
    """Median and quartiles."""
    return _both({key: 1e3 * sample[key] for key in ("low", "median", "high")}, ".2f")


def seconds(sample: Mapping[str, Any]) -> tuple[str, str]:
    return _both(sample, ".3f")


def times(sample: Mapping[str, Any]) -> tuple[str, str]:
    """A ratio."""
    median, quartiles = _both(sample, ".3f")
    return f"{median}x", quartiles


def number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _both(sample: Mapping[str, Any], form: str) -> tuple[str, str]:
    low, median, high = (format(sample[key], form) for key in ("low", "median", "high"))
    return median, f"{low} .. {high}"
