"""Tables on stdout."""

import sys
from io import TextIOWrapper

from rich.console import Console
from rich.table import Table

WIDTH_IN_FILES = 200


def width() -> int:
    """Of the terminal; in a file there is room."""
    return Console().width if sys.stdout.isatty() else WIDTH_IN_FILES


def show(table: Table) -> None:
    """As wide as the terminal, where long cells take several lines; in a file as wide as it needs to be."""
    for column in table.columns:
        column.overflow = "fold"  # a number that is cut off is another number
        column.no_wrap = False
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a ± must not end a command after hours
    Console(width=width(), markup=False).print(table)  # brackets belong to a name
