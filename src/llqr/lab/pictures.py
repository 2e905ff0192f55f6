"""What all pictures of the laboratory share: colours, a style, and SVG files that follow light and dark.

Colours are drawn for a light ground. An SVG also has a rule for every colour that says what it becomes where the reader
prefers dark; viewers that know no such rules show the light version.

matplotlib is imported by the first picture, so that `llqr --help` does not wait for it.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import wraps
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from llqr.lab.writing import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType  # newer than the oldest matplotlib that is supported

Arguments = ParamSpec("Arguments")

INK, SOFT, GRID = "#1c1c1c", "#6b6b6b", "#e4e4e4"
# Okabe and Ito's colours, which colour-blind readers can tell apart; yellow is left out as too pale for lines.
BLUE, ORANGE, GREEN, PINK, SKY, AMBER = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, AMBER, INK)
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
IN_THE_DARK = {
    INK: "#e6e6e6",
    SOFT: "#a3a7b0",
    GRID: "#3b3f49",
    BLUE: "#4ba3dd",
    ORANGE: "#f58442",
    GREEN: "#2fc498",
    PINK: "#e39cc4",
    SKY: "#86cdf5",
    AMBER: "#f0b840",
}
STYLE: "dict[RcKeyType, Any]" = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.color": SOFT,
    "ytick.labelcolor": INK,
    "svg.fonttype": "none",
}
WIDTH = 5.0
"""Inches: panels stand below each other, so that their text is still legible on a phone."""
LEGEND_ROW = 0.17
FONT = 'text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif !important; }'


def dark_rules() -> str:
    """CSS that replaces the colours of an SVG by those for a dark ground."""
    rules = (
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important; }}'
        for light, dark in IN_THE_DARK.items()
        for kind in ("stroke", "fill")
    )
    return "\n".join(rules)


def styled(draw: "Callable[Arguments, Figure]") -> "Callable[Arguments, Figure]":
    """Run ``draw`` inside the style, so that everything it adds to the figure gets it."""

    @wraps(draw)
    def drawn(*arguments: Arguments.args, **options: Arguments.kwargs) -> "Figure":
        import matplotlib as mpl

        with mpl.rc_context(STYLE):
            return draw(*arguments, **options)

    return drawn


def column(heights: Sequence[float]) -> "tuple[Figure, list[Axes]]":
    """Panels of these heights, in inches, below each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    return figure, list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])


def written_out(axis: "Axis", ticks: Sequence[float]) -> None:
    """Label a logarithmic axis with exactly these numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())


def look(number: int) -> tuple[str, Any]:
    """Colour and dashes of a method; the two cycle independently, so that combinations do not repeat early."""
    return COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]


def focus(axes: "Axes", values: Sequence[float]) -> None:
    """Show the range of these values, with a margin; what lies outside is cut off."""
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.5
    axes.set_ylim(low - margin, high + margin)


def legend_above(figure: "Figure", axes: "Axes", columns: int = 2) -> None:
    """The legend of one panel above all of them, where it hides nothing; for more than two rows the figure grows."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)
    rows = sum(1 + label.count("\n") for label in labels) / columns
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * max(0, rows - 2))


def note_below(figure: "Figure", text: str) -> None:
    figure.supxlabel(text, fontsize=7, color=SOFT)


def literal(text: str) -> str:
    """``text`` for matplotlib, which would read what stands between dollar signs as a formula."""
    return text.replace("$", r"\$")


def inline(figure: "Figure", title: str) -> str:
    """An SVG element for a page, without XML header and without ids that would clash with those of other pictures."""
    picture = _svg(figure, title)
    picture = re.sub(r"<metadata>.*?</metadata>", "", picture[picture.index("<svg") :], flags=re.DOTALL)
    picture = re.sub(r'<g id="[^"]*"', "<g", picture)
    return re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", r"<svg \1>", picture, count=1, flags=re.DOTALL)


def save(figure: "Figure", path: Path, title: str, source: str = "") -> None:
    """Write a picture; ``title`` is its text alternative and ``source`` says what it was drawn from."""
    style = f"<style>{FONT}\n@media (prefers-color-scheme: dark) {{\n{dark_rules()}\n}}</style>"
    made = _svg(figure, title, Title=title, Source=source or None, Creator=None)
    write_text(path, re.sub(r"(<svg [^>]*>)", rf"\1\n{style}", made, count=1))


def _svg(figure: "Figure", title: str, **metadata: str | None) -> str:
    import matplotlib as mpl

    file = StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": title}):  # ids are derived from it: the same picture is the same file
        figure.savefig(file, format="svg", metadata={"Date": None, **metadata}, transparent=True)
    return file.getvalue()


def digest(path: Path) -> str:
    """A file by its name and content, to be named as the source of a picture."""
    return f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
