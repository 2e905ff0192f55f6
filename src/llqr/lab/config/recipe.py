"""Recipes: everything that decides a training run, in TOML, read strictly and resolved to one `Run` per method.

A recipe names components once (``bases``, ``probes``, ``geometries``) and describes each method as a choice among them,
so that "LLQR+SAM reuses the hyperparameters of its LLQR and SAM components" holds unless the recipe names others. A
recipe may extend another one and differ from it in a few keys; a *variant*, written ``cifar100/resnet18@short``, is a
named set of such differences kept in the recipe itself; ``key=value`` overrides come last.

The built-in recipes are ``<table>/<row>`` with the names of the paper's tables. The options of tasks and data sets are
checked by the types that the tasks declare; no data is read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llqr import method_names
from llqr.lab.config import settings
from llqr.lab.config.layers import names, resolve
from llqr.lab.config.run import Run
from llqr.lab.config.strict import make
from llqr.lab.errors import ConfigurationError
from llqr.lab.names import check_folder_name, check_known, unknown

__all__ = ["Method", "Recipe", "load", "names"]

ALIASES = {name: name.replace("llqr", "llqr-ngd", 1) for name in method_names() if name.startswith("llqr")}
"""Short names of methods: the divergence is ngd unless another one is named."""


def full_name(method: str, known: Iterable[str]) -> str:
    """A method by its own name if it is ``known``, otherwise by the one that a short name stands for."""
    return method if method in known else ALIASES.get(method, method)


@dataclass(frozen=True)
class Method:
    """One method as a choice of components; ``transport`` says whether the metric also acts on the outer update."""

    base: str
    probe: str | None = None
    geometry: str | None = None
    transport: bool = True


@dataclass(frozen=True)
class Recipe:
    """A complete recipe. ``columns`` are the methods of its table; ``methods`` may define more."""

    title: str
    seeds: int
    columns: tuple[str, ...]
    task: settings.Choice
    data: settings.DataChoice
    model: settings.Choice
    training: settings.TrainingSettings
    schedule: settings.LrSchedule
    bases: dict[str, settings.Base]
    methods: dict[str, Method]
    probes: dict[str, settings.Probe] = field(default_factory=dict)
    geometries: dict[str, settings.GeometrySettings] = field(default_factory=dict)
    optimizer: settings.OptimizerSettings = field(default_factory=settings.OptimizerSettings)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    beside: str | None = None
    """The row of the paper's table that this one is shown beside although it is a different experiment."""
    caveat: str = ""
    """How it differs from that experiment; printed with the table."""

    def __post_init__(self) -> None:
        for name in (*self.methods, *self.variants):
            check_folder_name("methods and variants: each", name)
        for name, method in self.methods.items():
            for axis, known in (("base", self.bases), ("probe", self.probes), ("geometry", self.geometries)):
                chosen = getattr(method, axis)
                if chosen is not None:
                    check_known(f"methods.{name}.{axis}", chosen, known)
        strange = [column for column in self.columns if column not in self.methods]
        if strange or not self.columns:
            raise ValueError(f"columns must be some of {', '.join(self.methods)}, got {', '.join(strange) or 'none'}.")
        if not (self.title + self.caveat).isprintable():
            raise ValueError("title and caveat may not have control characters.")
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}.")
        if self.beside is not None and not self.caveat:
            raise ValueError("caveat must say how the row differs from the experiment it is shown beside.")

    def run(self, method: str, asked_by: str = "method") -> Run:
        """What the method of this name means here; ``asked_by`` is the option that named it."""
        name = full_name(method, self.methods)
        if name not in self.methods:
            raise ConfigurationError(unknown(asked_by, method, self.methods))
        chosen = self.methods[name]
        return Run(
            task=self.task,
            data=self.data,
            model=self.model,
            training=self.training,
            schedule=self.schedule,
            method=name,
            base=self.bases[chosen.base],
            probe=None if chosen.probe is None else self.probes[chosen.probe],
            geometry=None if chosen.geometry is None else self.geometries[chosen.geometry],
            transport=chosen.transport,
            optimizer=self.optimizer,
        )

    def listed(self, methods: str | Iterable[str] | None, asked_by: str) -> list[str]:
        """Methods by name, separated by commas or not, each once; None is the columns of the table."""
        if methods is None:
            return list(self.columns)
        names = [method.strip() for method in (methods.split(",") if isinstance(methods, str) else methods)]
        if not any(names):
            raise ConfigurationError(f"{asked_by} must name at least one method, got {methods!r}.")
        # Resolved, so that two names of one method give one run.
        return list(dict.fromkeys(self.run(name, asked_by).method for name in names if name))

    def check(self, where: str) -> None:
        """Refuse names and options that do not exist, before any data is read."""
        run = self.run(self.columns[0])
        run.check(where)  # task, data and model are those of all methods
        for name, geometry in self.geometries.items():
            if not isinstance(geometry.structure, str):  # patterns of the names of this network's parameters
                try:
                    geometry.metric(run.build_without_memory())
                except ValueError as error:
                    raise ConfigurationError(f"{where}: geometries.{name}: {error}.") from error


def build(table: Mapping[str, Any], where: str) -> Recipe:
    """Make a recipe from its merged layers; errors begin with ``where``."""
    made = make(Recipe, table, "", where)
    made.check(where)
    return made


def rows(table: str, variant: str | None = None) -> dict[str, str]:
    """The recipes of a table by row; only those that have the variant, or the first one, which says what it has."""
    known = {name.partition("/")[2]: name for name in names() if name.startswith(f"{table}/")}
    having = {row: name for row, name in known.items() if variant is None or variant in load(name).variants}
    return having or dict(list(known.items())[:1])


def load(name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load the recipe ``name``, ``name@variant``, or of a file, with ``key=value`` overrides applied last."""
    return build(resolve(str(name), overrides), str(name))
