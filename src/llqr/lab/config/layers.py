"""The layers of a recipe: a file on top of those it extends, then a variant, then ``key=value`` overrides.

A component may be ``like`` another one of its table and differ from it in a few keys, whichever layer wrote those.
"""

import copy
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llqr.lab.errors import ConfigurationError
from llqr.lab.names import check_known, suggestion

FOLDER = Path(__file__).parent / "recipes"
ALTERNATIVES = {"epochs": "steps", "steps": "epochs"}
"""Two ways to give the length of a run: a layer that gives one removes the other from the layers below."""
COMPONENTS = ("bases", "probes", "geometries")
Table = dict[str, Any]


def names() -> list[str]:
    """List the built-in recipes, ``<table>/<row>``."""
    found = (path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml"))
    return sorted(name for name in found if not name.startswith("protocol/"))


def resolve(name: str, overrides: Iterable[str]) -> Table:
    """Merge all layers of a recipe into one table."""
    plain, _, variant = name.partition("@")
    table = read(locate(plain), ())
    if variant:
        variants = table.get("variants", {})
        check_known(f"{plain}: variant", variant, variants)
        merge(table, copy.deepcopy(variants[variant]))
    for override in overrides:
        merge(table, parse_override(override))
    for section in COMPONENTS:
        components = table.get(section)
        if isinstance(components, dict):
            table[section] = {own: complete(components, section, own, plain, ()) for own in components}
    return table


def complete(components: Mapping[str, Any], section: str, name: str, where: str, seen: tuple[str, ...]) -> Any:
    """Return a component with what it takes from the one that it is ``like``."""
    own = components[name]
    if not isinstance(own, dict) or "like" not in own:
        return own
    key, model = f"{section}.{name}.like", own["like"]
    check_known(f"{where}: {key}", model, [other for other in components if other not in (*seen, name)])
    table = copy.deepcopy(complete(components, section, model, where, (*seen, name)))
    merge(table, {key: value for key, value in own.items() if key != "like"})
    return table


def locate(name: str, asked_by: str = "recipe", beside: Path = Path()) -> Path:
    """Find the file of a built-in recipe, or of a path from the folder ``beside`` or from here."""
    places = [FOLDER / f"{name}.toml"]
    places += [beside / name, Path(name)] if name.endswith(".toml") else []
    for path in places:
        if path.is_file():
            return path
    if name.endswith(".toml"):
        raise ConfigurationError(f"{asked_by}: {name}: there is no such file.")
    raise ConfigurationError(
        f"{asked_by} must be one that `llqr recipes` lists or a .toml file, got {name!r}{suggestion(name, names())}"
    )


def read(path: Path, seen: tuple[Path, ...]) -> Table:
    """Read a file on top of the one it extends."""
    if path.resolve() in seen:
        raise ConfigurationError(f"{path.name}: extends itself by way of {', '.join(one.name for one in seen)}.")
    label = path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else str(path)
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows write a mark first
        copy.deepcopy(own)  # dotted keys nest without recursion
    except (RecursionError, ValueError) as error:  # no TOML, or not in UTF-8
        raise ConfigurationError(f"{label}: {error}.") from error
    parent = own.pop("extends", None)
    if parent is None:
        return own
    if not isinstance(parent, str):
        raise ConfigurationError(f"{label}: extends must be the name of a recipe, got {parent!r}.")
    table = read(locate(parent, f"{label}: extends", path.parent), (*seen, path.resolve()))
    merge(table, own)
    return table


def merge(table: Table, layer: Mapping[str, Any]) -> None:
    """Lay ``layer`` over ``table``, in place: tables are merged, everything else is replaced."""
    for name, value in layer.items():
        other = ALTERNATIVES.get(name)
        if other in table and other not in layer:
            del table[other]
        if isinstance(value, Mapping):
            if not isinstance(table.get(name), dict):
                table[name] = {}
            merge(table[name], value)
        else:
            table[name] = value


def parse_override(text: str) -> Table:
    """Parse ``a.b=value`` into nested tables; the value is TOML, and a bare word is a string."""
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigurationError(f"--set must be key=value with a dotted key, got {text!r}.")
    try:
        return copy.deepcopy(nested(parts, parse_value(value)))
    except RecursionError as error:
        raise ConfigurationError(f"--set: {parts[0]} is nested too deeply.") from error


def parse_value(text: str) -> Any:
    """Parse a TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def nested(parts: Sequence[str], value: Any) -> Table:
    """Return tables that hold ``value`` under the dotted key of these parts."""
    for part in reversed(parts):
        value = {part: value}
    return dict(value)
