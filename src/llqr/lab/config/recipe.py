"""Recipes: everything that decides a training run, in TOML, read strictly and resolved to one `Run` for each method.

A recipe names components once (``bases``, ``probes``, ``geometries``) and describes each method as a choice among them,
so that "LLQR+SAM reuses the hyperparameters of its LLQR and SAM components" holds by construction. A recipe may extend
another one and differ from it in a few keys; a *variant*, written ``cifar100/resnet18@short``, is a named set of such
differences kept in the recipe itself; ``key=value`` overrides come last.

The built-in recipes are ``<table>/<row>`` with the names of the paper's tables. Nothing here knows what a data set or a
task is made of: their options are checked by the types that they register in `domains`.
"""

import copy
import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from llqr.lab.config.domains import TASKS, Domain
from llqr.lab.config.strict import ConfigurationError, make

FOLDER = Path(__file__).parent / "recipes"
ALIASES = {"llqr": "llqr-ngd", "llqr+sam": "llqr-ngd+sam", "llqr+fsam": "llqr-ngd+fsam"}
"""Short names of methods: the divergence is ngd unless said otherwise."""
ALTERNATIVES = {"training.epochs": "steps", "training.steps": "epochs"}
"""Two ways to give one thing: a recipe that gives one takes the place of the other in what it extends."""


@dataclass(frozen=True)
class Choice:
    """A task or a model: its name and its own options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataChoice(Choice):
    """A data set, and the folder below which it is found."""

    root: str = "data"


@dataclass(frozen=True)
class Base:
    """A base optimizer."""

    name: Literal["sgd", "adam", "adamw"]
    lr: float
    weight_decay: float
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.name != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(f"momentum and nesterov belong to sgd, got them with {self.name}.")
        if self.betas is None:
            return
        if self.name == "sgd":
            raise ValueError("betas belong to adam and adamw, got them with sgd.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {list(self.betas)}.")


@dataclass(frozen=True)
class LrSchedule:
    """How the learning rate moves, step by step: linearly up during the warm-up, then as ``name`` says.

    ``inverse-sqrt`` falls as ``sqrt(warmup_steps / step)``, whatever the length of the run.
    """

    name: Literal["cosine", "constant", "inverse-sqrt"]
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}.")
        if self.name == "inverse-sqrt" and self.warmup_steps < 1:
            raise ValueError("warmup_steps must be at least 1 with inverse-sqrt, which falls from their end on.")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long, in which portions, and in which precision.

    The length is given in ``epochs`` or in ``steps``. What is learned is evaluated after every epoch, or every
    ``evaluate_every`` steps, and always at the end. ``batch_size`` counts samples, and in translation padded tokens.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int
    eval_batch_size: int
    evaluate_every: int | None = None
    last: Literal["fill", "drop", "keep"] = "fill"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    channels_last: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "batch_size", "eval_batch_size", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"epochs or steps must be given, and not both, got {self.epochs} and {self.steps}.")

    def total_steps(self, an_epoch: int) -> int:
        """The length of the run, where an epoch has so many steps."""
        return self.epochs * an_epoch if self.steps is None else self.steps


def settings_made(settings: Any, apart_from: str) -> dict[str, Any]:
    """The fields of a dataclass that have a value, without one of them."""
    return {key: value for key, value in vars(settings).items() if key != apart_from and value is not None}


@dataclass(frozen=True)
class Probe:
    """Where a sharpness-aware method looks; ``eta`` belongs to fishersam and asam, ``lam`` to fsam."""

    kind: Literal["sam", "asam", "fishersam", "fsam"]
    rho: float
    eta: float | None = None
    lam: float | None = None
    norm: str | None = None
    start_after: int = 0

    def __post_init__(self) -> None:
        if (self.lam is not None) != (self.kind == "fsam"):
            raise ValueError(f"lam belongs to fsam, which needs it, got lam={self.lam} with {self.kind}.")
        if self.eta is not None and self.kind not in ("fishersam", "asam"):
            raise ValueError(f"eta belongs to fishersam and asam, got it with {self.kind}.")

    def arguments(self) -> dict[str, Any]:
        """What the optimizer's probe is given: the settings that were made, without the name."""
        return settings_made(self, apart_from="kind")


@dataclass(frozen=True)
class GeometrySettings:
    """How the metric is stored, learned and refreshed; ``batch_size`` samples make the inner batch.

    ``structure`` is one name for all blocks, or patterns of parameters with a name each. Blocks with a side above
    ``max_side`` fall back to a cheaper structure.
    """

    divergence: Literal["ngd", "newton"]
    structure: str | dict[str, str]
    every: int
    ema: float
    lr: float
    steps: int
    batch_size: int
    momentum: float | None = None
    clip: float | None = None
    damping: float | None = None
    curvature_scale: float | str | None = None
    micro_batch: int | None = None
    engine: str | None = None
    max_side: int | None = None
    spread: bool | None = None
    product_every: int | None = None

    def arguments(self) -> dict[str, Any]:
        """What `llqr.Geometry` is given: the settings that were made; the inner batch is the caller's to draw."""
        return settings_made(self, apart_from="batch_size")


@dataclass(frozen=True)
class Method:
    """One method as a choice of components; ``transport`` says whether the metric also moves the outer update."""

    base: str
    probe: str | None = None
    geometry: str | None = None
    transport: bool = True


@dataclass(frozen=True)
class Run:
    """All that decides one run but its seed. Two runs with equal fields are the same experiment."""

    task: Choice
    data: DataChoice
    model: Choice
    training: Training
    schedule: LrSchedule
    method: str
    base: Base
    probe: Probe | None
    geometry: GeometrySettings | None
    transport: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, as they are printed and logged."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Recipe:
    """A complete recipe. ``columns`` are the methods of its table; ``methods`` may define more."""

    title: str
    seeds: int
    columns: tuple[str, ...]
    task: Choice
    data: DataChoice
    model: Choice
    training: Training
    schedule: LrSchedule
    bases: dict[str, Base]
    methods: dict[str, Method]
    probes: dict[str, Probe] = field(default_factory=dict)
    geometries: dict[str, GeometrySettings] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    beside: str | None = None
    """The row of the paper's table that this one is shown beside although it is another experiment."""
    caveat: str = ""
    """In what it is another one; printed with the table."""

    def __post_init__(self) -> None:
        for name, method in self.methods.items():
            for axis, known in (("base", self.bases), ("probe", self.probes), ("geometry", self.geometries)):
                chosen = getattr(method, axis)
                if chosen is not None and chosen not in known:
                    raise ValueError(f"methods.{name}.{axis} must be one of {', '.join(known)}, got {chosen!r}.")
        unknown = [column for column in self.columns if column not in self.methods]
        if unknown or not self.columns:
            raise ValueError(f"columns must be some of {', '.join(self.methods)}, got {', '.join(unknown) or 'none'}.")
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}.")
        if self.beside is not None and not self.caveat:
            raise ValueError("caveat must say in what the row is another experiment than the one it stands beside.")

    def run(self, method: str) -> Run:
        """What the method of this name means here."""
        name = ALIASES.get(method, method)
        if name not in self.methods:
            raise ConfigurationError(f"method must be one of {', '.join(self.methods)}, got {method!r}.")
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
        )

    @property
    def domain(self) -> Domain:
        """Where the data of this recipe's task comes from."""
        return TASKS[self.task.name].domain

    @cached_property
    def task_options(self) -> Any:
        """The options of the task in the type that the task registers."""
        return make(TASKS[self.task.name].options, self.task.options, "task.options", lambda key: self.title)

    @cached_property
    def data_options(self) -> Any:
        """The options of the data in the type that the data set registers."""
        return make(self.domain.options(self.data.name), self.data.options, "data.options", lambda key: self.title)

    def build_model(self) -> nn.Module:
        """The network of this recipe for its complete data set, on the current default device."""
        place = self.data.name, Path(self.data.root), self.data_options
        return self.domain.build(self.model.name, self.model.options, *place)


def names() -> list[str]:
    """The built-in recipes, ``<table>/<row>``."""
    found = (path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml"))
    return sorted(name for name in found if not name.startswith("protocol/"))


def load(name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe ``name``, or ``name@variant``, or the file of that path, with ``key=value`` overrides applied last."""
    plain, _, variant = str(name).partition("@")
    table, origins = read(locate(plain), ())
    if variant:
        variants = table.get("variants", {})
        if variant not in variants:
            raise ConfigurationError(
                f"{plain}: variant must be one of {', '.join(variants) or '(none)'}, got {variant!r}."
            )
        merge(table, copy.deepcopy(variants[variant]), f"{plain}@{variant}", origins)
    for override in overrides:
        merge(table, parse_override(override), f"--set {override}", origins)

    def origin(key: str) -> str:
        """The file that wrote the key, or the nearest table around it."""
        while key and key not in origins:
            key = key.rpartition(".")[0]
        return origins.get(key, plain)

    recipe = make(Recipe, table, "", origin)
    check_choices(recipe, origin)
    return recipe


def check_choices(recipe: Recipe, origin: Any) -> None:
    """Refuse names and options of task, data and model that do not exist, before anything is loaded."""
    if recipe.task.name not in TASKS:
        raise ConfigurationError(
            f"{origin('task.name')}: task.name must be one of {', '.join(TASKS)}, got {recipe.task.name!r}."
        )
    make(TASKS[recipe.task.name].options, recipe.task.options, "task.options", origin)
    try:
        options = recipe.domain.options(recipe.data.name)
    except ValueError as error:
        raise ConfigurationError(f"{origin('data.name')}: {error}") from error
    make(options, recipe.data.options, "data.options", origin)
    try:
        with torch.device("meta"):
            recipe.build_model()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{origin('model')}: {error}") from error


def locate(name: str) -> Path:
    """The file of a built-in recipe or of a path."""
    built_in = FOLDER / f"{name}.toml"
    if built_in.is_file():
        return built_in
    if name.endswith(".toml"):
        if Path(name).is_file():
            return Path(name)
        raise ConfigurationError(f"{name}: there is no such file.")
    raise ConfigurationError(f"recipe must be a .toml file or one of {', '.join(names())}, got {name!r}.")


def read(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The table of a file on top of the one it extends, and which file every key comes from."""
    if path in seen:
        raise ConfigurationError(f"{path.name}: extends itself by way of {', '.join(one.name for one in seen)}.")
    label = path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else str(path)
    try:
        own = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{label}: {error}.") from error
    parent = own.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise ConfigurationError(f"{label}: extends must be the name of a recipe, got {parent!r}.")
    table, origins = ({}, {}) if parent is None else read(locate(parent), (*seen, path))
    merge(table, own, label, origins)
    return table, origins


def merge(
    table: dict[str, Any], layer: Mapping[str, Any], label: str, origins: dict[str, str], prefix: str = ""
) -> None:
    """Lay ``layer`` over ``table``, in place: tables are merged, everything else is replaced."""
    for name, value in layer.items():
        key = f"{prefix}{name}"
        origins[key] = label
        if ALTERNATIVES.get(key) in table and ALTERNATIVES[key] not in layer:
            del table[ALTERNATIVES[key]]
        if isinstance(value, Mapping):
            if not isinstance(table.get(name), dict):
                table[name] = {}
            merge(table[name], value, label, origins, f"{key}.")
        else:
            table[name] = value


def parse_override(text: str) -> dict[str, Any]:
    """``a.b=value`` as nested tables; the value is TOML, and a bare word is a string."""
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigurationError(f"--set must be key=value with a dotted key, got {text!r}.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for part in reversed(parts):
        parsed = {part: parsed}
    return parsed
