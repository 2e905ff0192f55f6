"""Numbers of several runs taken together."""

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from llqr.lab.results.paper_table import Number
from llqr.lab.runs.record import RunRecord


def mean_of(values: Sequence[float]) -> Number | None:
    return Number(fmean(values), stdev(values) if len(values) > 1 else None, len(values)) if values else None


def results_of(runs: Iterable[RunRecord], key: str) -> list[float]:
    """This number of every result that has it."""
    return [one.result[key] for one in runs if one.result is not None and one.result.get(key) is not None]


def relative_time(found: Sequence[RunRecord], reference: Sequence[RunRecord], key: str) -> float | None:
    """The time of a step relative to the reference, where both were measured on the same kind of device."""
    times, others = results_of(found, key), results_of(reference, "step_seconds")
    if not times or not others or len({one.device for one in (*found, *reference)}) > 1:
        return None
    return fmean(times) / fmean(others)
