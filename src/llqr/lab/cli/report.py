"""The commands that show what was measured: `llqr report`, `llqr table` and `llqr results`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from llqr.lab import machine, plots
from llqr.lab import report as pages
from llqr.lab.analysis.solution import Analyst
from llqr.lab.cli import options
from llqr.lab.cli.options import PLAIN
from llqr.lab.cli.terminal import show
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.own import experiment
from llqr.lab.report import markdown
from llqr.lab.results import measurements, tables
from llqr.lab.results.tables import PaperTable
from llqr.lab.runs import stored
from llqr.lab.runs.folder import RunFolder
from llqr.lab.writing import check_file, check_folder, write_text

RESULTS = Path("results")
Runs = Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or folders above them.")]
app = typer.Typer(**PLAIN)
results_app = typer.Typer(help="Keep results of runs in files, and draw their curves.", no_args_is_help=True, **PLAIN)
app.add_typer(results_app, name="results")


@app.command()
def report(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option(help="The file to write (default: report.html in the first of RUNS).")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Training samples to measure sharpness on. "
            "Default: as many as before, otherwise a number that suits the task. 0: measure nothing.",
        ),
    ] = None,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Write an HTML page: results, curves, sharpness of the solutions, refreshes, configuration."""
    found = stored.find(runs)
    target = out or runs[0] / "report.html"
    check_file("--out", target)
    write_report([run.path for run in found], target, machine.choose_device(device), samples=samples, quiet=quiet)
    print(target)


def write_report(
    folders: Sequence[Path], out: Path, device: torch.device, *, samples: int | None = None, quiet: bool = False
) -> None:
    """Measure the solutions of finished runs that were not measured yet, then write the page."""
    analyst = Analyst(device, samples)
    notes: dict[Path, str] = {}
    console = Console(stderr=True, quiet=quiet)
    waiting = [folder for folder in folders if analyst.needed(RunFolder(folder)) and not _names_code(folder)]
    for folder in waiting:
        check_folder("RUNS", folder)
    hidden = quiet or not console.is_terminal
    for folder in track(waiting, "measuring solutions", console=console, disable=hidden, transient=True):
        try:
            analyst.measure(RunFolder(folder))
        except (DataError, torch.OutOfMemoryError) as error:
            notes[folder] = str(error).partition("\n")[0]
    pages.write([stored.read(folder) for folder in folders], out, notes)


def _names_code(folder: Path) -> bool:
    """Whether its experiment is not imported yet: to read a folder must not run the code that it names."""
    run = RunFolder(folder).config()["run"]
    return run["task"]["name"] == "own" and run["data"]["root"] not in experiment.held


@app.command()
def table(
    name: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="A table of the paper, or of ours, or TABLE@VARIANT.")
    ] = None,
    folder: Annotated[Path, typer.Option("--results", help="Folder with the files of results, *.jsonl.")] = RESULTS,
    write: Annotated[Path | None, typer.Option(help="Rewrite the marked tables in this Markdown file.")] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Instead of the paper's numbers: the differences to this method, such as sam, with Welch's p."
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Also draw it: a file ending in .svg (follows light and dark).")
    ] = None,
) -> None:
    """Print a table, measured beside paper, with what is missing; or rewrite the tables in a Markdown file."""
    if (name is None) == (write is None):
        raise ConfigurationError("TABLE or --write must be given, and not both.")
    if not folder.is_dir():
        raise ConfigurationError(f"--results: there is no folder {folder}.")
    if picture is not None:
        check_file("--plot", picture, ".svg")
    runs = measurements.read(folder)
    if write is not None:
        if not write.is_file():
            raise ConfigurationError(f"--write: {write} is not there.")
        check_file("--write", write)
        write_text(write, markdown.regenerate(write.read_text(), runs))
        return
    assert name is not None
    built = tables.build(name, runs)
    if picture is not None:
        plots.save_table(built, picture)
    if against is not None:
        show_comparison(built, against)
    else:
        show_table(built)


def show_table(built: PaperTable) -> None:
    """Print a table, and which runs do not count in it."""
    headings, rows = tables.texts(built)
    _show(built, headings, [[row, method, measured or "missing", *others] for row, method, measured, *others in rows])
    for note in tables.footnotes(built):
        print(note)
    if not built.missing.empty:
        print(f"{len(built.missing)} of {len(built.cells)} cells are missing.")
    for reason in built.left_out:
        print(f"Not counted: {reason}")


def show_comparison(built: PaperTable, reference: str) -> None:
    """Print how the methods of a table differ from one of them."""
    found = tables.compare(built, reference)
    if found.empty:
        print("Nothing is measured yet.")
    else:
        _show(built, *tables.compared_texts(found))
        print(tables.WELCH)


def _show(built: PaperTable, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows begin with their name, which is shown once, and the method."""
    title = f"{built.name}: {built.metric}" if built.metric else built.name
    columns = (Column(heading, justify="right") for heading in headings[2:])
    shown = Table(*headings[:2], *columns, box=SIMPLE, title=title)
    previous = ""
    for row, *cells in rows:
        shown.add_row("" if row == previous else row, *cells)
        previous = row
    show(shown)


@results_app.command()
def add(
    runs: Runs,
    to: Annotated[Path, typer.Option(help="The file of JSON lines to append to, such as results/cifar100.jsonl.")],
) -> None:
    """Append finished runs to a file of results, as --keep does; runs that are there already are skipped.

    The curves of all runs, finished or not, are kept in the folder "curves" beside the file.
    """
    check_file("--to", to, ".jsonl")
    evaluated = [run for run in stored.find(runs) if run.records]
    if not evaluated:
        raise DataError("RUNS holds no run that was evaluated.")
    new, already = measurements.add(evaluated, to)
    print(f"{new} added, {already} there already")


@results_app.command()
def draw(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Files of curves, as `add` writes them.")],
    to: Annotated[Path, typer.Option(help="The picture: a file ending in .svg (follows light and dark).")],
    method: Annotated[list[str] | None, typer.Option(help="Only the runs of this method; may be repeated.")] = None,
    panel: Annotated[list[str] | None, typer.Option(help="Such as error:epoch or BLEU:step; may be repeated.")] = None,
) -> None:
    """Draw kept curves: what was evaluated, the training loss, and how much the metric changed a gradient."""
    check_file("--to", to, ".svg")
    for file in files:
        if not file.is_file():
            raise ConfigurationError(f"FILES: {file} is no file.")
    plots.save_curves(files, to, method or (), panel or ())
    print(to)
