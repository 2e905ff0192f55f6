"""TOML tables into dataclasses, strictly: an error names unknown keys, missing keys and wrong types."""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from llqr.lab.errors import ConfigurationError as ConfigurationError  # where readers of a configuration look for it
from llqr.lab.names import suggestion, unknown

T = TypeVar("T")


def make(cls: type[T], table: Any, key: str, where: str, siblings: Iterable[str] = ()) -> T:
    """Make an instance of the dataclass ``cls`` from ``table``, found under the dotted ``key`` of the file ``where``.

    A table that lacks a key may have the misspelt name of one of its ``siblings``.
    """
    assert dataclasses.is_dataclass(cls)
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{where}: {key} must be a table, got {table!r}.")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for name, value in table.items():
        path = f"{key}.{name}" if key else name
        if name not in fields:
            known = f"known here: {', '.join(fields)}{suggestion(name, fields)}"
            raise ConfigurationError(f"{where}: unknown key {path}; {known}")
        values[name] = convert(hints[name], value, path, where)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            around, _, own = key.rpartition(".")
            meant = suggestion(own, siblings, prefix=f"{around}.")
            raise ConfigurationError(f"{where}: {f'{key}.{name}' if key else name} is missing{meant}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:  # a value that the dataclass itself refuses
        raise ConfigurationError(f"{where}: {f'{key}: ' if key else ''}{error}") from error


def convert(hint: Any, value: Any, key: str, where: str, siblings: Iterable[str] = ()) -> Any:
    """Convert ``value`` to the type ``hint``, or raise an error that names ``key``."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return make(hint, value, key, where, siblings)
    if kind is typing.Literal:
        if value in arguments and type(value) in {type(choice) for choice in arguments}:
            return value
        raise ConfigurationError(f"{where}: {unknown(key, value, arguments)}")
    if kind in (types.UnionType, typing.Union):
        if isinstance(value, Mapping) and (tables := [one for one in arguments if dataclasses.is_dataclass(one)]):
            return convert(tables[0], value, key, where, siblings)
        for choice in arguments:
            try:
                return convert(choice, value, key, where)
            except ConfigurationError:
                continue
    elif kind is dict and isinstance(value, Mapping):
        return {
            name: convert(arguments[1], entry, f"{key}.{name}", where, [other for other in value if other != name])
            for name, entry in value.items()
        }
    elif kind is tuple and isinstance(value, list | tuple):
        of_each = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(of_each) == len(value):
            return tuple(convert(one, entry, key, where) for one, entry in zip(of_each, value, strict=True))
    elif hint is float and (type(value) is float or (type(value) is int and abs(value) < 2**1000)):
        return float(value)
    elif hint is torch.dtype and isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype):
        return getattr(torch, value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ConfigurationError(f"{where}: {key} must be {describe(hint)}, got {value!r}.")


def describe(hint: Any) -> str:
    """Name a type as a TOML file can hold it: neither None nor a function, which a schedule may also be."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        others = (choice for choice in arguments if choice is not types.NoneType)
        return " or ".join(describe(choice) for choice in others if typing.get_origin(choice) is not Callable)
    if kind is tuple:
        return "a list" if arguments[-1] is Ellipsis else f"a list of {len(arguments)}"
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false", torch.dtype: "a torch.dtype"}
    return words.get(hint, "a table")
