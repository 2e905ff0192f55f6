"""The command line: `llqr COMMAND`."""

import json
import sys
from dataclasses import asdict
from typing import Annotated, NoReturn

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

import llqr
from llqr.lab.cli import data, options, report, runs, translate
from llqr.lab.cli.bench import bench_app
from llqr.lab.cli.terminal import show
from llqr.lab.cli.toy import app as toy
from llqr.lab.config import recipe
from llqr.lab.errors import EXIT_CODES
from llqr.lab.results import cluster, storage

HELP = """Geometry-aware sharpness minimization: train, compare, and reproduce the paper's tables.

Exit codes: 0 done; 2 bad arguments; 3 data or a run file missing or damaged; 4 the training diverged; 75 stopped by a
signal or by --max-minutes with a checkpoint, from which the same command resumes. Results go to stdout, everything else
to stderr.
"""
app = typer.Typer(
    help=HELP, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False
)
app.add_typer(toy, name="toy")
app.add_typer(bench_app, name="bench")
for group in (runs, report, data, translate):
    group.mount(app)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(llqr.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
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
    table = Table(Column("recipe", no_wrap=True), "title", "methods of the table", "seeds", "variants", box=SIMPLE)
    for name, one in found.items():
        table.add_row(name, one.title, ", ".join(one.columns), str(one.seeds), ", ".join(one.variants))
    show(table)


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
        print(json.dumps([row.to_dict() for row in rows], indent=1))
    else:
        show(storage.as_table(rows))


@app.command("cluster")
def show_cluster(as_json: options.Json = False) -> None:
    """Print what a metric costs on 64 to 1024 devices, on paper: traffic and arithmetic of a step and of a refresh."""
    found = cluster.costs()
    if as_json:
        print(json.dumps([asdict(cost) | {"overhead": cost.overhead} for cost in found], indent=1))
    else:
        show(cluster.as_table(found))


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit; an error that is not a bug becomes one sentence on stderr and an exit code."""
    try:
        app(arguments)
    except tuple(EXIT_CODES) as error:
        print(f"llqr: {error}", file=sys.stderr)
        sys.exit(next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind)))
    sys.exit(0)
