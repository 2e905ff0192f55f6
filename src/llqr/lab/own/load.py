"""From what a command line or a program names to a recipe of the laboratory.

A user's experiment becomes a recipe: the settings it gives, over defaults, under those of the command line.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from llqr.geometry.geometry import DEFAULT_INNER
from llqr.lab.config.layers import merge, names, nested, origin_in, parse_override
from llqr.lab.config.recipe import Recipe
from llqr.lab.config.run import Run
from llqr.lab.config.strict import make
from llqr.lab.data.streaming import FileOptions
from llqr.lab.errors import ConfigurationError
from llqr.lab.names import check_folder_name, check_known
from llqr.lab.tasks.own import fingerprint, image_folder, sources
from llqr.lab.tasks.own.batches import Samples, first, length, rows, understood
from llqr.lab.tasks.own.experiment import Experiment
from llqr.probes import PROBES
from llqr.solvers import SOLVERS, Inner

MODEL = "resnet18"
"""The network for a folder of images, if none is named."""
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
Override = str | tuple[str, Any]
"""A setting and its value: ``key=value`` as on the command line, or both by themselves."""


def is_named_by(name: str) -> bool:
    """Whether a name is that of an experiment of one's own: a Python file, a function of a module, or a folder."""
    return sources.is_named_by(name) or is_folder(name)


def is_folder(name: str) -> bool:
    """A built-in recipe comes before a folder of the same name."""
    return Path(name).is_dir() and name.partition("@")[0] not in names()


def label(name: str) -> str:
    """How its runs are filed: by the name that the experiment gives itself, or by that of its folder or file."""
    if is_folder(name):
        return Path(name).resolve().name
    return sources.experiment(sources.source(name), 0).name or sources.label(name)


def load(name: str, overrides: Iterable[Override] = ()) -> Recipe:
    """The recipe of an experiment of this name, with ``key=value`` overrides applied last."""
    if is_folder(name):
        return _folder(Path(name).resolve(), label(name), list(overrides))
    source = sources.source(name)
    made = sources.experiment(source, 0)
    return recipe(made, label(name), parts_of(made, label(name), source, sources.digest_of(source)), overrides)


def hold(experiment: Experiment, name: str, overrides: Iterable[Override] = ()) -> Recipe:
    """The recipe of an object of this program."""
    functions: list[Any] = [experiment.loss, experiment.metric, experiment.evaluate, experiment.forward]
    given = isinstance(experiment.model, nn.Module)
    if not given:
        functions.append(experiment.model)
    texts = [sources.network_digest(experiment, weights=given), *map(fingerprint.of_function, functions)]
    digest = fingerprint.of_texts([*texts, sources.data_digest(experiment)])
    source = sources.hold(name, experiment, digest)
    return recipe(experiment, name, parts_of(experiment, name, source, digest), overrides)


def _folder(folder: Path, filed_under: str, overrides: list[Override]) -> Recipe:
    chosen: dict[str, Any] = {"data": {"options": {}}, "model": {"name": MODEL, "options": {}}}
    for override in overrides:
        parsed = layer(override)
        merge(chosen, {part: parsed[part] for part in chosen if part in parsed}, "", {})
    origin = f"--set data.options of {filed_under}"
    options = make(FileOptions, chosen["data"]["options"], "data.options", lambda key: origin)
    made = image_folder.experiment(folder, options, chosen["model"]["name"], chosen["model"]["options"])
    parts = {
        "task": {"name": "image-folder", "options": {"digest": image_folder.digest(folder)}},
        "data": {"name": filed_under, "root": str(folder), "options": dataclasses.asdict(options)},
        "model": chosen["model"],
    }
    return recipe(made, filed_under, parts, overrides)


def layer(override: Override) -> dict[str, Any]:
    """A setting as nested tables."""
    if isinstance(override, str):
        return parse_override(override)
    key, value = override
    return nested(key.split("."), value)


def defaults(base: str) -> dict[str, Any]:
    """Every method of the library over this base optimizer."""
    check_known("base", base, BASES)
    methods: dict[str, Any] = {name: {"base": name} for name in BASES}
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


def recipe(experiment: Experiment, label: str, parts: Mapping[str, Any], overrides: Iterable[Override] = ()) -> Recipe:
    """The recipe of an experiment, filed under ``label``.

    ``parts`` are its tables of task, data and model, see `parts_of`; ``overrides`` are those of ``--set``.
    """
    check_folder_name("name", label)
    table: dict[str, Any] = defaults(experiment.base)
    origins: dict[str, str] = {}
    merge(table, _given(experiment, label) | dict(parts), label, origins)
    for override in (*experiment.settings.items(), *overrides):
        merge(table, layer(override), f"--set {override}" if isinstance(override, str) else "settings", origins)

    origin = origin_in(origins, label)
    for name, part in parts.items():
        if table[name] != part:
            raise ConfigurationError(f"{origin(name)}: {name} is what the experiment gives; change it there.")
    _fill_in(table, experiment)
    made = make(Recipe, table, "", origin)
    made.check(origin)
    return made


def mixed_bases(runs: Iterable[Run]) -> list[str]:
    """A sentence for every base optimizer that is compared with methods over another one."""
    known = {settings["name"]: name for name, settings in BASES.items()}
    bases = {run.method: known[run.base.name] for run in runs if run.task.name == "own"}
    over = list(dict.fromkeys(base for method, base in bases.items() if method not in BASES))
    return [
        f"{method} is compared with methods over {', '.join(over)}; base={method!r} puts them over the same optimizer."
        for method in bases
        if method in BASES and over and method not in over and not set(over) & bases.keys()
    ]


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
        batch = first(data)
        if batch is None:
            raise ConfigurationError("train gave no batch.")
        batch_size = inner = getattr(data, "batch_size", None) or rows(batch)
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
        solver = SOLVERS.get(geometry["inner"].get("solver", Inner.solver))
        if solver is not None and solver.extrapolates:
            geometry["inner"].setdefault("product_every", DEFAULT_INNER.product_every)
        geometry.setdefault("batch_size", inner)
        geometry.setdefault("every", min(500, max(10, total // REFRESHES)))


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
