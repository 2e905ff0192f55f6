"""Tables of the HTML page: every cell carries the number it is sorted by and the files the number comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HtmlCell:
    """``source`` is shown as a tooltip; ``link`` leads to the file or to the runs behind the number.

    ``files`` are further links, as (name, address).
    """

    text: str
    value: float | str | None = None
    source: str = ""
    link: str = ""
    strong: bool = False
    files: Sequence[tuple[str, str]] = ()

    @property
    def key(self) -> str:
        """What the column is sorted by."""
        return self.text if self.value is None else str(self.value)

    @property
    def is_number(self) -> bool:
        return isinstance(self.value, int | float) or self == EMPTY


EMPTY = HtmlCell("–")


def plain_cell(value: Any) -> HtmlCell:
    """A value that comes from no file, such as a setting; a dash if there is none."""
    return EMPTY if value is None else HtmlCell(str(value), value if isinstance(value, int | float) else None)


@dataclass(frozen=True)
class HtmlRow:
    """``anchor`` is the target of links within the page."""

    cells: list[HtmlCell]
    anchor: str = ""


@dataclass(frozen=True)
class HtmlTable:
    """The first cell of a row says what the row is about."""

    headings: Sequence[str]
    rows: list[HtmlRow]

    def is_numeric(self, column: int) -> bool:
        return all(row.cells[column].is_number for row in self.rows)
