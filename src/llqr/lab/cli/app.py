"""The command line: `llqr COMMAND`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

import llqr
from llqr.lab.cli import data as cli_data
from llqr.lab.cli import options
from llqr.lab.cli import report as reporting
from llqr.lab.cli import translate as cli_translate
from llqr.lab.cli.bench import bench_app
from llqr.lab.cli.options import Named, load_recipe
from llqr.lab.cli.terminal import show
from llqr.lab.cli.toy import app as toy
from llqr.lab.config import recipe
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.errors import EXIT_CODES
from llqr.lab.results import storage
from llqr.lab.results import summary as comparison
from llqr.lab.runs import dry_run as planning
from llqr.lab.runs.experiment import carry_out
from llqr.lab.runs.folder import Plan, plans
from llqr.lab.training.loop import Execution
from llqr.lab.training.progress import Display
from llqr.lab.training.stop import Stop

HELP = """Geometry-aware sharpness minimization: train, compare, and reproduce the paper's tables.

Exit codes: 0 done; 2 bad arguments; 3 data or a run file missing or damaged; 4 the training diverged; 75 stopped by a
signal or by --max-minutes with a checkpoint, the same command goes on from it. Results go to stdout, everything else to
stderr.
"""
app = typer.Typer(
    help=HELP, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False
)
app.add_typer(toy, name="toy")
app.add_typer(bench_app, name="bench")
reporting.mount(app)
cli_data.mount(app)
cli_translate.mount(app)


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
def train(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe, recipe@variant, or a TOML file.")],
    method: Annotated[str | None, typer.Option(help="The method (default: the first of the recipe's table).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides everything random in the run.")] = 0,
    overrides: options.Set = None,
    out: options.Out = Path("runs"),
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    capture: options.Capture = None,
    compiled: options.Compile = False,
    max_minutes: options.MaxMinutes = None,
    checkpoint_minutes: options.CheckpointMinutes = 5.0,
    tensorboard: options.TensorBoard = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
) -> None:
    """Train one method of a recipe with one seed, or go on where an earlier command was stopped."""
    chosen = load_recipe(name, overrides, data_dir)
    wanted = plans(chosen.name, chosen.recipe, [method or chosen.recipe.columns[0]], [seed], out)
    execution = options.execution(device, capture, compiled, checkpoint_minutes, tensorboard)
    _make(wanted, execution, max_minutes, quiet=quiet, as_json=as_json, dry_run=dry_run)


@app.command()
def compare(
    name: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A recipe, recipe@variant, or a TOML file.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Instead of RECIPE: the data set.")] = None,
    model: Annotated[str | None, typer.Option(help="Instead of RECIPE: the network.")] = None,
    methods: options.Methods = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, counted from 0.")] = 3,
    overrides: options.Set = None,
    out: options.Out = Path("runs"),
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    capture: options.Capture = None,
    compiled: options.Compile = False,
    max_minutes: options.MaxMinutes = None,
    checkpoint_minutes: options.CheckpointMinutes = 5.0,
    tensorboard: options.TensorBoard = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
) -> None:
    """Train several methods with several seeds, print them side by side and write report.html."""
    chosen = _recipe_for(name, data, model, overrides, data_dir)
    wanted = plans(chosen.name, chosen.recipe, chosen.methods(methods), list(range(seeds)), out)
    execution = options.execution(device, capture, compiled, checkpoint_minutes, tensorboard)
    _make(wanted, execution, max_minutes, quiet=quiet, as_json=as_json, dry_run=dry_run)
    if not dry_run:
        reporting.after_comparison([plan.folder for plan in wanted], out / "report.html", execution.device, quiet=quiet)


@app.command()
def reproduce(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table of the paper; `llqr recipes` lists them.")],
    row: Annotated[list[str] | None, typer.Option(help="Only this row of the table, any number of times.")] = None,
    variant: Annotated[str | None, typer.Option(help="A variant of the recipes, such as short.")] = None,
    methods: options.Methods = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds (default: as many as the paper).")] = None,
    overrides: options.Set = None,
    out: options.Out = Path("runs"),
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    capture: options.Capture = None,
    compiled: options.Compile = False,
    max_minutes: options.MaxMinutes = None,
    checkpoint_minutes: options.CheckpointMinutes = 5.0,
    tensorboard: options.TensorBoard = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
) -> None:
    """Make the runs of a table of the paper that are not made yet."""
    wanted: list[Plan] = []
    for name in _rows(table, row):
        chosen = load_recipe(name if variant is None else f"{name}@{variant}", overrides, data_dir)
        numbers = list(range(seeds or chosen.recipe.seeds))
        wanted += plans(chosen.name, chosen.recipe, chosen.methods(methods), numbers, out)
    execution = options.execution(device, capture, compiled, checkpoint_minutes, tensorboard)
    _make(wanted, execution, max_minutes, quiet=quiet, as_json=as_json, dry_run=dry_run)


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
def show_storage(as_json: options.Json = False) -> None:
    """Print the paper's storage table, counted from the layout of the metric."""
    rows = storage.rows()
    if as_json:
        print(json.dumps([row.to_dict() for row in rows], indent=1))
    else:
        show(storage.as_table(rows))


def _recipe_for(
    name: str | None, data: str | None, model: str | None, overrides: list[str] | None, data_dir: Path | None
) -> Named:
    """The recipe of that name, or the one of a data set and a network; any network may take the place of a row's."""
    if (name is None) == (data is None and model is None):
        raise ConfigurationError("RECIPE or --data and --model must be given, and not both.")
    if name is not None:
        return load_recipe(name, overrides, data_dir)
    if data is None or model is None:
        raise ConfigurationError(f"{'--data' if data is None else '--model'} must be given too.")
    rows = _rows(data, None)
    if f"{data}/{model}" in rows:
        return load_recipe(f"{data}/{model}", overrides, data_dir)
    similar = load_recipe(rows[0], [f"model.name={json.dumps(model)}", *(overrides or [])], data_dir)
    return Named(f"{data}/{model}", similar.recipe)


def _rows(table: str, chosen: Sequence[str] | None) -> list[str]:
    """The recipes of a table, or of some of its rows."""
    known = recipe.names()
    rows = {name.partition("/")[2]: name for name in known if name.partition("/")[0] == table}
    if not rows:
        tables = dict.fromkeys(name.partition("/")[0] for name in known)
        raise ConfigurationError(f"TABLE must be one of {', '.join(tables)}, got {table!r}.")
    for row in chosen or ():
        if row not in rows:
            raise ConfigurationError(f"--row must be one of {', '.join(rows)}, got {row!r}.")
    return [rows[row] for row in chosen or rows]


def _make(
    wanted: list[Plan], execution: Execution, max_minutes: float | None, *, quiet: bool, as_json: bool, dry_run: bool
) -> None:
    """Carry out the plans and print what came of them, or only say what they are."""
    if dry_run:
        if as_json:
            print(json.dumps(planning.describe(wanted), indent=1))
        else:
            print("\n".join(planning.explain(wanted)))
        return
    with Stop(max_minutes) as stop, Display(len(wanted), quiet=quiet) as display:
        results = carry_out(wanted, execution, stop, display)
    summaries = comparison.summarise(results)
    if as_json:
        print(json.dumps({"runs": results, "summaries": [asdict(summary) for summary in summaries]}, indent=1))
        return
    for _, rows in groupby(summaries, key=lambda summary: summary.recipe):
        show(comparison.as_table(list(rows)))


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit; what is not a bug becomes one sentence on stderr and an exit code."""
    try:
        app(arguments)
    except tuple(EXIT_CODES) as error:
        print(f"llqr: {error}", file=sys.stderr)
        sys.exit(next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind)))
    sys.exit(0)
