"""Tables in a Markdown file, between ``<!-- table:NAME -->`` and ``<!-- /table -->``: made by a command, never typed.

``<!-- table:NAME ROW ROW -->`` shows some rows of one of the paper's tables only. ``<!-- table:bench/FILE KEY=VALUE``
``-->`` shows what a command of `llqr bench` left in ``results/bench/FILE.json``, of its rows those with such values.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from llqr.lab.bench import record_markdown
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.results import paper_table as tables
from llqr.lab.results.measurements import Measurement
from llqr.lab.results.paper_table import PaperTable

MARK = re.compile(r"<!-- (?:table:(?P<name>[^\s>]+)(?P<rows>(?: [^\s>]+)*)|(?P<end>/table)) -->")


def regenerate(text: str, measurements: Sequence[Measurement], results: Path) -> str:
    """The text with every marked block made anew from the measurements and the benchmarks in a folder of results."""
    pieces, position = [], 0
    for name, rows, start, end in _blocks(text):
        if name.startswith("bench/"):
            made = record_markdown.markdown(results / f"{name}.json", rows)
        else:
            table = tables.build(name, measurements)
            unknown = [row for row in rows if row not in {cell.row for cell in table.cells}]
            if unknown:
                raise ConfigurationError(f"table:{name}: there is no row {unknown[0]!r}.")
            made = markdown(table, rows)
        pieces += [text[position:start], "\n", made, "\n"]
        position = end
    return "".join([*pieces, text[position:]])


def names(text: str) -> list[str]:
    """The tables that a text shows."""
    return [name for name, *_ in _blocks(text)]


def _blocks(text: str) -> Iterator[tuple[str, list[str], int, int]]:
    """Name, rows, and where the content of each block begins and ends."""
    opened: re.Match[str] | None = None
    for mark in MARK.finditer(text):
        if (mark["end"] is None) == (opened is not None):
            raise ConfigurationError(f"{mark.group()} at character {mark.start()} has no mark that it belongs to.")
        if opened is not None:
            yield opened["name"], opened["rows"].split(), opened.end(), mark.start()
        opened = None if mark["end"] else mark
    if opened is not None:
        raise ConfigurationError(f"{opened.group()} at character {opened.start()} is not closed by <!-- /table -->.")


def markdown(table: PaperTable, rows: Sequence[str] = ()) -> str:
    """The measured cells beside the paper's, and what is missing in words."""
    chosen = table.of_rows(rows)
    if not chosen.measured:
        return "Nothing is measured yet."
    headings = ["measured", "n", *(tables.TESTED if chosen.tested else ()), "paper", "n", "difference"]
    lines = [f"| | | {' | '.join(headings)} |", f"|:--|:--|{'--:|' * len(headings)}"]
    lines += [f"| {' | '.join((cell.row, cell.column, *tables.texts(cell, chosen)))} |" for cell in chosen.measured]
    lines += ["", f"{table.metric[0].upper()}{table.metric[1:]}; mean ± standard deviation over n seeds."]
    for caveat in tables.footnotes(chosen):
        lines += ["", caveat]
    if chosen.missing:
        lines += ["", f"Not measured yet: {chosen.missing_in_words()}."]
    return "\n".join(lines)
