"""A run on disk: one folder with what was asked for, what happened in every epoch, where it stands, and its result.

``config.json``    the resolved configuration, versions, machine and command, and those of every later command
``log.jsonl``      one line an evaluation, which is once an epoch unless the recipe says otherwise
``checkpoint.pt``  the latest state; what the same command goes on from, and the trained network when it is done
``best.pt``        the weights with the best metric on the validation set, of tasks that have one
``result.json``    written last: a run is finished when it is there
"""

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import llqr
from llqr.lab.errors import DataError
from llqr.lab.config.recipe import Recipe, Run
from llqr.lab.config.strict import ConfigurationError


@dataclass(frozen=True)
class Plan:
    """A run that is to be made: a method of a recipe, a seed, and the folder its files go to."""

    name: str
    recipe: Recipe
    run: Run
    seed: int
    folder: Path

    @property
    def label(self) -> str:
        return f"{self.name} {self.run.method} seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """What was asked for, as it is written down."""
        return plain({"recipe": self.name, "seed": self.seed, "run": self.run.to_dict()})


def plans(name: str, recipe: Recipe, methods: list[str], seeds: list[int], out: Path) -> list[Plan]:
    """Every method with every seed, the seeds outermost: a comparison cut short is fair to all methods."""
    runs = [recipe.run(method) for method in methods]
    return [Plan(name, recipe, run, seed, out / name / run.method / f"seed{seed}") for seed in seeds for run in runs]


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.pt"
        self.best = path / "best.pt"
        self.log = Log(path / "log.jsonl")

    def check(self, plan: Plan) -> None:
        """Refuse a folder that holds another run than the planned one."""
        if not (self.path / "config.json").exists():
            return
        ours = plan.to_dict()
        theirs = {key: value for key, value in self.config().items() if key in ours}
        theirs, ours = dict(flatten(theirs)), dict(flatten(ours))
        # Where the data lies decides nothing: a run may go on on another machine.
        for key in sorted({*theirs, *ours} - {"run.data.root"}):
            if theirs.get(key) != ours.get(key):
                raise ConfigurationError(
                    f"--out: {self.path} holds a run with {key} = {theirs.get(key)}, not {ours.get(key)}; "
                    "choose another folder or delete that one."
                )

    def begin(self, plan: Plan, facts: Mapping[str, Any]) -> None:
        """Write down what is about to happen; a later command on the same run is added to the first one."""
        self.path.mkdir(parents=True, exist_ok=True)
        now = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["llqr", *sys.argv[1:]]),
            "versions": versions(),
            "machine": dict(facts),
        }
        if (self.path / "config.json").exists():
            config = self.config()
            config["resumed"].append(now)
        else:
            config = plan.to_dict() | now | {"resumed": []}
        write_json(self.path / "config.json", config)

    def config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run."""
        path = self.path / "result.json"
        return read_json(path) if path.exists() else None

    def finish(self, result: Mapping[str, Any]) -> None:
        write_json(self.path / "result.json", result)


class Log:
    """Records in a file of JSON lines; after a resume the file holds what the checkpoint knows, no more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []

    def restore(self, records: list[dict[str, Any]]) -> None:
        self.records = list(records)
        write_text(self.path, "".join(f"{json.dumps(record)}\n" for record in self.records))

    def append(self, record: Mapping[str, Any]) -> None:
        self.records.append(plain(record))
        with self.path.open("a") as file:
            file.write(f"{json.dumps(self.records[-1])}\n")


def versions() -> dict[str, str | None]:
    return {
        "llqr": llqr.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def plain(value: Any) -> Any:
    """What JSON can hold, exactly as it will be read back; a number that is none becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted keys."""
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from flatten(entry, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}.") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(plain(value), indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """In one step, so that a reader never sees half a file."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)
