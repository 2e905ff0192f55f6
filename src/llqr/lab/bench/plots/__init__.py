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

TITLES = {
    "cadence": "Epoch time relative to SAM, by refresh interval",
    "memory": "Most memory that a step and a refresh hold",
    "peers": "Our steps compared with those of pytorch_optimizer",
    "refresh": "Time of a refresh, and error of what it learns",
    "scaling": "Time of a refresh by the number of parameters",
    "shards": "Memory and traffic of a metric that ranks share",
    "solvers": "Objective of a refresh by the number of products with H",
    "step": "Time of a step relative to SGD",
}
DRAWINGS: "dict[str, Callable[[Rows], Figure]]" = {
    draw.__name__: draw for draw in (cadence, memory, peers, refresh, scaling, shards, solvers, step)
}


def save(record: Mapping[str, Any], path: Path, source: str = "") -> None:
    """Draw the rows of a record, in the form it has on disk, with the machine they were measured on."""
    figure = DRAWINGS[record["bench"]](record["rows"])
    pictures.note_below(figure, measured_on(record))
    pictures.save(figure, path, TITLES[record["bench"]], source)


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
