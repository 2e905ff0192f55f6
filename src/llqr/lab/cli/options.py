"""The options that several commands share, and options declared once as the fields of a dataclass."""

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}
"""Help and errors as plain text, without typer's frames."""

DataDir = Annotated[
    Path | None, typer.Option(help="Folder that holds the data sets (default: data.root of the recipe).")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Also draw it: a file ending in .svg (follows light and dark), .png or .pdf."),
]


def options_from_dataclasses(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter whose default is a dataclass by one option per field, as the field's annotation says."""
    classes: dict[str, tuple[type, dict[str, Any]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        default = parameter.default
        if is_dataclass(default):
            hints = typing.get_type_hints(type(default), include_extras=True)
            classes[parameter.name] = type(default), hints
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters += [
                inspect.Parameter(name, kind, default=getattr(default, name), annotation=hint)
                for name, hint in hints.items()
            ]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: cls(**{field: given.pop(field) for field in hints}) for name, (cls, hints) in classes.items()}
        command(**given, **made)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
