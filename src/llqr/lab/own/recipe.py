"""A user's experiment as a recipe: the settings it gives, over defaults, under those of the command line."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from llqr.lab.config.layers import merge, origin_in, parse_override
from llqr.lab.config.recipe import Recipe
from llqr.lab.config.strict import make
from llqr.lab.errors import ConfigurationError
from llqr.lab.names import check_folder_name, unknown
from llqr.lab.tasks.own.batches import Samples, length, rows, understood
from llqr.lab.tasks.own.experiment import Experiment
from llqr.probes import PROBES

BATCH_SIZE = 128
REFRESHES = 20
"""How often a metric is learned in a run that is too short for a refresh every 500 steps."""
BASES: dict[str, dict[str, Any]] = {
    "sgdm": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
    "adam": {"name": "adam", "lr": 1e-3, "weight_decay": 0.0},
    "adamw": {"name": "adamw", "lr": 1e-3, "weight_decay": 1e-2},
}
RADII: dict[str, dict[str, Any]] = {
    "sam": {"rho": 0.05},
    "asam": {"rho": 0.5, "eta": 0.01},
    "fishersam": {"rho": 0.1, "eta": 0.1},
    "fsam": {"rho": 0.05, "lam": 0.9},
}
"""The defaults of the library's methods."""
GEOMETRIES: dict[str, dict[str, Any]] = {"ngd": {"ema": 0.95}, "newton": {"ema": 0.9}}


Override = str | tuple[str, Any]
"""A setting and its value: ``key=value`` as on the command line, or both by themselves."""


def layer(override: Override) -> dict[str, Any]:
    """A setting as nested tables."""
    if isinstance(override, str):
        return parse_override(override)
    key, table = override
    for part in reversed(key.split(".")):
        table = {part: table}
    return dict(table)


def defaults(base: str) -> dict[str, Any]:
    """Every method of the library over this base optimizer."""
    if base not in BASES:
        raise ConfigurationError(unknown("base", base, BASES))
    methods: dict[str, Any] = {name: {"base": name} for name in BASES}
    methods |= {probe: {"base": base, "probe": probe} for probe in PROBES}
    for geometry in GEOMETRIES:
        learned = {"base": base, "geometry": geometry}
        methods[f"llqr-{geometry}"] = learned
        for probe in PROBES:
            methods[f"llqr-{geometry}+{probe}"] = learned | {"probe": probe}
            methods[f"llqr-{geometry}-probe-only+{probe}"] = learned | {"probe": probe, "transport": False}
    inner = {"product_every": 3}  # as a `Geometry` has it by default
    metric = {"structure": "e-kfac", "inner": inner}
    return {
        "seeds": 3,
        "columns": [base, "sam", "llqr-ngd+sam"],
        "training": {"epochs": 30, "last": "fill"},
        "schedule": {"name": "cosine"},
        "bases": {name: dict(settings) for name, settings in BASES.items()},
        "probes": {probe: {"kind": probe} | RADII[probe] for probe in PROBES},
        "geometries": {name: metric | {"divergence": name} | own for name, own in GEOMETRIES.items()},
        "methods": methods,
    }


def recipe(experiment: Experiment, label: str, parts: Mapping[str, Any], overrides: Iterable[Override] = ()) -> Recipe:
    """The recipe of an experiment, filed under ``label``.

    ``parts`` are its tables of task, data and model, see `parts_of`; ``overrides`` are those of ``--set``.
    """
    check_folder_name("name", label)
    table: dict[str, Any] = defaults(experiment.base)
    origins: dict[str, str] = {}
    merge(table, _given(experiment, label) | dict(parts), label, origins)
    for override in (*experiment.settings.items(), *overrides):
        merge(table, layer(override), f"--set {override if isinstance(override, str) else override[0]}", origins)

    origin = origin_in(origins, label)
    for name, part in parts.items():
        if table[name] != part:
            raise ConfigurationError(f"{origin(name)}: {name} is what the experiment gives; change it there.")
    _fill_in(table, experiment)
    made = make(Recipe, table, "", origin)
    made.check(origin)
    return made


def parts_of(experiment: Experiment, label: str, source: str, digest: str) -> dict[str, Any]:
    """Task, data and model of an experiment that a source gives."""
    model = experiment.model
    of_class = type(model).__name__
    return {
        "task": {"name": "own", "options": {"digest": digest}},
        "data": {"name": label, "root": source},
        "model": {"name": of_class if isinstance(model, nn.Module) else str(getattr(model, "__name__", of_class))},
    }


def _given(experiment: Experiment, label: str) -> dict[str, Any]:
    """The settings that the experiment itself decides."""
    drops = isinstance(experiment.train, DataLoader) and experiment.train.drop_last
    last = "drop" if drops else None
    table: dict[str, Any] = {
        "title": experiment.title or label,
        "training": _present(epochs=experiment.epochs, batch_size=experiment.batch_size, last=last),
        "bases": {experiment.base: _present(lr=experiment.lr, weight_decay=experiment.weight_decay)},
        "probes": {probe: _present(rho=experiment.rho) for probe in ("sam", "fsam")},
    }
    metric = _present(every=experiment.every, structure=experiment.structure)
    table["geometries"] = {name: dict(metric) for name in GEOMETRIES}
    return table


def _fill_in(table: dict[str, Any], experiment: Experiment) -> None:
    """Sizes that depend on the data, where nothing has set them."""
    training, data = table["training"], understood("train", experiment.train, experiment.workers)
    if isinstance(data, Samples):
        size = getattr(experiment.train, "batch_size", None) if isinstance(experiment.train, DataLoader) else None
        batch_size = training.setdefault("batch_size", size or min(BATCH_SIZE, data.count))
        if not isinstance(batch_size, int) or batch_size < 1:
            return  # refused with its origin when the table is read
        steps, inner = -(-data.count // batch_size), min(BATCH_SIZE, data.count)
    else:
        batch_size = inner = getattr(data, "batch_size", None) or _first_size(data)
        steps = length(data)
        for sizes in (training, *table["geometries"].values()):
            if sizes.setdefault("batch_size", batch_size) != batch_size:
                raise ConfigurationError(
                    f"batch_size must be {batch_size}, as the loader makes them, got {sizes['batch_size']}; "
                    "from a Dataset any size can be drawn."
                )
    training.setdefault("eval_batch_size", batch_size)
    epochs = training.get("epochs")
    total = training.get("steps") or (epochs if isinstance(epochs, int) else 1) * steps
    for geometry in table["geometries"].values():
        geometry.setdefault("batch_size", inner)
        geometry.setdefault("every", min(500, max(10, total // REFRESHES)))


def _first_size(data: Iterable[Any]) -> int:
    for batch in data:
        return rows(batch)
    raise ConfigurationError("train gave no batch.")


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
