"""The methods of a table compared with one of them, by Welch's test on the seeds of each."""

from dataclasses import dataclass

from llqr.lab.config.recipe import ALIASES
from llqr.lab.names import check_known
from llqr.lab.results.paper_table import Number, PaperTable


@dataclass(frozen=True)
class Comparison:
    """A measured cell and its difference to the ``reference`` method of its row.

    ``p`` is two-sided, without the assumption of equal variances, and missing where a method has fewer than two seeds.
    ``difference`` is missing where the reference was not measured, and for the reference itself.
    """

    row: str
    method: str
    reference: str
    measured: Number
    difference: float | None = None
    p: float | None = None

    def texts(self) -> list[str]:
        """The texts of the columns that `headings` names."""
        difference = "" if self.difference is None else f"{self.difference:+.{self.measured.decimals}f}"
        return [str(self.measured), str(self.measured.n), difference, "" if self.p is None else f"{self.p:.2g}"]


def headings(reference: str) -> list[str]:
    """The columns after row and method."""
    return ["measured", "n", f"- {reference}", "p"]


def compare(table: PaperTable, reference: str) -> list[Comparison]:
    """The measured cells of a table, each compared with the ``reference`` method of its row."""
    reference = ALIASES.get(reference, reference)
    methods = dict.fromkeys(cell.column for cell in table.cells)
    check_known("against", reference, methods)
    references = {cell.row: cell.measured for cell in table.measured if cell.column == reference}
    found = []
    for cell in table.measured:
        assert cell.measured is not None
        other = None if cell.column == reference else references.get(cell.row)
        compared = () if other is None else (cell.measured.mean - other.mean, welch(cell.measured, other))
        found.append(Comparison(cell.row, cell.column, reference, cell.measured, *compared))
    return found


def welch(one: Number, other: Number) -> float | None:
    """The two-sided p of equal means; None with fewer than two seeds, or if no seed differs from another."""
    if one.std is None or other.std is None or one.std == other.std == 0:
        return None
    from scipy.stats import ttest_ind_from_stats

    found = ttest_ind_from_stats(one.mean, one.std, one.n, other.mean, other.std, other.n, equal_var=False)
    return float(found.pvalue)


def explanation(reference: str) -> str:
    """What must be known to read the comparison."""
    return f"The differences are to {reference}; p is two-sided, by Welch's test, for methods with two seeds or more."
