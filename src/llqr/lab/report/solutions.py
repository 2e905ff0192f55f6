"""The solutions: their sharpness, and the loss around them."""

import numpy as np

from llqr.lab.report.html_table import HtmlCell, HtmlTable, mean
from llqr.lab.report.plots import Plot
from llqr.lab.report.section import Part, Section, analysis_of, sources
from llqr.lab.runs.stored import StoredRun

TITLE = "Sharpness of the solutions"


def sharpness(section: Section) -> Part | None:
    """The top eigenvalues of `H` and of `U^1/2 H U^1/2`."""
    missing = [f"Not measured: {note}" for note in dict.fromkeys(section.notes.values())]
    if not section.measured:
        return Part(TITLE, missing) if missing else None
    plot = Plot("● of H, ○ of √U H √U (perceived)", "top eigenvalue", "", section.looks)
    rows = []
    shown = section.by_method(section.measured)
    for number, (method, runs) in enumerate(shown):
        link = f"#{section.rows_of(method)}"
        found = {kind: section.analyses(runs, "sharpness", kind, "value") for kind in ("top", "perceived")}
        for kind, values in found.items():
            plot.dots(method, number, [one.value for one in values], filled=kind == "top")
        reasons = dict.fromkeys(analysis_of(run)["sharpness"]["reason"] for run in runs)
        rows.append(
            [
                HtmlCell(method),
                mean(found["top"], link),
                mean(found["perceived"], link) if found["perceived"] else HtmlCell("–", source="\n".join(reasons)),
                mean(section.analyses(runs, "loss"), link),
                HtmlCell(str(len(runs)), len(runs), section.files(runs, "analysis.json"), link),
            ]
        )
    plot.name_rows([method for method, _ in shown])
    samples = ", ".join(str(count) for count in sorted({analysis_of(run)["samples"] for run in section.measured}))
    engines = ", ".join(dict.fromkeys(analysis_of(run)["engine"] for run in section.measured))
    sentence = (
        f"H is the Hessian of the mean loss on {samples} training samples at the last weights, in eval mode, "
        f"without weight decay; eigenvalues by Lanczos, products by {engines}. Perceived is the sharpness in "
        "the method's own metric U: the top eigenvalue of √U H √U, with U = I where no metric is learned. "
        + sources("analysis.json", section.measured)
    )
    headings = ["method", "top eigenvalue", "perceived", "loss on these samples", "n"]
    return Part(TITLE, [sentence, *missing], [HtmlTable(headings, rows)], [plot])


def slices(section: Section) -> Part | None:
    """The loss along lines through the solutions."""
    if not section.measured:
        return None
    along = Plot("Along the top eigenvector of H", "distance from the solution", "loss", section.looks)
    random = Plot("Along random filter-normalised directions", "norms of the filters", "loss", section.looks)
    for method, runs in section.by_method(section.measured):
        for plot, is_random in ((along, False), (random, True)):
            found = [_mean_slice(run, is_random) for run in runs]
            plot.curves(method, found[0][0], [losses for _, losses in found])
    sentence = (
        "The loss of the table above at weights moved along a line, with the range over seeds; for random directions "
        "the mean over directions. " + sources("analysis.json", section.measured)
    )
    return Part("Slices of the loss surface", [sentence], plots=[along, random], legend=section.looks)


def _mean_slice(run: StoredRun, is_random: bool) -> tuple[list[float], list[float]]:
    """Positions and losses of a run's slices of one kind, averaged where there are several."""
    chosen = [line for line in analysis_of(run)["slices"] if line["direction"].startswith("random") is is_random]
    losses = np.array([line["losses"] for line in chosen], dtype=float)  # a loss that is not finite is null, here NaN
    return chosen[0]["positions"], losses.mean(axis=0).tolist()
