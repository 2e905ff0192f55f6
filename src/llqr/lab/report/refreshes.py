"""The refreshes of the metric, and its spectrum over the run."""

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from llqr.lab.report.html_table import EMPTY, HtmlCell, HtmlTable, Sourced
from llqr.lab.report.plots import Plot
from llqr.lab.report.section import Part, Section, sources
from llqr.lab.runs.stored import StoredRun
from llqr.report import WEAK, percent

MIB = 2**20


def refreshes(section: Section) -> Part | None:
    """One row per method that learns a metric, the objective of every refresh, and the metric over the run."""
    learned = [run for run in section.runs if any(record["refreshes"] for record in run.records)]
    if not learned:
        return None
    effect = Plot("Change of a gradient by U, |Ug − g| / |g| in %", "step", "%", section.looks)
    change = Plot("Change of J by a refresh, in % of its size", "step", "%", section.looks)
    label = "Lowest and highest mean eigenvalue of U among layers"
    spectrum = Plot(label, section.axis, "mean eigenvalue", section.looks)
    rows = []
    shown = section.by_method(learned)
    for method, runs in shown:
        rows.append(_cells(section, method, runs))
        _plot(effect, method, runs, _effect)
        _plot(change, method, runs, _change)
        count = min(len(run.records) for run in runs)
        for key in ("min", "max"):
            several = [[record["spectrum"][key] for record in run.records[:count]] for run in runs]
            spectrum.curves(method, [record[section.axis] for record in runs[0].records[:count]], several)
    sentence = (
        "J is the objective that a refresh minimises; a rejected refresh kept the old metric. The mean eigenvalue of a "
        "layer is trace(U) / n over its n weights; U starts at 1. The change of g is |Ug − g| / |g| on the gradient g "
        "of the inner batch, after the last accepted refresh. " + sources("log.jsonl", learned)
    )
    weak = list(filter(None, (_weakness(section, method, runs) for method, runs in shown)))
    plots = [effect, change, spectrum] if any(_reported(run, "change") for run in learned) else [change, spectrum]
    legend = {method: section.looks[method] for method, _ in shown}
    return Part("Refreshes of the metric", [sentence, *weak], [HtmlTable.of(rows)], plots, legend)


def last_effect(section: Section, run: StoredRun, key: str) -> Sourced | None:
    """The ``change`` or ``cosine`` after the last accepted refresh; runs from before they were logged have none."""
    found = _reported(run, key)
    return Sourced(found[-1], section.link(run, "log.jsonl"), f"refreshes.{key}") if found else None


def _reported(run: StoredRun, key: str) -> list[float]:
    return [report[key] for report in _reports(run) if report["accepted"] and report.get(key) is not None]


def _weakness(section: Section, method: str, runs: Sequence[StoredRun]) -> str:
    """A sentence about runs whose metric is next to the identity, empty if there are none."""
    found = [one.value for run in runs if (one := last_effect(section, run, "change")) is not None]
    weak = [value for value in found if value < WEAK]
    if not weak:
        return ""
    where = "" if len(weak) == len(found) else f" in {len(weak)} of {len(found)} runs"
    return f"The metric of {method} changed gradients by {percent(fmean(weak))}{where}: it did nearly nothing."


def _cells(section: Section, method: str, runs: Sequence[StoredRun]) -> dict[str, HtmlCell]:
    logs = section.files(runs, "log.jsonl")
    reports = [report for run in runs for report in _reports(run)]
    changes = [change for change in map(_change, reports) if change is not None]
    counts = [len(_reports(run)) for run in runs]
    shares = [100 * _seconds(run, "refresh") / _seconds(run, "train") for run in runs]
    rejected, seconds = sum(not report["accepted"] for report in reports), fmean(r["seconds"] for r in reports)
    sizes = [run.result["metric_bytes"] / MIB for run in runs if run.result is not None]
    change = HtmlCell(f"{median(changes):.2f} %", median(changes), f"median\n{logs}") if changes else EMPTY
    size = HtmlCell(f"{fmean(sizes):,.2f}", fmean(sizes), section.files(runs, "result.json")) if sizes else EMPTY
    spectra = [run.records[-1]["spectrum"] for run in runs]
    return {
        "method": HtmlCell(method, link=f"#{section.rows_of(method)}"),
        "refreshes": HtmlCell(f"{fmean(counts):g}", fmean(counts), f"per run, on average\n{logs}"),
        "rejected": HtmlCell(str(rejected), rejected, f"in all {len(runs)} runs\n{logs}"),
        "seconds each": HtmlCell(f"{seconds:.3f}", seconds, f"on average\n{logs}"),
        "of the time": HtmlCell(f"{fmean(shares):.1f} %", fmean(shares), f"of training, on average\n{logs}"),
        "change of J": change,
        "change of g": _effect_cell(section, runs, "change"),
        "cos(g, Ug)": _effect_cell(section, runs, "cosine"),
        "engine": HtmlCell(", ".join(dict.fromkeys(report["engine"] for report in reports)), source=logs),
        "lowest U": _layers(spectra, "min", logs),
        "median U": _layers(spectra, "median", logs),
        "highest U": _layers(spectra, "max", logs),
        "MiB of U": size,
    }


def _effect_cell(section: Section, runs: Sequence[StoredRun], key: str) -> HtmlCell:
    found = [one for run in runs if (one := last_effect(section, run, key)) is not None]
    if not found:
        return EMPTY
    value = fmean(one.value for one in found)
    return HtmlCell(percent(value) if key == "change" else f"{value:.3f}", value, "\n".join(map(str, found)))


def _layers(spectra: Sequence[dict[str, Any]], key: str, source: str) -> HtmlCell:
    """The mean over runs at the end of training, with the layers it belongs to."""
    value = fmean(spectrum[key] for spectrum in spectra)
    layers = dict.fromkeys(spectrum.get(f"{key}_layer", "") for spectrum in spectra)
    named = f"layer {', '.join(layers)}\n" if any(layers) else ""
    return HtmlCell(f"{value:.4f}", value, f"{named}{source}")


def _plot(plot: Plot, method: str, runs: Sequence[StoredRun], number: Callable[[dict[str, Any]], float | None]) -> None:
    """Plot a number of every refresh, at the steps at which every run has it."""
    found = [
        {report["step"]: value for report in _reports(run) if (value := number(report)) is not None} for run in runs
    ]
    steps = [step for step in found[0] if all(step in one for one in found)]
    if steps:
        plot.curves(method, steps, [[one[step] for step in steps] for one in found])


def _reports(run: StoredRun) -> list[dict[str, Any]]:
    return [report for record in run.records for report in record["refreshes"]]


def _seconds(run: StoredRun, part: str) -> float:
    return float(sum(record["seconds"][part] for record in run.records))


def _effect(report: dict[str, Any]) -> float | None:
    """How much the metric that the refresh led to changes a gradient, in per cent."""
    change = report.get("change")
    return None if change is None or not report["accepted"] else 100 * float(change)


def _change(report: dict[str, Any]) -> float | None:
    """The change of the objective by a refresh, in per cent of its size before."""
    before, after = report["objective_before"], report["objective_after"]
    return None if before is None or after is None or before == 0 else 100 * (after - before) / abs(before)
