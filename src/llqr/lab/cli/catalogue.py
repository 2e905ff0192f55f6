"""The commands that list what is built in: `llqr recipes` and `llqr storage`."""

import textwrap
from typing import Annotated

import typer

from llqr.lab.cli.options import PLAIN
from llqr.lab.cli.terminal import show, width
from llqr.lab.config import recipe
from llqr.lab.results import storage

app = typer.Typer(**PLAIN)


@app.command()
def recipes() -> None:
    """List the built-in recipes: TABLE/ROW, their methods and their variants."""
    for name in recipe.names():
        one = recipe.load(name)
        facts = [one.title, f"{one.seeds} seeds", ", ".join(one.columns)]
        facts += [f"variants {', '.join(one.variants)}"] if one.variants else []
        print(name)
        print(textwrap.fill("; ".join(facts), width(), initial_indent="  ", subsequent_indent="  "))


@app.command("storage")
def show_storage(
    shards: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Devices that the metric is shared out among, repeatable (default: 1 and 4)."),
    ] = None,
) -> None:
    """Print the paper's storage table and cheaper structures, counted from the layout of the metric."""
    show(storage.as_table(storage.rows(shards or storage.SHARDS)))
