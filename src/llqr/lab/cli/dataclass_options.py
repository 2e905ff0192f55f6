"""Command-line options made from dataclasses, so that an option is declared once: as a field.

A parameter of a command whose default is an instance of a dataclass becomes one option per field, nested dataclasses
included: `product_every` becomes ``--product-every``, with the instance's value as its default and the entry under
"Attributes:" in the docstring as its help. A field that is annotated with a `typer.Option` keeps it.
"""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from typing import Annotated, Any

import typer

from llqr.lab.config.layers import parse_value
from llqr.lab.config.strict import convert
from llqr.lab.errors import ConfigurationError

ENTRY = re.compile(r"^    (?P<names>\w+(?:, \w+)*): (?P<text>.+?)(?=^ {0,4}\S|\Z)", flags=re.M | re.S)


@dataclass(frozen=True)
class Fields:
    """Annotates such a parameter: which fields have no option, and which take several values.

    Attributes:
        omit: fields, or whole nested dataclasses, that keep the value of the default.
        sweep: fields that take values separated by commas. Parameter and default are then tuples of instances: one
            for every combination.
    """

    omit: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()


def options_from_dataclasses(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with every dataclass parameter replaced by its options."""
    defaults: dict[str, Any] = {}
    options: dict[str, list[Option]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        instances = parameter.default if isinstance(parameter.default, tuple) else (parameter.default,)
        if not is_dataclass(instances[0]):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        marks = typing.get_args(parameter.annotation)[1:]
        wanted = next((mark for mark in marks if isinstance(mark, Fields)), Fields())
        defaults[parameter.name] = parameter.default
        options[parameter.name] = list(_options(instances, wanted))
        parameters += [option.parameter() for option in options[parameter.name]]
    known = {option.name for listed in options.values() for option in listed}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        own = {name: value for name, value in given.items() if name not in known}
        try:
            command(**own, **{name: _made(default, options[name], given) for name, default in defaults.items()})
        except ValueError as error:  # the library names the argument, which is an option here
            name = re.split(r"\W", str(error), maxsplit=1)[0]
            if name not in known:
                raise
            raise ConfigurationError(flag(name) + str(error).removeprefix(name)) from error

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Option:
    """The option of one field; ``defaults`` has several values only if it is swept."""

    name: str
    hint: Any
    defaults: Sequence[Any]
    help: str
    swept: bool

    def parameter(self) -> inspect.Parameter:
        """Declare it to typer: other than flags and declared options, everything is text."""
        annotation, default = self.hint, self.defaults[0]
        if self.hint is bool:
            annotation = Annotated[bool, typer.Option(f"{flag(self.name)}/--no-{flag(self.name)[2:]}", help=self.help)]
        elif not self._is_declared:
            annotation = Annotated[str | None, typer.Option(flag(self.name), help=self.help)]
            texts = dict.fromkeys(str(value).removeprefix("torch.") for value in self.defaults)
            default = None if default is None else ",".join(texts)
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def values(self, given: Any) -> list[Any]:
        """Convert what was given on the command line to values of the field: one, unless it is swept."""
        if given is None or self.hint is bool or self._is_declared:
            return [given]
        texts = given.split(",") if self.swept else [given]
        return [convert(self.hint, parse_value(text), flag(self.name), "command line") for text in texts]

    @property
    def _is_declared(self) -> bool:
        return typing.get_origin(self.hint) is Annotated


def _options(instances: Sequence[Any], wanted: Fields) -> Iterator[Option]:
    """Yield the options of instances of one dataclass, which differ in swept fields only."""
    cls = type(instances[0])
    hints, helps = typing.get_type_hints(cls, include_extras=True), attribute_help(cls)
    for name in (field.name for field in fields(cls) if field.name not in wanted.omit):
        values = [getattr(instance, name) for instance in instances]
        if is_dataclass(values[0]):
            yield from _options(values, wanted)
        else:
            yield Option(name, hints[name], values, helps.get(name, ""), name in wanted.sweep)


def _made(default: Any, options: Sequence[Option], given: Mapping[str, Any]) -> Any:
    """Return the instance, or the tuple of instances, with what was given."""
    values = [option.values(given[option.name]) for option in options]
    names = [option.name for option in options]
    first = default[0] if isinstance(default, tuple) else default
    made = tuple(_changed(first, dict(zip(names, chosen, strict=True))) for chosen in product(*values))
    return made if isinstance(default, tuple) else made[0]


def _changed(instance: Any, values: Mapping[str, Any]) -> Any:
    """Return the instance with these values in its fields and in those of the dataclasses it holds."""
    held = {field.name: getattr(instance, field.name) for field in fields(instance)}
    nested = {name: _changed(value, values) for name, value in held.items() if is_dataclass(value)}
    return replace(instance, **nested, **{name: values[name] for name in held.keys() & values.keys()})


def attribute_help(cls: type) -> dict[str, str]:
    """Return the entries under "Attributes:" in the docstring of a class and of its bases, as sentences."""
    found = {name: text for base in reversed(cls.__bases__) for name, text in attribute_help(base).items()}
    _, _, listed = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    for entry in ENTRY.finditer(listed.partition("\n\n")[0] + "\n"):
        text = " ".join(entry["text"].split()).replace("`", "")
        found |= dict.fromkeys(entry["names"].split(", "), text[:1].upper() + text[1:])
    return found
