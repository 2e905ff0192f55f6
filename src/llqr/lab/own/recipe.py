"""An experiment as a recipe of the laboratory: the settings it gives, over defaults, under those of the caller."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from llqr import PROBES, SOLVERS, Inner
from llqr.lab.config.layers import Table, merge, nested, parse_override
from llqr.lab.config.recipe import Recipe, build
from llqr.lab.errors import ConfigurationError
from llqr.lab.names import check_folder_name, check_known
from llqr.lab.own import experiment as experiments
from llqr.lab.own.experiment import Experiment
from llqr.lab.own.task import Samples

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
"""The defaults of the library's methods; a probe that a user has registered has SAM's radius."""
GEOMETRIES: dict[str, dict[str, Any]] = {"ngd": {"ema": 0.95}, "newton": {"ema": 0.9}}


def load(name: str, overrides: Iterable[str] = (), settings: Mapping[str, Any] | None = None) -> Recipe:
    """Return the recipe of a file; ``key=value`` overrides or ``settings`` by dotted keys come last.

    Its ``data.name`` is what runs are filed under: the name of the experiment, or that of its file.
    """
    layers = [*map(parse_override, overrides), *as_layers(settings or {})]
    source = experiments.source_of(name)
    experiments.import_file(source)
    experiment = experiments.of_seed(source, 0)
    file, _, function = source.rpartition(":")
    own = Path(file).stem + ("" if function == experiments.FUNCTION else f"-{function}")
    return of_experiment(experiment, experiment.name or own, source, layers)


def as_layers(settings: Mapping[str, Any]) -> list[Table]:
    """Turn settings by dotted keys into nested tables."""
    return [nested(key.split("."), value) for key, value in settings.items()]


def of_experiment(experiment: Experiment, filed_under: str, source: str, layers: list[Table]) -> Recipe:
    """Return the recipe of an experiment that ``source`` gives."""
    model = experiment.model
    of_class = type(model).__name__
    parts = {
        "task": {"name": "own"},
        "data": {"name": filed_under, "root": source},
        "model": {"name": of_class if isinstance(model, nn.Module) else getattr(model, "__name__", of_class)},
    }
    for layer in layers:
        if fixed := parts.keys() & layer.keys():
            raise ConfigurationError(f"{filed_under}: {min(fixed)} is what the experiment gives; change it there.")
    check_folder_name("name", filed_under)
    table = defaults(experiment.base)
    for layer in [parts, _given(experiment, filed_under), *as_layers(experiment.settings), *layers]:
        merge(table, layer)
    _fill_in(table, experiment)
    return build(table, filed_under)


def defaults(base: str) -> Table:
    """Return settings for every method of the library over this base optimizer."""
    check_known("base", base, BASES)
    methods: Table = {name: {"base": name} for name in BASES}
    methods |= {probe: {"base": base, "probe": probe} for probe in PROBES}
    for geometry in GEOMETRIES:
        learned = {"base": base, "geometry": geometry}
        methods[f"llqr-{geometry}"] = learned
        for probe in PROBES:
            methods[f"llqr-{geometry}+{probe}"] = learned | {"probe": probe}
            methods[f"llqr-{geometry}-probe-only+{probe}"] = learned | {"probe": probe, "transport": False}
    return {
        "seeds": 3,
        "columns": [base, "sam", "llqr-ngd+sam"],
        "training": {"epochs": 30, "last": "fill"},
        "schedule": {"name": "cosine"},
        "bases": {name: dict(settings) for name, settings in BASES.items()},
        "probes": {probe: {"kind": probe} | RADII.get(probe, RADII["sam"]) for probe in PROBES},
        "geometries": {
            name: {"structure": "e-kfac", "divergence": name, "inner": {}} | own for name, own in GEOMETRIES.items()
        },
        "methods": methods,
    }


def _given(experiment: Experiment, filed_under: str) -> Table:
    """Return the settings that the experiment itself decides."""
    drops = isinstance(experiment.train, DataLoader) and experiment.train.drop_last
    metric = _present(every=experiment.every, structure=experiment.structure)
    return {
        "title": filed_under,
        "training": _present(
            epochs=experiment.epochs, batch_size=experiment.batch_size, last="drop" if drops else None
        ),
        "bases": {experiment.base: _present(lr=experiment.lr, weight_decay=experiment.weight_decay)},
        "probes": {probe: _present(rho=experiment.rho) for probe in ("sam", "fsam")},
        "geometries": {name: dict(metric) for name in GEOMETRIES},
    }


def _fill_in(table: Table, experiment: Experiment) -> None:
    """Set the sizes that depend on the data, where nothing has set them."""
    training, count = table["training"], len(Samples.of("train", experiment.train))
    smaller = min(BATCH_SIZE, count)
    batch_size = training.setdefault("batch_size", getattr(experiment.train, "batch_size", None) or smaller)
    training.setdefault("eval_batch_size", batch_size)
    if not isinstance(batch_size, int) or batch_size < 1:
        return  # refused with its origin when the table is read
    epochs = training.get("epochs")
    total = training.get("steps") or (epochs if isinstance(epochs, int) else 1) * -(-count // batch_size)
    for geometry in table["geometries"].values():
        solver = SOLVERS.get(geometry["inner"].get("solver", Inner.solver))
        if solver is not None and solver.extrapolates:
            geometry["inner"].setdefault("product_every", 3)  # as in `llqr.Geometry`
        geometry.setdefault("batch_size", smaller)
        geometry.setdefault("every", min(500, max(10, total // REFRESHES)))


def _present(**values: Any) -> Table:
    return {name: value for name, value in values.items() if value is not None}
