"""Runs that were made: wherever they were read from, and with what their folders hold."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from llqr.lab.config import recipe
from llqr.lab.config.run import Run
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.json_files import read_json
from llqr.lab.runs.shapes import ANALYSIS, RECORD, checked


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
    def device(self) -> str:
        """What the times of the run depend on most."""
        machine = self.config["machine"]
        return str(machine.get("gpu") or machine["device"])

    @property
    def counted_in(self) -> str:
        """The unit of progress: ``step`` where the recipe counts in steps, otherwise ``epoch``."""
        training = self.config["run"]["training"]
        return "step" if training.get("steps") or training.get("evaluate_every") else "epoch"


LAST = sys.maxsize


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
    analysis = folder / "analysis.json"
    return StoredRun(
        files.config(),
        result,
        checked(read_json(analysis), ANALYSIS, str(analysis)) if analysis.exists() else None,
        str(folder),
        folder,
        list(_records(folder / "log.jsonl", finished=result is not None)),
    )


def _records(path: Path, finished: bool) -> Iterator[dict[str, Any]]:
    lines = path.read_bytes().splitlines() if path.exists() else []
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
