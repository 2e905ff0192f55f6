"""Tables in a Markdown file, between ``<!-- table:NAME -->`` and ``<!-- /table -->``, written by `llqr table --write`.

``<!-- table:NAME ROW ROW -->`` shows only these rows of one of the paper's tables. ``<!-- table:bench/FILE KEY=VALUE``
``-->`` shows the rows with these values of ``results/bench/FILE.json``, which a command of `llqr bench` wrote.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from llqr.lab.bench import record_markdown
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.results import build_table
from llqr.lab.results.paper_table import TESTED, PaperTable, footnotes, texts
from llqr.lab.runs.record import RunRecord

MARK = re.compile(r"<!-- (?:table:(?P<name>[^\s>]+)(?P<rows>(?: [^\s>]+)*)|(?P<end>/table)) -->")


def regenerate(text: str, runs: Sequence[RunRecord], results: Path) -> str:
    """The text with every marked block rewritten from these runs and the benchmarks in a folder of results."""
    pieces: list[str] = []
    position = 0
    for name, rows, start, end in _blocks(text):
        if name.startswith("bench/"):
            made = record_markdown.markdown(results / f"{name}.json", rows)
        else:
            table = build_table.build(name, runs)
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
            raise ConfigurationError(f"{mark.group()} at character {mark.start()} has no matching mark.")
        if opened is not None:
            yield opened["name"], opened["rows"].split(), opened.end(), mark.start()
        opened = None if mark["end"] else mark
    if opened is not None:
        raise ConfigurationError(f"{opened.group()} at character {opened.start()} is not closed by <!-- /table -->.")


def markdown(table: PaperTable, rows: Sequence[str] = ()) -> str:
    """The measured cells beside the paper's, and a sentence on what is missing."""
    chosen = table.of_rows(rows)
    if not chosen.measured:
        return "Nothing is measured yet."
    headings = ["measured", "n", *(TESTED if chosen.tested else ()), "paper", "n", "difference"]
    lines = [f"| | | {' | '.join(headings)} |", f"|:--|:--|{'--:|' * len(headings)}"]
    lines += [f"| {' | '.join((cell.row, cell.column, *texts(cell, chosen)))} |" for cell in chosen.measured]
    lines += ["", f"{table.metric[0].upper()}{table.metric[1:]}; mean ± standard deviation over n seeds."]
    for caveat in footnotes(chosen):
        lines += ["", caveat]
    if chosen.missing:
        lines += ["", f"Not measured yet: {chosen.missing_in_words()}."]
    return "\n".join(lines)
