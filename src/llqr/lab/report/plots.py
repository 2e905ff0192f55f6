"""Plots as inline SVG: text stays text, and a method looks the same in every plot of a page.

matplotlib is imported by the first plot, so that `llqr --help` does not wait for it.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

import numpy as np

from llqr.lab.pictures import STYLE, literal

SIZE = (4.4, 2.8)
"""Inches."""
LONGEST = 30
"""Characters on a line of the name of a row."""


@dataclass(frozen=True)
class Look:
    """Colour and dashes of a method, see `pictures.look`."""

    colour: str
    dashes: str | tuple[float, tuple[float, ...]]

    @property
    def dasharray(self) -> str:
        """The dashes in SVG's notation."""
        return "" if isinstance(self.dashes, str) else " ".join(f"{2 * length:g}" for length in self.dashes[1])


class Plot:
    """A plot that is being drawn; ``label`` says what it shows and is its text alternative."""

    def __init__(self, label: str, x: str, y: str, looks: Mapping[str, Look]) -> None:
        import matplotlib as mpl
        from matplotlib.figure import Figure

        self.label, self.looks = label, looks
        with mpl.rc_context(STYLE):
            self._figure = Figure(figsize=SIZE, layout="constrained")
            self.axes = self._figure.subplots()
        self.axes.set(xlabel=literal(x), ylabel=literal(y))

    def curves(self, method: str, x: Sequence[float], several: Sequence[Sequence[float]]) -> None:
        """The mean of several curves as a line, their range as a band."""
        look, stacked = self.looks[method], np.array(several, dtype=float)
        mean, low, high = (reduce(stacked, axis=0) for reduce in (np.mean, np.min, np.max))
        if len(stacked) > 1:
            self.axes.fill_between(x, low, high, color=look.colour, alpha=0.15, linewidth=0)
        marker = "o" if len(x) == 1 else None
        self.axes.plot(x, mean, color=look.colour, linestyle=look.dashes, linewidth=1.6, marker=marker)

    def dots(self, method: str, row: int, values: Sequence[float], *, filled: bool) -> None:
        """Values as dots on row number ``row``."""
        colour = self.looks[method].colour
        face = colour if filled else "none"
        height = row + (-0.15 if filled else 0.15)
        self.axes.scatter(values, [height] * len(values), s=26, facecolor=face, edgecolor=colour, zorder=3)

    def name_rows(self, names: Sequence[str]) -> None:
        """Long names, such as those of methods that were run with several settings, take several lines."""
        broken = [literal(fill(name, LONGEST)) for name in names]
        lines = max(name.count("\n") + 1 for name in broken)
        self._figure.set_figheight(max(SIZE[1], 0.8 + 0.16 * lines * len(names)))
        self.axes.set_yticks(range(len(names)), broken)
        self.axes.set_ylim(len(names) - 0.4, -0.6)
        if self.axes.get_xlim()[0] > 0:
            self.axes.set_xlim(left=0)

    def svg(self) -> str:
        """The SVG element, without XML header and without ids that would clash with those of other plots."""
        import matplotlib as mpl

        file = io.StringIO()
        with mpl.rc_context({**STYLE, "svg.hashsalt": self.label}):
            self._figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
        picture = file.getvalue()
        picture = picture[picture.index("<svg") :]
        picture = re.sub(r"<metadata>.*?</metadata>", "", picture, flags=re.DOTALL)
        picture = re.sub(r'<g id="[^"]*"', "<g", picture)
        return re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", r"<svg \1>", picture, count=1, flags=re.DOTALL)
