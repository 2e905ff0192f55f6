"""Numbers of several runs taken together."""

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from llqr.lab.results.paper_table import Number, PaperCell
from llqr.lab.runs.record import RunRecord


def mean_of(values: Sequence[float]) -> Number | None:
    return Number(fmean(values), stdev(values) if len(values) > 1 else None, len(values)) if values else None


def results_of(runs: Iterable[RunRecord], key: str) -> list[float]:
    """This number of every result that has it."""
    return [one.result[key] for one in runs if one.result is not None and one.result.get(key) is not None]


def measured_cell(
    row: str,
    column: str,
    found: Sequence[RunRecord],
    reference: Sequence[RunRecord],
    measure: str,
    *,
    paper: Number | None = None,
    beside: Number | None = None,
) -> PaperCell:
    """What these runs of a method come to; times are relative to the runs of the ``reference``."""
    return PaperCell(
        row,
        column,
        mean_of(results_of(found, measure)),
        paper,
        tuple(one.origin for one in found),
        beside=beside,
        tested=mean_of([one.tested for one in found if one.tested is not None]),
        relative_time=relative_time(found, reference, "step_seconds"),
        probing_time=relative_time(found, reference, "probing_step_seconds"),
    )


def relative_time(found: Sequence[RunRecord], reference: Sequence[RunRecord], key: str) -> float | None:
    """The time of a step relative to the reference, where both were measured on the same kind of device."""
    times, others = results_of(found, key), results_of(reference, "step_seconds")
    if not times or not others or len({one.device for one in (*found, *reference)}) > 1:
        return None
    return fmean(times) / fmean(others)
