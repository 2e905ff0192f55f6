"""The commands that list what is built in: `llqr recipes` and `llqr storage`."""

import json
import textwrap
from typing import Annotated

import typer

from llqr.lab.cli import options
from llqr.lab.cli.options import PLAIN
from llqr.lab.cli.terminal import show, width
from llqr.lab.config import recipe
from llqr.lab.results import storage

app = typer.Typer(**PLAIN)


@app.command()
def recipes(as_json: options.Json = False) -> None:
    """List the built-in recipes: TABLE/ROW, their methods and their variants."""
    found = {name: recipe.load(name) for name in recipe.names()}
    if as_json:
        known = {name: {"title": one.title, "methods": one.columns, "seeds": one.seeds} for name, one in found.items()}
        listed = [{"name": name, **known[name], "variants": list(one.variants)} for name, one in found.items()]
        print(json.dumps(listed, indent=1))
        return
    for name, one in found.items():
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
    as_json: options.Json = False,
) -> None:
    """Print the paper's storage table and cheaper structures, counted from the layout of the metric."""
    rows = storage.rows(shards or storage.SHARDS)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        show(storage.as_table(rows))
