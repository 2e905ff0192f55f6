"""Tables in a Markdown file, between ``<!-- table:NAME -->`` and ``<!-- /table -->``, written by `llqr table --write`.

``<!-- table:NAME ROW ROW -->`` shows only these rows of one of the paper's tables, ``<!-- table:NAME@VARIANT -->`` the
table of a variant of the recipes. With ``against=sam`` it shows the differences to that method instead of the paper's
numbers.
"""

import re
from collections.abc import Sequence

from llqr.lab.errors import ConfigurationError
from llqr.lab.grouping import grouped
from llqr.lab.names import check_known
from llqr.lab.results import tables
from llqr.lab.results.tables import PaperTable
from llqr.lab.runs.stored import RunRecord

BLOCK = re.compile(r"(<!-- table:([^\s>]+)((?: [^\s>]+)*) -->)(.*?)(<!-- /table -->)", re.DOTALL)
MARK = re.compile(r"<!-- (?:table:[^>]*|/table) -->")


def regenerate(text: str, runs: Sequence[RunRecord]) -> str:
    """The text with every marked block rewritten from these runs."""

    def made(block: re.Match[str]) -> str:
        start, name, words, content, end = block.groups()
        if MARK.search(content):
            raise ConfigurationError(f"{start} is not closed by <!-- /table -->.")
        return f"{start}\n{_table(name, words.split(), runs)}\n{end}"

    if stray := MARK.search(BLOCK.sub("", text)):
        raise ConfigurationError(f"{stray.group()} has no matching mark.")
    return BLOCK.sub(made, text)


def _table(name: str, words: Sequence[str], runs: Sequence[RunRecord]) -> str:
    """One of the paper's tables as its mark asks for it: rows, and options with an equals sign."""
    options = dict(word.split("=", 1) for word in words if "=" in word)
    for key in options:
        check_known(f"table:{name}: option", key, ("against",))
    table = tables.build(name, runs)
    rows = [word for word in words if "=" not in word]
    for row in rows:
        check_known(f"table:{name}: row", row, dict.fromkeys(table.cells["row"]))
    chosen = table.of_rows(rows)
    if chosen.measured.empty:
        return "Nothing is measured yet."
    return compared(chosen, options["against"]) if "against" in options else markdown(chosen)


def markdown(table: PaperTable) -> str:
    """The measured cells beside the paper's, and a sentence on what is missing."""
    headings, rows = tables.texts(table)
    notes = [tables.explanation(table), *tables.footnotes(table)]
    if not table.missing.empty:
        missing = grouped(table.missing.itertuples(), lambda cell: cell.row)
        listed = (f"{row}: {', '.join(cell.method for cell in cells)}" for row, cells in missing.items())
        notes.append(f"Not measured yet: {'; '.join(listed)}.")
    return "\n\n".join([_lines(headings, [row for row in rows if row[2]]), *notes])


def compared(table: PaperTable, reference: str) -> str:
    """The measured cells and their differences to one method."""
    found = tables.compare(table, reference)
    return "\n\n".join([_lines(*tables.compared_texts(found)), f"{tables.explanation(table)} {tables.WELCH}"])


def _lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Row and method, aligned left, then columns of numbers."""
    head = [f"| | | {' | '.join(headings[2:])} |", f"|:--|:--|{'--:|' * (len(headings) - 2)}"]
    return "\n".join(head + [f"| {' | '.join(row)} |" for row in rows])
