"""Runs that were made, read back from their folders, and what tells runs of one method apart."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from llqr.lab.config import recipe
from llqr.lab.config.run import Run
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.grouping import grouped
from llqr.lab.runs.folder import RunFolder, text_of
from llqr.lab.runs.json_files import ANALYSIS, RECORD, checked, content, flatten, plain, read_json

LAST = sys.maxsize
IDENTITY = ("data.root", "method")
"""Settings in which runs of the same kind may differ."""


@dataclass(frozen=True)
class RunRecord:
    """What was asked for and what came of it: ``result`` is None until the run is finished.

    ``config`` has the fields of a ``config.json``; ``analysis`` is what was measured of the solution, if anything.
    ``origin`` says where the run was read: a folder, or a file and its line.
    """

    config: dict[str, Any]
    result: dict[str, Any] | None
    analysis: dict[str, Any] | None
    origin: str

    @property
    def recipe(self) -> str:
        return str(self.config["recipe"])

    @property
    def method(self) -> str:
        return str(self.config["run"]["method"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @cached_property
    def run(self) -> Run:
        """The run that was made. Options that are newer than it have their defaults, which change nothing."""
        return Run.from_dict(self.config["run"], self.origin)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings with today's defaults for options that are newer than the run, where they can still be read."""
        try:
            return self.run.to_dict()
        except ConfigurationError:
            return dict(self.config["run"])

    @property
    def label(self) -> str:
        return f"{self.recipe} {self.method} seed {self.seed}"

    @property
    def tested(self) -> float | None:
        """The metric on the test set, where the run chose its best weights by a validation set."""
        if self.result is None or "test_of_best" not in self.result:
            return None
        return float(self.result["test_of_best"][self.result["metric"]])

    @property
    def loss(self) -> float | None:
        """The loss of the last evaluation, on the data that the metric was measured on."""
        result = self.result or {}
        found = result.get(result.get("split", "test"), {}).get("loss")
        return None if found is None else float(found)

    @property
    def text(self) -> str | None:
        """The key of the prepared text that a finished run was made with; None for other data."""
        return text_of(self.result)

    @property
    def device(self) -> str:
        """What the times of the run depend on most."""
        machine = self.config["machine"]
        return str(machine.get("gpu") or machine["device"])

    @property
    def shared_device(self) -> bool:
        """Whether other programs used the device, also after a resume, so that the times of the run mean nothing."""
        return any(made["machine"].get("shared") for made in (self.config, *self.config["resumed"]))

    @property
    def counted_in(self) -> str:
        """The unit of progress: ``step`` where the recipe counts in steps, otherwise ``epoch``."""
        training = self.config["run"]["training"]
        return "step" if training.get("steps") or training.get("evaluate_every") else "epoch"


@dataclass(frozen=True)
class StoredRun(RunRecord):
    """A run with its folder and its log, which a line of a file of results does not have."""

    path: Path
    records: list[dict[str, Any]]

    def __repr__(self) -> str:
        """One line: a notebook shows lists of runs, and the log of one fills pages."""
        return f"StoredRun('{self.path}', {self.state})"

    def renamed(self, method: str) -> "StoredRun":
        """The same run under another name of its method."""
        config = self.config | {"run": self.config["run"] | {"method": method}}
        return replace(self, config=config, result=None if self.result is None else self.result | {"method": method})

    @property
    def state(self) -> str:
        if self.result is not None:
            return "finished"
        training = self.config["run"]["training"]
        unit, total = ("step", training["steps"]) if training.get("steps") else ("epoch", training["epochs"])
        return f"{unit} {self.records[-1][unit] if self.records else 0:g} of {total}"


def find(paths: Iterable[Path]) -> list[StoredRun]:
    """The runs in these folders and below them, each once: by recipe, then by method in the order of the table."""
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} is not there.")
        below = sorted(config.parent for config in path.rglob("config.json"))
        if not below:
            raise DataError(f"{path} holds no run: there is no config.json in it or below it.")
        folders |= dict.fromkeys(below)
    runs = [read(folder) for folder in folders]
    return sorted(
        runs, key=lambda run: (run.recipe, _places(run.recipe).get(run.method, LAST), run.config["started"], run.seed)
    )


def read(folder: Path) -> StoredRun:
    """The run in this folder."""
    files = RunFolder(folder)
    result = files.result()
    file = folder / "analysis.json"
    analysis = read_json(file, ANALYSIS) if file.exists() else None
    records = list(_records(folder / "log.jsonl", finished=result is not None))
    return StoredRun(files.config(), result, analysis, str(folder), folder, records)


def _records(path: Path, finished: bool) -> Iterator[dict[str, Any]]:
    lines = content(path).splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (RecursionError, ValueError) as error:
            if number == len(lines) and not finished:
                return  # cut off when the run was killed
            raise DataError(f"{path}, line {number} is damaged: {error}.") from error
        yield checked(record, RECORD, f"{path}, line {number}")


@cache
def _places(name: str) -> dict[str, int]:
    """The methods of a built-in recipe, those of its table first; those of others are sorted by when they started."""
    try:
        known = recipe.load(name)
    except ConfigurationError:
        return {}
    return {method: place for place, method in enumerate(dict.fromkeys([*known.columns, *known.methods]))}


def settings_apart(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of these configurations, the settings in which they differ, as ``key=value``; empty if in none."""
    settings = [dict(flatten(plain(run))) for run in runs]
    keys = dict.fromkeys(key for own in settings for key in own if key not in IDENTITY)
    differing = [key for key in keys if len({str(own.get(key)) for own in settings}) > 1]
    return [", ".join(f"{key.removeprefix('task.options.')}={own.get(key)}" for key in differing) for own in settings]


def told_apart(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], list[StoredRun]]:
    """Rename methods by what tells their runs apart, so that only seeds are averaged; return also the runs left out.

    Of a run that several folders hold, one counts: a seed that counts twice makes a deviation too small.
    """
    counted: dict[tuple[str, str, int], StoredRun] = {}
    for name, own in grouped(runs, lambda run: run.recipe).items():
        texts = len({run.text for run in own} - {None})
        for method, its in grouped(own, lambda run: run.method).items():
            for run, setting in zip(its, settings_apart([run.settings for run in its]), strict=True):
                # Two methods on two texts differ in more than the method, which their settings do not show.
                text = f"text={run.text or 'unknown'}" if texts > 1 else ""
                place = (name, ", ".join(part for part in (method, setting, text) if part), run.seed)
                if place not in counted or (counted[place].result is None and run.result is not None):
                    counted[place] = run
    labels = {run.path: label for (_, label, _), run in counted.items()}
    kept = [run.renamed(labels[run.path]) for run in runs if run.path in labels]
    return kept, [run for run in runs if run.path not in labels]
