"""`llqr toy`: the figures of the two-scale pothole model, each with its numbers.

The options of a command are the parameters of the function that runs its experiment.
"""

import inspect
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from llqr.lab.cli.options import PLAIN
from llqr.lab.writing import check_folder, explained

HELP = "The two-scale pothole model: toy figures, phase diagrams, hovering and selection."
Out = Annotated[Path, typer.Option("--out", help="Folder for figures and numbers.", file_okay=False)]
OUT = Path("runs/toy")


def __getattr__(name: str) -> typer.Typer:
    """``app``, made when it is asked for: the experiments import matplotlib."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llqr.lab.toy.escape import run_escape
    from llqr.lab.toy.hover import run_hover
    from llqr.lab.toy.noise import run_noise
    from llqr.lab.toy.phase import run_phase
    from llqr.lab.toy.selection import run_selection
    from llqr.lab.toy.transfer import run_transfer

    app, commands = typer.Typer(**PLAIN), typer.Typer(help=HELP, no_args_is_help=True, **PLAIN)
    app.add_typer(commands, name="toy")
    experiments = (run_hover, run_escape, run_noise, run_phase, run_selection, run_transfer)
    figures = [commands.command(run.__name__.removeprefix("run_"))(_command(run)) for run in experiments]

    @commands.command("all")
    def all_command(out: Out = OUT) -> None:
        """Every figure with its default options."""
        for command in figures:
            command(out=out)

    return app


def _command(run: Callable[..., Any]) -> Callable[..., None]:
    """Run an experiment, save its result and print its numbers; the recorded command names every option."""
    from llqr.lab.toy.experiment import save, single_numbers

    parameters = inspect.signature(run).parameters
    options = [parameter for parameter in parameters.values() if parameter.name != "progress"]

    def command(out: Path, **given: Any) -> None:
        check_folder("--out", out)
        try:
            with _bar() as progress:
                shown = {"progress": progress} if "progress" in parameters else {}
                result = run(**given, **shown)
        except ValueError as error:  # the library names the argument, which is an option here
            raise typer.BadParameter(str(error)) from None
        chosen = {option.name: given.get(option.name, option.default) for option in options}
        words = [word for key, value in chosen.items() for word in (f"--{key.replace('_', '-')}", f"{value:g}")]
        with explained(out):
            save(result, out, shlex.join(["llqr", "toy", result.name, *words]))
        typer.echo("\n  ".join([str(run.__doc__), *single_numbers(result.numbers), f"-> {out}"]))

    command.__doc__ = run.__doc__
    place = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=OUT, annotation=Out)
    command.__signature__ = inspect.Signature([*options, place])  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*options, place)}
    return command


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, with one line per part of the work."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
