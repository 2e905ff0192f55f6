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
from llqr.lab.cli.options import ChosenRecipe, load_recipe
from llqr.lab.cli.terminal import show
from llqr.lab.cli.toy import app as toy
from llqr.lab.config import recipe
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.errors import EXIT_CODES
from llqr.lab.results import measurements, storage
from llqr.lab.results.summary import as_table, summarise
from llqr.lab.runs import dry_run as dry
from llqr.lab.runs import stored
from llqr.lab.runs.experiment import carry_out
from llqr.lab.runs.planned import PlannedRun, plan
from llqr.lab.training.loop import Execution
from llqr.lab.training.progress import Display
from llqr.lab.training.stop import Stop

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
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random in the run.")] = 0,
    overrides: options.Set = None,
    out: options.Out = Path("runs"),
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    capture: options.Capture = None,
    compiled: options.Compile = False,
    max_minutes: options.MaxMinutes = None,
    checkpoint_minutes: options.CheckpointMinutes = 5.0,
    tensorboard: options.TensorBoard = False,
    keep: options.Keep = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
) -> None:
    """Train one method of a recipe with one seed, or resume a run that was stopped."""
    chosen = load_recipe(name, overrides, data_dir)
    planned = plan(chosen.name, chosen.recipe, [method or chosen.recipe.columns[0]], [seed], out)
    execution = options.execution(device, capture, compiled, checkpoint_minutes, tensorboard)
    if _make(planned, execution, max_minutes, keep, quiet=quiet, as_json=as_json, dry_run=dry_run):
        _keep(planned, keep)


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
    keep: options.Keep = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
) -> None:
    """Train several methods with several seeds, print them side by side and write report.html."""
    chosen = _recipe_for(name, data, model, overrides, data_dir)
    planned = plan(chosen.name, chosen.recipe, chosen.methods(methods), list(range(seeds)), out)
    execution = options.execution(device, capture, compiled, checkpoint_minutes, tensorboard)
    if _make(planned, execution, max_minutes, keep, quiet=quiet, as_json=as_json, dry_run=dry_run):
        reporting.after_comparison([one.path for one in planned], out / "report.html", execution.device, quiet=quiet)
        _keep(planned, keep)


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
    keep: options.Keep = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
) -> None:
    """Make the runs of a table of the paper, except those that are finished.

    With --keep: also write report.html, keep the runs in that file, and print the table, measured beside paper.
    """
    planned: list[PlannedRun] = []
    for name in _rows(table, row):
        chosen = load_recipe(name if variant is None else f"{name}@{variant}", overrides, data_dir)
        numbers = list(range(seeds or chosen.recipe.seeds))
        planned += plan(chosen.name, chosen.recipe, chosen.methods(methods), numbers, out)
    execution = options.execution(device, capture, compiled, checkpoint_minutes, tensorboard)
    made = _make(planned, execution, max_minutes, keep, quiet=quiet, as_json=as_json, dry_run=dry_run)
    if made and keep is not None:
        reporting.after_comparison([one.path for one in planned], out / "report.html", execution.device, quiet=quiet)
        _keep(planned, keep)
        if not as_json:
            reporting.show_table(table, measurements.read(keep.parent), row or ())


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
) -> ChosenRecipe:
    """The recipe of that name, or that of a data set with a network, which may be one that no row has."""
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
    return ChosenRecipe(f"{data}/{model}", similar.recipe)


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
    planned: list[PlannedRun],
    execution: Execution,
    max_minutes: float | None,
    keep: Path | None,
    *,
    quiet: bool,
    as_json: bool,
    dry_run: bool,
) -> bool:
    """Carry out the runs and print their results, or only say what they are; whether they were made."""
    if keep is not None:
        measurements.check_file("--keep", keep)
    if dry_run:
        print(json.dumps(dry.describe(planned), indent=1) if as_json else "\n".join(dry.explain(planned)))
        return False
    with Stop(max_minutes) as stop, Display(len(planned), quiet=quiet) as display:
        results = carry_out(planned, execution, stop, display)
    summaries = summarise(results)
    if as_json:
        print(json.dumps({"runs": results, "summaries": [asdict(summary) for summary in summaries]}, indent=1))
        return True
    for _, rows in groupby(summaries, key=lambda summary: summary.recipe):
        show(as_table(list(rows)))
    return True


def _keep(planned: Sequence[PlannedRun], path: Path | None) -> None:
    """Append the runs to a file of results, if one was named."""
    if path is not None:
        new, already = measurements.add([stored.read(one.path) for one in planned], path)
        print(f"{path}: {new} added, {already} there already", file=sys.stderr)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit; an error that is not a bug becomes one sentence on stderr and an exit code."""
    try:
        app(arguments)
    except tuple(EXIT_CODES) as error:
        print(f"llqr: {error}", file=sys.stderr)
        sys.exit(next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind)))
    sys.exit(0)
