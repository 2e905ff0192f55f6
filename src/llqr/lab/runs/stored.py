"""Runs read back from their folders."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from llqr.lab.config import recipe
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.json_files import read_json
from llqr.lab.runs.record import RunRecord
from llqr.lab.runs.shapes import ANALYSIS, RECORD, checked

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
