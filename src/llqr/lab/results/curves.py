"""The course of runs, finished or not: every evaluation and every refresh, one line of JSON per run; kept and drawn."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from llqr.lab import pictures
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.grouping import grouped
from llqr.lab.names import check_known
from llqr.lab.results import measurements
from llqr.lab.runs.json_files import CURVE, checked, plain
from llqr.lab.runs.provenance import command, source_state
from llqr.lab.runs.stored import StoredRun, settings_apart
from llqr.lab.writing import make_folder, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


HEIGHT = 1.9
"""Inches per panel."""
CHANGE = "refresh_change"
LONG = 28
"""Characters of a name, of which two do not stand side by side in a legend."""
WIDEST = 70
"""Characters of a legend as wide as the picture."""


def save(files: Sequence[Path], path: Path, methods: Sequence[str] = ()) -> None:
    """Draw the curves of these files, or only those of some methods."""
    lines = [line for file in files for line in read(file).values()]
    known = list(dict.fromkeys(line["run"]["method"] for line in lines))
    for method in methods:
        check_known("--method", method, known)
    chosen = [line for line in lines if line["run"]["method"] in (methods or known)]
    if not chosen:
        raise ConfigurationError("FILES hold no curve.")
    title = ", ".join(_named(chosen, several_recipes=True))
    pictures.save(draw(chosen), path, title, ", ".join(map(pictures.digest, files)))


@pictures.styled
def draw(lines: Sequence[Line]) -> "Figure":
    """One panel per quantity, one line per run, one colour per method and setting."""
    named = _named(lines, several_recipes=len({line["recipe"] for line in lines}) > 1)
    panels = dict(_panels(lines))
    figure, places = pictures.column([HEIGHT] * len(panels))
    for axes, (column, label) in zip(places, panels.items(), strict=True):
        for number, (name, runs) in enumerate(named.items()):
            _lines(axes, column, name, number, [run for run in runs if column in run])
        axes.set_ylabel(pictures.literal(label))
        # Without the first steep quarter, beside which the differences at the end could not be seen.
        late = [value for line in lines if column != CHANGE for value in line[column][len(line[column]) // 4 :]]
        if shown := [value for value in late if value is not None]:
            pictures.focus(axes, shown)
        axes.set_xlim(0, max(line["epoch"][-1] for line in lines))
    places[-1].set_xlabel("epoch")
    pictures.legend_above(figure, places[0], columns=2 if max(map(len, named)) <= LONG else 1)
    stopped = [
        f"{name}, seed {run['seed']}, stopped at epoch {run['epoch'][-1]:g}"
        for name, runs in named.items()
        for run in runs
        if not run["finished"]
    ]
    pictures.note_below(figure, pictures.literal("\n".join(["one line per run", *stopped])))
    return figure


def _named(lines: Sequence[Line], *, several_recipes: bool) -> dict[str, list[Line]]:
    """The curves by what they are called: runs of one name differ in nothing but their seed."""
    groups = grouped(lines, lambda line: (line["recipe"] if several_recipes else "", line["run"]["method"]))
    named: dict[str, list[Line]] = {}
    for recipe_and_method, own in groups.items():
        name = " ".join(filter(None, recipe_and_method))
        for line, setting in zip(own, settings_apart([line["run"] for line in own]), strict=True):
            named.setdefault(f"{name}, {setting}" if setting else name, []).append(line)
    return named


def _panels(lines: Sequence[Line]) -> Iterator[tuple[str, str]]:
    """The columns to draw, and what their axes are called: what is evaluated beside the loss, or else that loss."""
    kinds = {(line["split"], list(line)[list(line).index("step") + 1]) for line in lines}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{split} {column}" for split, column in kinds))
        raise ConfigurationError(f"FILES: the runs were evaluated by {found}; draw them apart.")
    split, evaluated = kinds.pop()
    yield evaluated, f"{split} loss" if evaluated == f"{split}_loss" else f"{split} {evaluated}"
    yield "train_loss", "training loss"
    if any(CHANGE in line for line in lines):
        yield CHANGE, "|Ug - g| / |g|"


def _lines(axes: "Axes", column: str, name: str, number: int, runs: Sequence[Line]) -> None:
    colour, dashes = pictures.look(number)
    for place, run in enumerate(runs):
        steps_per_epoch = run["step"][-1] / run["epoch"][-1]
        x = [step / steps_per_epoch for step in run["refresh_step"]] if column == CHANGE else run["epoch"]
        y = np.array(run[column], dtype=float)  # null, for a number that is not finite, becomes NaN
        label = "_" if place else pictures.literal(fill(name, WIDEST))
        marker = "o" if len(x) == 1 else None
        axes.plot(x, y, color=colour, linestyle=dashes, linewidth=1.1, marker=marker, label=label)
