"""Measurements that are kept: files of JSON lines, one line a run with everything needed to judge it.

They are the only source of the tables that are published. A line holds the resolved configuration, the versions, the
machines and the commands of a run, its result, and the sharpness of its solution if that was measured. Where things lay
on the machine decides nothing and stays out.
"""

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from llqr.lab.config.strict import ConfigurationError
from llqr.lab.errors import DataError
from llqr.lab.runs.folder import flatten, plain
from llqr.lab.runs.logged import LoggedRun

KIND = "run"
ELSEWHERE = "run.data.root"
ABSOLUTE = re.compile(r"""(?:^|(?<==)|(?<==["']))/[^"']*""")


@dataclass(frozen=True)
class Measurement:
    """A line of a file of results."""

    entry: dict[str, Any]
    origin: str
    """File and line."""

    @property
    def recipe(self) -> str:
        return self.entry["recipe"]

    @property
    def method(self) -> str:
        return self.entry["run"]["method"]

    @property
    def seed(self) -> int:
        return self.entry["seed"]

    @property
    def result(self) -> dict[str, Any]:
        return self.entry["result"]

    @property
    def tested(self) -> float | None:
        """The metric on the test set, where the run chose its best weights by a validation set."""
        return self.result.get("test_of_best", {}).get(self.result["metric"])

    @property
    def device(self) -> str:
        """What the times of the run depend on most."""
        return self.entry["machine"].get("gpu") or self.entry["machine"]["device"]

    def differences(self, run: dict[str, Any]) -> list[str]:
        """In what this run's configuration is another one than ``run``; an option left out is one not set."""
        return differences(self.entry["run"], run)


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """``key = theirs, not ours`` for every setting in which two configurations differ."""
    one, other = (dict(flatten({"run": plain(run)})) for run in (theirs, ours))
    keys = sorted(key for key in {*one, *other} - {ELSEWHERE} if not _same(one.get(key), other.get(key)))
    return [f"{key.removeprefix('run.')} = {one.get(key)}, not {other.get(key)}" for key in keys]


def _same(one: Any, other: Any) -> bool:
    return one == other or {str(one), str(other)} <= {"None", "{}"}


def entry_of(run: LoggedRun) -> dict[str, Any]:
    """What is kept of a finished run."""
    if run.result is None:
        raise DataError(f"{run.path} is not finished ({run.state}).")
    config = dict(run.config)
    resolved = dict(config["run"], data={key: value for key, value in config["run"]["data"].items() if key != "root"})
    entry = {"kind": KIND, "recipe": run.recipe, "seed": run.seed, "run": resolved}
    entry |= {key: config[key] for key in ("started", "command", "versions", "machine", "resumed")}
    entry["command"] = without_places(entry["command"])
    entry["resumed"] = [dict(later, command=without_places(later["command"])) for later in entry["resumed"]]
    entry["result"] = run.result
    if run.analysis is not None:
        kept = ("samples", "loss", "sharpness", "engine")
        entry["analysis"] = {key: run.analysis[key] for key in kept}
    return plain(entry)


def without_places(command: str) -> str:
    """A command with absolute paths cut down to their last part, also behind an equals sign."""
    return shlex.join(
        ABSOLUTE.sub(lambda found: PurePosixPath(found.group()).name, word) for word in shlex.split(command)
    )


def add(runs: Iterable[LoggedRun], path: Path) -> tuple[int, int]:
    """Append finished runs to a file; how many were new, and how many were there already.

    A run that is there with another result is refused: one of the two must be deleted by whoever knows which is right.
    """
    kept = {_identity(known.entry): known for known in read_file(path)} if path.exists() else {}
    lines = []
    already = 0
    for run in runs:
        entry = entry_of(run)
        known = kept.get(_identity(entry))
        if known is None:
            lines.append(json.dumps(entry))
        elif known.result == entry["result"]:
            already += 1
        else:
            raise ConfigurationError(
                f"--to: {known.origin} holds another result of {run.recipe} {run.method} seed {run.seed}; delete that "
                "line first if the new one is the right one."
            )
    if lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
    return len(lines), already


def _identity(entry: dict[str, Any]) -> str:
    return json.dumps([entry["recipe"], entry["seed"], entry["run"]], sort_keys=True)


def read(folder: Path) -> list[Measurement]:
    """All measured runs in the ``*.jsonl`` files of a folder; lines of another kind than runs are passed over."""
    return [measurement for path in sorted(folder.glob("*.jsonl")) for measurement in read_file(path)]


def read_file(path: Path) -> list[Measurement]:
    measurements = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        origin = f"{path.name}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise DataError(f"{origin} is damaged: {error}.") from error
        if not isinstance(entry, dict) or "kind" not in entry:
            raise DataError(f"{origin} is no result: it does not say of which kind it is.")
        if entry["kind"] == KIND:
            measurements.append(Measurement(entry, origin))
    return measurements
