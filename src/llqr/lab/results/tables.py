"""The paper's tables, with measured numbers beside the printed ones.

A run belongs to a cell if its resolved configuration is the one that the cell's recipe gives the method. The name under
which it was run does not matter: a run made for one table also counts where another table repeats the experiment, and a
run with an overridden setting counts nowhere. ``cifar100@kfac`` is the table of that variant, with the rows whose
recipes have it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from llqr.lab.config import recipe
from llqr.lab.config.recipe import Recipe, full_name
from llqr.lab.config.run import Run
from llqr.lab.errors import ConfigurationError
from llqr.lab.grouping import grouped
from llqr.lab.names import check_known, unknown
from llqr.lab.number_table import decimals, spread
from llqr.lab.results.measurements import differences
from llqr.lab.results.summary import welch
from llqr.lab.runs.stored import RunRecord, settings_apart

MARK = "†"
"""Marks numbers of the paper that belong to a different experiment."""


@cache
def paper() -> dict[str, Any]:
    """All tables of the paper, by name."""
    tables: dict[str, Any] = json.loads((Path(__file__).parent / "paper_tables.json").read_text())
    return tables


@dataclass(frozen=True)
class PaperTable:
    """A table with one row of ``cells`` for every method of every row.

    Columns of the cells: ``mean``, ``std`` and ``n`` of the best evaluation, as the paper prints it; ``values`` of the
    last evaluations of the seeds, with ``last`` and ``last_std``, and their ``loss`` and ``loss_std``; ``test`` and
    ``test_std`` on the test set, where the values are not; ``time`` of a step relative to the first method of the row
    on the same device, and ``probing_time``, the same from where the probe begins; ``paper``, ``paper_std`` and
    ``paper_n``, the printed number; ``origins``, the lines of the runs. A missing number is None or NaN.

    ``left_out`` says which runs of the recipes count in no cell, and why. ``caveats`` say how rows differ from the
    experiment of the paper that they are shown beside, and must not be compared with.
    """

    name: str
    metric: str
    cells: pd.DataFrame
    left_out: Sequence[str] = ()
    caveats: Mapping[str, str] = field(default_factory=dict)

    @property
    def measured(self) -> pd.DataFrame:
        return self.cells[self.cells["mean"].notna()]

    @property
    def missing(self) -> pd.DataFrame:
        return self.cells[self.cells["mean"].isna()]

    def of_rows(self, rows: Sequence[str]) -> "PaperTable":
        """Only these rows; all of them if none is named."""
        if not rows:
            return self
        caveats = {row: caveat for row, caveat in self.caveats.items() if row in rows}
        return replace(self, cells=self.cells[self.cells["row"].isin(rows)], caveats=caveats)


# -- filling a table ---------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The tables there are: those of the paper that compare methods, and those that only we have."""
    printed = [name for name, table in paper().items() if isinstance(table.get("rows"), dict)]
    ours = (name.partition("/")[0] for name in recipe.names())
    return list(dict.fromkeys([*printed, *ours]))


def build(name: str, runs: Sequence[RunRecord]) -> PaperTable:
    """The table of this name, or of a variant, ``NAME@VARIANT``, filled with these runs."""
    plain, at, variant = name.partition("@")
    own = [run for run in runs if run.recipe == name]
    if plain not in names() and own:
        return _own_table(name, own)
    if plain not in names():
        ours = dict.fromkeys(run.recipe for run in runs if run.recipe.partition("/")[0] not in names())
        raise ConfigurationError(unknown("TABLE", name, [*names(), *ours], ", or TABLE@VARIANT"))
    chosen = recipe.rows(plain, variant if at else None)
    recipes = {row: recipe.load(f"{other}{at}{variant}") for row, other in chosen.items()}
    table = paper().get(plain, {"rows": {}, "seeds": None})
    printed = table["rows"]
    rows = [row for row in dict.fromkeys([*printed, *recipes]) if not at or row in recipes]
    cells = _frame(cell for row in rows for cell in _row(row, recipes.get(row), printed, table["seeds"], runs))
    used = set(cells["origins"].explode())
    metric = table.get("metric", "").removeprefix("best ")
    caveats = {row: one.caveat for row, one in recipes.items() if one.beside is not None}
    left_out = list(_left_out(plain, recipes, runs, used))
    return PaperTable(name, metric or _metric(used, runs), cells, left_out, caveats)


def _row(
    row: str,
    known: Recipe | None,
    printed: Mapping[str, Mapping[str, Sequence[float]]],
    seeds: int | None,
    runs: Sequence[RunRecord],
) -> Iterator[dict[str, Any]]:
    own = printed.get(row, {})
    beside = {} if known is None or known.beside is None else printed.get(known.beside, {})
    reference: list[RunRecord] = []
    for method in dict.fromkeys([*own, *(known.columns if known else ())]):
        found = [] if known is None else _matching(known.run(method).to_dict(), runs, reference)
        reference = reference or found
        numbers = own.get(method) or beside.get(method)
        number = dict(zip(("paper", "paper_std"), numbers, strict=False)) | {"paper_n": seeds} if numbers else {}
        yield _cell(row, method, found, reference) | number


def _matching(run: dict[str, Any], runs: Iterable[RunRecord], reference: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs of this configuration, the first one of every seed.

    If they are runs on prepared text, all are on that of the ``reference``, or of the first one.
    """
    seeds: dict[int, RunRecord] = {}
    for one in runs:
        if one.method == run["method"] and not differences(one.settings, run):
            first = next(iter((*reference, *seeds.values())), one)
            if one.text == first.text:
                seeds.setdefault(one.seed, one)
    return list(seeds.values())


def counts(run: Run, seed: int, runs: Iterable[RunRecord]) -> bool:
    """Whether a run of this configuration and seed is among these."""
    return any(one.seed == seed for one in _matching(run.to_dict(), runs, ()))


def _metric(used: set[str], runs: Iterable[RunRecord]) -> str:
    """What was measured, where the paper does not say."""
    counted = (one.result["metric"] for one in runs if one.origin in used and one.result is not None)
    return ", ".join(dict.fromkeys(counted))


def _left_out(table: str, recipes: dict[str, Recipe], runs: Iterable[RunRecord], used: set[str]) -> Iterator[str]:
    for one in runs:
        own, _, row = one.recipe.partition("@")[0].partition("/")
        if own != table or one.origin in used or row not in recipes:
            continue
        label = f"{one.label} ({one.origin})"
        if one.method not in recipes[row].methods:
            yield f"{label}: the recipe knows no such method"
            continue
        differing = differences(one.settings, recipes[row].run(one.method).to_dict())
        otherwise = "no column of the table, or a seed seen before"
        if one.text is not None:
            otherwise += f", or another text ({one.text}) than that of the first run of its row"
        yield f"{label}: {'; '.join(differing) if differing else otherwise}"


COLUMNS = ("row", "method", "values", "mean", "std", "n", "last", "last_std", "loss", "loss_std", "test", "test_std")
TIMES = {"time": "step_seconds", "probing_time": "probing_step_seconds"}
SHOWN = {"last": "last_std", "mean": "std", "loss": "loss_std"}
PRINTED = ("paper", "paper_std", "paper_n", "origins")


def _frame(cells: Iterable[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(list(cells), columns=[*COLUMNS, *TIMES, *PRINTED], dtype=object)


def _cell(row: str, method: str, found: Sequence[RunRecord], reference: Sequence[RunRecord]) -> dict[str, Any]:
    """What these runs of a method come to; times are relative to the runs of the ``reference``."""
    best, last = _results(found, "best"), _results(found, "last")
    loss, tested = (pd.Series([getattr(one, key) for one in found], dtype=float) for key in ("loss", "tested"))
    others = (number for own in (last, loss, tested) for number in (own.mean(), own.std()))
    numbers = (last.tolist(), best.mean(), best.std(), len(best) or None, *others)
    times = {name: _relative_time(found, reference, key) for name, key in TIMES.items()}
    return dict(zip(COLUMNS, (row, method, *numbers), strict=True)) | times | {"origins": [one.origin for one in found]}


def _results(runs: Iterable[RunRecord], key: str) -> "pd.Series[float]":
    """This number of every result that has it."""
    return pd.Series([(one.result or {}).get(key) for one in runs], dtype=float).dropna()


def _relative_time(found: Sequence[RunRecord], reference: Sequence[RunRecord], key: str) -> float | None:
    """The time of a step relative to the reference, where both had the same kind of device to themselves."""
    runs = [*found, *reference]
    if len({one.device for one in runs}) > 1 or any(one.shared_device for one in runs):
        return None
    return float(_results(found, key).mean() / _results(reference, "step_seconds").mean())


def _own_table(name: str, runs: Sequence[RunRecord]) -> PaperTable:
    """The kept runs of an experiment of one's own: no recipe says what belongs to it, so that all of them do.

    One column per method, and one row for all runs or, if a method was run with several settings, for each.
    """
    rows: dict[str, dict[str, dict[int, RunRecord]]] = {}
    for method, own in grouped(runs, lambda run: run.method).items():
        for run, setting in zip(own, settings_apart([run.settings for run in own]), strict=True):
            seeds = rows.setdefault(f"{name} {setting}".strip(), {}).setdefault(method, {})
            seeds.setdefault(run.seed, run)
    cells = []
    for row, methods in rows.items():
        first, *_ = found = {method: list(seeds.values()) for method, seeds in methods.items()}
        cells += [_cell(row, method, own, found[first]) for method, own in found.items()]
    return PaperTable(name, _metric({run.origin for run in runs}, runs), _frame(cells))


# -- reading a table ---------------------------------------------------------------------------------------------------


def text(mean: Any, std: Any = None) -> str:
    """A mean with its standard deviation, or nothing."""
    return "" if pd.isna(mean) else spread(mean, std)


def difference(table: PaperTable, cell: Any) -> Any:
    """Measured less printed, unless the printed number is that of a different experiment."""
    missing = pd.isna(cell.mean) or pd.isna(cell.paper) or cell.row in table.caveats
    return None if missing else cell.mean - cell.paper


def texts(table: PaperTable) -> tuple[list[str], list[list[str]]]:
    """The headings and rows of the table as it is shown; test, times and the paper's numbers where it has them."""
    tested, printed = (bool(table.cells[column].notna().any()) for column in ("test", "paper"))
    headings = ["row", "method", "last", "best", "n", "loss"]
    headings += ["test", "time / step", "while probing"] if tested else []
    rows = []
    for cell in table.cells.itertuples():
        shown = [cell.row, cell.method, *_numbers(cell)]
        if tested:
            times = ["" if pd.isna(time) else f"{time:.2f}x" for time in (cell.time, cell.probing_time)]
            shown += [text(cell.test, cell.test_std), *times]
        if printed:
            by = difference(table, cell)
            mark = MARK if cell.row in table.caveats and not pd.isna(cell.paper) else ""
            shown += [text(cell.paper, cell.paper_std) + mark]
            shown += ["" if pd.isna(cell.paper_n) else str(cell.paper_n)]
            shown += ["" if by is None else f"{by:+.2f}"]
        rows.append(shown)
    return [*headings, *(("paper", "n", "best - paper") if printed else ())], rows


def _numbers(cell: Any) -> list[str]:
    """The last and the best evaluation, how many seeds, and the loss of the last one."""
    n = "" if pd.isna(cell.n) else str(cell.n)
    last, best, loss = ((getattr(cell, key), getattr(cell, std)) for key, std in SHOWN.items())
    return [text(*last), text(*best), n, text(*loss)]


def explanation(table: PaperTable) -> str:
    """What is measured, in one sentence."""
    metric = f"{table.metric[0].upper()}{table.metric[1:]}"
    return f"{metric}: last and best evaluation, and loss of the last; mean ± standard deviation over n seeds."


def footnotes(table: PaperTable) -> list[str]:
    """What must be known to read the table."""
    notes = [f"{MARK} {row}: {caveat}" for row, caveat in table.caveats.items()]
    if table.cells["test"].notna().any():
        first = table.measured["method"].iloc[0]
        notes.append(
            f"Test is measured once, with the weights that were the best on the validation set. Times are per "
            f"step relative to {first}, refreshes included: over the whole run, and from where the probe begins."
        )
    return notes


def compare(table: PaperTable, reference: str) -> pd.DataFrame:
    """The measured cells, each with its difference to the ``reference`` method of its row and Welch's two-sided p.

    Of the last evaluations. Both are missing for the reference itself and where it was not measured, and p for fewer
    than three seeds.
    """
    known = dict.fromkeys(table.cells["method"])
    reference = full_name(reference, known)
    check_known("--against", reference, known)
    found = table.measured.copy()
    others = {cell.row: cell for cell in found.itertuples() if cell.method == reference}
    pairs = [(cell, None if cell.method == reference else others.get(cell.row)) for cell in found.itertuples()]
    found["reference"] = reference
    found["difference"] = [None if other is None else cell.last - other.last for cell, other in pairs]
    found["p"] = [None if other is None else welch(cell.values, other.values) for cell, other in pairs]
    return found


def compared_texts(found: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """The headings and rows of a comparison as it is shown."""
    rows = []
    for cell in found.itertuples():
        by = "" if pd.isna(cell.difference) else f"{cell.difference:+.{decimals(cell.last)}f}"
        p = "" if pd.isna(cell.p) else f"{cell.p:.2g}"
        last, *others = _numbers(cell)
        rows.append([cell.row, cell.method, last, by, p, *others])
    return ["row", "method", "last", f"- {found['reference'].iloc[0]}", "p", "best", "n", "loss"], rows


WELCH = "Differences are of the last evaluation; p is Welch's, two-sided, from three seeds on."
