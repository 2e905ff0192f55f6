"""The command line: `llqr COMMAND`. Nothing here imports torch; a command's module is imported when it is run."""

import errno
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import llqr
from llqr.lab.cli.options import PLAIN
from llqr.lab.errors import EXIT_CODES, CannotWrite, DataError, Interrupted
from llqr.lab.stop import Stop

HELP = """Geometry-aware sharpness minimization: train, compare, and reproduce the paper's tables.

Exit codes: 0 done; 1 an error in your own code, a bug, or a failed run of --jobs; 2 bad arguments; 3 data or a run
file missing or damaged; 4 the training diverged; 73 results cannot be written; 75 stopped by a signal or by
--max-minutes with a checkpoint, from which the same command resumes; 130 interrupted. Results go to stdout, everything
else to stderr.
"""
COMMANDS = {
    "train": ("runs", "Train one method of a recipe with one seed, or resume a run that was stopped."),
    "compare": ("runs", "Train several methods with several seeds, print them side by side and write report.html."),
    "reproduce": ("runs", "Make the runs of a table of the paper, except those that are finished."),
    "report": ("report", "Write an HTML page: results, curves, sharpness, refreshes, configuration."),
    "table": ("report", "Print a table, measured beside paper; or rewrite the tables in a Markdown file."),
    "results": ("report", "Keep results of runs in files, and draw their curves."),
    "data": ("data", "Prepare parallel text for translation; files are plain, .xz or .gz."),
    "recipes": ("catalogue", "List the built-in recipes: TABLE/ROW, their methods and their variants."),
    "storage": ("catalogue", "Print the paper's storage table and cheaper structures."),
    "bench": ("bench", "Time steps and refreshes, and measure their memory."),
    "toy": ("toy", "The two-scale pothole model: toy figures, phase diagrams, hovering and selection."),
}
"""By name: the module in this folder whose ``app`` has the command, and what the list of commands says about it."""
UNWRITABLE = (errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EPERM, errno.EROFS)


class LazyCommands(TyperGroup):
    """Lists all commands, but imports the module of one only to run it: torch alone takes more than a second."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, summary) in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=summary, rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            room, _ = COMMANDS[name]
            with Stop() as stop:  # a Ctrl-C in the middle of its import ends torch, or leaves half of numpy
                module = import_module(f"llqr.lab.cli.{room}")
            if stop.requested:
                raise KeyboardInterrupt
            command = typer.main.get_group(module.app).commands[name]
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # before typer turns it into "Aborted!" and exit code 1
            raise Interrupted("interrupted.") from None


app = typer.Typer(cls=LazyCommands, help=HELP, no_args_is_help=True, **PLAIN)


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


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit; an error that is not a bug becomes one sentence on stderr and an exit code."""
    usual = warnings.formatwarning
    warnings.formatwarning = _format_warning
    try:
        app(arguments, prog_name="llqr")
    except tuple(EXIT_CODES) as error:
        code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
        _fail(str(error), code)
    except OSError as error:
        if error.errno is None:
            raise
        code = EXIT_CODES[CannotWrite if error.errno in UNWRITABLE else DataError]
        _fail(f"{error.filename or 'a file'}: {error.strerror}.", code)
    finally:
        warnings.formatwarning = usual
    sys.exit(0)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Show a warning of llqr as a sentence; a line of its code tells the user nothing."""
    if Path(filename).is_relative_to(Path(llqr.__file__).parent):
        return f"llqr: warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _fail(sentence: str, code: int) -> NoReturn:
    # What a file holds must not control the terminal.
    shown = "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in sentence)
    print(f"llqr: {shown}", file=sys.stderr)
    sys.exit(code)
