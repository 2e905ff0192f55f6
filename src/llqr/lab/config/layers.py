"""The layers of a recipe: a file on top of those it extends, then a variant, then ``key=value`` overrides.

A component may be ``like`` another one of its table and differ from it in a few keys, whichever layer wrote those.
"""

import copy
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llqr.lab.config.strict import ConfigurationError, Origin
from llqr.lab.names import check_known, suggestion, unknown

FOLDER = Path(__file__).parent / "recipes"
ALTERNATIVES = {"training.epochs": "steps", "training.steps": "epochs"}
"""Two ways to give one thing, also in a variant: a layer that gives one removes the other from the layers below."""
COMPONENTS = ("bases", "probes", "geometries")


def names() -> list[str]:
    """The built-in recipes, ``<table>/<row>``."""
    found = (path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml"))
    return sorted(name for name in found if not name.startswith("protocol/"))


def resolve(name: str, overrides: Iterable[str]) -> tuple[dict[str, Any], Origin]:
    """All layers of a recipe as one table, and a function from a key to the layer that wrote it."""
    plain, _, variant = name.partition("@")
    table, origins = read(locate(plain), ())
    if variant:
        variants = table.get("variants", {})
        check_known(f"{plain}: variant", variant, variants)
        merge(table, copy.deepcopy(variants[variant]), f"{plain}@{variant}", origins)
    for override in overrides:
        merge(table, parse_override(override), f"--set {override}", origins)
    origin = origin_in(origins, plain)
    for section in COMPONENTS:
        components = table.get(section)
        if isinstance(components, dict):
            table[section] = {name: complete(components, section, name, origin, ()) for name in components}
    return table, origin


def complete(
    components: Mapping[str, Any], section: str, name: str, origin: Origin, seen: tuple[str, ...]
) -> dict[str, Any]:
    """A component with what it takes from the one that it is ``like``."""
    own = components[name]
    if not isinstance(own, dict) or "like" not in own:
        return own
    key, model = f"{section}.{name}.like", own["like"]
    if not isinstance(model, str) or model not in components:
        others = [other for other in components if other != name]
        raise ConfigurationError(f"{origin(key)}: {unknown(key, model, others)}")
    if model in (*seen, name):
        raise ConfigurationError(f"{origin(key)}: {key} must not lead back to {name!r}, got {model!r}.")
    table = copy.deepcopy(complete(components, section, model, origin, (*seen, name)))
    merge(table, {key: value for key, value in own.items() if key != "like"}, "", {})
    return table


def origin_in(origins: Mapping[str, str], otherwise: str) -> Origin:
    """A function from a key to the layer that wrote it, or the nearest table around it."""

    def origin(key: str) -> str:
        while key and key not in origins:
            key = key.rpartition(".")[0]
        return origins.get(key, otherwise)

    return origin


def locate(name: str, asked_by: str = "recipe", beside: Path = Path()) -> Path:
    """The file of a built-in recipe, or of a path from the folder ``beside`` or from here; ``asked_by`` named it."""
    built_in = FOLDER / f"{name}.toml"
    if built_in.is_file():
        return built_in
    if name.endswith(".toml"):
        for path in (beside / name, Path(name)):
            if path.is_file():
                return path
        raise ConfigurationError(f"{asked_by}: {name}: there is no such file.")
    raise ConfigurationError(
        f"{asked_by} must be a .toml file or one that `llqr recipes` lists, got {name!r}{suggestion(name, names())}"
    )


def read(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The table of a file on top of the one it extends, and which file every key comes from."""
    if path.resolve() in seen:
        raise ConfigurationError(f"{path.name}: extends itself by way of {', '.join(one.name for one in seen)}.")
    label = path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else str(path)
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows write a mark first
    except ValueError as error:  # no TOML, or not in UTF-8
        raise ConfigurationError(f"{label}: {error}.") from error
    parent = own.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise ConfigurationError(f"{label}: extends must be the name of a recipe, got {parent!r}.")
    table: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if parent is not None:
        table, origins = read(locate(parent, f"{label}: extends", path.parent), (*seen, path.resolve()))
    merge(table, own, label, origins)
    return table, origins


def merge(
    table: dict[str, Any], layer: Mapping[str, Any], label: str, origins: dict[str, str], prefix: str = ""
) -> None:
    """Lay ``layer`` over ``table``, in place: tables are merged, everything else is replaced."""
    for name, value in layer.items():
        key = f"{prefix}{name}"
        origins[key] = label
        other = ALTERNATIVES.get(".".join(key.split(".")[-2:]))
        if other in table and other not in layer:
            del table[other]
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
        return nested(parts, tomllib.loads(f"value = {value}")["value"])
    except tomllib.TOMLDecodeError:
        return nested(parts, value.strip())


def nested(parts: Sequence[str], value: Any) -> dict[str, Any]:
    """The value under a dotted key, of which these are the parts."""
    for part in reversed(parts):
        value = {part: value}
    return dict(value)
