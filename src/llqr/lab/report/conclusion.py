"""What came out, in a sentence, and the settings that decide it."""

from collections.abc import Sequence
from typing import Any

from llqr.lab.report.html_table import HtmlCell, HtmlTable, digits, plain_cell, spread
from llqr.lab.report.section import Section, result_of
from llqr.lab.results import summary
from llqr.lab.results.against import welch
from llqr.lab.results.summary import Summary

CHANCE = 0.05
"""A difference with a larger p is one that seeds alone could explain."""

DECIDING = {
    "rho": ("probe", "rho"),
    "structure": ("geometry", "structure"),
    "lr": ("base", "lr"),
    "refresh every": ("geometry", "every"),
    "divergence": ("geometry", "divergence"),
    "norm of the probe": ("probe", "norm"),
    "optimizer": ("base", "name"),
    "weight decay": ("base", "weight_decay"),
}
"""Columns of the settings that decide a run, and where its configuration holds them."""


def conclusion(section: Section) -> str:
    """The best method, its difference to the first one and to the next best, n, p, and what it costs."""
    if not section.finished:
        return "No run is finished yet."
    result = result_of(section.finished[0])
    found = summary.summarise(map(result_of, section.finished))
    order = sorted(found, key=lambda one: one.best_mean, reverse=result["larger_is_better"])
    best, first = order[0], found[0]
    said = f"{best.method} came out best, with a best {best.metric} of {_mean(best)}"
    if len(found) == 1:
        return f"{said}; it is the only method. One {best.counted_in} took {_seconds(best)}."
    tied = [one for one in order if one.best_mean == best.best_mean]
    other = tied[1] if len(tied) > 1 else first if best is not first else order[1]
    distance = format(abs(best.best_mean - other.best_mean), digits(best.best_mean))
    direction = "above" if result["larger_is_better"] else "below"
    times = f"{best.seconds / other.seconds:.2f} times as long as one of {other.method}"
    unfinished = len(section.runs) - len(section.finished)
    compared = [
        f"{said}, {distance} {direction} {other.method}, which has {_mean(other)}.",
        _certainty(best, other),
        "" if order[1] is other else f"Next is {order[1].method} with {_mean(order[1])}. {_certainty(best, order[1])}",
    ]
    sentences = [
        *([_equal(tied)] if len(tied) > 1 else compared),
        _tested(best, other),
        f"One {best.counted_in} of {best.method} took {times} ({_seconds(best)} against {_seconds(other)}).",
        f"{unfinished} of {len(section.runs)} runs are not finished." if unfinished else "",
    ]
    return " ".join(filter(None, sentences))


def _equal(tied: Sequence[Summary]) -> str:
    *others, last = (one.method for one in tied)
    means = " and ".join(dict.fromkeys(map(_mean, tied)))
    return f"{', '.join(others)} and {last} came out equal, with a best {tied[0].metric} of {means}."


def deciding(section: Section) -> HtmlTable:
    """What was chosen for every method; settings that no method has are left out."""
    chosen = {method: [run.config["run"] for run in runs] for method, runs in section.by_method(section.runs)}
    columns = {heading: [_chosen(runs, *place) for runs in chosen.values()] for heading, place in DECIDING.items()}
    columns = {heading: values for heading, values in columns.items() if any(value is not None for value in values)}
    rows = [
        [HtmlCell(method), *(plain_cell(values[number]) for values in columns.values())]
        for number, method in enumerate(chosen)
    ]
    return HtmlTable(["method", *columns], rows)


def _certainty(best: Summary, other: Summary) -> str:
    """Whether the difference is more than the spread over seeds."""
    if min(best.n, other.n) < 2:
        which = "each method" if best.n == other.n else (best.method if best.n < 2 else other.method)
        return f"With one run of {which} there is no p: whether it is more than chance cannot be said."
    p = welch(best.best, other.best)
    if p is None:
        return "No seed differs from another, so there is no p."
    return f"Welch's p is {p:.2g}: seeds alone {'hardly' if p < CHANCE else 'could'} explain the difference."


def _mean(one: Summary) -> str:
    return f"{spread(one.best_mean, one.best_std)} (n = {one.n})"


def _tested(best: Summary, other: Summary) -> str:
    """The same comparison on a test set that did not choose the evaluation, where there is one."""
    if best.test_mean is None or other.test_mean is None:
        return ""
    ours, theirs = spread(best.test_mean, best.test_std), spread(other.test_mean, other.test_std)
    return f"On the test set it is {ours} against {theirs}."


def _seconds(one: Summary) -> str:
    return f"{summary.TIMES[one.counted_in][1].format(one.seconds)} s"


def _chosen(runs: Sequence[dict[str, Any]], part: str, key: str) -> Any:
    """One setting of the runs of a method, all its values if they differ; None without such a part."""
    found = [(run.get(part) or {}).get(key) for run in runs]
    # Structures may be a table from patterns of names.
    shown = [", ".join(f"{k}: {v}" for k, v in one.items()) if isinstance(one, dict) else one for one in found]
    values = list(dict.fromkeys(shown))
    return values[0] if len(values) == 1 else ", ".join(map(str, values))
