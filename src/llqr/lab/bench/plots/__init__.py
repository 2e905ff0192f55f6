"""Pictures of measurements: `llqr bench COMMAND --plot FILE`, and `llqr bench plot` for recorded ones."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llqr.lab import pictures
from llqr.lab.bench.plots.bars import memory, peers, refresh, step
from llqr.lab.bench.plots.lines import cadence, scaling, shards, solvers
from llqr.lab.bench.record import Rows, measured_on
from llqr.lab.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWINGS: "dict[str, tuple[Callable[[Rows], Figure], str]]" = {
    "cadence": (cadence, "Epoch time relative to SAM, by refresh interval"),
    "memory": (memory, "Most memory that a step and a refresh hold"),
    "peers": (peers, "Our steps compared with those of pytorch_optimizer"),
    "refresh": (refresh, "Time of a refresh, and error of what it learns"),
    "scaling": (scaling, "Time of a refresh by the number of parameters"),
    "shards": (shards, "Memory and traffic of a metric that ranks share"),
    "solvers": (solvers, "Objective of a refresh by the number of products with H"),
    "step": (step, "Time of a step relative to SGD"),
}
"""By bench: what draws it, and its title."""


def save(record: Mapping[str, Any], path: Path, source: str = "") -> None:
    """Draw the rows of a record, in the form it has on disk, with the machine they were measured on."""
    draw, title = DRAWINGS[record["bench"]]
    figure = draw(record["rows"])
    pictures.note_below(figure, measured_on(record))
    pictures.save(figure, path, title, source)


def save_recorded(file: Path, path: Path) -> None:
    """Draw a measurement that a command recorded with ``--out``."""
    try:
        record = json.loads(file.read_text())
        complete, bench = record["complete"], record["bench"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{file} is no file that `llqr bench --out` wrote.") from error
    if not complete or bench not in DRAWINGS:
        raise ConfigurationError(f"{file}: {'nothing draws ' + bench if complete else 'the command was interrupted'}.")
    save(record, path, pictures.digest(file))
