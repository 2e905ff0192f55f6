"""The commands that list what is built in: `llqr recipes` and `llqr storage`."""

import json
import textwrap

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from llqr.lab.cli import options
from llqr.lab.cli.terminal import show, width
from llqr.lab.config import recipe
from llqr.lab.results import storage

WIDE = 140
"""Columns of a terminal that a table of recipes needs."""


def mount(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("recipes")(recipes)
    app.command("storage")(show_storage)


def recipes(as_json: options.Json = False) -> None:
    """List the built-in recipes: TABLE/ROW, their methods and their variants."""
    found = {name: recipe.load(name) for name in recipe.names()}
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "name": name,
                        "title": one.title,
                        "methods": list(one.columns),
                        "seeds": one.seeds,
                        "variants": list(one.variants),
                    }
                    for name, one in found.items()
                ],
                indent=1,
            )
        )
        return
    if width() < WIDE:
        for name, one in found.items():
            facts = [one.title, f"{one.seeds} seeds", ", ".join(one.columns)]
            facts += [f"variants {', '.join(one.variants)}"] if one.variants else []
            print(name)
            print(textwrap.fill("; ".join(facts), width(), initial_indent="  ", subsequent_indent="  "))
        return
    table = Table(Column("recipe", no_wrap=True), "title", "methods of the table", "seeds", "variants", box=SIMPLE)
    for name, one in found.items():
        table.add_row(name, one.title, ", ".join(one.columns), str(one.seeds), ", ".join(one.variants))
    show(table)


def show_storage(as_json: options.Json = False) -> None:
    """Print the paper's storage table and cheaper structures, counted from the layout of the metric."""
    rows = storage.rows()
    if as_json:
        print(json.dumps([row.to_dict() for row in rows], indent=1))
    else:
        show(storage.as_table(rows))
