"""Methods side by side: results of several seeds gathered into one table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from rich.box import SIMPLE
from rich.table import Table


@dataclass(frozen=True)
class Summary:
    """One method of one recipe over its seeds. ``relative_time`` is that of an epoch, beside the first method."""

    recipe: str
    method: str
    metric: str
    n: int
    best_mean: float
    best_std: float | None
    last_mean: float
    last_std: float | None
    epoch_seconds: float
    relative_time: float


def summarise(results: Iterable[dict[str, Any]]) -> list[Summary]:
    """Results by recipe and method, in the order in which these first appear."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["recipe"], result["method"]), []).append(result)
    first_seconds: dict[str, float] = {}
    summaries = []
    for (recipe, method), group in groups.items():
        best, last = [result["best"] for result in group], [result["last"] for result in group]
        seconds = median(result["epoch_seconds"] for result in group)
        summaries.append(
            Summary(
                recipe=recipe,
                method=method,
                metric=group[0]["metric"],
                n=len(group),
                best_mean=fmean(best),
                best_std=stdev(best) if len(best) > 1 else None,
                last_mean=fmean(last),
                last_std=stdev(last) if len(last) > 1 else None,
                epoch_seconds=seconds,
                relative_time=seconds / first_seconds.setdefault(recipe, seconds),
            )
        )
    return summaries


def as_table(summaries: Sequence[Summary]) -> Table:
    """The rows of one recipe for a terminal; ± is the sample standard deviation over the seeds."""
    first = summaries[0]
    table = Table(title=first.recipe, box=SIMPLE)
    table.add_column("method")
    headings = (f"best {first.metric}", f"last {first.metric}", "n", "s/epoch", f"time / {first.method}")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in summaries:
        best, last = _spread(row.best_mean, row.best_std), _spread(row.last_mean, row.last_std)
        table.add_row(row.method, best, last, f"{row.n}", f"{row.epoch_seconds:.3f}", f"{row.relative_time:.2f}x")
    return table


def _spread(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"
