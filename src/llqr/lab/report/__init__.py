"""`llqr report`: runs as one self-contained HTML page."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from llqr.lab.grouping import grouped
from llqr.lab.pictures import dark_rules
from llqr.lab.report.conclusion import conclusion
from llqr.lab.report.outcomes import curves, summary
from llqr.lab.report.provenance import configuration, every_run
from llqr.lab.report.refreshes import refreshes
from llqr.lab.report.section import Section
from llqr.lab.report.solutions import sharpness, slices
from llqr.lab.runs.stored import StoredRun, told_apart
from llqr.lab.writing import make_folder, write_text

__all__ = ["render", "write"]

PARTS = (summary, curves, sharpness, slices, refreshes, every_run, configuration)
"""The parts of a recipe's section, in this order; a part with nothing to show is left out."""


def write(runs: Sequence[StoredRun], out: Path, notes: dict[Path, str] | None = None) -> None:
    """Write the report on these runs to the file ``out``."""
    make_folder(out.parent)
    write_text(out, render(runs, out.parent, notes))


def render(runs: Sequence[StoredRun], home: Path, notes: dict[Path, str] | None = None) -> str:
    """The page as HTML; links to the files of the runs are relative to the folder ``home``.

    ``notes`` say why the solution of a run, given by its path, was not measured.
    """
    runs, repeated = told_apart(runs)
    groups = grouped(runs, lambda run: run.recipe)
    sections = [Section(name, own, home, notes or {}, repeated) for name, own in groups.items()]
    finished = sum(run.result is not None for run in runs)
    counts = f"{len(runs)} runs" if finished == len(runs) else f"{len(runs)} runs, {finished} of them finished"
    environment = Environment(loader=PackageLoader("llqr.lab.report", "."), autoescape=True, undefined=StrictUndefined)
    shown = [(one, conclusion(one), [part for make in PARTS if (part := make(one)) is not None]) for one in sections]
    title = sections[0].title if len(sections) == 1 else f"{len(sections)} experiments"
    return environment.get_template("page.html").render(
        title=title, counts=counts, sections=shown, dark_figures=dark_rules()
    )
