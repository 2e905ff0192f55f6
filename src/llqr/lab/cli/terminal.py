"""Tables on stdout."""

import sys

from rich.console import Console
from rich.table import Table

WIDTH_IN_FILES = 200


def show(table: Table) -> None:
    """As wide as the terminal; in a file as wide as it needs to be."""
    Console(width=None if sys.stdout.isatty() else WIDTH_IN_FILES).print(table)
