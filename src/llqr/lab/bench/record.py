"""A measurement as a file: every row, with its command, commit and machine."""

from collections.abc import Iterable, Iterator, Mapping
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


def recorded(
    bench: str, config: Mapping[str, Any], device: torch.device, rows: Iterable[Row], out: Path
) -> Iterator[Row]:
    """Rows as they come in; the file is rewritten after each one, so that an interrupted command leaves what it has.

    ``complete`` says whether all rows are there. With those of `scaling` comes the fitted exponent.
    """
    head = {"bench": bench, **made_now(machines.describe(device)), "config": config}
    head["command"] = without_places(head["command"])
    found: list[Row] = []
    for row in rows:
        found.append(row)
        write_json(out, head | {"rows": found, "complete": False})
        yield row
    fitted = scaling.conclusion(found) if bench == "scaling" else {}
    write_json(out, head | {"rows": found, "complete": True} | fitted)
