"""The kept runs of an experiment of one's own as a table: no recipe says what belongs to it, so that all of them do."""

from collections.abc import Iterator, Sequence

from llqr.lab.grouping import grouped
from llqr.lab.results.averages import measured_cell
from llqr.lab.results.paper_table import PaperCell, PaperTable
from llqr.lab.runs.apart import settings_apart
from llqr.lab.runs.record import RunRecord


def own_table(name: str, runs: Sequence[RunRecord], measure: str) -> PaperTable:
    """One column per method, and one row for all runs or, if a method was run with several settings, for each."""
    rows: dict[str, list[RunRecord]] = {}
    for method in dict.fromkeys(run.method for run in runs):
        for setting, found in _by_setting([run for run in runs if run.method == method]).items():
            rows.setdefault(f"{name} {setting}".strip(), []).extend(found)
    metrics = dict.fromkeys(f"{measure} {one.result['metric']}" for one in runs if one.result is not None)
    cells = [cell for row, own in rows.items() for cell in _cells(row, own, measure)]
    return PaperTable(name, ", ".join(metrics), cells)


def _cells(row: str, runs: Sequence[RunRecord], measure: str) -> Iterator[PaperCell]:
    methods = grouped(runs, lambda run: run.method)
    reference = next(iter(methods.values()))
    for method, found in methods.items():
        yield measured_cell(row, method, found, reference, measure)


def _by_setting(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """The runs of a method by the settings in which they differ, the first one of every seed."""
    groups: dict[str, dict[int, RunRecord]] = {}
    for run, label in zip(runs, settings_apart([run.run.to_dict() for run in runs]), strict=True):
        groups.setdefault(label, {}).setdefault(run.seed, run)
    return {label: list(own.values()) for label, own in groups.items()}
