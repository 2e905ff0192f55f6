"""The paper's tables with measured numbers beside them.

A measured run belongs to a cell if its resolved configuration is the one that the recipe of the cell gives the method:
what the run was called does not matter, so that a run made for one table also counts where another table repeats the
experiment, and a run with an overridden setting counts nowhere.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from llqr.lab import recipe, storage
from llqr.lab.results import Measurement
from llqr.lab.strict import ConfigurationError

PAPER = Path(__file__).parent / "paper_tables.json"


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
    """One number of a table; ``origins`` are the lines it was measured in."""

    row: str
    column: str
    measured: Number | None
    paper: Number | None
    origins: tuple[str, ...] = ()

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
        numbers = {"measured": self.measured, "paper": self.paper}
        plain = {key: None if number is None else vars(number) for key, number in numbers.items()}
        return (
            {"row": self.row, "column": self.column} | plain | {"difference": self.difference, "origins": self.origins}
        )


@dataclass(frozen=True)
class PaperTable:
    """A table: ``left_out`` says which runs of its recipes count in no cell, and why."""

    name: str
    metric: str
    cells: Sequence[Cell]
    left_out: Sequence[str] = ()

    @property
    def measured(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.measured is not None]

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
    cells, used = [], set()
    for row in dict.fromkeys([*printed["rows"], *recipes]):
        known = recipes.get(row)
        numbers = printed["rows"].get(row, {})
        for column in dict.fromkeys([*numbers, *(known.columns if known else ())]):
            found = [] if known is None else _matching(known.run(column).to_dict(), measurements)
            used |= {one.origin for one in found}
            expected = Number(*numbers[column], n=printed["seeds"]) if column in numbers else None
            cells.append(Cell(row, column, _mean(found), expected, tuple(one.origin for one in found)))
    left_out = list(_left_out(name, recipes, measurements, used))
    return PaperTable(name, printed.get("metric") or _metric(cells, measurements), cells, left_out)


def _matching(run: dict[str, Any], measurements: Iterable[Measurement]) -> list[Measurement]:
    """The runs of this configuration, the first one of every seed."""
    seeds: dict[int, Measurement] = {}
    for one in measurements:
        if one.method == run["method"] and not one.differences(run):
            seeds.setdefault(one.seed, one)
    return list(seeds.values())


def _mean(found: Sequence[Measurement]) -> Number | None:
    values = [one.result["best"] for one in found]
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
