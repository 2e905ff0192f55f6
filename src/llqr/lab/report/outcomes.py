"""What the methods achieved: a table with times, and curves against steps and against time."""

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, median

from llqr.lab import pictures
from llqr.lab.report.conclusion import deciding
from llqr.lab.report.html_table import EMPTY, HtmlCell, HtmlTable, mean
from llqr.lab.report.plots import Plot
from llqr.lab.report.section import SPLITS, Part, Section, result_of, sources
from llqr.lab.results import summary as compare
from llqr.lab.runs.stored import StoredRun


def summary(section: Section) -> Part:
    """Mean ± standard deviation, n, times relative to the first method, and the settings that decide the runs."""
    if not section.finished:
        return Part("Results", ["No run is finished yet."])
    result = result_of(section.finished[0])
    metric, larger, split = result["metric"], result["larger_is_better"], result.get("split", "test")
    summaries = {row.method: row for row in compare.summarise(map(result_of, section.finished))}
    best = (max if larger else min)(found.best_mean for found in summaries.values())
    others = [name for name in result[split] if name != metric]
    tested = "test_of_best" in result
    probing = any("probing_step_seconds" in result_of(run) for run in section.finished)
    first, reference = next(iter(summaries.items()))
    rows = []
    for method, runs in section.by_method(section.finished):
        found = summaries[method]
        link = f"#{section.rows_of(method)}"
        kind, unit = compare.TIMES[found.counted_in]
        times = "median of\n" + "\n".join(map(str, section.results(method, kind)))
        relative = f"{found.seconds:.6g} s against {reference.seconds:.6g} s of {first}"
        cells = {
            "method": HtmlCell(method),
            f"best {metric}": mean(section.results(method, "best"), link, strong=found.best_mean == best),
        }
        if tested:
            cells[f"test {metric} of the best"] = mean(section.results(method, "test_of_best", metric), link)
        cells[f"last {metric}"] = mean(section.results(method, "last"), link)
        for name in others:
            cells[f"last {split} {name.replace('_', ' ')}"] = mean(section.results(method, split, name), link)
        cells |= {
            "n": HtmlCell(str(found.n), found.n, section.files(runs, "result.json"), link),
            f"s / {reference.counted_in}": HtmlCell(unit.format(found.seconds), found.seconds, times, link),
            f"time / {first}": HtmlCell(f"{found.relative_time:.2f}×", found.relative_time, relative, link),
        }
        if probing:
            cells["while probing"] = _probing(section, runs, reference.seconds, link)
        rows.append(cells)
    better = "larger" if larger else "smaller"
    sentence = f"Mean ± standard deviation over n seeds; a {better} {metric} is better. Times without evaluation."
    if probing:
        sentence += f" The last column is the time of a step once the probes have begun, relative to {first}."
    facts = [f"{metric}: {result_of(run)['bleu']}." for run in section.finished if "bleu" in result_of(run)]
    return Part("Results", [sentence, *dict.fromkeys(facts)], [HtmlTable.of(rows), deciding(section)])


def _probing(section: Section, runs: Sequence[StoredRun], reference: float, link: str) -> HtmlCell:
    """The time of a step once the probe has begun, for a method whose probe begins late."""
    several = [
        section.result(run, "probing_step_seconds") for run in runs if result_of(run).get("probing_step_seconds")
    ]
    if not several:
        return EMPTY
    ratio = median(one.value for one in several) / reference
    return HtmlCell(f"{ratio:.2f}×", ratio, "median of\n" + "\n".join(map(str, several)), link)


def curves(section: Section) -> Part | None:
    """Everything measured during training: against the position in the run, and the metrics also against time."""
    logged = [run for run in section.runs if run.records]
    if not logged:
        return None
    split = next(name for name in SPLITS if name in logged[0].records[0])
    metrics, losses = ([(kind, name) for name in logged[0].records[0][kind]] for kind in (split, "train"))
    plots = [_curve(section, logged, *one, timed=timed) for one in metrics for timed in (False, True)]
    plots += [_curve(section, logged, *one, timed=False) for one in losses]
    sentence = (
        "Mean over seeds, with the range from the lowest to the highest; the first quarter may be cut off. Time is "
        "training time, with refreshes and without evaluations. " + sources("log.jsonl", logged)
    )
    return Part("Curves", [sentence], plots=plots, legend=section.looks)


def _curve(section: Section, logged: Sequence[StoredRun], kind: str, name: str, *, timed: bool) -> Plot:
    axis = "minutes" if timed else section.axis
    shown = name.replace("_", " ")
    plot = Plot(f"{kind} {shown} over time" if timed else f"{kind} {shown}", axis, shown, section.looks)
    values, late = [], []
    for method, runs in section.by_method(logged):
        count = min(len(run.records) for run in runs)
        several = [[record[kind][name] for record in run.records[:count]] for run in runs]
        several = [[float("nan") if value is None else value for value in one] for one in several]
        positions = [record[section.axis] for record in runs[0].records[:count]]
        plot.curves(method, _minutes(runs, count) if timed else positions, several)
        values += [value for one in several for value in one if value == value]
        late += [value for one in several for value in one[count // 4 :] if value == value]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        plot.axes.set_yscale("log")
    elif late:
        pictures.focus(plot.axes, late)
    return plot


def _minutes(runs: Sequence[StoredRun], count: int) -> list[float]:
    """When the evaluations were made, averaged over the runs."""
    times = [list(accumulate(record["seconds"]["train"] for record in run.records[:count])) for run in runs]
    return [fmean(at) / 60 for at in zip(*times, strict=True)]
