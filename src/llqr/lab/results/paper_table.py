"""The paper's tables with measured numbers beside them.

A measured run belongs to a cell if its resolved configuration is the one that the recipe of the cell gives the method:
what the run was called does not matter, so that a run made for one table also counts where another table repeats the
experiment, and a run with an overridden setting counts nowhere.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from llqr.lab.config import recipe
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.results import storage
from llqr.lab.results.measurements import Measurement

PAPER = Path(__file__).parent / "paper_tables.json"
MARK = "†"
"""Stands by numbers of the paper that are of another experiment."""
TESTED = ("test", "time / step", "while probing")
"""What is shown too where a test set was measured beside the table's own numbers."""


@dataclass(frozen=True)
class Number:
    """A mean over ``n`` seeds, or a number that was counted and has no n."""

    mean: float
    std: float | None = None
    n: int | None = None

    def __str__(self) -> str:
        text = f"{self.mean:,.2f}" if isinstance(self.mean, float) else f"{self.mean:,}"
        return text if self.std is None else f"{text} ± {self.std:.2f}"


@dataclass(frozen=True)
class Cell:
    """One number of a table; ``origins`` are the lines it was measured in.

    ``beside`` is a number of the paper for another experiment, which the measured one is not to be compared with.
    ``tested`` is measured on the test set where ``measured`` is not; ``relative_time`` is that of a step beside the
    first method of the row on the same device, and ``probing_time`` the same from where the probe begins.
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

    @property
    def difference_in_words(self) -> str:
        """Signed, and empty if there is none."""
        if self.difference is None:
            return ""
        return f"{self.difference:+.2f}" if isinstance(self.difference, float) else f"{self.difference:+,}"

    def to_dict(self) -> dict[str, Any]:
        numbers = {key: getattr(self, key) for key in ("measured", "paper", "beside", "tested")}
        plain = {key: None if number is None else vars(number) for key, number in numbers.items()}
        others = {key: getattr(self, key) for key in ("difference", "relative_time", "probing_time", "origins")}
        return {"row": self.row, "column": self.column} | plain | others


@dataclass(frozen=True)
class PaperTable:
    """A table: ``left_out`` says which runs of its recipes count in no cell, and why.

    ``caveats`` say of rows in what they are another experiment than the one of the paper they are shown beside.
    """

    name: str
    metric: str
    cells: Sequence[Cell]
    left_out: Sequence[str] = ()
    caveats: Mapping[str, str] = field(default_factory=dict)

    @property
    def measured(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.measured is not None]

    @property
    def tested(self) -> bool:
        """Whether a test set was measured beside what the table is of."""
        return any(cell.tested is not None for cell in self.cells)

    def of_rows(self, rows: Sequence[str]) -> "PaperTable":
        """Some rows of it, all of them if none is named."""
        chosen = [cell for cell in self.cells if not rows or cell.row in rows]
        shown = {cell.row for cell in chosen}
        caveats = {row: caveat for row, caveat in self.caveats.items() if row in shown}
        return replace(self, cells=chosen, caveats=caveats)

    @property
    def missing(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.measured is None]

    def missing_in_words(self) -> str:
        """The missing cells, row by row."""
        rows: dict[str, list[str]] = {}
        for cell in self.missing:
            rows.setdefault(cell.row, []).append(cell.column)
        return "; ".join(f"{row}: {', '.join(columns)}" for row, columns in rows.items())


@cache
def paper() -> dict[str, Any]:
    """The numbers of the paper."""
    return json.loads(PAPER.read_text())


def names() -> list[str]:
    """The tables there are: those of the paper that compare methods, storage, and those that only we have."""
    printed = [name for name, table in paper().items() if isinstance(table.get("rows"), dict)]
    ours = (name.partition("/")[0] for name in recipe.names())
    return list(dict.fromkeys([*printed, "storage", *ours]))


def build(name: str, measurements: Sequence[Measurement]) -> PaperTable:
    """The table of this name with what was measured."""
    if name == "storage":
        return PaperTable(name, "count, and MiB for each device", list(_storage_cells()))
    if name not in names():
        raise ConfigurationError(f"TABLE must be one of {', '.join(names())}, got {name!r}.")
    printed = paper().get(name, {"rows": {}, "seeds": None})
    recipes = {known.partition("/")[2]: recipe.load(known) for known in recipe.names() if known.startswith(f"{name}/")}
    cells = []
    for row in dict.fromkeys([*printed["rows"], *recipes]):
        cells += _row(row, recipes.get(row), printed, measurements)
    used = {origin for cell in cells for origin in cell.origins}
    left_out = list(_left_out(name, recipes, measurements, used))
    caveats = {row: known.caveat for row, known in recipes.items() if known.beside is not None}
    return PaperTable(name, printed.get("metric") or _metric(cells, measurements), cells, left_out, caveats)


def _row(
    row: str, known: recipe.Recipe | None, printed: dict[str, Any], measurements: Sequence[Measurement]
) -> Iterator[Cell]:
    def expected(numbers: dict[str, list[float]], column: str) -> Number | None:
        return Number(*numbers[column], n=printed["seeds"]) if column in numbers else None

    own = printed["rows"].get(row, {})
    other = {} if known is None or known.beside is None else printed["rows"].get(known.beside, {})
    reference: list[Measurement] = []
    for column in dict.fromkeys([*own, *(known.columns if known else ())]):
        found = [] if known is None else _matching(known.run(column).to_dict(), measurements)
        reference = reference or found
        yield Cell(
            row,
            column,
            _mean([one.result["best"] for one in found]),
            expected(own, column),
            tuple(one.origin for one in found),
            beside=expected(other, column),
            tested=_mean([one.tested for one in found if one.tested is not None]),
            relative_time=_relative(found, reference, "step_seconds"),
            probing_time=_relative(found, reference, "probing_step_seconds"),
        )


def _matching(run: dict[str, Any], measurements: Iterable[Measurement]) -> list[Measurement]:
    """The runs of this configuration, the first one of every seed."""
    seeds: dict[int, Measurement] = {}
    for one in measurements:
        if one.method == run["method"] and not one.differences(run):
            seeds.setdefault(one.seed, one)
    return list(seeds.values())


def _relative(found: Sequence[Measurement], reference: Sequence[Measurement], key: str) -> float | None:
    """The time of a step beside the reference's, where both were measured on the same kind of device."""
    times = [one.result[key] for one in found if one.result.get(key)]
    others = [one.result["step_seconds"] for one in reference if one.result.get("step_seconds")]
    if not times or not others or len({one.device for one in (*found, *reference)}) > 1:
        return None
    return fmean(times) / fmean(others)


def _mean(values: Sequence[float]) -> Number | None:
    return Number(fmean(values), stdev(values) if len(values) > 1 else None, len(values)) if values else None


def _metric(cells: Iterable[Cell], measurements: Iterable[Measurement]) -> str:
    """What was measured, where the paper does not say it."""
    used = {origin for cell in cells for origin in cell.origins}
    return ", ".join(dict.fromkeys(f"best {one.result['metric']}" for one in measurements if one.origin in used))


def _left_out(
    table: str, recipes: dict[str, recipe.Recipe], measurements: Iterable[Measurement], used: set[str]
) -> Iterator[str]:
    for one in measurements:
        own, _, row = one.recipe.partition("@")[0].partition("/")
        if own != table or one.origin in used or row not in recipes:
            continue
        label = f"{one.recipe} {one.method} seed {one.seed} ({one.origin})"
        if one.method not in recipes[row].methods:
            yield f"{label}: the recipe knows no such method"
            continue
        differing = one.differences(recipes[row].run(one.method).to_dict())
        yield f"{label}: {'; '.join(differing) if differing else 'no column of the table, or a seed seen before'}"


def texts(cell: Cell, table: PaperTable) -> list[str]:
    """What is printed of a cell: measured, n, test and times where the table has them, paper, n, difference."""
    measured, paper = (_with_n(number) for number in (cell.measured, cell.paper))
    if cell.beside is not None:
        paper = [f"{cell.beside}{MARK}", str(cell.beside.n)]
    tested = []
    if table.tested:
        times = [f"{time:.2f}x" if time else "" for time in (cell.relative_time, cell.probing_time)]
        tested = [str(cell.tested or ""), *times]
    return [*measured, *tested, *paper, cell.difference_in_words]


def footnotes(table: PaperTable) -> list[str]:
    """What must be known to read the table."""
    notes = [f"{MARK} {row}: {caveat}" for row, caveat in table.caveats.items()]
    if table.tested:
        first = next(cell.column for cell in table.cells if cell.measured is not None)
        notes.append(
            f"Test is measured once, with the weights that were the best on the validation set. Times are those of a "
            f"step beside {first}'s, refreshes included: over the whole run, and from where the probe begins."
        )
    return notes


def _with_n(number: Number | None) -> list[str]:
    return ["", ""] if number is None else [str(number), "" if number.n is None else str(number.n)]


def _storage_cells() -> Iterator[Cell]:
    """Counted here and now: nothing has to be measured."""
    keys = ("model", "structure", "shards")
    printed = {tuple(row[key] for key in keys): row for row in paper()["storage"]["rows"]}
    for counted in (row.to_dict() for row in storage.rows()):
        place = tuple(counted[key] for key in keys)
        label = f"{counted['model']} {counted['structure']}, {counted['shards']} device(s)"
        for column in (key for key in counted if key not in keys):
            theirs = printed.get(place)
            expected = None if theirs is None else Number(theirs[column])
            yield Cell(label, column, Number(counted[column]), expected)
