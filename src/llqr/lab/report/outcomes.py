"""What the methods achieved: a table with times, and what was measured epoch by epoch."""

from llqr.lab import compare
from llqr.lab.report.plots import Plot
from llqr.lab.report.section import Part, Section, sources
from llqr.lab.report.tables import Cell, Row, Table, mean


def summary(section: Section) -> Part:
    """Mean ± standard deviation, n, and times beside the first method."""
    if not section.finished:
        return Part("Results", ["No run is finished yet."])
    summaries = {row.method: row for row in compare.summarise(run.result for run in section.finished)}
    metric, larger = (section.finished[0].result[key] for key in ("metric", "larger_is_better"))
    best = (max if larger else min)(found.best_mean for found in summaries.values())
    others = [name for name in section.finished[0].result["test"] if name != metric]
    first, reference = next(iter(summaries.items()))
    rows = []
    for method, found in summaries.items():
        link = f"#{section.rows_of(method)}"
        seconds = section.results(method, "epoch_seconds")
        times = "median of\n" + "\n".join(map(str, seconds))
        relative = f"{found.epoch_seconds:.6g} s beside {reference.epoch_seconds:.6g} s of {first}"
        cells = [
            Cell(method),
            mean(section.results(method, "best"), link, strong=found.best_mean == best),
            mean(section.results(method, "last"), link),
            *(mean(section.results(method, "test", name), link) for name in others),
            Cell(str(found.n), found.n, "\n".join(one.file for one in seconds), link),
            Cell(f"{found.epoch_seconds:.3f}", found.epoch_seconds, times, link),
            Cell(f"{found.relative_time:.2f}×", found.relative_time, relative, link),
        ]
        rows.append(Row(cells))
    headings = ["method", f"best {metric}", f"last {metric}", *(f"last test {name}" for name in others)]
    headings += ["n", "s / epoch", f"time / {first}"]
    better = "larger" if larger else "smaller"
    sentence = f"Mean ± standard deviation over n seeds; a {better} {metric} is better. Times without evaluation."
    return Part("Results", [sentence], [Table(headings, rows)])


def curves(section: Section) -> Part | None:
    """Everything that is measured epoch by epoch."""
    logged = [run for run in section.runs if run.records]
    if not logged:
        return None
    kinds = [(kind, name) for kind in ("test", "train") for name in logged[0].records[0][kind]]
    plots = []
    for kind, name in kinds:
        plot = Plot(f"{kind} {name}", "epoch", name, section.looks)
        values, late = [], []
        for method, runs in section.by_method(logged):
            epochs = min(len(run.records) for run in runs)
            several = [[record[kind][name] for record in run.records[:epochs]] for run in runs]
            plot.curves(method, [record["epoch"] for record in runs[0].records[:epochs]], several)
            values += [value for one in several for value in one]
            late += [value for one in several for value in one[epochs // 4 :]]
        if min(values) > 0 and max(values) > 20 * min(values):
            plot.logarithmic()
        else:
            plot.focus(late)
        plots.append(plot)
    sentence = (
        "Mean over seeds, and the range from the lowest to the highest; the first quarter may be cut off. "
        + sources("log.jsonl", logged)
    )
    return Part("Curves", [sentence], plots=plots, legend=section.looks)
