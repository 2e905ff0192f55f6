"""Methods side by side: results over several seeds, gathered into one table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean, median, stdev
from typing import Any

from rich.box import SIMPLE
from rich.table import Column, Table

from llqr.lab.grouping import grouped
from llqr.lab.number_table import spread
from llqr.lab.results.paper_table import Number

TIMES = {"epoch": ("epoch_seconds", "{:.3f}"), "step": ("step_seconds", "{:.5f}")}
"""The time shown for a run that counts in epochs or in steps, and its format in seconds."""


@dataclass(frozen=True)
class Summary:
    """One method of one recipe over its seeds. ``seconds`` are those of an epoch, or of a step if the runs count steps.

    ``relative_time`` is relative to the first method; ``test_mean`` is there where the best weights were tested.
    """

    recipe: str
    method: str
    metric: str
    n: int
    best_mean: float
    best_std: float | None
    last_mean: float
    last_std: float | None
    test_mean: float | None
    test_std: float | None
    counted_in: str
    seconds: float
    relative_time: float

    @property
    def best(self) -> Number:
        return Number(self.best_mean, self.best_std, self.n)


def summarise(results: Iterable[dict[str, Any]]) -> list[Summary]:
    """Results by recipe and method, in the order in which these first appear."""
    first_seconds: dict[str, float] = {}
    summaries = []
    for (recipe, method), group in grouped(results, itemgetter("recipe", "method")).items():
        metric, counted_in = group[0]["metric"], group[0].get("counted_in", "epoch")
        seconds = median(result[TIMES[counted_in][0]] for result in group)
        best, last = ([result[key] for result in group] for key in ("best", "last"))
        tested = [result["test_of_best"][metric] for result in group if "test_of_best" in result]
        summaries.append(
            Summary(
                recipe=recipe,
                method=method,
                metric=metric,
                n=len(group),
                best_mean=fmean(best),
                best_std=_deviation(best),
                last_mean=fmean(last),
                last_std=_deviation(last),
                test_mean=fmean(tested) if tested else None,
                test_std=_deviation(tested),
                counted_in=counted_in,
                seconds=seconds,
                relative_time=seconds / first_seconds.setdefault(recipe, seconds),
            )
        )
    return summaries


def as_table(summaries: Sequence[Summary]) -> Table:
    """The rows of one recipe for a terminal; ± is the sample standard deviation over seeds."""
    first = summaries[0]
    tested = first.test_mean is not None
    headings = [f"best {first.metric}", f"last {first.metric}"]
    headings += [f"test {first.metric} of the best"] if tested else []
    headings += ["n", f"s / {first.counted_in}", f"time / {first.method}"]
    columns = (Column(heading, justify="right") for heading in headings)
    table = Table("method", *columns, title=first.recipe, box=SIMPLE)
    for row in summaries:
        pairs: list[tuple[float, float | None]] = [(row.best_mean, row.best_std), (row.last_mean, row.last_std)]
        if row.test_mean is not None:
            pairs.append((row.test_mean, row.test_std))
        time = TIMES[row.counted_in][1].format(row.seconds)
        table.add_row(row.method, *(spread(*pair) for pair in pairs), f"{row.n}", time, f"{row.relative_time:.2f}x")
    return table


def _deviation(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None
