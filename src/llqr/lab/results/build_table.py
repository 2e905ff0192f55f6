"""The paper's tables filled with measured runs.

A run belongs to a cell if its resolved configuration is the one that the cell's recipe gives the method. The name under
which it was run does not matter: a run made for one table also counts where another table repeats the experiment, and a
run with an overridden setting counts nowhere. ``cifar100@paper`` is the table of that variant, with the rows whose
recipes have it.
"""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, stdev
from typing import Any, Literal

from llqr.lab.config import recipe
from llqr.lab.config.recipe import Recipe
from llqr.lab.errors import ConfigurationError
from llqr.lab.grouping import grouped
from llqr.lab.names import unknown
from llqr.lab.results import storage
from llqr.lab.results.measurements import differences
from llqr.lab.results.paper_table import Number, PaperCell, PaperTable, paper
from llqr.lab.runs.stored import RunRecord, settings_apart

Measure = Literal["best", "last"]
"""Which evaluation of a run counts. The paper prints the best one."""


def names() -> list[str]:
    """The tables there are: those of the paper that compare methods, storage, and those that only we have."""
    printed = [name for name, table in paper().items() if isinstance(table.get("rows"), dict)]
    ours = (name.partition("/")[0] for name in recipe.names())
    return list(dict.fromkeys([*printed, "storage", *ours]))


def build(name: str, runs: Sequence[RunRecord], measure: Measure = "best") -> PaperTable:
    """The table of this name, or of a variant, ``NAME@VARIANT``, filled with these runs.

    Without the paper's numbers unless the best evaluation counts.
    """
    plain, at, variant = name.partition("@")
    own = [run for run in runs if run.recipe == name]
    if plain not in names() and own:
        return own_table(name, own, measure)
    if plain not in names() or (plain == "storage" and at):
        ours = dict.fromkeys(run.recipe for run in runs if run.recipe.partition("/")[0] not in names())
        raise ConfigurationError(unknown("TABLE", name, [*names(), *ours], ", or TABLE@VARIANT"))
    if plain == "storage":
        return PaperTable(name, "count, and MiB for each device", list(_storage_cells()))
    printed = paper().get(plain, {"rows": {}, "seeds": None})
    known = [other for other in recipe.names() if other.startswith(f"{plain}/")]
    # A variant's table has the rows of the recipes that have it. If none does, the first one says which ones there are.
    chosen = [other for other in known if variant in recipe.load(other).variants] or known[:1] if at else known
    recipes = {other.partition("/")[2]: recipe.load(f"{other}{at}{variant}") for other in chosen}
    cells: list[PaperCell] = []
    for row in dict.fromkeys([*printed["rows"], *recipes]):
        if at and row not in recipes:
            continue
        cells += _row(row, recipes.get(row), printed, runs, measure)
    used = {origin for cell in cells for origin in cell.origins}
    left_out = list(_left_out(plain, recipes, runs, used))
    caveats = {row: one.caveat for row, one in recipes.items() if one.beside is not None}
    metric = printed.get("metric") if measure == "best" else None
    return PaperTable(name, metric or _metric(cells, runs, measure), cells, left_out, caveats)


def _row(
    row: str, known: Recipe | None, printed: dict[str, Any], runs: Sequence[RunRecord], measure: Measure
) -> Iterator[PaperCell]:
    def expected(numbers: dict[str, list[float]], column: str) -> Number | None:
        if column not in numbers or measure != "best":
            return None
        mean, *deviation = numbers[column]
        return Number(mean, deviation[0] if deviation else None, printed["seeds"])

    own = printed["rows"].get(row, {})
    other = {} if known is None or known.beside is None else printed["rows"].get(known.beside, {})
    reference: list[RunRecord] = []
    for column in dict.fromkeys([*own, *(known.columns if known else ())]):
        found = [] if known is None else _matching(known.run(column).to_dict(), runs, reference)
        reference = reference or found
        numbers = {"paper": expected(own, column), "beside": expected(other, column)}
        yield measured_cell(row, column, found, reference, measure, **numbers)


def _matching(run: dict[str, Any], runs: Iterable[RunRecord], reference: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs of this configuration, the first one of every seed.

    If they are runs on prepared text, all are on that of the ``reference``, or of the first one.
    """
    seeds: dict[int, RunRecord] = {}
    for one in runs:
        if one.method == run["method"] and not differences(one.run.to_dict(), run):
            first = next(iter((*reference, *seeds.values())), one)
            if one.text == first.text:
                seeds.setdefault(one.seed, one)
    return list(seeds.values())


def _metric(cells: Iterable[PaperCell], runs: Iterable[RunRecord], measure: str) -> str:
    """What was measured, where the paper does not say."""
    used = {origin for cell in cells for origin in cell.origins}
    counted = (one.result["metric"] for one in runs if one.origin in used and one.result is not None)
    return ", ".join(dict.fromkeys(f"{measure} {metric}" for metric in counted))


def _left_out(table: str, recipes: dict[str, Recipe], runs: Iterable[RunRecord], used: set[str]) -> Iterator[str]:
    for one in runs:
        own, _, row = one.recipe.partition("@")[0].partition("/")
        if own != table or one.origin in used or row not in recipes:
            continue
        label = f"{one.label} ({one.origin})"
        if one.method not in recipes[row].methods:
            yield f"{label}: the recipe knows no such method"
            continue
        differing = differences(one.run.to_dict(), recipes[row].run(one.method).to_dict())
        otherwise = "no column of the table, or a seed seen before"
        if one.text is not None:
            otherwise += f", or another text ({one.text}) than that of the first run of its row"
        yield f"{label}: {'; '.join(differing) if differing else otherwise}"


def _storage_cells() -> Iterator[PaperCell]:
    """Counted, not measured."""
    keys = ("model", "structure", "shards")
    printed = {tuple(row[key] for key in keys): row for row in paper()["storage"]["rows"]}
    for counted in (row.to_dict() for row in storage.rows()):
        place = tuple(counted[key] for key in keys)
        label = f"{counted['model']} {counted['structure']}, {counted['shards']} device(s)"
        for column in (key for key in counted if key not in keys):
            theirs = printed.get(place)
            expected = None if theirs is None else Number(theirs[column])
            yield PaperCell(label, column, Number(counted[column]), expected)


def mean_of(values: Sequence[float]) -> Number | None:
    return Number(fmean(values), stdev(values) if len(values) > 1 else None, len(values)) if values else None


def results_of(runs: Iterable[RunRecord], key: str) -> list[float]:
    """This number of every result that has it."""
    return [one.result[key] for one in runs if one.result is not None and one.result.get(key) is not None]


def measured_cell(
    row: str,
    column: str,
    found: Sequence[RunRecord],
    reference: Sequence[RunRecord],
    measure: str,
    *,
    paper: Number | None = None,
    beside: Number | None = None,
) -> PaperCell:
    """What these runs of a method come to; times are relative to the runs of the ``reference``."""
    return PaperCell(
        row,
        column,
        mean_of(results_of(found, measure)),
        paper,
        tuple(one.origin for one in found),
        beside=beside,
        tested=mean_of([one.tested for one in found if one.tested is not None]),
        relative_time=relative_time(found, reference, "step_seconds"),
        probing_time=relative_time(found, reference, "probing_step_seconds"),
    )


def relative_time(found: Sequence[RunRecord], reference: Sequence[RunRecord], key: str) -> float | None:
    """The time of a step relative to the reference, where both had the same kind of device to themselves."""
    times, others = results_of(found, key), results_of(reference, "step_seconds")
    runs = [*found, *reference]
    if not times or not others or len({one.device for one in runs}) > 1 or any(one.shared_device for one in runs):
        return None
    return fmean(times) / fmean(others)


def own_table(name: str, runs: Sequence[RunRecord], measure: str) -> PaperTable:
    """The kept runs of an experiment of one's own: no recipe says what belongs to it, so that all of them do.

    One column per method, and one row for all runs or, if a method was run with several settings, for each.
    """
    rows: dict[str, list[RunRecord]] = {}
    for method in dict.fromkeys(run.method for run in runs):
        for setting, found in _by_setting([run for run in runs if run.method == method]).items():
            rows.setdefault(f"{name} {setting}".strip(), []).extend(found)
    cells: list[PaperCell] = []
    for row, own in rows.items():
        methods = grouped(own, lambda run: run.method)
        reference = next(iter(methods.values()))
        cells += [measured_cell(row, method, found, reference, measure) for method, found in methods.items()]
    return PaperTable(name, _metric(cells, runs, measure), cells)


def _by_setting(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """The runs of a method by the settings in which they differ, the first one of every seed."""
    groups: dict[str, dict[int, RunRecord]] = {}
    for run, label in zip(runs, settings_apart([run.run.to_dict() for run in runs]), strict=True):
        groups.setdefault(label, {}).setdefault(run.seed, run)
    return {label: list(own.values()) for label, own in groups.items()}
