"""The options that several commands share."""

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
