"""Tables on a page: a recorded measurement as Markdown."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llqr.lab.bench import cadence, memory, peers, refresh, scaling, shards, solvers, step
from llqr.lab.errors import ConfigurationError

TABLES = {
    module.__name__.rpartition(".")[2]: module.as_table
    for module in (cadence, memory, peers, refresh, scaling, shards, solvers, step)
}


def markdown(file: Path, filters: Sequence[str] = ()) -> str:
    """The table that the command printed, with the rows that match every ``key=value``, and where it comes from."""
    if not file.is_file():
        raise ConfigurationError(f"table:bench/{file.stem}: {file} does not exist.")
    record = json.loads(file.read_text())
    if not record["complete"]:
        raise ConfigurationError(f"table:bench/{file.stem}: the command was interrupted.")
    rows = [row for row in record["rows"] if all(_matches(row, wanted) for wanted in filters)]
    if not rows:
        raise ConfigurationError(f"table:bench/{file.stem}: no row matches {' '.join(filters)}.")
    table = TABLES[record["bench"]](rows)
    lines = [" | ".join(str(column.header) for column in table.columns)]
    lines += [" | ".join({"left": ":--", "right": "--:"}[column.justify] for column in table.columns)]
    lines += [" | ".join(map(str, cells)) for cells in zip(*(column.cells for column in table.columns), strict=True)]
    versions, machine = record["versions"], record["machine"]
    place = machine.get("gpu") or f"{machine['cpus']} CPU cores"
    # Files from before commits were recorded say null.
    commit = f", commit {record['commit'][:12]}" if record.get("commit") else ""
    changed = ", changed" if commit and record["dirty"] else ""
    source = f"`{record['command']}` on {place}, torch {versions['torch']}{commit}{changed}."
    return "\n".join([*(f"| {line} |" for line in lines), "", source])


def _matches(row: dict[str, Any], wanted: str) -> bool:
    """Rows without the key match too: methods without a metric have no interval."""
    key, _, value = wanted.partition("=")
    return row.get(key) is None or str(row[key]) == value
