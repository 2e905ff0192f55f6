"""A table of the paper with measured numbers beside the printed ones, and how its cells are written."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from llqr.lab.grouping import grouped
from llqr.lab.number_table import decimals

FILE = Path(__file__).parent / "paper_tables.json"


@cache
def paper() -> dict[str, Any]:
    """All tables of the paper, by name."""
    tables: dict[str, Any] = json.loads(FILE.read_text())
    return tables


MARK = "†"
"""Marks numbers of the paper that belong to a different experiment."""
TESTED = ("test", "time / step", "while probing")
"""The extra columns of a table with results on a test set."""
PRINTED = ("paper", "n", "difference")
"""Those of a table with numbers of the paper."""


@dataclass(frozen=True)
class Number:
    """A mean over ``n`` seeds, or an exact count, which has no n."""

    mean: float
    std: float | None = None
    n: int | None = None

    def __str__(self) -> str:
        text = f"{self.mean:,.{self.decimals}f}" if isinstance(self.mean, float) else f"{self.mean:,}"
        return text if self.std is None else f"{text} ± {self.std:.{self.decimals}f}"

    @property
    def decimals(self) -> int:
        return 2 if self.n is None else decimals(self.mean)


@dataclass(frozen=True)
class PaperCell:
    """One number of a table; ``origins`` are the lines it was measured in.

    ``beside`` is a number of the paper for a different experiment, which must not be compared with the measured one.
    ``tested`` is measured on the test set where ``measured`` is not; ``relative_time`` is the time of a step relative
    to the first method of the row on the same device, and ``probing_time`` the same from where the probe begins.
    """

    row: str
    column: str
    measured: Number | None
    paper: Number | None
    origins: tuple[str, ...] = ()
    beside: Number | None = None
    tested: Number | None = None
    relative_time: float | None = None
    probing_time: float | None = None

    @property
    def difference(self) -> float | None:
        return None if self.measured is None or self.paper is None else self.measured.mean - self.paper.mean

    def to_dict(self) -> dict[str, Any]:
        numbers = {key: getattr(self, key) for key in ("measured", "paper", "beside", "tested")}
        plain = {key: None if number is None else vars(number) for key, number in numbers.items()}
        others = {key: getattr(self, key) for key in ("difference", "relative_time", "probing_time", "origins")}
        return {"row": self.row, "column": self.column} | plain | others


@dataclass(frozen=True)
class PaperTable:
    """A table: ``left_out`` says which runs of its recipes count in no cell, and why.

    ``caveats`` say how rows differ from the experiment of the paper that they are shown beside.
    """

    name: str
    metric: str
    cells: Sequence[PaperCell]
    left_out: Sequence[str] = ()
    caveats: Mapping[str, str] = field(default_factory=dict)

    @property
    def measured(self) -> list[PaperCell]:
        return [cell for cell in self.cells if cell.measured is not None]

    @property
    def tested(self) -> bool:
        """Whether any run was also measured on a test set."""
        return any(cell.tested is not None for cell in self.cells)

    @property
    def printed(self) -> bool:
        """Whether the paper has numbers for any cell, or for another experiment beside it."""
        return any(cell.paper is not None or cell.beside is not None for cell in self.cells)

    def of_rows(self, rows: Sequence[str]) -> "PaperTable":
        """Only these rows; all of them if none is named."""
        chosen = [cell for cell in self.cells if not rows or cell.row in rows]
        shown = {cell.row for cell in chosen}
        caveats = {row: caveat for row, caveat in self.caveats.items() if row in shown}
        return replace(self, cells=chosen, caveats=caveats)

    @property
    def missing(self) -> list[PaperCell]:
        return [cell for cell in self.cells if cell.measured is None]

    def missing_in_words(self) -> str:
        """The missing cells, row by row."""
        rows = grouped(self.missing, lambda cell: cell.row)
        return "; ".join(f"{row}: {', '.join(cell.column for cell in cells)}" for row, cells in rows.items())


def headings(table: PaperTable) -> list[str]:
    """The columns after row and method: test, times and the paper's numbers where the table has them."""
    return ["measured", "n", *(TESTED if table.tested else ()), *(PRINTED if table.printed else ())]


def texts(cell: PaperCell, table: PaperTable) -> list[str]:
    """The texts of a cell in the columns that `headings` names."""
    measured, paper = (
        ["", ""] if number is None else [str(number), str(number.n or "")] for number in (cell.measured, cell.paper)
    )
    difference = ""
    if cell.difference is not None:
        difference = format(cell.difference, "+.2f" if isinstance(cell.difference, float) else "+,")
    if cell.beside is not None:
        paper = [f"{cell.beside}{MARK}", str(cell.beside.n)]
    tested = []
    if table.tested:
        times = [f"{time:.2f}x" if time else "" for time in (cell.relative_time, cell.probing_time)]
        tested = [str(cell.tested or ""), *times]
    return [*measured, *tested, *([*paper, difference] if table.printed else [])]


def footnotes(table: PaperTable) -> list[str]:
    """What must be known to read the table."""
    notes = [f"{MARK} {row}: {caveat}" for row, caveat in table.caveats.items()]
    if table.tested:
        first = next(cell.column for cell in table.cells if cell.measured is not None)
        notes.append(
            f"Test is measured once, with the weights that were the best on the validation set. Times are per "
            f"step relative to {first}, refreshes included: over the whole run, and from where the probe begins."
        )
    return notes
