"""The runs of one recipe as all parts of the report use them: grouped, linked, with numbers that name their files.

Metric names come from the runs: the report does not depend on the task.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llqr.lab import pictures
from llqr.lab.errors import ConfigurationError
from llqr.lab.grouping import grouped
from llqr.lab.report.html_table import HtmlTable, Sourced
from llqr.lab.report.plots import Look, Plot
from llqr.lab.runs.stored import StoredRun

SPLITS = ("valid", "test")
"""A record has the numbers of one of them."""


@dataclass(frozen=True)
class Part:
    """A heading and what stands below it; ``folded`` tables are collapsed until they are clicked."""

    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[HtmlTable] = ()
    plots: Sequence[Plot] = ()
    legend: dict[str, Look] = field(default_factory=dict)
    folded: Sequence[tuple[str, HtmlTable]] = ()
    listings: Sequence[str] = ()


class Section:
    """The runs of one recipe, in the order in which methods are shown; times are compared with those of the first.

    The folder ``home`` holds the page: links are relative to it. ``notes`` say what could not be measured, by the path
    of a run, which may be another recipe's. ``repeated`` runs are those that others stand for.
    """

    def __init__(
        self, name: str, runs: Sequence[StoredRun], home: Path, notes: dict[Path, str], repeated: Sequence[StoredRun]
    ) -> None:
        if len(kinds := {_evaluated_by(run.records[0]) for run in runs if run.records}) > 1:
            found = " and ".join(sorted(kinds))
            raise ConfigurationError(f"RUNS: those of {name} were evaluated by {found}; report on them apart.")
        self.name = name
        self.anchor = anchor(name)
        self.runs = runs
        self.home = home
        self.notes = {run.path: notes[run.path] for run in runs if run.path in notes}
        self.methods = list(dict.fromkeys(run.method for run in runs))
        self.looks = {method: Look(*pictures.look(number)) for number, method in enumerate(self.methods)}
        self.repeated = [run for run in repeated if run.recipe == name]
        self.finished = [run for run in runs if run.result is not None]
        self.measured = [run for run in runs if run.analysis is not None]
        self.axis = "step" if any(run.counted_in == "step" for run in runs) else "epoch"
        self.title = result_of(self.finished[0])["title"] if self.finished else name

    def by_method(self, runs: Iterable[StoredRun]) -> list[tuple[str, list[StoredRun]]]:
        """The runs of each method, for the methods that have any."""
        groups = grouped(runs, lambda run: run.method)
        return [(method, groups[method]) for method in self.methods if method in groups]

    def results(self, method: str, *keys: str) -> list[Sourced]:
        """One number of the results, for every finished run of a method."""
        return [self.result(run, *keys) for run in self.finished if run.method == method]

    def result(self, run: StoredRun, *keys: str) -> Sourced:
        value = _at(run.result, keys)
        number = float("nan") if value is None else value  # JSON has no NaN and no infinity
        return Sourced(number, self.link(run, "result.json"), ".".join(keys))

    def analyses(self, runs: Iterable[StoredRun], *keys: str) -> list[Sourced]:
        """One number of the analyses, for those of these runs that have it."""
        found = [(self.link(run, "analysis.json"), _at(run.analysis, keys)) for run in runs]
        return [Sourced(value, file, ".".join(keys)) for file, value in found if value is not None]

    def rows_of(self, method: str) -> str:
        """The anchor on the page where the runs of a method are listed."""
        return f"runs-{self.anchor}-{anchor(method)}"

    def link(self, run: StoredRun, file: str = "") -> str:
        """The path of a file of a run, relative to the page, quoted: a name may look like an address."""
        return quote(Path(os.path.relpath(run.path / file, self.home)).as_posix(), safe="/+@=,")

    def files(self, runs: Iterable[StoredRun], file: str) -> str:
        return "\n".join(self.link(run, file) for run in runs)


def result_of(run: StoredRun) -> dict[str, Any]:
    """The result of a finished run."""
    assert run.result is not None
    return run.result


def analysis_of(run: StoredRun) -> dict[str, Any]:
    """The analysis of a measured run."""
    assert run.analysis is not None
    return run.analysis


def sources(file: str, runs: Sequence[StoredRun]) -> str:
    return f"From {file} of {len(runs)} {'run' if len(runs) == 1 else 'runs'}."


def anchor(name: str) -> str:
    return re.sub(r"[\W_]+", "-", name).strip("-")


def _evaluated_by(record: dict[str, Any]) -> str:
    """The split and the metric, which is the first of its numbers."""
    split = next(name for name in SPLITS if name in record)
    return f"{split} {next(iter(record[split]))}"


def _at(table: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        if table is None:
            return None
        table = table[key]
    return table
