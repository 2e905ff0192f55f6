"""A measurement on disk: what was asked for, on which machine, by which command, and every row."""

import shlex
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from llqr.lab import machine
from llqr.lab.results.measurements import without_places
from llqr.lab.runs.folder import plain, versions, write_json


class Record:
    """Rows as they come in; the file is written anew after each, so that a command cut short leaves what it has.

    ``complete`` says whether all rows are there.
    """

    def __init__(
        self, bench: str, config: Mapping[str, Any], device: torch.device, out: Path | None, **packages: str | None
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._out = out
        self._head = {
            "bench": bench,
            "command": without_places(shlex.join(["llqr", *sys.argv[1:]])),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions() | packages,
            "machine": machine.describe(device),
            "config": dict(config),
        }
        self._complete = False
        self._tail: dict[str, Any] = {}
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)

    def collect(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self.rows.append(row)
            self._write()
        self._complete = True
        self._write()

    def conclude(self, **conclusion: Any) -> None:
        self._tail = conclusion
        self._write()

    def to_dict(self) -> dict[str, Any]:
        return plain(self._head | {"complete": self._complete, "rows": self.rows} | self._tail)

    def _write(self) -> None:
        if self._out is not None:
            write_json(self._out, self.to_dict())
