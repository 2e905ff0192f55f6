"""Tables of the HTML page: every cell carries the number it is sorted by and the files the number comes from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, stdev
from typing import Any, Self


@dataclass(frozen=True)
class HtmlCell:
    """``source`` is shown as a tooltip; ``link`` leads to the file or to the runs behind the number.

    ``files`` are further links, as (name, address). The ``anchor`` of a row's first cell is the target of links within
    the page.
    """

    text: str
    value: float | str | None = None
    source: str = ""
    link: str = ""
    strong: bool = False
    files: Sequence[tuple[str, str]] = ()
    anchor: str = ""

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
class HtmlTable:
    """The first cell of a row says what the row is about."""

    headings: Sequence[str]
    rows: Sequence[Sequence[HtmlCell]]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, HtmlCell]]) -> Self:
        """Of rows that all have a cell for the same headings."""
        return cls(list(rows[0]), [list(row.values()) for row in rows])

    def is_numeric(self, column: int) -> bool:
        return all(row[column].is_number for row in self.rows)


@dataclass(frozen=True)
class Sourced:
    """A number, and the file and key it was read from."""

    value: float
    file: str
    key: str

    def __str__(self) -> str:
        return f"{self.value:.6g}  {self.file}: {self.key}"


def number(value: float) -> str:
    """``value`` with enough digits to tell numbers of this size apart."""
    return format(value, digits(value) if 1e-3 <= abs(value) < 1e6 else ".4g")


def digits(value: float) -> str:
    """The format of a difference or a deviation that stands beside ``value``."""
    size = abs(value)
    decimals = 1 if size >= 1000 else 2 if size >= 10 else 3 if size >= 1 else 4
    return f".{decimals}f" if 1e-3 <= size < 1e6 else ".2g"


def single(one: Sourced, link: str = "") -> HtmlCell:
    return HtmlCell(number(one.value), one.value, str(one), link)


def mean(several: Sequence[Sourced], link: str = "", *, strong: bool = False) -> HtmlCell:
    """Mean ± sample standard deviation; a dash if ``several`` is empty."""
    if not several:
        return EMPTY
    values = [one.value for one in several]
    source = "\n".join(map(str, several))
    if not all(map(isfinite, values)):
        return HtmlCell("not finite", source=source, link=link)
    centre = fmean(values)
    text = spread(centre, stdev(values) if len(values) > 1 else None)
    return HtmlCell(text, centre, source, link, strong)


def spread(centre: float, deviation: float | None) -> str:
    """A mean, with its standard deviation where there is one."""
    return number(centre) if deviation is None else f"{number(centre)} ± {deviation:{digits(centre)}}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
