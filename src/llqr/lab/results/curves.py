"""Kept curves of runs, finished or not: every evaluation and every refresh, one line of JSON per run."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llqr.lab.errors import DataError
from llqr.lab.results import measurements
from llqr.lab.runs.json_files import CURVE, checked, plain
from llqr.lab.runs.provenance import command, source_state
from llqr.lab.runs.stored import StoredRun
from llqr.lab.writing import make_folder, write_text

if TYPE_CHECKING:
    pass

Line = dict[str, Any]
KIND = "curve"
REFRESH = {
    "refresh_step": "step",
    "refresh_seconds": "seconds",
    "refresh_change": "change",
    "refresh_cosine": "cosine",
    "objective_before": "objective_before",
    "objective_after": "objective_after",
}
"""Columns with one number per refresh, and what its report calls them."""
DIGITS = 6
"""Significant ones, which a curve is kept with."""


def write(runs: Iterable[StoredRun], folder: Path) -> list[Path]:
    """Write the curves of runs to a folder: one file per recipe and seed, which keeps its curves of other runs."""
    files: dict[Path, dict[str, Line]] = {}
    for run in runs:
        path = folder / f"{run.recipe.replace('/', '-')}-seed{run.seed}.jsonl"
        lines = files.setdefault(path, read(path) if path.exists() else {})
        line = line_of(run)
        lines[_identity(line)] = line
    make_folder(folder)
    for path, lines in files.items():
        write_text(path, "".join(f"{json.dumps(line)}\n" for line in lines.values()))
    return list(files)


def read(path: Path) -> dict[str, Line]:
    """The curves of a file by the identity of their runs."""
    found = {}
    for origin, line in measurements.lines_of(path):
        if line["kind"] != KIND:
            raise DataError(f"{origin} is no curve, but a {line['kind']}.")
        found[_identity(line)] = checked(line, CURVE, origin)
    return found


def _identity(line: Line) -> str:
    """As the settings are written, which today's recipes need not know: a log outlives them."""
    return json.dumps([line["recipe"], line["seed"], line["run"]], sort_keys=True)


def line_of(run: StoredRun) -> Line:
    """A run that was evaluated, with its columns: one number per evaluation, then one per refresh."""
    split = "valid" if "valid" in run.records[0] else "test"
    columns = {name: [record[name] for record in run.records] for name in ("epoch", "step")}
    for name in run.records[0][split]:
        columns[f"{split}_loss" if name == "loss" else name] = [record[split][name] for record in run.records]
    columns["train_loss"] = [record["train"]["loss"] for record in run.records]
    columns["train_seconds"] = [record["seconds"]["train"] for record in run.records]
    reports = [report for record in run.records for report in record["refreshes"]]
    for name, key in REFRESH.items():
        if any(key in report for report in reports):  # runs without a metric have none, old ones no change
            columns[name] = [report.get(key) for report in reports]
    made_by = {"command": measurements.without_places(command()), **source_state()}
    line = measurements.head_of(run, KIND) | {"made_by": made_by, "finished": run.result is not None, "split": split}
    rounded = {
        name: [float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value for value in values]
        for name, values in columns.items()
    }
    plain_line: Line = plain(line | rounded)
    return plain_line
