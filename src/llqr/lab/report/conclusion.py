"""What came out, in a sentence, and the settings that decide it."""

from typing import Any

from llqr.lab.report.html_table import HtmlCell, HtmlRow, HtmlTable, plain_cell
from llqr.lab.report.section import Section, result_of
from llqr.lab.report.sourced_numbers import digits, spread
from llqr.lab.results import summary
from llqr.lab.results.against import welch
from llqr.lab.results.paper_table import Number
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
    """The best method, its difference to the first one, n, p, and what it costs."""
    if not section.finished:
        return "No run is finished yet."
    result = result_of(section.finished[0])
    found = summary.summarise(map(result_of, section.finished))
    order = sorted(found, key=lambda one: one.best_mean, reverse=result["larger_is_better"])
    best, first = order[0], found[0]
    said = f"{best.method} came out best: {best.metric} {_mean(best)}"
    if len(found) == 1:
        return f"{said}, the only method. One {_unit(best)} took {_seconds(best)}."
    other = first if best is not first else order[1]
    distance = format(abs(best.best_mean - other.best_mean), digits(best.best_mean))
    direction = "above" if result["larger_is_better"] else "below"
    said += f", {distance} {direction} {other.method} ({_mean(other)}). {_certainty(best, other)}"
    ratio = best.seconds / other.seconds
    cost = f"{ratio:.2f} times as long as one of {other.method} ({_seconds(best)} against {_seconds(other)})"
    said += f" One {_unit(best)} of {best.method} took {cost}."
    unfinished = len(section.runs) - len(section.finished)
    return f"{said} {unfinished} of {len(section.runs)} runs are not finished." if unfinished else said


def deciding(section: Section) -> HtmlTable:
    """What the user chose for every method; settings that no method has are left out."""
    chosen = {method: runs[0].config["run"] for method, runs in section.by_method(section.runs)}
    columns = {
        heading: [_setting(run, keys) for run in chosen.values()]
        for heading, keys in DECIDING.items()
        if any(_setting(run, keys) is not None for run in chosen.values())
    }
    rows = [
        HtmlRow([HtmlCell(method), *(plain_cell(values[place]) for values in columns.values())])
        for place, method in enumerate(chosen)
    ]
    return HtmlTable(["method", *columns], rows)


def _certainty(best: Summary, other: Summary) -> str:
    """Whether the difference is more than the spread over seeds."""
    if min(best.n, other.n) < 2:
        which = "each method" if best.n == other.n else (best.method if best.n < 2 else other.method)
        return f"With one run of {which} there is no p: whether it is more than chance cannot be said."
    p = welch(Number(best.best_mean, best.best_std, best.n), Number(other.best_mean, other.best_std, other.n))
    if p is None:
        return "No seed differs from another, so there is no p."
    verdict = "more than seeds explain" if p < CHANCE else "no more than seeds alone could explain"
    return f"Welch's p is {p:.2g}: {verdict}."


def _mean(one: Summary) -> str:
    return f"{spread(one.best_mean, one.best_std)}, n = {one.n}"


def _seconds(one: Summary) -> str:
    return f"{summary.TIMES[one.counted_in][1].format(one.seconds)} s"


def _unit(one: Summary) -> str:
    return "epoch" if one.counted_in == "epoch" else "step"


def _setting(run: dict[str, Any], keys: tuple[str, str]) -> Any:
    """None where a method has no such part, such as the probe of plain SGD."""
    part, key = keys
    return (run.get(part) or {}).get(key)
