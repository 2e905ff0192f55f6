"""A run on disk: one folder with its configuration, a log of its evaluations, its latest state and its result.

``config.json``    the resolved configuration; command, commit, versions and machine, also those of every resume
``log.jsonl``      one line per evaluation, which is once per epoch unless the recipe says otherwise
``checkpoint.pt``  the latest state: the same command resumes from it, and it holds the trained network at the end
``best.pt``        the weights with the best metric on the validation set, of tasks that have one
``result.json``    written last: a run is finished when this file exists
``output.log``     what the process of the run printed, where `--jobs` gave it one
``.lock``          held by the process that works on the run, and free when that process is gone, however it ended
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from llqr.lab.config.run import Run
from llqr.lab.errors import ConfigurationError
from llqr.lab.runs.json_files import CONFIG, RESULT, flatten, plain, read_json, write_json
from llqr.lab.runs.planned import PlannedRun
from llqr.lab.runs.provenance import made_now
from llqr.lab.writing import explained, make_folder, write_text


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.pt"
        self.best = path / "best.pt"
        self.log = Log(path / "log.jsonl")
        self.output = path / "output.log"

    def check(self, planned: PlannedRun) -> None:
        """Refuse a folder that holds another run than the planned one."""
        if not (self.path / "config.json").exists():
            return
        ours = plain(planned.to_dict())
        theirs = dict(flatten({key: value for key, value in self.config().items() if key in ours}))
        ours = dict(flatten(ours))
        # Where the data are does not matter: a run may be resumed on another machine.
        differing = [key for key in sorted({*theirs, *ours} - {"run.data.root"}) if theirs.get(key) != ours.get(key)]
        found = [f"with {key} = {theirs.get(key)}, not {ours.get(key)}" for key in differing]
        text, now = text_of(self.result()), planned.run.task_type.prepared_key(planned.run)
        if now is not None and text not in (now, None):
            found.append(f"of {planned.recipe} on another text")
        if found:
            raise ConfigurationError(
                f"--out: {self.path} holds a run {found[0]}; choose another folder or delete that one."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from working on this run at the same time; refuse files that are really elsewhere."""
        make_folder(self.path)
        for entry in self.path.iterdir():
            if entry.is_symlink():
                raise ConfigurationError(f"--out: {entry} is a link, which a run does not follow; remove it.")
        try:
            lock = FileLock(self.path / ".lock").acquire(timeout=0)
        except Timeout as error:
            raise ConfigurationError(
                f"--out: {self.path} is in use by another process; wait until that ends or choose another folder."
            ) from error
        with lock:
            for part in self.path.glob(".*.part"):  # of a process that was killed
                part.unlink(missing_ok=True)
            yield

    def begin(self, planned: PlannedRun, machine: Mapping[str, Any]) -> None:
        """Write down what is about to happen; a later command on the same run is added to the first one."""
        now = made_now(machine)
        if (self.path / "config.json").exists():
            config = self.config()
            config["resumed"].append(now)
        else:
            config = planned.to_dict() | now | {"resumed": []}
        write_json(self.path / "config.json", config)

    def config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json", CONFIG)

    def run(self) -> Run:
        """The run that the configuration describes."""
        return Run.from_dict(self.config()["run"], "config.json")

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run."""
        path = self.path / "result.json"
        return read_json(path, RESULT) if path.exists() else None

    def last_output(self) -> str:
        """The last line that the process of the run printed: of one that failed, the reason."""
        lines = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        return lines[-1].removeprefix("llqr: ") if lines else ""

    def finish(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Write the result down; it is returned as it will be read back."""
        written: dict[str, Any] = plain(result)
        write_json(self.path / "result.json", written)
        return written


class Log:
    """Records in a file of JSON lines; after a resume it holds the records of the checkpoint and no others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []

    def restore(self, records: list[dict[str, Any]]) -> None:
        self.records = list(records)
        write_text(self.path, "".join(f"{json.dumps(record)}\n" for record in self.records))

    def append(self, record: Mapping[str, Any]) -> None:
        self.records.append(plain(record))
        with explained(self.path), self.path.open("a") as file:
            file.write(f"{json.dumps(self.records[-1])}\n")


def text_of(result: Mapping[str, Any] | None) -> str | None:
    """The key of the prepared text in a result, see `llqr.lab.text.prepared_folder`."""
    key: str | None = (result or {}).get("text", {}).get("key")
    return key
