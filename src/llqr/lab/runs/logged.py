"""Runs read back from their folders."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llqr.lab.config import recipe
from llqr.lab.errors import DataError
from llqr.lab.runs.folder import RunFolder, read_json
from llqr.lab.config.strict import ConfigurationError


@dataclass(frozen=True)
class LoggedRun:
    """What the files of a run say: ``result`` is None until it is finished, ``analysis`` until it is measured."""

    path: Path
    config: dict[str, Any]
    records: list[dict[str, Any]]
    result: dict[str, Any] | None
    analysis: dict[str, Any] | None

    @property
    def recipe(self) -> str:
        return self.config["recipe"]

    @property
    def method(self) -> str:
        return self.config["run"]["method"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def counted_in(self) -> str:
        """What tells how far the run is: ``step`` where the recipe counts in steps, otherwise ``epoch``."""
        training = self.config["run"]["training"]
        return "step" if training.get("steps") or training.get("evaluate_every") else "epoch"

    @property
    def state(self) -> str:
        if self.result is not None:
            return "finished"
        training = self.config["run"]["training"]
        unit, total = ("step", training["steps"]) if training.get("steps") else ("epoch", training["epochs"])
        return f"{unit} {self.records[-1][unit] if self.records else 0:g} of {total}"


def find(paths: Iterable[Path]) -> list[LoggedRun]:
    """The runs in these folders and below them, each once: recipe by recipe, methods in the order of the table."""
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} is not there.")
        below = sorted(config.parent for config in path.rglob("config.json"))
        if not below:
            raise DataError(f"{path} holds no run: there is no config.json in it or below it.")
        folders |= dict.fromkeys(below)
    runs = [read(folder) for folder in folders]
    return sorted(runs, key=lambda run: (run.recipe, _rank(run.recipe, run.method), run.config["started"], run.seed))


def read(folder: Path) -> LoggedRun:
    """The run in this folder."""
    files = RunFolder(folder)
    result = files.result()
    analysis = folder / "analysis.json"
    return LoggedRun(
        folder,
        files.config(),
        list(_records(folder / "log.jsonl", finished=result is not None)),
        result,
        read_json(analysis) if analysis.exists() else None,
    )


def _records(path: Path, finished: bool) -> Iterator[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            if number == len(lines) and not finished:
                return  # cut off by the kill that ended the run
            raise DataError(f"{path}, line {number} is damaged: {error}.") from error


@cache
def _order(name: str) -> tuple[str, ...]:
    """The methods of a built-in recipe, those of its table first."""
    try:
        known = recipe.load(name)
    except ConfigurationError:
        return ()
    return tuple(dict.fromkeys([*known.columns, *known.methods]))


def _rank(name: str, method: str) -> int:
    """Where a method stands in its table; methods of other recipes go by when they were started."""
    order = _order(name)
    return order.index(method) if method in order else len(order)
