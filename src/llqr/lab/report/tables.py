"""Tables of a page: every cell knows its number for sorting, and the files that the number comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True)
class Cell:
    """``source`` appears when the pointer rests on the cell; ``link`` leads to the file or to the runs behind it.

    ``files`` are further links, each with its name.
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


EMPTY = Cell("–")


@dataclass(frozen=True)
class Row:
    """``anchor`` is what links on the page lead to."""

    cells: list[Cell]
    anchor: str = ""


@dataclass(frozen=True)
class Table:
    """The first cell of a row says what the row is about."""

    headings: Sequence[str]
    rows: list[Row]

    def is_numeric(self, column: int) -> bool:
        return all(row.cells[column].is_number for row in self.rows)


@dataclass(frozen=True)
class Sourced:
    """A number, and the file and key it was read from."""

    value: float
    file: str
    key: str

    def __str__(self) -> str:
        return f"{self.value:.6g}  {self.file}: {self.key}"


def number(value: float) -> str:
    """Enough digits to tell numbers of this size apart."""
    return f"{value:.{_decimals(value)}f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"


def single(one: Sourced, link: str = "") -> Cell:
    return Cell(number(one.value), one.value, str(one), link)


def mean(several: Sequence[Sourced], link: str = "", *, strong: bool = False) -> Cell:
    """Mean ± sample standard deviation; a dash if there is nothing."""
    if not several:
        return EMPTY
    values = [one.value for one in several]
    centre = fmean(values)
    text = number(centre)
    if len(values) > 1:
        spread = stdev(values)
        text += f" ± {spread:.{_decimals(centre)}f}" if 1e-3 <= abs(centre) < 1e6 else f" ± {spread:.2g}"
    return Cell(text, centre, "\n".join(map(str, several)), link, strong)


def _decimals(value: float) -> int:
    size = abs(value)
    return 1 if size >= 1000 else 2 if size >= 10 else 3 if size >= 1 else 4


def duration(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds < 100
        else f"{seconds / 60:.1f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )
