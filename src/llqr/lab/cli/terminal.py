"""Tables on stdout."""

import sys
from io import TextIOWrapper

from rich.console import Console
from rich.table import Table

WIDTH_IN_FILES = 200


def width() -> int:
    """The width of the terminal, or plenty for a file."""
    return Console().width if sys.stdout.isatty() else WIDTH_IN_FILES


def show(table: Table) -> None:
    """Print a table: long cells wrap on a terminal, and are on one line in a file."""
    for column in table.columns:
        column.overflow = "fold"  # a number that is cut off is another number
        column.no_wrap = False
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a ± must not end a command after hours
    Console(width=width(), markup=False).print(table)  # brackets belong to a name
