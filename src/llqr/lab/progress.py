"""What is shown while runs are made: progress bars on a terminal, occasional lines elsewhere; all on stderr."""

import time
from typing import Self

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

SECONDS_BETWEEN_LINES = 30.0


class Display:
    """One bar for the run under way and, when there will be several ``runs``, one for all of them."""

    def __init__(self, runs: int = 1, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, markup=False)  # brackets belong to a name
        label = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
        counts = MofNCompleteColumn(table_column=Column(no_wrap=True))
        left = TimeRemainingColumn(table_column=Column(no_wrap=True))
        hidden = quiet or not self._console.is_terminal
        self._bars = Progress(label, counts, left, console=self._console, disable=hidden)
        self._all = self._bars.add_task("all runs", total=runs) if runs > 1 else None
        self._run: TaskID | None = None
        self._label = ""
        self._said = 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def begin(self, label: str, total: int, done: int) -> None:
        """A run of ``total`` steps begins, or continues after ``done`` of them."""
        self._label, self._said = label, time.monotonic()
        self._run = self._bars.add_task(label, total=total, completed=done)

    def advance(self, done: int) -> None:
        """``done`` steps are done."""
        if self._run is not None:
            self._bars.update(self._run, completed=done)

    def evaluated(self, position: str, metric: str, loss: float) -> None:
        """The model has been evaluated at this position of the run."""
        state = f"{position}: {metric}, train loss {loss:.4f}"
        if self._run is not None:
            self._bars.update(self._run, description=f"{self._label}\n  {state}")
        now = time.monotonic()
        if self._bars.disable and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            self._console.print(f"{self._label}: {state}", highlight=False, soft_wrap=True)

    def end(self, outcome: str) -> None:
        """A run is done, whether now or by an earlier command."""
        if self._run is not None:
            self._bars.remove_task(self._run)
            self._run = None
        if self._all is not None:
            self._bars.advance(self._all)
        self._console.print(outcome, highlight=False, soft_wrap=True)
