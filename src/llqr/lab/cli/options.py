"""The options that several commands share."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}
"""Help and errors as plain text, without typer's frames."""

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter whose default is a dataclass by the fields of it, which are annotated as options."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameter = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        if not is_dataclass(parameter.default):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group = parameter.default
        hints = get_type_hints(type(group), include_extras=True)
        parameters += [
            parameter.replace(name=field.name, default=getattr(group, field.name), annotation=hints[field.name])
            for field in fields(group)
        ]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = replace(group, **{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
