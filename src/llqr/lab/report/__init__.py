"""`llqr report`: runs as one self-contained HTML page."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import pandas as pd

from llqr.lab import pictures
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.grouping import grouped
from llqr.lab.report import parts
from llqr.lab.report.parts import Part
from llqr.lab.runs.stored import StoredRun, told_apart
from llqr.lab.writing import write_text

__all__ = ["render", "write"]


def write(runs: Sequence[StoredRun], out: Path, notes: dict[Path, str] | None = None) -> None:
    """Write the report on these runs to the file ``out``."""
    try:
        page = render(runs, out.parent, notes)
    except ConfigurationError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"RUNS: a log, result or analysis is damaged ({type(error).__name__}: {error}).") from error
    write_text(out, page)


def render(runs: Sequence[StoredRun], home: Path, notes: dict[Path, str] | None = None) -> str:
    """The page as HTML; the folders of the runs are named relative to the folder ``home``.

    ``notes`` say why the solution of a run, given by its path, was not measured.
    """
    counted, repeated = told_apart(runs)
    sections = grouped(counted, lambda run: run.recipe)
    titles = {name: next((run.result["title"] for run in own if run.result), name) for name, own in sections.items()}
    title = next(iter(titles.values())) if len(titles) == 1 else f"{len(titles)} experiments"
    body = [f"<h1>{escape(title)}</h1>"]
    for name, own in sections.items():
        if len(titles) > 1:
            body.append(f"<h2>{escape(titles[name])} <small>{escape(name)}</small></h2>")
        body.append(f'<p class="conclusion">{escape(parts.conclusion(own))}</p>')
        methods = list(dict.fromkeys(run.method for run in own))
        again = [run for run in repeated if run.recipe == name]
        made = [
            parts.results(own),
            parts.curves(own, methods),
            parts.solutions(own, notes or {}),
            parts.refreshes(own, methods),
            parts.every_run(own, again, home),
            parts.configuration(own),
        ]
        body += [_html(part, methods) for part in made if part is not None]
    style = (Path(__file__).parent / "style.css").read_text()
    dark = f"@media screen and (prefers-color-scheme: dark) {{ {pictures.dark_rules()} }}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}{dark}</style>
</head>
<body>
{chr(10).join(body)}
</body>
</html>
"""


def _html(part: Part, methods: Sequence[str]) -> str:
    made = [f"<h3>{part.title}</h3>", *(f"<p>{escape(sentence)}</p>" for sentence in part.sentences)]
    made += [_table(frame) for frame in part.tables]
    if part.figures:
        made += [_legend(methods), '<div class="plots">']
        for label, figure in part.figures.items():
            drawn = pictures.inline(figure, label)
            made.append(f'<figure role="img" aria-label="{escape(label)}">{drawn}</figure>')
        made.append("</div>")
    for name, frame in part.folded.items():
        made.append(f"<details><summary>{escape(name)}</summary>{_table(frame)}</details>")
    return "\n".join([*made, *(f"<pre>{escape(listing)}</pre>" for listing in part.listings)])


def _table(frame: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        return f'<div class="wide">{frame.to_html(index=False, border=0)}</div>'


def _legend(methods: Sequence[str]) -> str:
    items = []
    for number, method in enumerate(methods):
        colour, dashes = pictures.look(number)
        dasharray = "" if isinstance(dashes, str) else " ".join(f"{2 * length:g}" for length in dashes[1])
        line = f'<line x1="0" y1="4" x2="26" y2="4" style="stroke: {colour}" stroke-width="3"'
        line = f'<svg viewBox="0 0 26 8" aria-hidden="true">{line} stroke-dasharray="{dasharray}"/></svg>'
        items.append(f"<li>{line}{escape(method)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'
