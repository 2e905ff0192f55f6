"""Tables in a Markdown file, between ``<!-- table:NAME -->`` and ``<!-- /table -->``, written by `llqr table --write`.

``<!-- table:NAME ROW ROW -->`` shows only these rows of one of the paper's tables, ``<!-- table:NAME@VARIANT -->`` the
table of a variant of the recipes. With ``against=sam`` it shows the differences to that method instead of the paper's
numbers, and with ``measure=last`` the last evaluation of every run counts, not the best.
``<!-- table:bench/FILE KEY=VALUE -->`` shows the rows with these values of
``results/bench/FILE.json``, which a command of `llqr bench` wrote.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from llqr.lab.errors import ConfigurationError
from llqr.lab.results import against, build_table
from llqr.lab.results.build_table import Measure
from llqr.lab.results.paper_table import PaperTable, footnotes, headings, texts
from llqr.lab.runs.stored import RunRecord

MARK = re.compile(r"<!-- (?:table:(?P<name>[^\s>]+)(?P<rows>(?: [^\s>]+)*)|(?P<end>/table)) -->")
MEASURES: dict[str, Measure] = {"best": "best", "last": "last"}


def regenerate(text: str, runs: Sequence[RunRecord], results: Path) -> str:
    """The text with every marked block rewritten from these runs and the benchmarks in a folder of results."""
    pieces: list[str] = []
    position = 0
    for name, words, start, end in _blocks(text):
        if name.startswith("bench/"):
            from llqr.lab.bench import record  # imports every bench, which `llqr train` does not need

            made = record.markdown(results / f"{name}.json", words)
        else:
            made = _block(name, words, runs)
        pieces += [text[position:start], "\n", made, "\n"]
        position = end
    return "".join([*pieces, text[position:]])


def _block(name: str, words: Sequence[str], runs: Sequence[RunRecord]) -> str:
    """One of the paper's tables as its mark asks for it: rows, and options with an equals sign."""
    rows = [word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    unknown = [key for key in options if key not in ("against", "measure")]
    if unknown:
        raise ConfigurationError(f"table:{name}: the options are against and measure, got {unknown[0]!r}.")
    measure = options.get("measure", "best")
    if measure not in MEASURES:
        raise ConfigurationError(f"table:{name}: measure must be one of {', '.join(MEASURES)}, got {measure!r}.")
    table = build_table.build(name, runs, MEASURES[measure])
    missing = [row for row in rows if row not in {cell.row for cell in table.cells}]
    if missing:
        raise ConfigurationError(f"table:{name}: there is no row {missing[0]!r}.")
    return compared(table, options["against"], rows) if "against" in options else markdown(table, rows)


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
    lines = _lines(headings(chosen), [(cell.row, cell.column, *texts(cell, chosen)) for cell in chosen.measured])
    lines += ["", _what(table)]
    for caveat in footnotes(chosen):
        lines += ["", caveat]
    if chosen.missing:
        lines += ["", f"Not measured yet: {chosen.missing_in_words()}."]
    return "\n".join(lines)


def compared(table: PaperTable, reference: str, rows: Sequence[str] = ()) -> str:
    """The measured cells and their differences to one method."""
    found = against.compare(table.of_rows(rows), reference)
    if not found:
        return "Nothing is measured yet."
    reference = found[0].reference
    lines = _lines(against.headings(reference), [(one.row, one.method, *one.texts()) for one in found])
    return "\n".join([*lines, "", f"{_what(table)} {against.explanation(reference)}"])


def _lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Row and method, aligned left, then columns of numbers."""
    head = [f"| | | {' | '.join(headings)} |", f"|:--|:--|{'--:|' * len(headings)}"]
    return head + [f"| {' | '.join(row)} |" for row in rows]


def _what(table: PaperTable) -> str:
    return f"{table.metric[0].upper()}{table.metric[1:]}; mean ± standard deviation over n seeds."
