"""From what a command line or a program names to a recipe of the laboratory."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llqr.lab.config.layers import merge, names
from llqr.lab.config.recipe import Recipe
from llqr.lab.config.strict import make
from llqr.lab.own.recipe import Override, layer, parts_of, recipe
from llqr.lab.tasks.own import fingerprint, image_folder, sources
from llqr.lab.tasks.own.batches import first, understood
from llqr.lab.tasks.own.experiment import Experiment

MODEL = "resnet18"
"""The network for a folder of images, if none is named."""


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
    functions = (experiment.loss, experiment.metric, experiment.evaluate, experiment.forward)
    held_out = [experiment.test] if experiment.valid is None else [experiment.test, experiment.valid]
    data = [understood("train", experiment.train, 0), *(understood("test", one, 0) for one in held_out)]
    digest = fingerprint.of_texts(
        [
            fingerprint.of_model(experiment.model),
            *map(fingerprint.of_function, functions),
            *(fingerprint.of_data(getattr(one, "dataset", one), first(one)) for one in data),
        ]
    )
    source = sources.hold(name, experiment, digest)
    return recipe(experiment, name, parts_of(experiment, name, source, digest), overrides)


def _folder(folder: Path, filed_under: str, overrides: list[Override]) -> Recipe:
    chosen: dict[str, Any] = {"data": {"options": {}}, "model": {"name": MODEL, "options": {}}}
    for override in overrides:
        parsed = layer(override)
        merge(chosen, {part: parsed[part] for part in chosen if part in parsed}, "", {})
    origin = f"--set data.options of {filed_under}"
    options = make(image_folder.FolderOptions, chosen["data"]["options"], "data.options", lambda key: origin)
    made = image_folder.experiment(folder, options, chosen["model"]["name"], chosen["model"]["options"])
    parts = {
        "task": {"name": "image-folder", "options": {"digest": image_folder.digest(folder)}},
        "data": {"name": filed_under, "root": str(folder), "options": dataclasses.asdict(options)},
        "model": chosen["model"],
    }
    return recipe(made, filed_under, parts, overrides)
