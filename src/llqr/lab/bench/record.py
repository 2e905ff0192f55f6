"""A measurement as a file: every row, with its command, commit and machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from llqr.lab import machine as machines
from llqr.lab.bench import cadence, host, memory, peers, refresh, scaling
from llqr.lab.results.measurements import without_places
from llqr.lab.runs.json_files import write_json
from llqr.lab.runs.provenance import made_now

Row = dict[str, Any]
BENCHES = {module.__name__.rpartition(".")[2]: module for module in (cadence, host, memory, peers, refresh, scaling)}


class Record:
    """Rows as they come in; the file is rewritten after each one, so that an interrupted command leaves what it has.

    ``complete`` says whether all rows are there.
    """

    def __init__(self, bench: str, config: Mapping[str, Any], device: torch.device, out: Path | None) -> None:
        self.rows: list[Row] = []
        self._out = out
        self._head = {"bench": bench, **made_now(machines.describe(device)), "config": dict(config)}
        self._head["command"] = without_places(self._head["command"])

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._write(complete=False)

    def finish(self) -> None:
        """Write down that this is all, and for `scaling` the fitted exponent."""
        fitted = scaling.conclusion(self.rows) if self._head["bench"] == "scaling" else {}
        self._write(complete=True, **fitted)

    def _write(self, **end: Any) -> None:
        if self._out is not None:
            write_json(self._out, self._head | {"rows": self.rows} | end)
