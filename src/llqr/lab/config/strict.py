"""TOML tables into dataclasses, strictly: unknown keys, missing keys and wrong types are named and refused."""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

Origin = Callable[[str], str]
"""Where a dotted key was written, for the message of an error."""


class ConfigurationError(ValueError):
    """A configuration that cannot be used; the message names the key and the file it stands in."""


def make(cls: type, table: Any, key: str, origin: Origin) -> Any:
    """An instance of the dataclass ``cls`` from ``table``, which stands under the dotted ``key``."""
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{origin(key)}: {key} must be a table, got {table!r}.")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for name, value in table.items():
        path = f"{key}.{name}" if key else name
        if name not in fields:
            raise ConfigurationError(f"{origin(path)}: unknown key {path}; known here: {', '.join(fields)}.")
        values[name] = convert(hints[name], value, path, origin)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ConfigurationError(f"{origin(key)}: {f'{key}.{name}' if key else name} is missing.")
    try:
        return cls(**values)
    except ValueError as error:  # a value that the dataclass itself refuses
        raise ConfigurationError(f"{origin(key)}: {f'{key}: ' if key else ''}{error}") from error


def convert(hint: Any, value: Any, key: str, origin: Origin) -> Any:
    """``value`` as the type ``hint`` asks for, or an error that names ``key``."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return make(hint, value, key, origin)
    if kind is typing.Literal:
        if value in arguments and type(value) in {type(choice) for choice in arguments}:
            return value
        raise ConfigurationError(f"{origin(key)}: {key} must be one of {', '.join(arguments)}, got {value!r}.")
    if kind is types.UnionType:
        for choice in arguments:
            try:
                return convert(choice, value, key, origin)
            except ConfigurationError:
                continue
    elif kind is dict and isinstance(value, Mapping):
        return {name: convert(arguments[1], entry, f"{key}.{name}", origin) for name, entry in value.items()}
    elif kind is tuple and isinstance(value, list | tuple):
        return tuple(convert(arguments[0], entry, f"{key}[{index}]", origin) for index, entry in enumerate(value))
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ConfigurationError(f"{origin(key)}: {key} must be {describe(hint)}, got {value!r}.")


def describe(hint: Any) -> str:
    """A type in the words of a TOML file."""
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false", types.NoneType: "absent"}
    if hint in words:
        return words[hint]
    kind = typing.get_origin(hint)
    if kind is types.UnionType:
        return " or ".join(describe(choice) for choice in typing.get_args(hint) if choice is not types.NoneType)
    if kind is typing.Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    return "a list" if kind is tuple else "a table"
